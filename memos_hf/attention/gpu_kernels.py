"""The compiled part of GPU decode attention: two Triton kernels, `attend` and `combine` (flash-decoding).

The tokens of each pair of batch row and KV head are cut into splits, one program each. The query heads of a KV head,
times the queries, are the rows of one tile, so that K and V are loaded once for all of them::

    pair 0    sealed split 0 | sealed split 1 | … | exact split 0: sinks, tail | exact split 1: tail | …
    partials  (output, maximum, sum) of every row, of each split

Sealed and exact tokens never share a split, as what comes of sealed values may be rotated. `combine` joins the partials
of a row by their maxima and sums (Milakov and Gimelshein, arXiv:1805.02867) and turns the rotated part back.

Codes become numbers in registers. A scale that all channels of a token share is applied to scores and weights, any
other to the tile. Every count that changes while a sequence grows is a plain argument that is not specialised, so
growth compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# The interpreter computes with numpy, which has no bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOWEST = tl.constexpr(float("-inf"))
# Sinks, and partials, that are read at a time, and channels that are turned back at a time.
SINK_TILE = tl.constexpr(16)
SPLIT_TILE = tl.constexpr(16)
ROTATION_TILE = tl.constexpr(32)

# What may change from call to call.
_CHANGING = (
    *("splits", "sealed_splits", "sealed_steps", "exact_steps", "entries", "table_stride", "starts_stride"),
    *("queries", "rows", "chunks", "heads", "tail_tokens", "mask"),
    *("key_batch_stride", "key_head_stride", "value_batch_stride", "value_head_stride"),
    *("mask_batch_stride", "mask_head_stride", "mask_query_stride"),
)


def _compiled(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def _kernel(function: Callable[..., Any]) -> Any:
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in _CHANGING if name in arguments])


@_compiled
def _dot(left: tl.tensor, right: tl.tensor, total: tl.tensor) -> tl.tensor:
    """`total + left @ right`, summed in float32: on tensor cores for half precision, exact for float32."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@_compiled
def _product(left: tl.tensor, right: tl.tensor, total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`_dot` in `dtype`, the query's, if `right` is of it too, and else in float32."""
    exact: tl.constexpr = dtype if dtype == right.dtype else tl.float32
    return _dot(left.to(exact), right.to(exact), total)


@_compiled
def _of_groups(
    stored: tl.tensor,
    rows: tl.tensor,
    has_row: tl.tensor,
    columns: tl.tensor,
    has_column: tl.tensor,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """What is stored of groups in these rows and columns, as float32."""
    offsets = rows[:, None] * STRIDE + columns[None, :]
    return tl.load(stored + offsets, mask=has_row[:, None] & has_column[None, :], other=0).to(tl.float32)


@_compiled
def _spread(groups: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Numbers of groups for every code of a tile, as far as broadcasting does not do that anyway."""
    rows: tl.constexpr = groups.shape[0]
    columns: tl.constexpr = groups.shape[1]
    if (rows == 1 or rows == ROWS) and (columns == 1 or columns == COLUMNS):
        return groups
    else:
        apart = tl.reshape(groups, (rows, 1, columns, 1))
        apart = tl.broadcast_to(apart, (rows, ROWS // rows, columns, COLUMNS // columns))
        return tl.reshape(apart, (ROWS, COLUMNS))


@_compiled
def _side_by_side(tiles: tl.tensor) -> tl.tensor:
    """One tile of one, two or four."""
    rows: tl.constexpr = tiles[0].shape[0]
    columns: tl.constexpr = tiles[0].shape[1]
    if len(tiles) == 1:
        return tiles[0]
    elif len(tiles) == 2:
        return tl.reshape(tl.permute(tl.join(tiles[0], tiles[1]), (0, 2, 1)), (rows, 2 * columns))
    else:
        joined = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
        return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (rows, 4 * columns))


@_compiled
def _and(tiles: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """Tiles and one more."""
    return tiles + (tile,)  # noqa: RUF005


@_compiled
def _normalized(scales: tl.tensor, UNIT: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Tiles of scales times `UNIT`, and a factor that is left over: float16 has too small a range for some products."""
    count: tl.constexpr = len(scales)
    factor = 1.0
    if dtype == tl.float16:
        factor = tl.max(tl.max(scales[0], 1), 0) * UNIT
        for index in tl.static_range(1, count):
            factor = tl.maximum(factor, tl.max(tl.max(scales[index], 1), 0) * UNIT)
        factor = tl.where(factor > 0, factor, 1.0)
    tiles = ()
    for index in tl.static_range(count):
        tiles = _and(tiles, scales[index] * (UNIT / factor))
    return tiles, factor


@_compiled
def _floats(codes: tl.tensor, place: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """Codes as float32. `place` says which of the codes in a byte is meant."""
    if LAYOUT.bits < 8:
        return ((codes.to(tl.int32) >> (place * LAYOUT.bits)) & (2**LAYOUT.bits - 1)).to(tl.float32)
    elif LAYOUT.floating:
        bits = codes.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # read as a float16 it is 2**8 too small
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return codes.to(tl.int8).to(tl.float32)


@_compiled
def _in_pairs(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Each number twice in a register, as halves."""
    return (numbers.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@_compiled
def _half_of(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return pairs.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@_compiled
def _two_halves(
    words: tl.tensor,
    first: tl.constexpr,
    place: tl.constexpr,
    added: tl.tensor,
    factors: tl.tensor,
    LAYOUT: tl.constexpr,
) -> tl.tensor:
    """For the interpreter: bytes `first` and the next of each word, converted as the PTX does."""
    dtype: tl.constexpr = tl.bfloat16 if LAYOUT.base == 32 else tl.float16
    low = _floats((words >> (8 * first)) & 0xFF, place, LAYOUT)
    high = _floats((words >> (8 * first + 8)) & 0xFF, place, LAYOUT)
    shift = LAYOUT.lowest
    if added is not None:
        shift = _half_of(added, dtype) + LAYOUT.base
    factor = 1.0
    if factors is not None:
        factor = _half_of(factors, dtype)
    low = ((low + shift) * factor).to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = ((high + shift) * factor).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@_compiled
def _four_halves(
    words: tl.tensor, place: tl.constexpr, added: tl.tensor, factors: tl.tensor, LAYOUT: tl.constexpr
) -> tl.tensor:
    """The codes of four bytes as halves, in two registers; `added` and `factors` are pairs of halves, or `None`."""
    if INTERPRETED:
        low = _two_halves(words, 0, place, added, factors, LAYOUT)
        return low, _two_halves(words, 2, place, added, factors, LAYOUT)
    else:
        ptx: tl.constexpr = LAYOUT.ptx[place]
        if added is None:
            added = words
        else:
            # Hidden from the compiler, which else would lay the product out for the narrowest load behind it.
            added = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [added], tl.int32, False, 1)
        if factors is None:
            return tl.inline_asm_elementwise(ptx, "=r,=r,r,r", [words, added], (tl.int32, tl.int32), True, 1)
        else:
            operands = [words, added, factors]
            return tl.inline_asm_elementwise(ptx, "=r,=r,r,r,r", operands, (tl.int32, tl.int32), True, 1)


@_compiled
def _numbers(
    codes: tl.tensor,
    place: tl.constexpr,
    zeros: tl.tensor,
    scales: tl.tensor,
    LAYOUT: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Codes as numbers of `dtype`: in steps, which is exact, or scaled.

    Zero points, in steps, and scales are those of groups, if there are any.
    """
    rows: tl.constexpr = codes.shape[0]
    columns: tl.constexpr = codes.shape[1]
    if len(LAYOUT.ptx) > 0:
        added = None
        if zeros is not None:
            added = _spread(_in_pairs(zeros - LAYOUT.base, dtype), rows, columns)
        factors = None
        if scales is not None:
            factors = _spread(_in_pairs(scales, dtype), rows, columns)
        low, high = _four_halves(codes, place, added, factors, LAYOUT)
        even = tl.join(low.to(tl.int16), high.to(tl.int16))
        odd = tl.join((low >> 16).to(tl.int16), (high >> 16).to(tl.int16))
        return tl.reshape(tl.join(even, odd), (rows, 4 * columns)).to(dtype, bitcast=True)
    else:
        numbers = _floats(codes, place, LAYOUT)
        if zeros is not None:
            numbers += _spread(zeros, rows, columns)
        else:
            numbers += LAYOUT.lowest
        if scales is not None:
            numbers *= _spread(scales, rows, columns)
        return numbers.to(dtype)


@_compiled
def _exact_keys(
    keys: tl.tensor, stride: tl.tensor, tokens: tl.tensor, valid: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """Exact keys of these tokens, `[channels, tokens]`."""
    channels = tl.arange(0, KEYS.tile)
    here = valid[None, :] & (channels < KEYS.dim)[:, None]
    return tl.load(keys + tokens[None, :] * stride + channels[:, None], mask=here, other=0)


@_compiled
def _value_channels(VALUES: tl.constexpr) -> tl.tensor:
    """The channels of a tile of values, in the order in which stretches lie side by side, and which of them are."""
    index = tl.arange(0, VALUES.tile)
    if VALUES.run == VALUES.stretch or VALUES.stretches == 1:
        return index, index < VALUES.dim
    else:
        channels = index // VALUES.run * VALUES.stretch + index % VALUES.run
        return channels, (index % VALUES.run < VALUES.stretch) & (channels < VALUES.dim)


@_compiled
def _exact_values(
    values: tl.tensor, stride: tl.tensor, tokens: tl.tensor, valid: tl.tensor, VALUES: tl.constexpr
) -> tl.tensor:
    """Exact values of these tokens, `[tokens, channels]`."""
    channels, has_channel = _value_channels(VALUES)
    here = valid[:, None] & has_channel[None, :]
    return tl.load(values + tokens[:, None] * stride + channels[None, :], mask=here, other=0)


@_compiled
def _codes(stored: tl.tensor, rows: tl.tensor, has_row: tl.tensor, first: tl.tensor, LAYOUT: tl.constexpr) -> tl.tensor:
    """Bytes from `first` on of these rows of a block, `[rows, run]`; in words of four if PTX converts them."""
    size: tl.constexpr = 4 if len(LAYOUT.ptx) > 0 else 1
    width: tl.constexpr = LAYOUT.stretch // size
    if len(LAYOUT.ptx) > 0:
        stored = stored.to(tl.pointer_type(tl.int32))
    columns = first // size + tl.arange(0, LAYOUT.run // size)
    here = has_row[:, None]
    if LAYOUT.run > LAYOUT.stretch:
        here = here & (columns < width)[None, :]
    return tl.load(stored + rows[:, None] * width + columns[None, :], mask=here, other=0)


@_compiled
def _key_groups(
    stored: tl.tensor, block: tl.tensor, column: tl.tensor, count: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """What is stored of the groups of a tile of keys, `[channels, tokens]` for each stretch."""
    stride: tl.constexpr = KEYS.block // KEYS.group_tokens
    stored += block * (KEYS.dim // KEYS.group_channels * stride)
    channels = tl.arange(0, KEYS.tile // KEYS.channel_span) * KEYS.channel_span
    tiles = ()
    stretches: tl.constexpr = KEYS.stretches
    for stretch in tl.static_range(stretches):
        tokens = column + stretch * KEYS.stretch + tl.arange(0, KEYS.run // KEYS.token_span) * KEYS.token_span
        rows = channels // KEYS.group_channels
        columns = tokens // KEYS.group_tokens
        tiles = _and(tiles, _of_groups(stored, rows, channels < KEYS.dim, columns, tokens < count, stride))
    return tiles


@_compiled
def _sealed_scores(
    query: tl.tensor,
    codes: tl.tensor,
    block: tl.tensor,
    column: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    valid: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    KEYS: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Products of the query with a tile of keys, `[rows, tokens]`."""
    codes += block * (KEYS.dim * KEYS.stretch)
    if KEYS.bits == 0:
        return _product(query, _exact_keys(codes, KEYS.dim, tokens, valid, KEYS), None, dtype)
    else:
        channels = tl.arange(0, KEYS.tile)
        packed = _codes(codes, channels, channels < KEYS.dim, column, KEYS)
        factor = 1.0
        if not KEYS.shared:
            steps, factor = _normalized(_key_groups(scales, block, column, count, KEYS), KEYS.scale_unit, dtype)
        if zeros is not None:
            points = _key_groups(zeros, block, column, count, KEYS)
        step = None
        zero = None
        tiles = ()
        stretches: tl.constexpr = KEYS.stretches
        for stretch in tl.static_range(stretches):
            if not KEYS.shared:
                step = steps[stretch]
            if zeros is not None:
                zero = points[stretch] * KEYS.zero_unit
            tiles = _and(tiles, _numbers(packed, stretch, zero, step, KEYS, dtype))
        scores = _dot(query, _side_by_side(tiles), None) * factor
        if KEYS.shared:
            groups: tl.constexpr = KEYS.block // KEYS.group_tokens
            shared = tl.load(scales + block * groups + tokens // KEYS.group_tokens, mask=valid, other=0)
            scores *= (shared.to(tl.float32) * KEYS.scale_unit)[None, :]
        return scores


@_compiled
def _value_groups(
    stored: tl.tensor, block: tl.tensor, tokens: tl.tensor, valid: tl.tensor, VALUES: tl.constexpr
) -> tl.tensor:
    """What is stored of the groups of a tile of values, `[tokens, channels]` for each stretch."""
    stride: tl.constexpr = VALUES.channels // VALUES.group_channels
    stored += block * (VALUES.block // VALUES.group_tokens * stride)
    offsets = tl.arange(0, VALUES.run // VALUES.channel_span) * VALUES.channel_span
    tiles = ()
    stretches: tl.constexpr = VALUES.stretches
    for stretch in tl.static_range(stretches):
        columns = (stretch * VALUES.stretch + offsets) // VALUES.group_channels
        rows = tokens // VALUES.group_tokens
        tiles = _and(tiles, _of_groups(stored, rows, valid, columns, offsets < VALUES.stretch, stride))
    return tiles


@_compiled
def _add_sealed_values(
    output: tl.tensor,
    weights: tl.tensor,
    codes: tl.tensor,
    block: tl.tensor,
    tokens: tl.tensor,
    valid: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    VALUES: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Add the weighted values of a tile of tokens."""
    codes += block * (VALUES.stretch * VALUES.block)
    if VALUES.bits == 0:
        return _product(weights, _exact_values(codes, VALUES.dim, tokens, valid, VALUES), output, dtype)
    else:
        packed = _codes(codes, tokens, valid, 0, VALUES)
        step = None
        zero = None
        steps, factor = _normalized(_value_groups(scales, block, tokens, valid, VALUES), VALUES.scale_unit, dtype)
        if zeros is not None:
            points = _value_groups(zeros, block, tokens, valid, VALUES)
        tiles = ()
        stretches: tl.constexpr = VALUES.stretches
        for stretch in tl.static_range(stretches):
            if not VALUES.shared:
                step = steps[stretch]
            if zeros is not None:
                zero = points[stretch] * VALUES.zero_unit
            tiles = _and(tiles, _numbers(packed, stretch, zero, step, VALUES, dtype))
        if VALUES.shared:
            weights *= tl.reshape(steps[0], (1, tokens.shape[0]))
        values = _side_by_side(tiles)
        if dtype == tl.float16:
            return output + _dot(weights.to(dtype), values, None) * factor
        else:
            return _dot(weights.to(dtype), values, output)


@_compiled
def _allowed(
    scores: tl.tensor,
    positions: tl.tensor,
    valid: tl.tensor,
    mask_rows: tl.tensor,
    last_seen: tl.tensor,
    softcap: tl.tensor,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
) -> tl.tensor:
    """Soft cap, mask or causal limit of scores `[rows, tokens]` at these positions; -inf where a token is not valid."""
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    if MASK == "none":
        return tl.where(valid[None, :] & (positions[None, :] <= last_seen[:, None]), scores, LOWEST)
    else:
        mask = tl.load(mask_rows[:, None] + positions[None, :], mask=valid[None, :], other=0)
        if MASK == "boolean":
            return tl.where(valid[None, :] & (mask != 0), scores, LOWEST)
        else:
            return tl.where(valid[None, :], scores + mask.to(tl.float32), LOWEST)


@_compiled
def _softened(scores: tl.tensor, top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Weights of scores under the new running maximum, by what to rescale earlier sums, and new maximum and sum."""
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == LOWEST, 0.0, highest)  # rows that have seen nothing yet
    weights = tl.exp(scores - finite[:, None])
    rescale = tl.exp(top - finite)
    return weights, rescale, highest, total * rescale + tl.sum(weights, 1)


@_compiled
def _query_tile(query: tl.tensor, indices: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Rows of queries, `[rows, channels]`."""
    channels = tl.arange(0, KEYS.tile)
    return tl.load(
        query + indices[:, None] * KEYS.dim + channels[None, :], mask=(channels < KEYS.dim)[None, :], other=0
    )


@_kernel
def attend(
    query: tl.tensor,
    sealed_query: tl.tensor,
    partials: tl.tensor,
    key_codes: tl.tensor,
    key_scales: tl.tensor,
    key_zeros: tl.tensor,
    value_codes: tl.tensor,
    value_scales: tl.tensor,
    value_zeros: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    tail_keys: tl.tensor,
    tail_values: tl.tensor,
    sink_keys: tl.tensor,
    sink_values: tl.tensor,
    sink_positions: tl.tensor,
    mask: tl.tensor,
    scale: tl.tensor,
    sealed_scale: tl.tensor,
    softcap: tl.tensor,
    kv_heads: tl.tensor,
    queries: tl.tensor,
    rows: tl.tensor,
    chunks: tl.tensor,
    splits: tl.tensor,
    sealed_splits: tl.tensor,
    sealed_steps: tl.tensor,
    exact_steps: tl.tensor,
    entries: tl.tensor,
    table_stride: tl.tensor,
    starts_stride: tl.tensor,
    tail_tokens: tl.tensor,
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_batch_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    mask_batch_stride: tl.tensor,
    mask_head_stride: tl.tensor,
    mask_query_stride: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    EXACT_TOKENS: tl.constexpr,
    EXACT_STAGES: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    ONE_MASK_ROW: tl.constexpr,
    PARTIAL: tl.constexpr,
) -> None:
    """Attention of `ROWS` rows of one pair over one split of its tokens, into `partials`.

    A tensor that is not there is `None`; without `sealed_query` nothing is sealed. Batch and head strides of K and V
    come in units of `STRIDE_UNIT`. `ONE_MASK_ROW` says that all rows of a pair have the same mask. A partial takes
    `PARTIAL` floats: output, maximum and sum.
    """
    program = tl.program_id(0)
    split = program % splits
    chunk = program // splits % chunks
    pair = (program // splits // chunks).to(tl.int64)
    batch_row = pair // kv_heads
    head = pair % kv_heads
    dtype: tl.constexpr = query.dtype.element_ty

    row = chunk * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(row, rows - 1)  # rows beyond the last repeat it, and are not written
    sealed_tokens = 0
    if sealed_query is not None:
        starts += batch_row * starts_stride
        table += batch_row * table_stride
        sealed_tokens = tl.load(starts + entries)
    last_seen = sealed_tokens + tail_tokens - queries + held % queries
    mask_rows = mask
    if MASK != "none":
        masked = tl.zeros((1,), tl.int32) if ONE_MASK_ROW else held
        query_head = head * (rows // queries) + masked // queries
        mask_rows += batch_row * mask_batch_stride + query_head * mask_head_stride
        mask_rows += (masked % queries).to(tl.int64) * mask_query_stride
    value_tile: tl.constexpr = VALUES.tile
    output = tl.zeros((ROWS, value_tile), tl.float32)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)

    if sealed_query is not None:
        steps_per_block: tl.constexpr = max(KEYS.stretch // KEYS.run, 1)
        rotated = _query_tile(sealed_query, pair * rows + held, KEYS)
        index = tl.arange(0, KEYS.run * KEYS.stretches)
        offsets = index // KEYS.run * KEYS.stretch + index % KEYS.run
        first = split * sealed_steps  # beyond the last for splits of exact tokens
        for step in range(first, tl.minimum(first + sealed_steps, entries * steps_per_block)):
            entry = step // steps_per_block
            column = step % steps_per_block * KEYS.run
            block = tl.maximum(tl.load(table + entry), 0).to(tl.int64) * kv_heads + head
            begin = tl.load(starts + entry)
            count = tl.load(starts + entry + 1) - begin
            tokens = column + offsets
            valid = (tokens < count) & (begin + tokens >= 0)  # those before 0 have left a sliding window
            if KEYS.run > KEYS.stretch:
                valid = valid & (index % KEYS.run < KEYS.stretch)
            scores = _sealed_scores(
                *(rotated, key_codes, block, column, count, tokens, valid),
                *(key_scales, key_zeros, KEYS, dtype),
            )
            seen = valid
            for sink in tl.static_range(SINKS):
                seen = seen & (begin + tokens != tl.load(sink_positions + batch_row * SINKS + sink))
            scores *= sealed_scale
            scores = _allowed(scores, begin + tokens, seen, mask_rows, last_seen, softcap, SOFTCAP, MASK)
            weights, rescale, top, total = _softened(scores, top, total)
            output *= rescale[:, None]
            output = _add_sealed_values(
                output, weights, value_codes, block, tokens, valid, value_scales, value_zeros, VALUES, dtype
            )

    exact = _query_tile(query, pair * rows + held, KEYS)
    if SINKS > 0:
        sinks = tl.where(split == sealed_splits, SINKS, 0)
        for start in tl.range(0, sinks, SINK_TILE, num_stages=1):
            tokens = start + tl.arange(0, SINK_TILE)
            positions = tl.load(sink_positions + batch_row * SINKS + tokens, mask=tokens < SINKS, other=-1)
            valid = (positions >= tl.maximum(tl.load(starts), 0)) & (positions < sealed_tokens)
            tile = _exact_keys(sink_keys + pair * (SINKS * KEYS.dim), KEYS.dim, tokens, valid, KEYS)
            scores = _product(exact, tile, None, dtype) * scale
            scores = _allowed(scores, positions, valid, mask_rows, last_seen, softcap, SOFTCAP, MASK)
            weights, rescale, top, total = _softened(scores, top, total)
            tile = _exact_values(sink_values + pair * (SINKS * VALUES.dim), VALUES.dim, tokens, valid, VALUES)
            output = _product(weights, tile, output * rescale[:, None], dtype)

    tail_keys += batch_row * (key_batch_stride * STRIDE_UNIT) + head * (key_head_stride * STRIDE_UNIT)
    tail_values += batch_row * (value_batch_stride * STRIDE_UNIT) + head * (value_head_stride * STRIDE_UNIT)
    first = tl.maximum(split - sealed_splits, 0) * exact_steps
    last = tl.minimum(first + exact_steps, tl.cdiv(tail_tokens, EXACT_TOKENS))
    last = tl.where(split >= sealed_splits, last, first)
    for step in tl.range(first, last, num_stages=EXACT_STAGES):
        tokens = step * EXACT_TOKENS + tl.arange(0, EXACT_TOKENS)
        valid = tokens < tail_tokens
        tile = _exact_keys(tail_keys, key_token_stride, tokens, valid, KEYS)
        scores = _product(exact, tile, None, dtype) * scale
        scores = _allowed(scores, sealed_tokens + tokens, valid, mask_rows, last_seen, softcap, SOFTCAP, MASK)
        weights, rescale, top, total = _softened(scores, top, total)
        tile = _exact_values(tail_values, value_token_stride, tokens, valid, VALUES)
        output = _product(weights, tile, output * rescale[:, None], dtype)

    channels, has_channel = _value_channels(VALUES)
    partials += ((pair * splits + split) * rows + row) * PARTIAL
    here = row < rows
    tl.store(partials[:, None] + channels[None, :], output, mask=here[:, None] & has_channel[None, :])
    tl.store(partials + VALUES.dim, top, mask=here)
    tl.store(partials + VALUES.dim + 1, total, mask=here)


@_compiled
def _joined(
    partials: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    top: tl.tensor,
    channels: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Sum over the partials `first` to `last`, at these channels, under the maximum `top`."""
    output = tl.zeros(channels.shape, tl.float32)
    for start in range(first, last, SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)
        places = partials + split * stride
        tops = tl.load(places + DIM, mask=split < last, other=LOWEST)
        here = (split < last)[:, None] & (channels < DIM)[None, :]
        part = tl.load(places[:, None] + channels[None, :], mask=here, other=0)
        output += tl.sum(part * tl.exp(tops - top)[:, None], 0)
    return output


@_kernel
def combine(
    partials: tl.tensor,
    output: tl.tensor,
    log_sum_exp: tl.tensor,
    head_sinks: tl.tensor,
    rotation: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    sealed_splits: tl.tensor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PARTIAL: tl.constexpr,
) -> None:
    """One row of the output out of its partials; 0 if it may attend to nothing.

    `rotation`, `[DIM, DIM]`, turns back what comes of sealed values, where it is not `None`. `log_sum_exp`, if there is
    one, is written to; there are no head sinks then.
    """
    row = tl.program_id(0).to(tl.int64)
    stride = rows.to(tl.int64) * PARTIAL
    partials += row // rows * splits * stride + row % rows * PARTIAL

    top = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0, tl.float32)
    if head_sinks is not None:
        top = tl.load(head_sinks + row // queries % heads).to(tl.float32)
        total = tl.full((), 1, tl.float32)
    for start in range(0, splits, SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)
        tops = tl.load(partials + split * stride + DIM, mask=split < splits, other=LOWEST)
        totals = tl.load(partials + split * stride + (DIM + 1), mask=split < splits, other=0)
        highest = tl.maximum(top, tl.max(tops, 0))
        finite = tl.where(highest == LOWEST, 0.0, highest)
        total = total * tl.exp(top - finite) + tl.sum(totals * tl.exp(tops - finite), 0)
        top = highest
    if log_sum_exp is not None:
        tl.store(log_sum_exp + row, top + tl.log(tl.where(total > 0, total, 1.0)))
    top = tl.where(top == LOWEST, 0.0, top)

    channels = tl.arange(0, TILE)
    if rotation is None:
        joined = _joined(partials, stride, 0, splits, top, channels, DIM)
    else:
        joined = _joined(partials, stride, sealed_splits, splits, top, channels, DIM)
        step: tl.constexpr = min(ROTATION_TILE, DIM)
        for first in range(0, DIM, step):
            some = first + tl.arange(0, step)
            part = _joined(partials, stride, 0, sealed_splits, top, some, DIM)
            turn = tl.load(rotation + some[:, None] * DIM + channels[None, :], mask=(channels < DIM)[None, :], other=0)
            joined += tl.sum(part[:, None] * turn, 0)
    result = tl.where(total > 0, joined / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(output + row * DIM + channels, result, mask=channels < DIM)
