"""The operators `memos::decode_attention` and, over a part of the cached tokens, `memos::partial_attention`.

Each has one schema for every device, so that compilers and profilers see it by name. A call hands over tensors and
strings alone. The functions take the same arguments as the reference and spell them out; kernels are chosen inside, by
device and by what is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ..blocks.codecs import BITS, BlockCodec, CodecSpec, Role
from . import cpu, gpu, reference
from .reference import Exact, Sealed, Sinks

# More queries than these in one call are a prompt: decoding tokens once, and then large products, is faster for them.
MOST_QUERIES = 32

_library = torch.library.Library("memos", "DEF")  # type: ignore[no-untyped-call]
# What is attended to, and by whom, in tensors and strings.
_STATES = (
    "Tensor query, Tensor tail_keys, Tensor tail_values, Tensor[] key_arenas, Tensor[] value_arenas, "
    "str key_codec, str value_codec, Tensor? block_table, Tensor? block_starts, "
    "Tensor? sink_keys, Tensor? sink_values, Tensor? sink_positions"
)
_COUNT = len(_STATES.split(", "))
for _schema in (
    f"decode_attention({_STATES}, Tensor? mask, float scale, float softcap=0.0, Tensor? head_sinks=None) -> Tensor",
    f"partial_attention({_STATES}, Tensor? mask, float scale, float softcap=0.0) -> (Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


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
    if _nobody_is_looking(query):
        return _run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks)
    states = _spelled_out(query, tail, sealed, sinks)
    output: Tensor = torch.ops.memos.decode_attention(*states, mask, scale, softcap, head_sinks)
    return output


def partial_attention(
    query: Tensor,
    tail: Exact | None,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention over a part of the cached tokens, through `torch.ops.memos.partial_attention`.

    :class:`memos_hf.attention.merge.Merge` joins the parts, each cached token being in one of them. Head sinks are no
    part of any: they come in there.

    Parameters
    ----------
    query : Tensor
        `[batch, heads, queries, head_dim]`. Any number of queries: more than `MOST_QUERIES` are attended to in plain
        torch, some at a time.
    tail : Exact, optional
        `None` if the part is made of sealed blocks alone.
    sealed : Sealed, optional
        Neighbouring entries of a block table. `sealed.starts` may begin after 0: positions, in masks and of sinks too,
        remain those in the row of all cached tokens. The tail follows the last entry, or begins at 0 if there is none.
    sinks : Sinks, optional
        As in a call over all tokens. A part takes those of its own sealed tokens, and leaves the others to other parts.
    mask : Tensor, optional
        Boolean (true: attend) or additive, `[batch or 1, heads or 1, queries, tokens]`, with at least as many tokens as
        the positions of this part reach. `None`: every query sees all of the part, so nothing is causal here.
    scale, softcap
        As :func:`decode_attention` takes them.

    Returns
    -------
    output : Tensor
        `[batch, heads, queries, value_dim]`, float32, or float64 if `query` is; the softmax is over this part alone. 0
        where nothing may be attended to.
    log_sum_exp : Tensor
        `[batch, heads, queries]` in the dtype of `output`: the logarithm of the sum of the exponentials of all scores,
        scaled, capped and masked. -inf where nothing may be attended to.

    Raises
    ------
    ValueError
        If shapes do not fit each other, naming the argument, what was expected and what came; or if `tail` and `sealed`
        are both `None`.
    """
    if tail is None:
        tail = _no_tail(query, sealed)
    if _nobody_is_looking(query):
        return _run_part(query, tail, sealed, sinks, mask, scale, softcap)
    states = _spelled_out(query, tail, sealed, sinks)
    result: tuple[Tensor, Tensor] = torch.ops.memos.partial_attention(*states, mask, scale, softcap)
    return result


def _nobody_is_looking(query: Tensor) -> bool:
    """Whether to pass by the dispatcher, which takes as long as a short context's attention."""
    return type(query) is Tensor and not torch.compiler.is_compiling() and not profiler._is_profiler_enabled


def _no_tail(query: Tensor, sealed: Sealed | None) -> Exact:
    if sealed is None:
        raise ValueError("tail, sealed: expected at least one of them, got None and None")
    batch, kv_heads = query.shape[0], sealed.keys["codes"].shape[1]
    return Exact(
        query.new_empty((batch, kv_heads, 0, query.shape[-1])),
        query.new_empty((batch, kv_heads, 0, sealed.value_codec.head_dim)),
    )


def _spelled_out(query: Tensor, tail: Exact, sealed: Sealed | None, sinks: Sinks | None) -> tuple[Any, ...]:
    """The arguments that `_STATES` says."""
    return (
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
    )


def _put_together(
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
) -> tuple[Tensor, Exact, Sealed | None, Sinks | None]:
    """What was spelled out."""
    sealed = None
    if block_table is not None and block_starts is not None:
        keys = _codec(key_codec, "key", query.shape[-1], key_arenas[0])
        values = _codec(value_codec, "value", tail_values.shape[-1], value_arenas[0])
        sealed = Sealed(keys, values, _named(keys, key_arenas), _named(values, value_arenas), block_table, block_starts)
    sinks = None
    if sink_keys is not None and sink_values is not None and sink_positions is not None:
        sinks = Sinks(sink_keys, sink_values, sink_positions)
    return query, Exact(tail_keys, tail_values), sealed, sinks


@torch.library.impl(_library, "decode_attention", "CompositeExplicitAutograd")
def _decode_attention(*arguments: Any) -> Tensor:
    return _run(*_put_together(*arguments[:_COUNT]), *arguments[_COUNT:])


@torch.library.impl(_library, "partial_attention", "CompositeExplicitAutograd")
def _partial_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run_part(*_put_together(*arguments[:_COUNT]), *arguments[_COUNT:])


def _run(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor:
    check_shapes(query, tail, sealed, sinks, mask, head_sinks)
    return _attend(query, tail, sealed, sinks, mask, scale, softcap, head_sinks, None)


def _run_part(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    check_shapes(query, tail, sealed, sinks, mask, None, whole=False)
    log_sum_exp = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    output = _attend(query, tail, sealed, sinks, mask, scale, softcap, None, log_sum_exp)
    return output, log_sum_exp


def _attend(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    head_sinks: Tensor | None,
    log_sum_exp: Tensor | None,
) -> Tensor:
    """Choose a kernel and call it."""
    many = log_sum_exp is not None and query.shape[2] > MOST_QUERIES
    run = reference.decode_attention if many else _kernel_for(query, tail, sealed)
    if not torch.is_autocast_enabled(query.device.type):
        return run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks, log_sum_exp)
    with torch.autocast(query.device.type, enabled=False):  # the softmax is accumulated in float32
        return run(query, tail, sealed, sinks, mask, scale, softcap, head_sinks, log_sum_exp)


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


@torch.library.register_fake("memos::partial_attention", lib=_library)  # type: ignore[untyped-decorator]
def _partial_attention_shape(
    query: Tensor, tail_keys: Tensor, tail_values: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty((*query.shape[:3], tail_values.shape[-1]), dtype=dtype)
    return output, query.new_empty(query.shape[:3], dtype=dtype)


def check_shapes(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    head_sinks: Tensor | None,
    whole: bool = True,
) -> None:
    """Raise a `ValueError` unless the arguments of a call, over all cached tokens or over a part, fit each other."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, tokens = tail.keys.shape[1:3]
    _expect("tail keys", tail.keys, (batch, kv_heads, tokens, head_dim))
    _expect("tail values", tail.values, (batch, kv_heads, tokens, tail.values.shape[-1]))
    if heads % kv_heads:
        raise ValueError(f"query: expected a multiple of {kv_heads} heads, as many as keys have, got {heads}")
    if sealed is not None and sealed.prepared.get("checked for") != (batch, kv_heads, whole, tokens > 0):
        _check_sealed(sealed, batch, kv_heads, whole, tokens > 0)
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
    fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == queries
    if not fits or mask.shape[3] < tokens or (whole and mask.shape[3] > tokens):
        expected = f"[1 or {batch}, 1 or {heads}, {queries}, {tokens}{'' if whole else ' or more'}]"
        raise ValueError(f"mask: expected {expected}, got {tuple(mask.shape)}")


def _check_sealed(sealed: Sealed, batch: int, kv_heads: int, whole: bool, has_tail: bool) -> None:
    entries = sealed.table.shape[-1]
    _expect("block table", sealed.table, (batch, entries))
    _expect("block starts", sealed.starts, (batch, entries + 1))
    for codec, arenas in ((sealed.key_codec, sealed.keys), (sealed.value_codec, sealed.values)):
        for name, (shape, _) in codec.layout(kv_heads).items():
            _expect(f"{codec.role} {name}", arenas[name], (arenas[name].shape[0], *shape))
    if sealed.starts.device.type == "cpu":
        sealed.prepared["tokens"] = _sealed_tokens(sealed.starts, whole, has_tail)
    sealed.prepared["checked for"] = (batch, kv_heads, whole, has_tail)


def _sealed_tokens(starts: Tensor, whole: bool, has_tail: bool) -> int:
    """Where the sealed tokens of the longest row end; raises if a row begins or ends where it must not.

    A part may begin anywhere, and, if no tail follows, lie before position 0 as a whole.
    """
    rows = starts[:, :: max(starts.shape[1] - 1, 1)].tolist()  # the first number and the last
    first, last = max((row[0] for row in rows), default=0), min((row[-1] for row in rows), default=0)
    if (whole and first > 0) or ((whole or has_tail) and last < 0):
        expected = "rows whose first number is at most 0 and whose last is at least 0"
        raise ValueError(f"block starts: expected {expected}, got a first of {first} and a last of {last}")
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
