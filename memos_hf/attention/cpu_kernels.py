"""The compiled part of CPU decode attention: one function, `attend`, that any number of threads may run on one job.

A job is a record of addresses, strides and sizes (`JOB`). Its work is a line of steps, each a tile of tokens of one
pair of batch row and KV head, cut into parts::

    pair 0: sealed … sealed sinks tail tail | pair 1: sealed … sealed sinks tail tail | …
    [ part 0        ][ part 1         ][ part 2          ][ part 3      ] …

A thread takes the next part from a counter until none is left, so threads that come late or never do no harm. A pair
that lies in one part is written to the output at once; what is left of the others is kept as (output, maximum, sum),
and whoever finishes last joins it (flash-decoding). Within a part the query heads of a KV head, times the queries,
are the rows of a small matrix, so that each tile is decoded once for all of them.

Addresses instead of arrays make one signature of every dtype and stride: the kernel is compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

# Kinds of storage, as the fields `*_kind` of a job say them.
FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT2, FP8 = range(7)
NO_MASK, BOOLEAN_MASK, ADDITIVE_MASK = range(3)

_CODED_FIELDS = (
    "kind",
    "codes",
    "scales",
    "zeros",
    "means",
    "channels",
    "group_channels",
    "group_tokens",
    "block_bytes",
    "rotated",
)
_EXACT_FIELDS = ("kind", "data", "batch_stride", "head_stride", "token_stride")
INTEGERS = (
    *("workers", "next_part", "finished_parts", "parts", "scratch", "scratch_size", "partials"),
    *("batch", "kv_heads", "group", "queries", "key_dim", "value_dim", "tile"),
    *("query", "output"),
    *("entries", "block_size", "table", "table_stride", "starts", "starts_stride"),
    *(f"key_{name}" for name in _CODED_FIELDS),
    *(f"value_{name}" for name in _CODED_FIELDS),
    "tail_tokens",
    *(f"tail_key_{name}" for name in _EXACT_FIELDS),
    *(f"tail_value_{name}" for name in _EXACT_FIELDS),
    *("sinks", "sink_positions"),
    *(f"sink_key_{name}" for name in _EXACT_FIELDS),
    *(f"sink_value_{name}" for name in _EXACT_FIELDS),
    *("mask_kind", "mask", "mask_batch_stride", "mask_head_stride", "mask_query_stride", "head_sinks"),
)
FLOATS = (
    *("scale", "softcap", "key_scale_unit", "key_zero_unit", "key_lowest", "key_mean_unit"),
    *("value_scale_unit", "value_zero_unit", "value_lowest"),
)
JOB = np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float64) for name in FLOATS])

# Sums may be reordered, so that they vectorise; infinities (masks) keep their meaning, so this is not `fastmath=True`.
_MATH = {"reassoc", "contract", "nsz", "arcp"}

_ZERO, _ONE, _HALF, _TWO = np.float32(0), np.float32(1), np.float32(0.5), np.float32(2)
_LOWEST, _INFINITY, _NOT_A_NUMBER = np.float32(-np.inf), np.float32(np.inf), np.float32(np.nan)
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = np.float32(1 / math.log(2)), np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_2, _EXP_3, _EXP_4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_EXP_5, _EXP_6 = np.float32(1 / 120), np.float32(1 / 720)
_EXP_MIN, _EXP_MAX = np.float32(-87), np.float32(88)
_HALF_SPECIAL = np.float32(65536)  # above float16's largest number: its infinities and NaNs, seen as numbers


def _compiled(function: Callable[..., Any]) -> Any:
    # Not cached: what is kept on disk is `attend`, into which these are compiled.
    return njit(fastmath=_MATH, error_model="numpy")(function)


def _c_function(function: Callable[..., Any]) -> Any:
    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the user's home may anything be written
        return cfunc(signature)(function)


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's `intrinsic`, whose type says nothing of the arguments that the compiler fills in."""
    return cast(Any, intrinsic)(function)


def _pointer_to(element: Any) -> Any:
    """An intrinsic that reads an address as a pointer to `element`."""
    pointer = types.CPointer(element)  # type: ignore[no-untyped-call]

    @_intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return read


_floats = _pointer_to(types.float32)
_int32s = _pointer_to(types.int32)
_uint16s = _pointer_to(types.uint16)
_int8s = _pointer_to(types.int8)
_uint8s = _pointer_to(types.uint8)


def _small_float(integer: Any, exponent_bits: int) -> Any:
    """An intrinsic that reads the bits of a small IEEE-like float, finite and with its sign on top, as a float32.

    In the compiler's own terms because numba would compute in 64 bits, which halves what fits in a vector. Numbers
    without a leading one are converted from integers: float32 numbers of that kind are slow on many processors.
    """
    mantissa_bits = integer.bitwidth - 1 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1

    @_intrinsic
    def convert(typing_context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, number = ir.IntType(32), ir.FloatType()
            wide, top = builder.zext(arguments[0], word), integer.bitwidth - 1
            sign = builder.shl(builder.and_(wide, word(1 << top)), word(31 - top))
            magnitude = builder.and_(wide, word((1 << top) - 1))
            moved = builder.shl(magnitude, word(23 - mantissa_bits))
            if bias != 127:
                normal = builder.add(moved, word((127 - bias) << 23))
                step = ir.Constant(number, 2.0 ** (1 - bias - mantissa_bits))
                tiny = builder.bitcast(builder.fmul(builder.sitofp(magnitude, number), step), word)
                moved = builder.select(builder.icmp_unsigned("<", magnitude, word(1 << mantissa_bits)), tiny, normal)
            return builder.bitcast(builder.or_(sign, moved), number)

        return types.float32(integer), generate

    return convert


_bfloat16 = _small_float(types.uint16, 8)
_finite_half = _small_float(types.uint16, 5)
_finite_fp8 = _small_float(types.uint8, 4)


@_intrinsic
def _packed_code(typing_context: Any, byte: Any, shift: Any, mask: Any) -> Any:
    """Some bits of a byte as a float32, computed in 32 bits as above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.lshr(builder.zext(arguments[0], word), builder.trunc(arguments[1], word))
        return builder.sitofp(builder.and_(shifted, builder.trunc(arguments[2], word)), ir.FloatType())

    return types.float32(types.uint8, types.int64, types.int64), generate


@_intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """Two to a whole number that comes as a float32, computed in 32 bits as above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], word), word(127))
        return builder.bitcast(builder.shl(biased, word(23)), ir.FloatType())

    return types.float32(types.float32), generate


@_intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [builder.inttoptr(arguments[0], byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_intrinsic
def _fetch_and_increment(typing_context: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, as one step that no thread can interrupt; the value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(types.int64), generate


@_intrinsic
def _address_of(typing_context: Any, pointer: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), generate


@_compiled
def _exp(x: Any) -> Any:
    """Exponential to float32 precision (Cephes' reduction), written out so that loops of it vectorise."""
    y = min(max(x, _EXP_MIN), _EXP_MAX)
    whole = np.floor(y * _LOG2_E + _HALF)
    y = y - whole * _LN_2_HIGH - whole * _LN_2_LOW
    series = y * (y * (y * (y * (y * _EXP_6 + _EXP_5) + _EXP_4) + _EXP_3) + _EXP_2) + _ONE
    value = (y * series + _ONE) * _power_of_two(whole)
    return value if x >= _EXP_MIN else _ZERO


@_compiled
def _half(bits: Any) -> Any:
    """Any float16, infinities and NaNs included."""
    value = _finite_half(bits)
    if abs(value) < _HALF_SPECIAL:
        return value
    return value * _INFINITY if abs(value) == _HALF_SPECIAL else _NOT_A_NUMBER


@_compiled
def _decode_run(kind: int, codes: int, shift: int, count: int, scales: Any, zeros: Any, out: Any) -> None:
    """`out[i] = code[i] * scales[i] + zeros[i]` for a run of codes that lie side by side."""
    if kind == INT8:
        signed = _int8s(codes)
        for i in range(count):
            out[i] = np.float32(signed[i]) * scales[i]
    elif kind == FP8:
        raw = _uint8s(codes)
        for i in range(count):
            out[i] = _finite_fp8(raw[i]) * scales[i]
    else:
        raw = _uint8s(codes)
        mask = 15 if kind == INT4 else 3
        for i in range(count):
            out[i] = _packed_code(raw[i], shift, mask) * scales[i] + zeros[i]


@_compiled
def _decode_uniform_run(kind: int, codes: int, shift: int, count: int, scale: Any, zero: Any, out: Any) -> None:
    """`out[i] = code[i] * scale + zero` for a run of codes that lie side by side."""
    if kind == INT8:
        signed = _int8s(codes)
        for i in range(count):
            out[i] = np.float32(signed[i]) * scale
    elif kind == FP8:
        raw = _uint8s(codes)
        for i in range(count):
            out[i] = _finite_fp8(raw[i]) * scale
    else:
        raw = _uint8s(codes)
        mask = 15 if kind == INT4 else 3
        for i in range(count):
            out[i] = _packed_code(raw[i], shift, mask) * scale + zero


@_compiled
def _prefetch_run(address: int, size: int) -> None:
    for line in range(0, size, 64):
        _prefetch(address + line)


@_compiled
def _per_byte(kind: int) -> int:
    return 2 if kind == INT4 else 4 if kind == INT2 else 1


@_compiled
def _read_scales(
    scales: int, zeros: int, first: int, count: int, scale_unit: Any, zero_unit: Any, lowest: Any, out: int
) -> None:
    """Scales, and behind them what a code of 0 stands for, of `count` groups from `first` on, as float32 at `out`."""
    stored, numbers = _uint16s(scales + 2 * first), _floats(out)
    for i in range(count):
        numbers[i] = _finite_half(stored[i]) * scale_unit
    offsets = _floats(out + 4 * count)
    if zeros:
        points = _int8s(zeros + first)
        for i in range(count):
            offsets[i] = np.float32(points[i]) * zero_unit * numbers[i]
    else:
        for i in range(count):
            offsets[i] = lowest * numbers[i]


@_compiled
def _read_key_scales(job: Any, first: int, count: int, out: int) -> None:
    units = np.float32(job.key_scale_unit), np.float32(job.key_zero_unit), np.float32(job.key_lowest)
    _read_scales(job.key_scales, job.key_zeros, first, count, units[0], units[1], units[2], out)


@_compiled
def _read_value_scales(job: Any, first: int, count: int, out: int) -> None:
    units = np.float32(job.value_scale_unit), np.float32(job.value_zero_unit), np.float32(job.value_lowest)
    _read_scales(job.value_scales, job.value_zeros, first, count, units[0], units[1], units[2], out)


@_compiled
def _decode_keys(job: Any, block: int, first: int, blocks_ahead: int, tile: int, scales: int) -> None:
    """Decode tokens `first` to `first + job.tile` of a block into `tile`, float32 `[key_dim, job.tile]`.

    Run by run of tokens whose codes lie side by side and, if they share scales, in one group.
    """
    per_byte, tokens = _per_byte(job.key_kind), job.tile
    stretch = job.block_size // per_byte
    ahead = blocks_ahead * job.key_block_bytes
    token_groups = job.block_size // job.key_group_tokens
    groups = job.key_dim // job.key_group_channels * token_groups
    if job.key_group_tokens > 1:
        _read_key_scales(job, block * groups, groups, scales)
    start = first
    while start < first + tokens:
        place, shift = start % stretch, start // stretch * (8 // per_byte)
        count = min(first + tokens - start, stretch - place)
        codes = job.key_codes + block * job.key_dim * stretch + place
        out = tile + 4 * (start - first)
        if job.key_group_tokens == 1:
            _decode_keys_of_tokens(job, codes, stretch, shift, count, block * groups + start, ahead, out, scales)
        else:
            count = min(count, job.key_group_tokens - start % job.key_group_tokens)
            group = start // job.key_group_tokens
            _decode_keys_of_group(job, codes, stretch, shift, count, token_groups, ahead, out, scales + 4 * group)
        start += count
    if job.key_means:
        means, unit = _uint16s(job.key_means + 2 * block * job.key_dim), np.float32(job.key_mean_unit)
        for channel in range(job.key_dim):
            mean, numbers = _finite_half(means[channel]) * unit, _floats(tile + 4 * channel * tokens)
            for i in range(tokens):
                numbers[i] += mean


@_compiled
def _decode_keys_of_tokens(
    job: Any, codes: int, stretch: int, shift: int, count: int, row: int, ahead: int, out: int, scales: int
) -> None:
    """A run of tokens that have scales of their own, for each group of channels."""
    for first_channel in range(0, job.key_dim, job.key_group_channels):
        _read_key_scales(job, row, count, scales)
        for channel in range(first_channel, first_channel + job.key_group_channels):
            target = _floats(out + 4 * channel * job.tile)
            _prefetch_run(codes + channel * stretch + ahead, count)
            offsets = _floats(scales + 4 * count)
            _decode_run(job.key_kind, codes + channel * stretch, shift, count, _floats(scales), offsets, target)
        row += job.block_size


@_compiled
def _decode_keys_of_group(
    job: Any, codes: int, stretch: int, shift: int, count: int, token_groups: int, ahead: int, out: int, scales: int
) -> None:
    """A run of tokens in one group: each channel, or group of channels, has one scale."""
    steps = _floats(scales)
    offsets = _floats(scales + 4 * (job.key_dim // job.key_group_channels) * token_groups)
    group = 0
    for first_channel in range(0, job.key_dim, job.key_group_channels):
        for channel in range(first_channel, first_channel + job.key_group_channels):
            target = _floats(out + 4 * channel * job.tile)
            _prefetch_run(codes + channel * stretch + ahead, count)
            run = codes + channel * stretch
            _decode_uniform_run(job.key_kind, run, shift, count, steps[group], offsets[group], target)
        group += token_groups


@_compiled
def _decode_values(job: Any, block: int, first: int, count: int, blocks_ahead: int, tile: int, scales: int) -> None:
    """Decode `count` tokens of a block from `first` on into `tile`, float32 `[count, value_dim]`.

    Run by run of channels whose codes lie side by side and share a scale.
    """
    per_byte = _per_byte(job.value_kind)
    stretch = job.value_channels // per_byte
    ahead = blocks_ahead * job.value_block_bytes
    groups = job.value_channels // job.value_group_channels
    if job.value_group_tokens > 1:  # one scale for all tokens: values have no groups of some
        rows, step = 1, 0
        _read_value_scales(job, block * groups, groups, scales)
    else:
        rows, step = count, groups
        _read_value_scales(job, (block * job.block_size + first) * groups, count * groups, scales)
    steps, offsets = _floats(scales), _floats(scales + 4 * rows * groups)
    channel = 0
    while channel < job.value_dim:
        place, shift = channel % stretch, channel // stretch * (8 // per_byte)
        group = channel // job.value_group_channels
        last = min(min((group + 1) * job.value_group_channels, channel - place + stretch), job.value_dim)
        codes = job.value_codes + (block * job.block_size + first) * stretch + place
        for i in range(count):
            out = _floats(tile + 4 * (i * job.value_dim + channel))
            _prefetch_run(codes + i * stretch + ahead, last - channel)
            run = codes + i * stretch
            _decode_uniform_run(job.value_kind, run, shift, last - channel, steps[group], offsets[group], out)
            group += step
        channel = last


@_compiled
def _widen(kind: int, source: int, stride: int, count: int, dim: int, tile: int) -> None:
    """Copy `count` tokens of 16-bit floats, `stride` elements apart, into `tile`, float32 `[count, dim]`."""
    for i in range(count):
        raw, out = _uint16s(source + 2 * i * stride), _floats(tile + 4 * i * dim)
        if kind == BFLOAT16:
            for j in range(dim):
                out[j] = _bfloat16(raw[j])
        else:
            for j in range(dim):
                out[j] = _half(raw[j])


@_compiled
def _accumulate(
    rows: int,
    inner: int,
    width: int,
    factors: int,
    factor_stride: int,
    matrix: int,
    matrix_stride: int,
    out: int,
    out_stride: int,
) -> None:
    """`out[r] += sum over k of factors[r, k] * matrix[k]`, rows `*_stride` floats apart and `width` or `inner` long.

    Scores are this with channels as `k`, outputs with tokens as `k`. Rows are taken four or three at a time, so that
    the matrix is read once for them.
    """
    done = 0
    while rows - done >= 4:
        place, target = factors + 4 * done * factor_stride, out + 4 * done * out_stride
        _accumulate_four(inner, width, place, factor_stride, matrix, matrix_stride, target, out_stride)
        done += 4
    if rows - done == 3:
        place, target = factors + 4 * done * factor_stride, out + 4 * done * out_stride
        _accumulate_three(inner, width, place, factor_stride, matrix, matrix_stride, target, out_stride)
        done += 3
    while done < rows:
        place, target = factors + 4 * done * factor_stride, out + 4 * done * out_stride
        _accumulate_one(inner, width, place, matrix, matrix_stride, target)
        done += 1


@_compiled
def _accumulate_four(
    inner: int, width: int, factors: int, factor_stride: int, matrix: int, matrix_stride: int, out: int, out_stride: int
) -> None:
    a, b = _floats(factors), _floats(factors + 4 * factor_stride)
    c, d = _floats(factors + 8 * factor_stride), _floats(factors + 12 * factor_stride)
    out_a, out_b = _floats(out), _floats(out + 4 * out_stride)
    out_c, out_d = _floats(out + 8 * out_stride), _floats(out + 12 * out_stride)
    whole = inner // 4 * 4
    for k in range(0, whole, 4):
        m0, m1 = _floats(matrix + 4 * k * matrix_stride), _floats(matrix + 4 * (k + 1) * matrix_stride)
        m2, m3 = _floats(matrix + 4 * (k + 2) * matrix_stride), _floats(matrix + 4 * (k + 3) * matrix_stride)
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        c0, c1, c2, c3 = c[k], c[k + 1], c[k + 2], c[k + 3]
        d0, d1, d2, d3 = d[k], d[k + 1], d[k + 2], d[k + 3]
        for i in range(width):
            out_a[i] += a0 * m0[i] + a1 * m1[i] + a2 * m2[i] + a3 * m3[i]
            out_b[i] += b0 * m0[i] + b1 * m1[i] + b2 * m2[i] + b3 * m3[i]
            out_c[i] += c0 * m0[i] + c1 * m1[i] + c2 * m2[i] + c3 * m3[i]
            out_d[i] += d0 * m0[i] + d1 * m1[i] + d2 * m2[i] + d3 * m3[i]
    for k in range(whole, inner):
        m0 = _floats(matrix + 4 * k * matrix_stride)
        a0, b0, c0, d0 = a[k], b[k], c[k], d[k]
        for i in range(width):
            out_a[i] += a0 * m0[i]
            out_b[i] += b0 * m0[i]
            out_c[i] += c0 * m0[i]
            out_d[i] += d0 * m0[i]


@_compiled
def _accumulate_three(
    inner: int, width: int, factors: int, factor_stride: int, matrix: int, matrix_stride: int, out: int, out_stride: int
) -> None:
    a, b, c = _floats(factors), _floats(factors + 4 * factor_stride), _floats(factors + 8 * factor_stride)
    out_a, out_b, out_c = _floats(out), _floats(out + 4 * out_stride), _floats(out + 8 * out_stride)
    whole = inner // 4 * 4
    for k in range(0, whole, 4):
        m0, m1 = _floats(matrix + 4 * k * matrix_stride), _floats(matrix + 4 * (k + 1) * matrix_stride)
        m2, m3 = _floats(matrix + 4 * (k + 2) * matrix_stride), _floats(matrix + 4 * (k + 3) * matrix_stride)
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        c0, c1, c2, c3 = c[k], c[k + 1], c[k + 2], c[k + 3]
        for i in range(width):
            out_a[i] += a0 * m0[i] + a1 * m1[i] + a2 * m2[i] + a3 * m3[i]
            out_b[i] += b0 * m0[i] + b1 * m1[i] + b2 * m2[i] + b3 * m3[i]
            out_c[i] += c0 * m0[i] + c1 * m1[i] + c2 * m2[i] + c3 * m3[i]
    for k in range(whole, inner):
        m0 = _floats(matrix + 4 * k * matrix_stride)
        a0, b0, c0 = a[k], b[k], c[k]
        for i in range(width):
            out_a[i] += a0 * m0[i]
            out_b[i] += b0 * m0[i]
            out_c[i] += c0 * m0[i]


@_compiled
def _accumulate_one(inner: int, width: int, factors: int, matrix: int, matrix_stride: int, out: int) -> None:
    a, out_a = _floats(factors), _floats(out)
    whole = inner // 8 * 8
    for k in range(0, whole, 8):
        m0, m1 = _floats(matrix + 4 * k * matrix_stride), _floats(matrix + 4 * (k + 1) * matrix_stride)
        m2, m3 = _floats(matrix + 4 * (k + 2) * matrix_stride), _floats(matrix + 4 * (k + 3) * matrix_stride)
        m4, m5 = _floats(matrix + 4 * (k + 4) * matrix_stride), _floats(matrix + 4 * (k + 5) * matrix_stride)
        m6, m7 = _floats(matrix + 4 * (k + 6) * matrix_stride), _floats(matrix + 4 * (k + 7) * matrix_stride)
        a0, a1, a2, a3, a4, a5, a6, a7 = a[k], a[k + 1], a[k + 2], a[k + 3], a[k + 4], a[k + 5], a[k + 6], a[k + 7]
        for i in range(width):
            near = a0 * m0[i] + a1 * m1[i] + a2 * m2[i] + a3 * m3[i]
            out_a[i] += near + (a4 * m4[i] + a5 * m5[i] + a6 * m6[i] + a7 * m7[i])
    for k in range(whole, inner):
        m0, a0 = _floats(matrix + 4 * k * matrix_stride), a[k]
        for i in range(width):
            out_a[i] += a0 * m0[i]


@_compiled
def _score_tokens(
    rows: int, dim: int, tokens: int, count: int, queries: int, keys: int, stride: int, scores: int
) -> None:
    """`scores[r, t] = queries[r] · keys[t]`, keys `stride` floats apart; rows of scores are `tokens` long."""
    whole = rows // 3 * 3
    for t in range(count):
        key = _floats(keys + 4 * t * stride)
        for r in range(0, whole, 3):
            q0, q1 = _floats(queries + 4 * r * dim), _floats(queries + 4 * (r + 1) * dim)
            q2 = _floats(queries + 4 * (r + 2) * dim)
            s0, s1, s2 = _ZERO, _ZERO, _ZERO
            for d in range(dim):
                s0 += q0[d] * key[d]
                s1 += q1[d] * key[d]
                s2 += q2[d] * key[d]
            _floats(scores + 4 * r * tokens)[t] = s0
            _floats(scores + 4 * (r + 1) * tokens)[t] = s1
            _floats(scores + 4 * (r + 2) * tokens)[t] = s2
        for r in range(whole, rows):
            q0 = _floats(queries + 4 * r * dim)
            s0 = _ZERO
            for d in range(dim):
                s0 += q0[d] * key[d]
            _floats(scores + 4 * r * tokens)[t] = s0


@_compiled
def _hadamard(rows: int, dim: int, vectors: int) -> None:
    """Multiply rows by the orthonormal Hadamard matrix, in place, by its fast transform."""
    factor = np.float32(1 / math.sqrt(dim))
    for r in range(rows):
        x = _floats(vectors + 4 * r * dim)
        half = 1
        while half < dim:
            for start in range(0, dim, 2 * half):
                for i in range(start, start + half):
                    a, b = x[i], x[i + half]
                    x[i], x[i + half] = a + b, a - b
            half *= 2
        for i in range(dim):
            x[i] *= factor


@_compiled
def _mask_tile(job: Any, row: int, head: int, position: int, count: int, scores: int) -> None:
    """Soft cap, mask or causal limit of the scores `[rows, tile]` of cached tokens from `position` on."""
    if job.softcap != 0.0:
        cap = np.float32(job.softcap)
        for r in range(job.group * job.queries):
            out = _floats(scores + 4 * r * job.tile)
            for t in range(count):
                out[t] = cap * (_ONE - _TWO / (_exp(_TWO * out[t] / cap) + _ONE))
    starts = _int32s(job.starts + 4 * row * job.starts_stride)
    total = np.int64(starts[job.entries]) + job.tail_tokens
    for r in range(job.group * job.queries):
        out = _floats(scores + 4 * r * job.tile)
        query = r % job.queries
        offset = row * job.mask_batch_stride + query * job.mask_query_stride + position
        offset += (head * job.group + r // job.queries) * job.mask_head_stride
        if job.mask_kind == BOOLEAN_MASK:
            allowed = _uint8s(job.mask + offset)
            for t in range(count):
                out[t] = out[t] if allowed[t] else _LOWEST
        elif job.mask_kind == ADDITIVE_MASK:
            bias = _floats(job.mask + 4 * offset)
            for t in range(count):
                out[t] += bias[t]
        else:
            for t in range(max(total - job.queries + query + 1 - position, 0), count):
                out[t] = _LOWEST


@_compiled
def _soften(rows: int, dim: int, tokens: int, count: int, scores: int, maxima: int, sums: int, output: int) -> None:
    """Turn scores into weights under the running maximum; what was summed up before is rescaled to it."""
    highest, total = _floats(maxima), _floats(sums)
    for r in range(rows):
        row, out = _floats(scores + 4 * r * tokens), _floats(output + 4 * r * dim)
        top = highest[r]
        for t in range(count):
            top = max(top, row[t])
        if top == _LOWEST:
            for t in range(count):
                row[t] = _ZERO
            continue
        rescale = _exp(highest[r] - top)
        part = _ZERO
        for t in range(count):
            weight = _exp(row[t] - top)
            row[t] = weight
            part += weight
        total[r] = total[r] * rescale + part
        if rescale != _ONE:
            for d in range(dim):
                out[d] *= rescale
        highest[r] = top


@_compiled
def _sealed_tile(job: Any, row: int, head: int, step: int, queries: int, scores: int, tile: int, state: int) -> None:
    """One tile of a sealed block. `state` is the address of output, maxima and sums, one behind the other.

    Tokens before position 0, which have left a sliding window, are passed over: there is no mask for them.
    """
    rows, tokens = job.group * job.queries, job.tile
    tiles = job.block_size // tokens
    entry, first = step // tiles, step % tiles * tokens
    starts = _int32s(job.starts + 4 * row * job.starts_stride)
    begin = np.int64(starts[entry])
    count = min(np.int64(starts[entry + 1]) - begin - first, tokens)
    hidden = max(-(begin + first), 0)
    if count <= hidden:
        return
    slot = np.int64(_int32s(job.table + 4 * row * job.table_stride)[entry])
    block = slot * job.kv_heads + head
    blocks_ahead = _blocks_to_next(job, row, entry, slot)
    scales = tile + 4 * tokens * max(job.key_dim, job.value_dim)
    if job.key_kind > FLOAT16:
        _decode_keys(job, block, first, blocks_ahead, tile, scales)
        numbers = _floats(scores)
        for i in range(rows * tokens):
            numbers[i] = _ZERO
        _accumulate(rows, job.key_dim, tokens, queries, job.key_dim, tile, tokens, scores, tokens)
    else:
        size = 4 if job.key_kind == FLOAT32 else 2
        source = job.key_codes + size * (block * job.block_size + first) * job.key_dim
        _score_exact(rows, job.key_kind, job.key_dim, tokens, count, queries, source, job.key_dim, tile, scores)
    first, count, scores = first + hidden, count - hidden, scores + 4 * hidden
    _mask_tile(job, row, head, begin + first, count, scores)
    if job.sinks:
        _skip_sinks(job, row, begin + first, count, scores)
    sums = state + 4 * rows * (job.value_dim + 1)
    _soften(rows, job.value_dim, tokens, count, scores, state + 4 * rows * job.value_dim, sums, state)
    if job.value_kind > FLOAT16:
        _decode_values(job, block, first, count, blocks_ahead, tile, scales)
        _accumulate(rows, count, job.value_dim, scores, tokens, tile, job.value_dim, state, job.value_dim)
    else:
        size = 4 if job.value_kind == FLOAT32 else 2
        source = job.value_codes + size * (block * job.block_size + first) * job.value_dim
        _add_exact(rows, job.value_kind, job.value_dim, tokens, count, scores, source, job.value_dim, tile, state)


@_compiled
def _blocks_to_next(job: Any, row: int, entry: int, slot: int) -> Any:
    """How many blocks of the arena lie between that of an entry and that of the next; 0 behind the last entry.

    Blocks lie anywhere, so no processor foresees the next one: decoding asks for it line by line while it goes.
    """
    if entry + 1 >= job.entries:
        return np.int64(0)
    return (np.int64(_int32s(job.table + 4 * row * job.table_stride)[entry + 1]) - slot) * job.kv_heads


@_compiled
def _score_exact(
    rows: int,
    kind: int,
    dim: int,
    tokens: int,
    count: int,
    queries: int,
    source: int,
    stride: int,
    tile: int,
    scores: int,
) -> None:
    if kind == FLOAT32:
        _score_tokens(rows, dim, tokens, count, queries, source, stride, scores)
    else:
        _widen(kind, source, stride, count, dim, tile)
        _score_tokens(rows, dim, tokens, count, queries, tile, dim, scores)


@_compiled
def _add_exact(
    rows: int,
    kind: int,
    dim: int,
    tokens: int,
    count: int,
    weights: int,
    source: int,
    stride: int,
    tile: int,
    output: int,
) -> None:
    if kind == FLOAT32:
        _accumulate(rows, count, dim, weights, tokens, source, stride, output, dim)
    else:
        _widen(kind, source, stride, count, dim, tile)
        _accumulate(rows, count, dim, weights, tokens, tile, dim, output, dim)


@_compiled
def _skip_sinks(job: Any, row: int, position: int, count: int, scores: int) -> None:
    """Leave out the encoded versions of tokens that are kept exact."""
    positions = _int32s(job.sink_positions + 4 * row * job.sinks)
    for sink in range(job.sinks):
        t = np.int64(positions[sink]) - position
        if 0 <= t < count:
            for r in range(job.group * job.queries):
                _floats(scores + 4 * r * job.tile)[t] = _LOWEST


@_compiled
def _sink_tile(job: Any, row: int, head: int, queries: int, scores: int, tile: int, state: int) -> None:
    """The sink tokens, one at a time: they need not be neighbours."""
    rows, tokens = job.group * job.queries, job.tile
    positions = _int32s(job.sink_positions + 4 * row * job.sinks)
    sealed = np.int64(_int32s(job.starts + 4 * row * job.starts_stride)[job.entries])
    maxima = state + 4 * rows * job.value_dim
    for sink in range(job.sinks):
        position = np.int64(positions[sink])
        if position < 0 or position >= sealed:
            continue
        size = 4 if job.sink_key_kind == FLOAT32 else 2
        place = row * job.sink_key_batch_stride + head * job.sink_key_head_stride + sink * job.sink_key_token_stride
        source = job.sink_key_data + size * place
        _score_exact(rows, job.sink_key_kind, job.key_dim, tokens, 1, queries, source, job.key_dim, tile, scores)
        _mask_tile(job, row, head, position, 1, scores)
        _soften(rows, job.value_dim, tokens, 1, scores, maxima, maxima + 4 * rows, state)
        size = 4 if job.sink_value_kind == FLOAT32 else 2
        place = row * job.sink_value_batch_stride + head * job.sink_value_head_stride
        source = job.sink_value_data + size * (place + sink * job.sink_value_token_stride)
        _add_exact(rows, job.sink_value_kind, job.value_dim, tokens, 1, scores, source, job.value_dim, tile, state)


@_compiled
def _tail_tile(job: Any, row: int, head: int, step: int, queries: int, scores: int, tile: int, state: int) -> None:
    """One tile of the tail."""
    rows, tokens = job.group * job.queries, job.tile
    first = step * tokens
    count = min(job.tail_tokens - first, tokens)
    sealed = np.int64(_int32s(job.starts + 4 * row * job.starts_stride)[job.entries])
    maxima = state + 4 * rows * job.value_dim
    size, stride = 4 if job.tail_key_kind == FLOAT32 else 2, job.tail_key_token_stride
    place = row * job.tail_key_batch_stride + head * job.tail_key_head_stride + first * stride
    source = job.tail_key_data + size * place
    _score_exact(rows, job.tail_key_kind, job.key_dim, tokens, count, queries, source, stride, tile, scores)
    _mask_tile(job, row, head, sealed + first, count, scores)
    _soften(rows, job.value_dim, tokens, count, scores, maxima, maxima + 4 * rows, state)
    size, stride = 4 if job.tail_value_kind == FLOAT32 else 2, job.tail_value_token_stride
    place = row * job.tail_value_batch_stride + head * job.tail_value_head_stride + first * stride
    source = job.tail_value_data + size * place
    _add_exact(rows, job.tail_value_kind, job.value_dim, tokens, count, scores, source, stride, tile, state)


@_compiled
def _load_queries(job: Any, row: int, head: int, queries: int) -> None:
    """Scaled rows of queries, plain and then rotated if the keys are."""
    count = job.group * job.queries * job.key_dim
    source = _floats(job.query + 4 * (row * job.kv_heads + head) * count)
    plain, rotated = _floats(queries), _floats(queries + 4 * count)
    factor = np.float32(job.scale)
    for i in range(count):
        plain[i] = source[i] * factor
    if job.key_rotated:
        for i in range(count):
            rotated[i] = plain[i]
        _hadamard(job.group * job.queries, job.key_dim, queries + 4 * count)


@_compiled
def _run_steps(job: Any, pair: int, first: int, last: int, scratch: int, state: int) -> None:
    """Steps `first` to `last` of a pair; `state` is left with the output over them, unrotated, its maxima and sums."""
    rows = job.group * job.queries
    row, head = pair // job.kv_heads, pair % job.kv_heads
    sealed_steps = job.entries * (job.block_size // job.tile)
    sink_steps = 1 if job.sinks and job.entries else 0
    queries = scratch
    scores = queries + 8 * rows * job.key_dim
    tile = scores + 4 * rows * job.tile
    _load_queries(job, row, head, queries)
    numbers = _floats(state)
    for i in range(rows * (job.value_dim + 2)):
        numbers[i] = _ZERO
    for r in range(rows):
        numbers[rows * job.value_dim + r] = _LOWEST
    sealed_queries = queries + (4 * rows * job.key_dim if job.key_rotated else 0)
    for step in range(first, min(last, sealed_steps)):
        _sealed_tile(job, row, head, step, sealed_queries, scores, tile, state)
    if job.value_rotated and first < sealed_steps:
        _hadamard(rows, job.value_dim, state)
    if sink_steps and first <= sealed_steps < last:
        _sink_tile(job, row, head, queries, scores, tile, state)
    for step in range(max(first - sealed_steps - sink_steps, 0), last - sealed_steps - sink_steps):
        _tail_tile(job, row, head, step, queries, scores, tile, state)


@_compiled
def _write_output(job: Any, pair: int, state: int) -> None:
    """Divide by the sums; rows that saw nothing are 0."""
    rows = job.group * job.queries
    head = pair % job.kv_heads
    numbers, out = _floats(state), _floats(job.output + 4 * pair * rows * job.value_dim)
    logits = _floats(job.head_sinks)
    for r in range(rows):
        top, total = numbers[rows * job.value_dim + r], numbers[rows * (job.value_dim + 1) + r]
        factor = _ONE / total if total > _ZERO else _ZERO
        if job.head_sinks:
            logit = logits[head * job.group + r // job.queries]
            level = max(top, logit)
            share = _exp(top - level) if total > _ZERO else _ZERO
            factor = share / (total * share + _exp(logit - level))
        for d in range(job.value_dim):
            out[r * job.value_dim + d] = numbers[r * job.value_dim + d] * factor


@_compiled
def _join(rows: int, dim: int, state: int, other: int) -> None:
    """Add the output, maxima and sums at `other` to those at `state`."""
    mine, theirs = _floats(state), _floats(other)
    for r in range(rows):
        top = max(mine[rows * dim + r], theirs[rows * dim + r])
        if top == _LOWEST:
            continue
        keep, take = _exp(mine[rows * dim + r] - top), _exp(theirs[rows * dim + r] - top)
        for d in range(dim):
            mine[r * dim + d] = mine[r * dim + d] * keep + theirs[r * dim + d] * take
        total = rows * (dim + 1) + r
        mine[total] = mine[total] * keep + theirs[total] * take
        mine[rows * dim + r] = top


@_compiled
def _steps_of_pair(job: Any) -> Any:
    sealed = job.entries * (job.block_size // job.tile)
    return sealed + (1 if job.sinks and job.entries else 0) + (job.tail_tokens + job.tile - 1) // job.tile


@_compiled
def _run_part(job: Any, part: int, scratch: int) -> None:
    steps = _steps_of_pair(job)
    total = job.batch * job.kv_heads * steps
    begin, end = part * total // job.parts, (part + 1) * total // job.parts
    size = 4 * job.group * job.queries * (job.value_dim + 2)
    while begin < end:
        pair = begin // steps
        first, last = begin - pair * steps, min(end - pair * steps, steps)
        if first == 0 and last == steps:
            state = scratch
            _run_steps(job, pair, first, last, scratch + size, state)
            _write_output(job, pair, state)
        else:
            state = job.partials + size * (2 * part + (1 if first == 0 else 0))
            _run_steps(job, pair, first, last, scratch + size, state)
        begin += last - first


@_compiled
def _join_parts(job: Any) -> None:
    """Join what the parts left of pairs that they share, in order: a shared pair begins at its first step."""
    rows = job.group * job.queries
    steps = _steps_of_pair(job)
    total = job.batch * job.kv_heads * steps
    size = 4 * rows * (job.value_dim + 2)
    state = np.int64(0)
    for part in range(job.parts):
        begin, end = part * total // job.parts, (part + 1) * total // job.parts
        while begin < end:
            pair = begin // steps
            first, last = begin - pair * steps, min(end - pair * steps, steps)
            if first == 0 and last < steps:
                state = job.partials + size * (2 * part + 1)
            elif first > 0:
                _join(rows, job.value_dim, state, job.partials + size * 2 * part)
                if last == steps:
                    _write_output(job, pair, state)
            begin += last - first


@_c_function
def attend(address: Any) -> None:
    """Work on the job at `address` until all its parts are taken."""
    job = carray(address, (1,), JOB)[0]
    base = _address_of(address)
    worker = _fetch_and_increment(base)
    scratch = job.scratch + worker * job.scratch_size
    part = _fetch_and_increment(base + 8)
    while part < job.parts:
        _run_part(job, part, scratch)
        if _fetch_and_increment(base + 16) == job.parts - 1:
            _join_parts(job)
        part = _fetch_and_increment(base + 8)
