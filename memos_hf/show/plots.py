"""Plots of a cache's reports, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report import CacheStats, MemoryReport, format_bytes
from .colours import PALETTE, device_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


def plot_memory(memory: MemoryReport, ax: Axes | None = None) -> Axes:
    """A column for each layer, by device, its shared part hatched; dashes for what full precision would take."""
    ax = ax if ax is not None else _new_axes((7, 3))
    layers = memory.by_layer
    places = range(len(layers))
    below = [0.0] * len(layers)
    for device, colour in device_colours(memory).items():
        used = [layer.used_by_device.get(device, 0) / MIB for layer in layers]
        if any(used):
            ax.bar(places, used, bottom=below, color=colour, label=device)
            below = [low + more for low, more in zip(below, used, strict=True)]
    if memory.shared_bytes:
        shared = [layer.shared_bytes / MIB for layer in layers]
        ax.bar(places, shared, fill=False, hatch="////", edgecolor="white", linewidth=0, label="shared, hatched")
    full = [layer.full_precision_bytes / MIB for layer in layers]
    if layers:
        edges = [place - 0.5 for place in range(len(layers) + 1)]
        ax.stairs(full, edges, color="gray", linestyle="--", label="full precision")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the columns, which fill the axes
    ax.locator_params(axis="x", integer=True)
    held = f"{format_bytes(memory.used_bytes)} of {format_bytes(memory.allocated_bytes)} used"
    ax.set(xlabel="layer", ylabel="MiB valid", title=f"{held}, {memory.ratio:.3f} of full precision")
    return ax


def plot_stats(stats: CacheStats, ax: Axes | None = None) -> Axes:
    """Two bars: which blocks were read on the device, and which attention calls read blocks in place."""
    ax = ax if ax is not None else _new_axes((7, 2))
    rows = {
        "attention calls": (("in place", stats.fused_calls), ("decoding", stats.materialised_calls)),
        "blocks read": (("on the device", stats.hits), ("below it", stats.misses)),
    }
    for place, ((first, count), (second, rest)) in enumerate(rows.values()):
        if count + rest:
            share = count / (count + rest)
            ax.barh([place, place], [share, 1 - share], left=[0, share], color=PALETTE[:2])
            ax.text(0.01, place, f"{count:,} {first}", ha="left", va="center")
            ax.text(0.99, place, f"{rest:,} {second}", ha="right", va="center")
    others = f"{stats.growths:,} growths, {stats.seals:,} blocks sealed, {stats.evictions:,} evicted"
    ax.set(xlim=(0, 1), ylim=(-0.5, 1.5), xlabel="share", title=f"{others}, {format_bytes(stats.bytes_moved)} moved")
    ax.set_yticks(range(len(rows)), list(rows))
    return ax


def _new_axes(size: tuple[float, float]) -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots are drawn with matplotlib: pip install 'memos_hf[plots]'") from error
    axes: Axes = plt.subplots(figsize=size, layout="constrained")[1]
    return axes
