"""Decode attention over encoded blocks in plain torch: what every kernel is tested against, and runs where none does.

The softmax is computed some blocks at a time with a running maximum and sum in float32 (Milakov and Gimelshein,
arXiv:1805.02867), so no score matrix over all tokens and no decoded copy of all K and V ever exists. Many queries, a
prompt over a part of the tokens, are cut into tiles: tokens are decoded once, and every tile takes them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..blocks.codecs import BlockCodec, hadamard
from .query_tile import QueryTile, queries_per_tile

# Tokens that are decoded, or read, at a time; of sealed ones, at least a block.
TOKENS_PER_STEP = 1024


class Prepared(dict[str, Any]):
    """What kernels have found out about tensors, addresses too, so that they need not look again at every call.

    Copies of the tensors begin without it.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return Prepared()

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, ()


@dataclass(frozen=True)
class Exact:
    """Keys and values in full precision, `[batch, kv_heads, tokens, head_dim]` each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Sealed:
    """Encoded blocks of a layer, read through a block table.

    Attributes
    ----------
    key_codec, value_codec : BlockCodec
    keys, values : dict[str, Tensor]
        The arenas, `[slots, …]` as :meth:`BlockCodec.layout` says.
    table : Tensor
        int32 `[batch, entries]`, the slot of each entry.
    starts : Tensor
        int32 `[batch, entries + 1]`, not falling. Entry `e` of row `b` holds the cached tokens `starts[b, e]` to
        `starts[b, e + 1] - 1`, the first ones of its block. Token 0 is the first that is visible, the one that masks
        begin with. Tokens at negative positions have left a sliding window and are not read: part of an entry may lie
        there, or all of it. So the first number is at most 0, and the last, at least 0, is the row's count of sealed
        tokens, behind which its tail begins. Only a part of a row begins later: some entries, with positions unchanged;
        and only a part that no tail follows may lie before 0 altogether.
    """

    key_codec: BlockCodec
    value_codec: BlockCodec
    keys: dict[str, Tensor]
    values: dict[str, Tensor]
    table: Tensor
    starts: Tensor
    prepared: Prepared = field(default_factory=Prepared, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Sinks:
    """Exact keys and values of a few sealed tokens, `[batch, kv_heads, sinks, head_dim]`, used instead of encoded ones.

    `positions`, int32 `[batch, sinks]`, says which cached tokens of the row they are. A sink at -1, or at a position
    that is not sealed, or not in this part, is left out.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    prepared: Prepared = field(default_factory=Prepared, init=False, repr=False, compare=False)


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
    """Attention of queries over sealed blocks, sinks and tail.

    The cached tokens of a row are its sealed tokens in the order of its block table, from position 0 on, then its
    tail. Computed in float32, or in float64 if `query` is. What is sealed may also begin at a later position, if the
    tokens before it are another part.

    Parameters
    ----------
    query : Tensor
        `[batch, heads, queries, head_dim]`; heads is a multiple of the heads of K and V.
    tail, sealed, sinks
        What is cached.
    mask : Tensor, optional
        Boolean (true: attend) or additive, `[batch or 1, heads or 1, queries, tokens]`. `None`: each of the last
        `queries` tokens sees those up to itself, or, of a part, every query sees everything.
    scale : float
        Factor of the scores.
    softcap : float
        Scores become `softcap * tanh(score / softcap)`; 0 for none.
    head_sinks : Tensor, optional
        `[heads]`, a logit of each head that takes a share of the probability and has no value (gpt-oss).
    log_sum_exp : Tensor, optional
        Says that this is a part of the cached tokens: `[batch, heads, queries]`, contiguous, in the dtype of the
        computation. The logarithms of the sums of the exponentials of scores are written to it, -inf where nothing
        may be attended to; `head_sinks` is `None` then.

    Returns
    -------
    Tensor
        `[batch, heads, queries, value_dim]` in the dtype of `query`, or in that of `log_sum_exp` where it is given; 0
        where nothing may be attended to.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads = tail.keys.shape[1]
    sealed_tokens = sealed.starts[:, -1:] if sealed is not None else tail.keys.new_zeros((1, 1), dtype=torch.int32)
    last_seen = None
    if mask is None and log_sum_exp is None:
        tokens = int(sealed_tokens.max()) + tail.keys.shape[2]
        last_seen = torch.arange(tokens - queries, tokens, device=query.device)
    rows = query.to(torch.promote_types(query.dtype, torch.float32)) * scale
    rows = rows.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    count = queries_per_tile(batch * heads * TOKENS_PER_STEP, query.device)
    tiles = [
        QueryTile(rows, slice(first, first + count), tail.values.shape[-1], mask, last_seen, softcap)
        for first in range(0, queries, count)
    ]
    if sealed is not None:
        _add_sealed(tiles, sealed, sinks)
        if sinks is not None:
            positions = sinks.positions.long()
            valid = (positions >= sealed.starts[:, :1].clamp(min=0)) & (positions < sealed_tokens)
            _add_exact(tiles, Exact(sinks.keys, sinks.values), positions, valid)
    for start in range(0, tail.keys.shape[2], TOKENS_PER_STEP):
        part = Exact(tail.keys[:, :, start:][:, :, :TOKENS_PER_STEP], tail.values[:, :, start:][:, :, :TOKENS_PER_STEP])
        offsets = torch.arange(start, start + part.keys.shape[2], device=query.device)
        _add_exact(tiles, part, sealed_tokens.long() + offsets, None)
    if log_sum_exp is not None:
        torch.cat([tile.log_sum_exp() for tile in tiles], dim=2, out=log_sum_exp)
        return torch.cat([tile.result(None) for tile in tiles], dim=2)
    return torch.cat([tile.result(head_sinks) for tile in tiles], dim=2).to(query.dtype)


def _add_sealed(tiles: list[QueryTile], sealed: Sealed, sinks: Sinks | None) -> None:
    """Add the blocks; a rotation is applied to the queries before and undone on the output after."""
    device, dtype = sealed.table.device, tiles[0].rows.dtype
    rows = [tile.rows for tile in tiles]
    if sealed.key_codec.spec.rotation:
        rotation = hadamard(sealed.key_codec.head_dim, device).to(dtype)
        rows = [some @ rotation for some in rows]
    in_block = torch.arange(sealed.key_codec.block_size, device=device)
    blocks = max(TOKENS_PER_STEP // sealed.key_codec.block_size, 1)
    for first in range(0, sealed.table.shape[1], blocks):
        slots = sealed.table[:, first : first + blocks].long().clamp(min=0)
        starts = sealed.starts[:, first : first + slots.shape[1] + 1].long()
        positions = (starts[:, :-1, None] + in_block).flatten(1)
        valid = (in_block < starts.diff(dim=1)[:, :, None]).flatten(1) & (positions >= 0)
        if sinks is not None:
            valid = valid & ~(positions[:, :, None] == sinks.positions[:, None, :]).any(dim=-1)
        keys = _gathered(sealed.key_codec, sealed.keys, slots).to(dtype)
        values = _gathered(sealed.value_codec, sealed.values, slots).to(dtype)
        all_valid = device.type == "cpu" and bool(valid.all())  # elsewhere, asking takes longer than filling
        if not all_valid:  # a slot may hold anything beside its valid tokens
            values = values.masked_fill(~valid[:, None, :, None], 0)
        for tile, some in zip(tiles, rows, strict=True):
            tile.add(keys, values, positions, None if all_valid else valid, some)
    if sealed.value_codec.spec.rotation:
        rotation = hadamard(sealed.value_codec.head_dim, device).to(dtype)
        for tile in tiles:
            tile.turn(rotation)


def _add_exact(tiles: list[QueryTile], exact: Exact, positions: Tensor, valid: Tensor | None) -> None:
    keys, values = (states.to(tiles[0].rows.dtype) for states in (exact.keys, exact.values))
    for tile in tiles:
        tile.add(keys, values, positions, valid)


def _gathered(codec: BlockCodec, arenas: dict[str, Tensor], slots: Tensor) -> Tensor:
    """Decoded, still rotated, blocks of every row side by side, `[batch, heads, tokens, head_dim]`."""
    states = codec.decode_rotated({name: arena[slots.flatten()] for name, arena in arenas.items()})
    states = states.view(*slots.shape, *states.shape[1:]).transpose(1, 2)
    return states.reshape(slots.shape[0], states.shape[1], -1, states.shape[-1])
