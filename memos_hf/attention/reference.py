"""Decode attention over encoded blocks in plain torch: what every kernel is tested against, and runs where none does.

The softmax is computed block by block with a running maximum and sum in float32 (Milakov and Gimelshein,
arXiv:1805.02867), so no score matrix over all tokens and no decoded copy of all K and V ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..blocks.codecs import BlockCodec, hadamard

# Sealed blocks that are decoded at a time, and exact tokens that are read at a time.
BLOCKS_PER_STEP = 8
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
        tokens, behind which its tail begins.
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


class OnlineSoftmax:
    """Attention output of rows of queries, accumulated over pieces of the keys.

    Parameters
    ----------
    like : Tensor
        The queries, `[batch, kv_heads, rows, head_dim]`.
    value_dim : int
        Head dim of the values.
    """

    def __init__(self, like: Tensor, value_dim: int) -> None:
        shape = like.shape[:-1]
        self.maximum = like.new_full((*shape, 1), -torch.inf)
        self.total = like.new_zeros((*shape, 1))
        self.output = like.new_zeros((*shape, value_dim))

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in scores `[batch, kv_heads, rows, tokens]` and values `[batch, kv_heads, tokens, value_dim]`."""
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1, keepdim=True))
        finite = torch.where(maximum == -torch.inf, 0, maximum)  # rows that have seen nothing yet
        rescale = torch.exp(self.maximum - finite)
        weights = torch.exp(scores - finite)
        self.total = self.total * rescale + weights.sum(dim=-1, keepdim=True)
        self.output = self.output * rescale + weights @ values
        self.maximum = maximum

    def result(self, head_sinks: Tensor | None) -> Tensor:
        """The output; 0 for rows that may attend to nothing."""
        total = self.total
        if head_sinks is not None:
            finite = torch.where(self.maximum == -torch.inf, 0, self.maximum)
            total = total + torch.exp(head_sinks - finite)
        return torch.where(total > 0, self.output / total, 0)

    def log_sum_exp(self) -> Tensor:
        """Logarithm of the sum of the exponentials of all scores, `[batch, kv_heads, rows]`; -inf for those rows."""
        return (self.maximum + torch.log(self.total)).squeeze(-1)


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
    """Attention of a few queries over sealed blocks, sinks and tail.

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
        `queries` tokens sees those up to itself.
    scale : float
        Factor of the scores.
    softcap : float
        Scores become `softcap * tanh(score / softcap)`; 0 for none.
    head_sinks : Tensor, optional
        `[heads]`, a logit of each head that takes a share of the probability and has no value (gpt-oss).
    log_sum_exp : Tensor, optional
        `[batch, heads, queries]`, contiguous, in the dtype of the computation. The logarithms of the sums over the
        exponentials of scores, without head sinks, are written to it: -inf where nothing may be attended to.

    Returns
    -------
    Tensor
        `[batch, heads, queries, value_dim]` in the dtype of `query`, or in that of `log_sum_exp` where it is given; 0
        where nothing may be attended to.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    kv_heads = tail.keys.shape[1]
    sealed_tokens = sealed.starts[:, -1:] if sealed is not None else tail.keys.new_zeros((1, 1), dtype=torch.int32)
    bias = _Bias(query, kv_heads, mask, int(sealed_tokens.max()) + tail.keys.shape[2], softcap)
    rows = (query.to(dtype) * scale).reshape(query.shape[0], kv_heads, -1, query.shape[-1])
    softmax = OnlineSoftmax(rows, tail.values.shape[-1])
    if sealed is not None:
        _add_sealed(softmax, rows, sealed, sinks, bias)
        if sinks is not None:
            positions = sinks.positions.long()
            valid = (positions >= sealed.starts[:, :1].clamp(min=0)) & (positions < sealed_tokens)
            _add_exact(softmax, rows, Exact(sinks.keys, sinks.values), positions, valid, bias)
    for start in range(0, tail.keys.shape[2], TOKENS_PER_STEP):
        part = Exact(tail.keys[:, :, start:][:, :, :TOKENS_PER_STEP], tail.values[:, :, start:][:, :, :TOKENS_PER_STEP])
        offsets = torch.arange(start, start + part.keys.shape[2], device=query.device)
        _add_exact(softmax, rows, part, sealed_tokens.long() + offsets, None, bias)
    if head_sinks is not None:
        head_sinks = head_sinks.to(dtype).view(1, kv_heads, -1, 1, 1).expand(-1, -1, -1, query.shape[2], 1)
        head_sinks = head_sinks.reshape(1, kv_heads, -1, 1)
    output = softmax.result(head_sinks).reshape(*query.shape[:3], -1)
    if log_sum_exp is None:
        return output.to(query.dtype)
    log_sum_exp.copy_(softmax.log_sum_exp().view_as(log_sum_exp))
    return output


class _Bias:
    """Soft cap and mask of scores `[batch, kv_heads, rows, tokens]`, at given positions of each batch row."""

    def __init__(self, query: Tensor, kv_heads: int, mask: Tensor | None, tokens: int, softcap: float) -> None:
        self.batch, self.heads, self.queries = query.shape[:3]
        self.kv_heads, self.softcap, self.tokens = kv_heads, softcap, tokens
        self.mask = mask

    def apply(self, scores: Tensor, positions: Tensor, valid: Tensor | None) -> Tensor:
        """Scores with everything applied; `positions` and `valid` are `[batch or 1, tokens]`."""
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        count = positions.shape[-1]
        scores = scores.view(self.batch, self.kv_heads, -1, self.queries, count)
        if self.mask is None or self.mask.shape[-1] == 0:  # a part that lies before the first visible token
            last_seen = torch.arange(self.tokens - self.queries, self.tokens, device=scores.device)
            allowed = positions[:, None, :] <= last_seen[:, None]
            scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
        else:
            scores = self._masked(scores, positions.clamp(0, self.mask.shape[-1] - 1))
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None, None], -torch.inf)
        return scores.reshape(self.batch, self.kv_heads, -1, count)

    def _masked(self, scores: Tensor, positions: Tensor) -> Tensor:
        assert self.mask is not None
        mask_heads = self.mask.shape[1]
        index = positions[:, None, None].expand(self.batch, mask_heads, self.queries, -1)
        mask = self.mask.expand(self.batch, -1, -1, -1).gather(3, index)
        split = (self.kv_heads, mask_heads // self.kv_heads) if mask_heads > 1 else (1, 1)
        mask = mask.view(self.batch, *split, self.queries, -1)
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)


def _add_sealed(softmax: OnlineSoftmax, rows: Tensor, sealed: Sealed, sinks: Sinks | None, bias: _Bias) -> None:
    """Add the blocks; a rotation is applied to the query before and undone on the output after."""
    if sealed.key_codec.spec.rotation:
        rows = rows @ hadamard(rows.shape[-1], rows.device).to(rows.dtype)
    in_block = torch.arange(sealed.key_codec.block_size, device=rows.device)
    for first in range(0, sealed.table.shape[1], BLOCKS_PER_STEP):
        slots = sealed.table[:, first : first + BLOCKS_PER_STEP].long().clamp(min=0)
        starts = sealed.starts[:, first : first + slots.shape[1] + 1].long()
        positions = (starts[:, :-1, None] + in_block).flatten(1)
        valid = (in_block < starts.diff(dim=1)[:, :, None]).flatten(1) & (positions >= 0)
        if sinks is not None:
            valid = valid & ~(positions[:, :, None] == sinks.positions[:, None, :]).any(dim=-1)
        keys = _gathered(sealed.key_codec, sealed.keys, slots).to(rows.dtype)
        values = _gathered(sealed.value_codec, sealed.values, slots).to(rows.dtype)
        values = values.masked_fill(~valid[:, None, :, None], 0)  # a slot may hold anything beside its valid tokens
        softmax.add(bias.apply(rows @ keys.transpose(2, 3), positions, valid), values)
    if sealed.value_codec.spec.rotation:
        softmax.output = softmax.output @ hadamard(softmax.output.shape[-1], rows.device).to(rows.dtype)


def _add_exact(
    softmax: OnlineSoftmax, rows: Tensor, exact: Exact, positions: Tensor, valid: Tensor | None, bias: _Bias
) -> None:
    scores = rows @ exact.keys.to(rows.dtype).transpose(2, 3)
    softmax.add(bias.apply(scores, positions, valid), exact.values.to(rows.dtype))


def _gathered(codec: BlockCodec, arenas: dict[str, Tensor], slots: Tensor) -> Tensor:
    """Decoded, still rotated, blocks of every row side by side, `[batch, heads, tokens, head_dim]`."""
    states = codec.decode_rotated({name: arena[slots.flatten()] for name, arena in arenas.items()})
    states = states.view(*slots.shape, *states.shape[1:]).transpose(1, 2)
    return states.reshape(slots.shape[0], states.shape[1], -1, states.shape[-1])
