"""What notebooks show of a cache and its reports: HTML that needs nothing else, on light and dark ground.

Text has the colour of the notebook, lines and free room a translucent grey; only bars have colours of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby

from ..report import CacheStats, LayerMemory, MemoryReport, format_bytes
from .colours import PALETTE, device_colours

CARD = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:52em;margin:.3em 0"
BARS = "display:grid;grid-template-columns:max-content minmax(6em,1fr) max-content;gap:.2em .8em;align-items:center"
TRACK = "position:relative;display:flex;height:1em;overflow:hidden"
FREE = "background:rgba(128,128,128,.25)"
HATCH = "background:repeating-linear-gradient(135deg,rgba(255,255,255,.6) 0 2px,transparent 2px 5px)"
LAYERS = "display:flex;align-items:flex-end;gap:1px;height:3.5em;border-bottom:1px solid rgba(128,128,128,.5)"
LAYER_WIDTH = "1.2em"  # at most
FAINT = "opacity:.75"


def cache_html(name: str, facts: Sequence[str], memory: MemoryReport, stats: CacheStats) -> str:
    """A whole cache: what it is, where its bytes are, what it did.

    Parameters
    ----------
    name : str
        Its class.
    facts : sequence of str
        Length, mode, and whatever else is to be known at first sight.
    memory : MemoryReport
    stats : CacheStats
    """
    title = _tag(f"<b>{escape(name)}</b> {escape(' · '.join(facts))}", "margin-bottom:.3em")
    return _tag(title + _devices(memory) + _layers(memory) + _counters(stats), CARD)


def memory_html(memory: MemoryReport) -> str:
    """Bytes by device and by layer, as bars."""
    return _tag(_devices(memory) + _layers(memory), CARD)


def stats_html(stats: CacheStats) -> str:
    """Counters, and as bars which blocks were on the device and which attention calls read in place."""
    return _tag(_counters(stats) or _tag("nothing counted yet", FAINT), CARD)


def _devices(memory: MemoryReport) -> str:
    """A bar for each device, of what is used, shared (hatched) and free (grey), all to one scale."""
    if not memory.by_device:
        return _tag("no bytes held yet", FAINT)
    most = max(memory.full_precision_bytes, *(max(m.used_bytes, m.allocated_bytes) for m in memory.by_device.values()))
    rows, colours = [], device_colours(memory)
    for device, held in memory.by_device.items():
        shared = min(held.shared_bytes, held.used_bytes)
        fill = f"background:{colours[device]}"
        bar = _segment(held.used_bytes - shared, most, fill)
        bar += _segment(shared, most, fill, _tag("", f"{HATCH};height:100%"))
        bar += _segment(max(held.allocated_bytes - held.used_bytes, 0), most, FREE)
        figures = f"{format_bytes(held.used_bytes)} used of {format_bytes(held.allocated_bytes)}"
        figures += f", {format_bytes(held.shared_bytes)} shared (hatched)" if held.shared_bytes else ""
        rows.append((device, bar, figures))
    outline = "box-sizing:border-box;border:1px dashed rgba(128,128,128,.9)"
    full = f"{format_bytes(memory.full_precision_bytes)}, of which {memory.ratio:.3f} is used"
    return _rows([*rows, ("full precision", _segment(memory.full_precision_bytes, most, outline), full)])


def _layers(memory: MemoryReport) -> str:
    """A column for each layer, by device from below and hatched where shared; equal neighbours are one wide column."""
    layers, colours = memory.by_layer, device_colours(memory)
    most = max((layer.used_bytes for layer in layers), default=0)
    if most == 0:
        return ""
    first, columns = 0, []
    for layer, equal in groupby(layers):
        count = len(list(equal))
        columns.append(_column(layer, first, count, most, colours))
        first += count
    kinds = Counter(layer.kind for layer in layers)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    caption = f"layers 0 to {len(layers) - 1}: {named}; at most {format_bytes(most)} in one"
    return _tag("".join(columns), f"{LAYERS};margin-top:.5em") + _tag(escape(caption), FAINT)


def _column(layer: LayerMemory, first: int, count: int, most: int, colours: dict[str, str]) -> str:
    """`count` layers from `first` on that are equal."""
    parts = [
        _tag("", f"background:{colours[device]};height:{_percent(used, most)}")
        for device, used in layer.used_by_device.items()
        if used
    ]
    if layer.shared_bytes:
        height = f"height:{_percent(layer.shared_bytes, most)}"
        parts.append(_tag("", f"{HATCH};position:absolute;bottom:0;width:100%;{height}"))
    which = f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}, each"
    where = ", ".join(f"{device} {format_bytes(used)}" for device, used in layer.used_by_device.items())
    shared = f", {format_bytes(layer.shared_bytes)} shared" if layer.shared_bytes else ""
    style = (
        f"position:relative;display:flex;flex-direction:column-reverse;height:100%;flex:{count} 1 0;"
        f"max-width:calc({count}*{LAYER_WIDTH})"
    )
    return _tag("".join(parts), style, f"{which}: {layer.kind}, {where or '0 B'}{shared}")


def _counters(stats: CacheStats) -> str:
    """What was read where, as bars, and a line of everything else that was counted."""
    bars = [
        _share(name, *parts)
        for name, *parts in (
            ("blocks read", ("on the device", stats.hits), ("below it", stats.misses)),
            ("attention calls", ("in place", stats.fused_calls), ("decoding", stats.materialised_calls)),
        )
        if sum(count for _, count in parts)
    ]
    counts = {
        "growths": stats.growths,
        "blocks sealed": stats.seals,
        "blocks evicted": stats.evictions,
        "damaged tokens": stats.damaged_tokens,
    }
    line = [f"{name} {count:,}" for name, count in counts.items() if count]
    line += [f"moved {format_bytes(stats.bytes_moved)}"] if stats.bytes_moved else []
    return (_rows(bars, "margin-top:.5em") if bars else "") + (_tag(" · ".join(line), FAINT) if line else "")


def _share(name: str, first: tuple[str, int], second: tuple[str, int]) -> tuple[str, str, str]:
    """A row whose bar shows which part of two counts the first is."""
    (one, count), (other, rest) = first, second
    whole = count + rest
    bar = _segment(count, whole, f"background:{PALETTE[0]}") + _segment(rest, whole, f"background:{PALETTE[1]}")
    return name, bar, f"{count:,} {one}, {rest:,} {other} ({count / whole:.0%} / {rest / whole:.0%})"


def _rows(rows: Sequence[tuple[str, str, str]], style: str = "") -> str:
    """Name, bar and figures of each; the bar is HTML already."""
    cells = [
        _tag(escape(name)) + _tag(bar, TRACK, f"{name}: {figures}") + _tag(escape(figures), "text-align:right")
        for name, bar, figures in rows
    ]
    return _tag("".join(cells), f"{BARS};{style}" if style else BARS)


def _segment(part: int, whole: int, style: str, content: str = "") -> str:
    return _tag(content, f"width:{_percent(part, whole)};{style}") if part else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%"


def _tag(content: str, style: str = "", title: str = "") -> str:
    """A `div` around `content`, which is HTML already."""
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in (("style", style), ("title", title)) if value)
    return f"<div{attributes}>{content}</div>"
