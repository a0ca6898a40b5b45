"""The compiled part of CPU decode attention: one function, `attend`, that any number of threads may run on one job.

A job is a record of addresses, strides and sizes (`JOB`). Its work is a line of steps, each a tile of tokens of one
pair of batch row and KV head, cut into parts::

    pair 0: sealed … sealed sinks tail tail | pair 1: sealed … sealed sinks tail tail | …
    [ part 0        ][ part 1         ][ part 2          ][ part 3      ] …

A thread takes the next part from a counter until none is left, so threads that come late or never do no harm. A pair
that lies in one part is written to the output at once; what is left of the others is kept as (output, maximum, sum),
and whoever finishes last joins it (flash-decoding). Within a part the query heads of a KV head, times the queries,
are the rows of a small matrix. Codes are decoded in registers on the way into products with it, a few rows at a time;
scales are folded into sums, queries or weights, so that the innermost loop converts and multiplies, nothing else.

Addresses instead of arrays make one signature of every dtype and stride: the kernel is compiled once.

All of it is in one file because numba keeps compiled code on disk until the file of its entry changes, and knows of no
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

# Kinds of storage, as the fields `*_kind` of a job say them.
FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT2, FP8 = range(7)
NO_MASK, BOOLEAN_MASK, ADDITIVE_MASK = range(3)

_CODED_FIELDS = (
    "kind",
    "codes",
    "scales",
    "zeros",
    "channels",
    "group_channels",
    "group_tokens",
    "block_bytes",
    "slot_stride",
    "head_stride",
    "rotated",
)
_EXACT_FIELDS = ("kind", "data", "batch_stride", "head_stride", "token_stride")
INTEGERS = (
    *("workers", "next_part", "finished_parts", "parts", "scratch", "scratch_size", "partials"),
    *("batch", "kv_heads", "group", "queries", "key_dim", "value_dim", "tile"),
    *("query", "output", "log_sum_exp"),
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
    *("scale", "softcap", "key_scale_unit", "key_zero_unit", "key_lowest"),
    *("value_scale_unit", "value_zero_unit", "value_lowest"),
)
JOB = np.dtype([(name, np.int64) for name in INTEGERS] + [(name, np.float64) for name in FLOATS])

# Rows of factors that are multiplied with a vector of elements once it is decoded, and lanes of that vector: their sums
# are to fit in the registers of the processor.
ROWS_AT_ONCE = 4
WIDE = 64 if get_host_cpu_features().get("avx512f") else 32
# Tokens of float32 values that are read vector after vector while the first-level cache has them.
TOKENS_AT_ONCE = 16

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


def _types(lanes: int) -> tuple[Any, Any]:
    """32-bit integers and floats: vectors of so many lanes, or scalars."""
    word, number = ir.IntType(32), ir.FloatType()
    return (word, number) if lanes == 1 else (ir.VectorType(word, lanes), ir.VectorType(number, lanes))


def _constant(like: Any, number: Any) -> Any:
    """A number of the type `like`, in every lane if that is a vector."""
    return ir.Constant(like, [number] * like.count if isinstance(like, ir.VectorType) else number)


def _in_all_lanes(builder: Any, value: Any, lanes: int) -> Any:
    if lanes == 1:
        return value
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, _constant(_types(lanes)[0], 0))


def _small_float(builder: Any, bits: Any, width: int, exponent_bits: int, lanes: int) -> Any:
    """Small IEEE-like floats, finite and with their sign on top, in the low bits of 32-bit integers, as float32.

    In the compiler's own terms because numba would compute in 64 bits, which halves what fits in a vector. Numbers
    without a leading one are converted from integers: float32 numbers of that kind are slow on many processors.
    """
    word, number = _types(lanes)
    mantissa_bits = width - 1 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    sign = builder.shl(builder.and_(bits, _constant(word, 1 << (width - 1))), _constant(word, 32 - width))
    magnitude = builder.and_(bits, _constant(word, (1 << (width - 1)) - 1))
    moved = builder.shl(magnitude, _constant(word, 23 - mantissa_bits))
    if bias != 127:
        normal = builder.add(moved, _constant(word, (127 - bias) << 23))
        step = _constant(number, 2.0 ** (1 - bias - mantissa_bits))
        tiny = builder.bitcast(builder.fmul(builder.sitofp(magnitude, number), step), word)
        is_tiny = builder.icmp_unsigned("<", magnitude, _constant(word, 1 << mantissa_bits))
        moved = builder.select(is_tiny, tiny, normal)
    return builder.bitcast(builder.or_(sign, moved), number)


def _reader_of(exponent_bits: int) -> Any:
    """An intrinsic that reads the bits of a 16-bit float as a float32."""

    @_intrinsic
    def convert(typing_context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _small_float(builder, builder.zext(arguments[0], ir.IntType(32)), 16, exponent_bits, 1)

        return types.float32(types.uint16), generate

    return convert


_bfloat16 = _reader_of(8)
_finite_half = _reader_of(5)


def _load(builder: Any, element: Any, lanes: int, address: Any) -> Any:
    kind = element if lanes == 1 else ir.VectorType(element, lanes)
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1 if element.intrinsic_name == "i8" else 4)


def _load_numbers(builder: Any, kind: int, address: Any, shift: Any, lanes: int) -> Any:
    """Elements that lie side by side at an address, as float32; packed ones are those that lie `shift` bits up."""
    word, number = _types(lanes)
    if kind == FLOAT32:
        return _load(builder, ir.FloatType(), lanes, address)
    raw = _load(builder, ir.IntType(8), lanes, address)
    if kind == INT8:
        return builder.sitofp(builder.sext(raw, word), number)
    wide = builder.zext(raw, word)
    if kind == FP8:
        return _small_float(builder, wide, 8, 4, lanes)
    shifted = builder.lshr(wide, _in_all_lanes(builder, builder.trunc(shift, ir.IntType(32)), lanes))
    return builder.sitofp(builder.and_(shifted, _constant(word, 15 if kind == INT4 else 3)), number)


def _emit_product(builder: Any, kind: int, rows: int, lanes: int, arguments: Any) -> None:
    """What `_product_of` makes, for one kind of elements and number of rows: the sums stay in registers."""
    factors, factor_stride, matrix, matrix_stride, inner, out, out_stride, shift, ahead = arguments
    integer, number = ir.IntType(64), ir.FloatType()
    targets = [builder.add(out, builder.mul(out_stride, integer(row))) for row in range(rows)]
    starts = [builder.add(factors, builder.mul(factor_stride, integer(row))) for row in range(rows)]
    new = cast(Any, cgutils.alloca_once_value)
    sums = [new(builder, _load(builder, number, lanes, target)) for target in targets]
    with cgutils.for_range(builder, inner) as loop:
        place = builder.add(matrix, builder.mul(loop.index, matrix_stride))
        numbers = _load_numbers(builder, kind, place, shift, lanes)
        if kind != FLOAT32:  # floats lie in line, which processors foresee
            _emit_prefetch(builder, builder.add(place, ahead))
        for start, total in zip(starts, sums, strict=True):
            factor = _load(builder, number, 1, builder.add(start, builder.shl(loop.index, integer(2))))
            product = builder.fmul(numbers, _in_all_lanes(builder, factor, lanes), flags=["contract"])
            builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
    for target, total in zip(targets, sums, strict=True):
        value = builder.load(total)
        builder.store(value, builder.inttoptr(target, value.type.as_pointer()), align=4)


def _product_of(lanes: int) -> Any:
    """An intrinsic: `out[r, i] += sum over k of factors[r, k] * matrix[k, i]`, for `lanes` neighbours `i`.

    `matrix` holds encoded elements, which are decoded on the way; strides are in bytes. Explicit vectors, as compilers
    do not keep the sums in registers when they find vectors by themselves.
    """

    @_intrinsic
    def product(
        typing_context: Any,
        kind: Any,
        rows: Any,
        factors: Any,
        factor_stride: Any,
        matrix: Any,
        matrix_stride: Any,
        inner: Any,
        out: Any,
        out_stride: Any,
        shift: Any,
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            wanted, count = arguments[:2]
            for known in (FLOAT32, INT8, INT4, INT2, FP8):
                with builder.if_then(builder.icmp_signed("==", wanted, wanted.type(known))):
                    for some in range(1, ROWS_AT_ONCE + 1):
                        with builder.if_then(builder.icmp_signed("==", count, count.type(some))):
                            _emit_product(builder, known, some, lanes, arguments[2:])
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 11), generate

    return product


@_intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """Two to a whole number that comes as a float32, computed in 32 bits as above."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(arguments[0], word), word(127))
        return builder.bitcast(builder.shl(biased, word(23)), ir.FloatType())

    return types.float32(types.float32), generate


def _emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address, which need not exist."""
    word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(function, [builder.inttoptr(address, byte), word(0), word(2), word(1)])


_product_wide, _product_half, _product_quarter, _product_1 = map(_product_of, (WIDE, WIDE // 2, WIDE // 4, 1))


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
def _accumulate(
    kind: int,
    shift: int,
    rows: int,
    inner: int,
    width: int,
    factors: int,
    factor_stride: int,
    matrix: int,
    matrix_stride: int,
    ahead: int,
    out: int,
    out_stride: int,
) -> None:
    """`out[r, i] += sum over k of factors[r, k] * matrix[k, i]` for `width` neighbours `i`; see `_product_of`.

    `factor_stride` and `out_stride` are in floats, `matrix_stride`, and `ahead`, how far to prefetch, in bytes.
    """
    size = 4 if kind == FLOAT32 else 1
    stride, to_stride = 4 * factor_stride, 4 * out_stride
    row = 0
    while row < rows:
        count = min(rows - row, ROWS_AT_ONCE)
        by, i = factors + row * stride, 0
        while i < width:
            at, to = matrix + size * i, out + row * to_stride + 4 * i
            if width - i >= WIDE:
                _product_wide(kind, count, by, stride, at, matrix_stride, inner, to, to_stride, shift, ahead)
                i += WIDE
            elif width - i >= WIDE // 2:
                _product_half(kind, count, by, stride, at, matrix_stride, inner, to, to_stride, shift, ahead)
                i += WIDE // 2
            elif width - i >= WIDE // 4:
                _product_quarter(kind, count, by, stride, at, matrix_stride, inner, to, to_stride, shift, ahead)
                i += WIDE // 4
            else:
                _product_1(kind, count, by, stride, at, matrix_stride, inner, to, to_stride, shift, ahead)
                i += 1
        row += count


@_compiled
def _score_codes(
    job: Any, block: int, first: int, blocks_ahead: int, queries: int, scores: int, work: int, scales: int
) -> None:
    """Scores of the tokens `first` to `first + job.tile` of a block; scales are folded into sums or queries."""
    rows, tokens = job.group * job.queries, job.tile
    numbers = _floats(scores)
    for i in range(rows * tokens):
        numbers[i] = _ZERO
    if job.key_group_tokens == 1:
        _score_tokens_with_scales(job, block, first, blocks_ahead, queries, scores, work, scales)
    else:
        _score_groups_of_tokens(job, block, first, blocks_ahead, queries, scores, work, scales)


@_compiled
def _score_run(
    job: Any, block: int, start: int, count: int, channel: int, channels: int, ahead: int, factors: int, out: int
) -> None:
    """Add `factors · codes` of some channels, for a run of tokens whose codes may lie in several stretches."""
    per_byte = _per_byte(job.key_kind)
    stretch = job.block_size // per_byte
    end, codes = start + count, job.key_codes + (block * job.key_dim + channel) * stretch
    while start < end:
        place, shift = start % stretch, start // stretch * (8 // per_byte)
        run = min(end - start, stretch - place)
        _accumulate(
            job.key_kind,
            shift,
            job.group * job.queries,
            channels,
            run,
            factors,
            job.key_dim,
            codes + place,
            stretch,
            ahead * job.key_block_bytes,
            out,
            job.tile,
        )
        start += run
        out += 4 * run


@_compiled
def _score_tokens_with_scales(
    job: Any, block: int, first: int, ahead: int, queries: int, scores: int, work: int, scales: int
) -> None:
    """Scores where tokens have scales of their own, one for each group of channels: they are applied to sums."""
    rows, tokens = job.group * job.queries, job.tile
    groups = job.key_dim // job.key_group_channels
    sums, steps, offsets = _floats(work), _floats(scales), _floats(scales + 4 * tokens)
    for group in range(groups):
        channel = group * job.key_group_channels
        for i in range(rows * tokens):
            sums[i] = _ZERO
        _score_run(job, block, first, tokens, channel, job.key_group_channels, ahead, queries + 4 * channel, work)
        _read_key_scales(job, (block * groups + group) * job.block_size + first, tokens, scales)
        for r in range(rows):
            query, out = _floats(queries + 4 * (r * job.key_dim + channel)), _floats(scores + 4 * r * tokens)
            part, total = _floats(work + 4 * r * tokens), _ZERO
            for c in range(job.key_group_channels):
                total += query[c]
            for t in range(tokens):
                out[t] += part[t] * steps[t] + total * offsets[t]


@_compiled
def _score_groups_of_tokens(
    job: Any, block: int, first: int, ahead: int, queries: int, scores: int, work: int, scales: int
) -> None:
    """Scores where tokens share scales, one for each channel or group of channels: they are folded into queries."""
    rows, tokens, dim = job.group * job.queries, job.tile, job.key_dim
    steps = scales
    offsets = steps + 4 * dim
    start = first
    while start < first + tokens:
        place = start // job.key_group_tokens
        count = min(first + tokens, (place + 1) * job.key_group_tokens) - start
        _read_scales_of_channels(job, block, place, steps, offsets)
        for r in range(rows):
            shared = _fold(dim, queries + 4 * r * dim, steps, offsets, work + 4 * r * dim)
            out = _floats(scores + 4 * (r * tokens + start - first))
            for t in range(count):
                out[t] = shared
        _score_run(job, block, start, count, 0, dim, ahead, work, scores + 4 * (start - first))
        start += count


@_compiled
def _read_scales_of_channels(job: Any, block: int, place: int, steps: int, offsets: int) -> None:
    """Scale, and what a code of 0 stands for, of every channel, for one group of tokens."""
    token_groups = job.block_size // job.key_group_tokens
    groups = job.key_dim // job.key_group_channels
    stored = _uint16s(job.key_scales + 2 * (block * groups * token_groups + place))
    points = _int8s(job.key_zeros + block * groups * token_groups + place)
    step, offset = _floats(steps), _floats(offsets)
    unit, zero_unit, lowest = np.float32(job.key_scale_unit), np.float32(job.key_zero_unit), np.float32(job.key_lowest)
    for group in range(groups):
        step[group] = _finite_half(stored[group * token_groups]) * unit
    if job.key_zeros:
        for group in range(groups):
            offset[group] = np.float32(points[group * token_groups]) * zero_unit * step[group]
    else:
        for group in range(groups):
            offset[group] = lowest * step[group]
    if job.key_group_channels > 1:
        for channel in range(job.key_dim - 1, -1, -1):
            step[channel] = step[channel // job.key_group_channels]
            offset[channel] = offset[channel // job.key_group_channels]


@_compiled
def _fold(dim: int, query: int, steps: int, offsets: int, factors: int) -> Any:
    """Write `query * steps`; return `query · offsets`."""
    numbers, step, offset, out = _floats(query), _floats(steps), _floats(offsets), _floats(factors)
    for channel in range(dim):
        out[channel] = numbers[channel] * step[channel]
    shared = _ZERO
    for channel in range(dim):
        shared += numbers[channel] * offset[channel]
    return shared


@_compiled
def _add_codes(
    job: Any, block: int, first: int, count: int, blocks_ahead: int, weights: int, work: int, scales: int, output: int
) -> None:
    """Add `weights · values` of `count` tokens of a block from `first` on; scales are folded into the weights."""
    rows, tokens, dim = job.group * job.queries, job.tile, job.value_dim
    groups = job.value_channels // job.value_group_channels
    if job.value_group_tokens > 1:  # one scale for all tokens: values have no groups of some
        step = 0
        _read_value_scales(job, block * groups, groups, scales)
        offsets = _floats(scales + 4 * groups)
    else:
        step = groups
        _read_value_scales(job, (block * job.block_size + first) * groups, count * groups, scales)
        offsets = _floats(scales + 4 * count * groups)
    steps = _floats(scales)
    shifted = job.value_zeros != 0 or job.value_lowest != 0.0
    for group in range(groups):
        channel = group * job.value_group_channels
        end = min(channel + job.value_group_channels, dim)
        for r in range(rows):
            weight, factors = _floats(weights + 4 * r * tokens), _floats(work + 4 * r * tokens)
            for i in range(count):
                factors[i] = weight[i] * steps[i * step + group]
            if shifted:
                shared = _ZERO
                for i in range(count):
                    shared += weight[i] * offsets[i * step + group]
                out = _floats(output + 4 * r * dim)
                for c in range(channel, end):
                    out[c] += shared
        _add_run(job, block, first, count, channel, end, blocks_ahead, work, output)


@_compiled
def _add_run(
    job: Any, block: int, first: int, count: int, channel: int, end: int, ahead: int, factors: int, output: int
) -> None:
    """Add `factors · codes` of the channels up to `end`, whose codes may lie in several stretches."""
    per_byte = _per_byte(job.value_kind)
    stretch = job.value_channels // per_byte
    codes = job.value_codes + (block * job.block_size + first) * stretch
    while channel < end:
        place, shift = channel % stretch, channel // stretch * (8 // per_byte)
        run = min(end - channel, stretch - place)
        _accumulate(
            job.value_kind,
            shift,
            job.group * job.queries,
            count,
            run,
            factors,
            job.tile,
            codes + place,
            stretch,
            ahead * job.value_block_bytes,
            output + 4 * channel,
            job.value_dim,
        )
        channel += run


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
    scales = tile + 4 * rows * max(job.key_dim, tokens)
    if job.key_kind > FLOAT16:
        _score_codes(job, block, first, blocks_ahead, queries, scores, tile, scales)
    else:
        size = 4 if job.key_kind == FLOAT32 else 2
        place = slot * job.key_slot_stride + head * job.key_head_stride + first * job.key_dim
        source = job.key_codes + size * place
        _score_exact(rows, job.key_kind, job.key_dim, tokens, count, queries, source, job.key_dim, tile, scores)
    first, count, scores = first + hidden, count - hidden, scores + 4 * hidden
    _mask_tile(job, row, head, begin + first, count, scores)
    if job.sinks:
        _skip_sinks(job, row, begin + first, count, scores)
    sums = state + 4 * rows * (job.value_dim + 1)
    _soften(rows, job.value_dim, tokens, count, scores, state + 4 * rows * job.value_dim, sums, state)
    if job.value_kind > FLOAT16:
        _add_codes(job, block, first, count, blocks_ahead, scores, tile, scales, state)
    else:
        size = 4 if job.value_kind == FLOAT32 else 2
        place = slot * job.value_slot_stride + head * job.value_head_stride + first * job.value_dim
        source = job.value_codes + size * place
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
    matrix = source
    if kind != FLOAT32:
        _widen(kind, source, stride, count, dim, tile)
        matrix, stride = tile, dim
    for first in range(0, count, TOKENS_AT_ONCE):
        part = min(count - first, TOKENS_AT_ONCE)
        at = matrix + 4 * first * stride
        _accumulate(FLOAT32, 0, rows, part, dim, weights + 4 * first, tokens, at, 4 * stride, 0, output, dim)


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
    """The sink tokens of sealed blocks, one at a time: they need not be neighbours."""
    rows, tokens = job.group * job.queries, job.tile
    positions = _int32s(job.sink_positions + 4 * row * job.sinks)
    starts = _int32s(job.starts + 4 * row * job.starts_stride)
    first, last = max(np.int64(starts[0]), 0), np.int64(starts[job.entries])
    maxima = state + 4 * rows * job.value_dim
    for sink in range(job.sinks):
        position = np.int64(positions[sink])
        if position < first or position >= last:
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
    if job.log_sum_exp:
        _write_log_sum_exp(job, pair, state)
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
def _write_log_sum_exp(job: Any, pair: int, state: int) -> None:
    """Of scores alone, without head sinks; rows that saw nothing are -inf."""
    rows = job.group * job.queries
    maxima, out = _floats(state + 4 * rows * job.value_dim), _floats(job.log_sum_exp + 4 * pair * rows)
    for r in range(rows):
        total = maxima[rows + r]
        out[r] = maxima[r] + np.log(total) if total > _ZERO else _LOWEST


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
    """At least one, so that something is written where there are no tokens."""
    sealed = job.entries * (job.block_size // job.tile)
    return max(sealed + (1 if job.sinks and job.entries else 0) + (job.tail_tokens + job.tile - 1) // job.tile, 1)


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
