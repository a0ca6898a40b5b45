"""Decode attention on the GPU: describes a call to the Triton kernels and launches them.

Nothing here waits for the device: counts come from shapes, and what only the device knows is read there.
"""

from __future__ import annotations

import contextlib
import logging
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.codecs import BITS, BlockCodec, hadamard, is_power_of_two
from . import gpu_ptx
from .reference import Exact, Sealed, Sinks

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 512
# Tensor cores take tiles of at least so many rows, channels and tokens.
SMALLEST_TILE = 16
# Elements of a tile of queries, K or V, a few of which have to lie in shared memory at once; in float32, which is not
# multiplied by tensor cores, in registers.
TILE_ELEMENTS, FLOAT32_TILE_ELEMENTS = 8192, 2048
# Rows of queries in one, for every so many of which K and V are loaded again, and tokens in one.
MOST_ROWS, MOST_TOKENS = 64, 128
# Tiles below which another split is not worth joining.
STEPS_PER_SPLIT = 2
# For what is in registers, more do not fit; they keep enough loads in flight.
WARPS_PER_PROCESSOR = 12
# For the interpreter, which runs one program after the other: so many that there is something to join.
INTERPRETED_PROCESSORS = 2
# Floats of a partial behind its output: maximum, sum, and two that keep the next one aligned to 16 bytes.
PARTIAL_EXTRA = 4
OLDEST_TRITON = (3, 6)
# Of CUDA devices, the first that multiply bfloat16, and that Triton compiles for.
OLDEST_CAPABILITY = (8, 0)


def available() -> bool:
    """Whether the kernels can be had; if not, one log line says what to install."""
    return _load_kernels() is not None


def supports(query: Tensor, tail_keys: Tensor, tail_values: Tensor, sealed: Sealed | None = None) -> bool:
    """Whether the kernels take queries, and exact and sealed keys and values, like these."""
    exact = [query, tail_keys, tail_values]
    if sealed is not None:
        codecs = ((sealed.key_codec, sealed.keys), (sealed.value_codec, sealed.values))
        exact += [arenas["codes"] for codec, arenas in codecs if codec.spec.kind == "full"]
    return (
        _has_tensor_cores(query.device)
        and all(states.dtype in DTYPES and states.shape[-1] <= LARGEST_HEAD_DIM for states in exact)
        and all(states.shape[2] * states.stride(2) < 2**31 for states in (tail_keys, tail_values))
    )


def decode_attention(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    head_sinks: Tensor | None,
    log_sum_exp: Tensor | None = None,
) -> Tensor:
    """As :func:`memos_hf.attention.reference.decode_attention`, by the compiled kernels.

    Queries in half precision are multiplied in half precision, in which codes are exact, and summed in float32. Tensors
    on the CPU are computed with by Triton's interpreter, if `TRITON_INTERPRET=1` was set before Triton was imported.

    Raises
    ------
    RuntimeError
        If triton is not installed.
    """
    kernels = _load_kernels()
    if kernels is None:
        raise RuntimeError("decode attention on the GPU needs triton 3.6 or newer: pip install 'memos_hf[gpu]'")
    batch, heads, queries, key_dim = query.shape
    pairs, value_dim = batch * tail.keys.shape[1], tail.values.shape[-1]
    output = query.new_empty(
        (batch, heads, queries, value_dim), dtype=query.dtype if log_sum_exp is None else log_sum_exp.dtype
    )
    if output.numel() == 0:
        return output
    rows = batch * heads * queries // pairs
    codecs = (sealed.key_codec, sealed.value_codec) if sealed is not None else None
    plan = _plan(codecs, key_dim, value_dim, query.dtype, rows)
    chunks = -(-rows // plan.rows)
    splits = _splits(query.device, pairs * chunks, plan, sealed, tail)
    partial = value_dim + PARTIAL_EXTRA
    query = query.contiguous()
    if log_sum_exp is not None and mask is None:
        queries = 1  # without a mask the kernels are causal at the end, which is no limit to one query of more heads
    shared = {
        "partials": query.new_empty(pairs * splits.total * rows * partial, dtype=torch.float32),
        **{"queries": queries, "rows": rows, "splits": splits.total, "sealed_splits": splits.sealed},
        **{"PARTIAL": partial, "num_warps": plan.warps, "enable_fp_fusion": True},
    }
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        kernels.attend[(pairs * chunks * splits.total,)](
            query=query,
            **_sealed_arguments(query, sealed, scale),
            **_tail_arguments(tail),
            **_sink_arguments(sinks if sealed is not None else None),
            **_mask_arguments(mask),
            scale=float(scale),
            softcap=float(softcap),
            kv_heads=tail.keys.shape[1],
            chunks=chunks,
            sealed_steps=splits.sealed_steps,
            exact_steps=splits.exact_steps,
            ROWS=plan.rows,
            KEYS=plan.keys,
            VALUES=plan.values,
            EXACT_TOKENS=plan.exact_tokens,
            EXACT_STAGES=plan.stages if sealed is None else 1,
            SOFTCAP=softcap != 0,
            num_stages=plan.stages,
            **shared,
        )
        turned = sealed is not None and sealed.value_codec.spec.rotation is not None
        kernels.combine[(pairs * rows,)](
            output=output,
            log_sum_exp=log_sum_exp,
            head_sinks=head_sinks.contiguous() if head_sinks is not None else None,
            rotation=hadamard(value_dim, query.device) if turned else None,
            heads=heads,
            DIM=value_dim,
            TILE=_tile(value_dim),
            **shared,
        )
    return output


class Layout(NamedTuple):
    """How K or V lies in its arenas, and how it is read: constants of a compiled kernel.

    Attributes
    ----------
    dim, channels, block : int
        Head dim; stored channels, padding included; tokens in a block.
    tile : int
        Channels in a tile, padding included.
    stretches, stretch, run : int
        How many codes a byte holds; how far apart they lie, along the tokens of keys and the channels of values; how
        many bytes in a row a tile is made of, so that it has `run * stretches` tokens or channels.
    bits, floating : int, bool
        Of a code, 0 for what is stored as it was; whether it is a float.
    shared : bool
        Whether all channels of a token share a scale.
    group_channels, group_tokens : int
        How many channels and tokens do.
    channel_span, token_span : int
        Of these, how many neighbours in a tile always do, so that one number is read for them.
    scale_unit, zero_unit, lowest : float
        As :class:`~memos_hf.blocks.codecs.BlockCodec` says; `lowest` is 0 where there are zero points.
    ptx, base
        What converts the first, second, … codes of four bytes, if they can be; see :mod:`memos_hf.attention.gpu_ptx`.
    """

    dim: int
    channels: int
    block: int
    tile: int
    stretches: int
    stretch: int
    run: int
    bits: int = 0
    floating: bool = False
    shared: bool = False
    group_channels: int = 1
    group_tokens: int = 1
    channel_span: int = 1
    token_span: int = 1
    scale_unit: float = 1.0
    zero_unit: float = 1.0
    lowest: float = 0.0
    ptx: tuple[str, ...] = ()
    base: float = 0.0


def _key_layout(codec: BlockCodec, tokens: int) -> Layout:
    dim, block = codec.head_dim, codec.block_size
    tile, stretches = _tile(dim), _codes_per_byte(codec)
    run = max(min(tokens, block), SMALLEST_TILE) // stretches
    layout = Layout(dim, codec.channels, block, tile, stretches, block // stretches, run)
    if codec.spec.kind == "full":
        return layout
    shared = codec.group_channels == codec.channels
    channel_span = tile if shared else codec.group_channels if is_power_of_two(codec.group_channels) else 1
    return _coded(layout, codec, shared, channel_span, min(codec.group_tokens, run))


def _value_layout(codec: BlockCodec) -> Layout:
    stretches = _codes_per_byte(codec)
    stretch, group = codec.channels // stretches, codec.group_channels
    run = max(_power_of_two(stretch), SMALLEST_TILE // stretches)
    layout = Layout(codec.head_dim, codec.channels, codec.block_size, run * stretches, stretches, stretch, run)
    if codec.spec.kind == "full":
        return layout
    shared = group == codec.channels
    aligned = is_power_of_two(group) and (stretch % group == 0 or group % stretch == 0)
    return _coded(layout, codec, shared, run if shared else min(group, run) if aligned else 1, 1)


def _coded(layout: Layout, codec: BlockCodec, shared: bool, channel_span: int, token_span: int) -> Layout:
    return layout._replace(
        bits=BITS[codec.spec.kind],
        floating=codec.spec.kind == "fp8",
        shared=shared,
        group_channels=codec.group_channels,
        group_tokens=codec.group_tokens,
        channel_span=channel_span,
        token_span=token_span,
        scale_unit=codec.scale_unit,
        zero_unit=codec.zero_unit,
        lowest=0.0 if codec.has_zero_points else codec.lowest,
    )


def _with_ptx(layout: Layout, codec: BlockCodec, span: int, dtype: torch.dtype) -> Layout:
    """The layout with conversions to a half-precision `dtype`, if four bytes in a row always have the same groups."""
    grouped = codec.has_zero_points or not layout.shared
    if layout.bits == 0 or layout.stretch % 4 or (grouped and span % 4):
        return layout
    bfloat16 = dtype == torch.bfloat16
    lowest = None if codec.has_zero_points else layout.lowest
    ptx = [
        gpu_ptx.conversion(codec.spec.kind, place, bfloat16, lowest, not layout.shared)
        for place in range(layout.stretches)
    ]
    return layout._replace(ptx=tuple(ptx), base=gpu_ptx.BASES[bfloat16][0])


def _codes_per_byte(codec: BlockCodec) -> int:
    return 8 // BITS.get(codec.spec.kind, 8)


def _tile(dim: int) -> int:
    return max(_power_of_two(dim), SMALLEST_TILE)


class _Plan(NamedTuple):
    """What a kernel is compiled for, beside the kind of mask: rows and tokens in a tile, and how it is run."""

    keys: Layout
    values: Layout
    rows: int
    exact_tokens: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def _plan(
    codecs: tuple[BlockCodec, BlockCodec] | None, key_dim: int, value_dim: int, dtype: torch.dtype, rows: int
) -> _Plan:
    single = dtype == torch.float32
    elements = FLOAT32_TILE_ELEMENTS if single else TILE_ELEMENTS
    most = max(elements // max(_tile(key_dim), _tile(value_dim)), SMALLEST_TILE)
    tokens, row_tile = min(most, MOST_TOKENS), min(_tile(rows), most, MOST_ROWS)
    if codecs is None:
        keys, values = (Layout(dim, dim, 1, _tile(dim), 1, dim, _tile(dim)) for dim in (key_dim, value_dim))
    else:
        keys, values = _key_layout(codecs[0], tokens), _value_layout(codecs[1])
        if not single and torch.version.hip is None:
            keys = _with_ptx(keys, codecs[0], keys.token_span, dtype)
            values = _with_ptx(values, codecs[1], values.channel_span, dtype)
    warps = 8 if single or row_tile > SMALLEST_TILE else 4
    return _Plan(keys, values, row_tile, tokens, warps, stages=3 if keys.bits and values.bits else 2)


class _Splits(NamedTuple):
    """How the tokens of each pair are cut: `sealed` splits and then others, of so many tiles each."""

    total: int
    sealed: int
    sealed_steps: int
    exact_steps: int


def _splits(device: torch.device, pairs: int, plan: _Plan, sealed: Sealed | None, tail: Exact) -> _Splits:
    """As many splits as keep the device busy, and no more than there is work for."""
    wanted = max(_processors(device) * (WARPS_PER_PROCESSOR // plan.warps) // pairs, 1)
    steps = 0
    if sealed is not None:
        steps = sealed.table.shape[1] * max(plan.keys.stretch // plan.keys.run, 1)
    sealed_steps = max(-(-steps // wanted), STEPS_PER_SPLIT)
    sealed_splits = -(-steps // sealed_steps)
    steps = -(-tail.keys.shape[2] // plan.exact_tokens)
    exact_steps = max(-(-steps // wanted), STEPS_PER_SPLIT)
    return _Splits(sealed_splits + max(-(-steps // exact_steps), 1), sealed_splits, sealed_steps, exact_steps)


def _sealed_arguments(query: Tensor, sealed: Sealed | None, scale: float) -> dict[str, Any]:
    arguments: dict[str, Any] = dict.fromkeys(_ARENAS)
    if sealed is None:
        return arguments | {
            **{"sealed_query": None, "sealed_scale": 0.0, "table": None, "starts": None},
            **{"entries": 0, "table_stride": 0, "starts_stride": 0},
        }
    for role, arenas in (("key", sealed.keys), ("value", sealed.values)):
        arguments |= {f"{role}_{name}": arena for name, arena in arenas.items()}
        if arenas["codes"].dtype == torch.float8_e4m3fn:  # which many devices have no type for
            arguments[f"{role}_codes"] = arenas["codes"].view(torch.uint8)
    table, starts = _int32_rows(sealed.table), _int32_rows(sealed.starts)
    if sealed.key_codec.spec.rotation is not None:
        # A matrix of ±1/n is exact in half precision, and no query turned by it is larger than it was.
        query, scale = (
            query @ _small_hadamard(query.shape[-1], query.device, query.dtype),
            scale * query.shape[-1] ** 0.5,
        )
    return arguments | {
        **{"sealed_query": query, "sealed_scale": float(scale), "table": table, "starts": starts},
        **{"entries": table.shape[1], "table_stride": table.stride(0), "starts_stride": starts.stride(0)},
    }


_ARENAS = ("key_codes", "key_scales", "key_zeros", "value_codes", "value_scales", "value_zeros")


def _int32_rows(table: Tensor) -> Tensor:
    table = table.to(torch.int32)
    return table if table.stride(-1) == 1 else table.contiguous()


def _tail_arguments(tail: Exact) -> dict[str, Any]:
    keys, values = (states if states.stride(-1) == 1 else states.contiguous() for states in (tail.keys, tail.values))
    # Which of these strides are multiples of 16 must be known for wide loads, and their values must not be.
    unit = 16 if all(states.stride(dim) % 16 == 0 for states in (keys, values) for dim in (0, 1)) else 1
    arguments: dict[str, Any] = {"tail_tokens": keys.shape[2], "STRIDE_UNIT": unit}
    for role, states in (("key", keys), ("value", values)):
        arguments |= {
            f"tail_{role}s": states,
            f"{role}_batch_stride": states.stride(0) // unit,
            f"{role}_head_stride": states.stride(1) // unit,
            f"{role}_token_stride": states.stride(2),
        }
    return arguments


def _sink_arguments(sinks: Sinks | None) -> dict[str, Any]:
    if sinks is None or sinks.positions.shape[1] == 0:
        return {"sink_keys": None, "sink_values": None, "sink_positions": None, "SINKS": 0}
    return {
        "sink_keys": sinks.keys.contiguous(),
        "sink_values": sinks.values.contiguous(),
        "sink_positions": sinks.positions.to(torch.int32).contiguous(),
        "SINKS": sinks.positions.shape[1],
    }


def _mask_arguments(mask: Tensor | None) -> dict[str, Any]:
    names = ("mask_batch_stride", "mask_head_stride", "mask_query_stride")
    if mask is None:
        return {"mask": None, "MASK": "none", "ONE_MASK_ROW": False, **dict.fromkeys(names, 0)}
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    strides = [0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3)]
    kind = "boolean" if mask.dtype == torch.bool else "additive"
    return {"mask": mask, "MASK": kind, "ONE_MASK_ROW": not any(strides[1:]), **dict(zip(names, strides, strict=True))}


@lru_cache(maxsize=64)
def _small_hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The Hadamard matrix with entries ±1/size."""
    with torch.inference_mode(False):
        return (hadamard(size, device).sign() / size).to(dtype)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


@cache
def _load_kernels() -> Any:
    try:
        import triton

        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
            raise ImportError(f"triton {triton.__version__} is too old")
        from . import gpu_kernels
    except ImportError:
        logger.warning(
            "triton 3.6 or newer is not installed: attention over encoded blocks runs in plain torch, several times "
            "slower. Install it with: pip install 'memos_hf[gpu]'"
        )
        return None
    return gpu_kernels
