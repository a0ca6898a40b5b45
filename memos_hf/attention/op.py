"""The operator `memos::decode_attention`: one schema for every device, so that compilers and profilers see it by name.

A call hands over tensors and strings alone. :func:`decode_attention` takes the same arguments as the reference and
spells them out; kernels are chosen inside, by device and by what is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import profiler

from ..blocks.codecs import BITS, BlockCodec, CodecSpec, Role
from . import cpu, gpu, reference
from .reference import Exact, Sealed, Sinks

_library = torch.library.Library("memos", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "decode_attention(Tensor query, Tensor tail_keys, Tensor tail_values, Tensor[] key_arenas, Tensor[] value_arenas, "
    "str key_codec, str value_codec, Tensor? block_table, Tensor? block_starts, "
    "Tensor? sink_keys, Tensor? sink_values, Tensor? sink_positions, "
    "Tensor? mask, float scale, float softcap=0.0, Tensor? head_sinks=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def decode_attention(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a few queries over sealed blocks, sinks and tail, through `torch.ops.memos.decode_attention`.

    Parameters and result are those of :func:`memos_hf.attention.reference.decode_attention`. The slots in
    `sealed.table` are not checked: they must lie in the arenas.

    Raises
    ------
    ValueError
        If shapes do not fit each other, naming the argument, what was expected and what came.
    """
    if type(query) is Tensor and not torch.compiler.is_compiling() and not profiler._is_profiler_enabled:
        # Nobody is looking, and the way through the dispatcher takes as long as a short context's attention.
        return _run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks)
    output: Tensor = torch.ops.memos.decode_attention(
        query,
        tail.keys,
        tail.values,
        list(sealed.keys.values()) if sealed is not None else [],
        list(sealed.values.values()) if sealed is not None else [],
        str(sealed.key_codec.spec) if sealed is not None else "",
        str(sealed.value_codec.spec) if sealed is not None else "",
        sealed.table if sealed is not None else None,
        sealed.starts if sealed is not None else None,
        sinks.keys if sinks is not None else None,
        sinks.values if sinks is not None else None,
        sinks.positions if sinks is not None else None,
        mask,
        scale,
        softcap,
        head_sinks,
    )
    return output


@torch.library.impl(_library, "decode_attention", "CompositeExplicitAutograd")
def _decode_attention(
    query: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    key_arenas: Sequence[Tensor],
    value_arenas: Sequence[Tensor],
    key_codec: str,
    value_codec: str,
    block_table: Tensor | None,
    block_starts: Tensor | None,
    sink_keys: Tensor | None,
    sink_values: Tensor | None,
    sink_positions: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor:
    sealed = None
    if block_table is not None and block_starts is not None:
        keys = _codec(key_codec, "key", query.shape[-1], key_arenas[0])
        values = _codec(value_codec, "value", tail_values.shape[-1], value_arenas[0])
        sealed = Sealed(keys, values, _named(keys, key_arenas), _named(values, value_arenas), block_table, block_starts)
    sinks = None
    if sink_keys is not None and sink_values is not None and sink_positions is not None:
        sinks = Sinks(sink_keys, sink_values, sink_positions)
    return _run(query, Exact(tail_keys, tail_values), sealed, sinks, mask, scale, softcap, head_sinks)


def _run(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    head_sinks: Tensor | None,
) -> Tensor:
    """Check the arguments and choose a kernel."""
    check_shapes(query, tail, sealed, sinks, mask, head_sinks)
    run = _kernel_for(query, tail, sealed)
    if not torch.is_autocast_enabled(query.device.type):
        return run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks)
    with torch.autocast(query.device.type, enabled=False):  # the softmax is accumulated in float32
        return run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks)


def _kernel_for(query: Tensor, tail: Exact, sealed: Sealed | None) -> Callable[..., Tensor]:
    """The fastest `decode_attention` that takes tensors like these, and is installed."""
    device = query.device.type
    if device == "cpu" and cpu.supports(query, tail.keys, tail.values) and cpu.available():
        return cpu.decode_attention
    if device == "cuda" and gpu.supports(query, tail.keys, tail.values, sealed) and gpu.available():
        return gpu.decode_attention
    return reference.decode_attention


@torch.library.register_fake("memos::decode_attention", lib=_library)  # type: ignore[untyped-decorator]
def _decode_attention_shape(query: Tensor, tail_keys: Tensor, tail_values: Tensor, *others: object) -> Tensor:
    return query.new_empty((*query.shape[:3], tail_values.shape[-1]))


def check_shapes(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    head_sinks: Tensor | None,
) -> None:
    """Raise a `ValueError` unless the arguments of a call fit each other."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = tail.keys.shape[1:3]
    _expect("tail keys", tail.keys, (batch, kv_heads, tokens, head_dim))
    _expect("tail values", tail.values, (batch, kv_heads, tokens, tail.values.shape[-1]))
    if heads % kv_heads:
        raise ValueError(f"query: expected a multiple of {kv_heads} heads, as many as keys have, got {heads}")
    if sealed is not None and sealed.prepared.get("checked for") != (batch, kv_heads):
        _check_sealed(sealed, batch, kv_heads)
    if sinks is not None:
        count = sinks.positions.shape[-1]
        _expect("sink positions", sinks.positions, (batch, count))
        _expect("sink keys", sinks.keys, (batch, kv_heads, count, head_dim))
        _expect("sink values", sinks.values, (batch, kv_heads, count, tail.values.shape[-1]))
    if head_sinks is not None:
        _expect("head_sinks", head_sinks, (heads,))
    if mask is None:
        return
    if sealed is not None and sealed.starts.device.type == "cpu":  # reading them would wait for another device
        tokens += sealed.prepared["tokens"]
    else:
        tokens = mask.shape[-1] if sealed is not None else tokens
    fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or tuple(mask.shape[2:]) != (queries, tokens):
        raise ValueError(f"mask: expected [1 or {batch}, 1 or {heads}, {queries}, {tokens}], got {tuple(mask.shape)}")


def _check_sealed(sealed: Sealed, batch: int, kv_heads: int) -> None:
    entries = sealed.table.shape[-1]
    _expect("block table", sealed.table, (batch, entries))
    _expect("block starts", sealed.starts, (batch, entries + 1))
    for codec, arenas in ((sealed.key_codec, sealed.keys), (sealed.value_codec, sealed.values)):
        for name, (shape, _) in codec.layout(kv_heads).items():
            _expect(f"{codec.role} {name}", arenas[name], (arenas[name].shape[0], *shape))
    if sealed.starts.device.type == "cpu":
        sealed.prepared["tokens"] = _sealed_tokens(sealed.starts)
    sealed.prepared["checked for"] = (batch, kv_heads)


def _sealed_tokens(starts: Tensor) -> int:
    """How many sealed tokens the longest row has; raises unless those of every row begin at 0 or before."""
    rows = starts[:, :: max(starts.shape[1] - 1, 1)].tolist()  # the first number and the last
    first, last = max((row[0] for row in rows), default=0), min((row[-1] for row in rows), default=0)
    if first > 0 or last < 0:
        raise ValueError(
            "block starts: expected rows whose first number is at most 0 and whose last is at least 0, got a first of "
            f"{first} and a last of {last}"
        )
    return max((int(row[-1]) for row in rows), default=0)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


@lru_cache(maxsize=256)
def _codec_of(text: str, role: Role, head_dim: int, block_size: int, dtype: torch.dtype) -> BlockCodec:
    return BlockCodec(CodecSpec.parse(text), role, head_dim, block_size, dtype)


def _codec(text: str, role: Role, head_dim: int, codes: Tensor) -> BlockCodec:
    """The codec that wrote arenas whose first one is `codes`."""
    kind = text.partition(" ")[0]
    if kind == "full":
        return _codec_of(text, role, head_dim, codes.shape[2], codes.dtype)
    block_size = codes.shape[3] * (8 // BITS[kind]) if role == "key" else codes.shape[2]
    return _codec_of(text, role, head_dim, block_size, torch.float32)


def _named(codec: BlockCodec, arenas: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(codec.layout(1), arenas, strict=True))
