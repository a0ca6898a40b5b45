"""Queries that take in tokens step by step: what they may see, and a softmax over what they have seen.

A prompt has many queries. In tiles of some of them, scores take little memory, however many tokens are attended to, and
stay in the processor's caches between the passes over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Scores of a tile, of all heads and the tokens of a step: they fit in a second-level cache, or keep a GPU busy.
SCORES_PER_TILE, SCORES_PER_GPU_TILE = 1 << 18, 1 << 25
# Fewer queries are not worth a tile of their own, however many heads they have.
QUERIES_PER_TILE = 16


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
        """Take in scores `[batch, kv_heads, rows, tokens]` and values `[batch, kv_heads, tokens, value_dim]`.

        The scores are overwritten.
        """
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1, keepdim=True))
        finite = _finite(maximum)
        rescale = (self.maximum - finite).exp_()
        weights = scores.sub_(finite).exp_()
        self.total.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
        output = self.output.mul_(rescale).view(-1, *self.output.shape[2:])
        output.baddbmm_(weights.flatten(0, 1), values.flatten(0, 1))
        self.maximum = maximum

    def result(self, head_sinks: Tensor | None) -> Tensor:
        """The output; 0 for rows that may attend to nothing."""
        total = self.total
        if head_sinks is not None:
            total = total + torch.exp(head_sinks - _finite(self.maximum))
        return torch.where(total > 0, self.output / total, 0)

    def log_sum_exp(self) -> Tensor:
        """Logarithm of the sum of the exponentials of all scores, `[batch, kv_heads, rows]`; -inf for those rows."""
        return (self.maximum + torch.log(self.total)).squeeze(-1)


def _finite(maximum: Tensor) -> Tensor:
    """Of rows that have seen nothing yet, the lowest number, which -inf may be compared with."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def queries_per_tile(scores: int, device: torch.device) -> int:
    """How many queries a tile is to have, if each has so many scores at a time."""
    most = SCORES_PER_TILE if device.type == "cpu" else SCORES_PER_GPU_TILE
    return max(most // max(scores, 1), QUERIES_PER_TILE)


class QueryTile:
    """Some queries of all heads, what they may see, and what they have seen so far.

    Parameters
    ----------
    rows : Tensor
        All queries, scaled, `[batch, kv_heads, group, queries, head_dim]`.
    some : slice
        Of the queries.
    value_dim : int
        Head dim of the values.
    mask : Tensor, optional
        For all queries, as :func:`memos_hf.attention.reference.decode_attention` takes it.
    last_seen : Tensor, optional
        `[queries]`, without a mask: the last position that each of all queries sees.
    softcap : float
    """

    def __init__(
        self,
        rows: Tensor,
        some: slice,
        value_dim: int,
        mask: Tensor | None,
        last_seen: Tensor | None,
        softcap: float,
    ) -> None:
        rows = rows[:, :, :, some]
        self.batch, self.kv_heads, self.group, self.queries = rows.shape[:4]
        self.rows = rows.flatten(2, 3)
        self.softcap = softcap
        self.mask = mask[:, :, some] if mask is not None else None
        self.last_seen = last_seen[some] if last_seen is not None else None
        self.softmax = OnlineSoftmax(self.rows, value_dim)

    def add(
        self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor | None, rows: Tensor | None = None
    ) -> None:
        """Take in tokens.

        Parameters
        ----------
        keys, values : Tensor
            `[batch, kv_heads, tokens, head_dim]`.
        positions, valid : Tensor
            `[batch or 1, tokens]`. `None`: all are valid.
        rows : Tensor, optional
            The queries, if they are to be others than given: rotated ones.
        """
        scores = (self.rows if rows is None else rows) @ keys.transpose(2, 3)
        self._restrict(scores.view(self.batch, self.kv_heads, self.group, self.queries, -1), positions, valid)
        self.softmax.add(scores, values)

    def _restrict(self, scores: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        """Apply the soft cap, and what may be seen, to scores `[batch, kv_heads, group, queries, tokens]` in place."""
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.last_seen is not None:
            hidden = positions[:, None, :] > self.last_seen[:, None]
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        elif self.mask is not None and self.mask.shape[-1] > 0:  # else a part lies before the first visible token
            mask = self._mask_at(self.mask, positions.clamp(0, self.mask.shape[-1] - 1))
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores.add_(mask)
        if valid is not None:
            scores.masked_fill_(~valid[:, None, None, None], -torch.inf)

    def _mask_at(self, mask: Tensor, positions: Tensor) -> Tensor:
        """The mask of these tokens, in dimensions like those of scores."""
        mask_heads = mask.shape[1]
        index = positions[:, None, None].expand(self.batch, mask_heads, self.queries, -1)
        mask = mask.expand(self.batch, -1, -1, -1).gather(3, index)
        split = (self.kv_heads, self.group) if mask_heads > 1 else (1, 1)
        return mask.view(self.batch, *split, self.queries, -1)

    def turn(self, rotation: Tensor) -> None:
        """Rotate what the values gave so far."""
        self.softmax.output = self.softmax.output @ rotation

    def result(self, head_sinks: Tensor | None) -> Tensor:
        """`[batch, heads, queries, value_dim]`; see :class:`OnlineSoftmax`."""
        if head_sinks is not None:
            logits = head_sinks.to(self.rows.dtype).view(1, self.kv_heads, self.group, 1, 1)
            head_sinks = logits.expand(-1, -1, -1, self.queries, -1).flatten(2, 3)
        return self.softmax.result(head_sinks).view(self.batch, self.kv_heads * self.group, self.queries, -1)

    def log_sum_exp(self) -> Tensor:
        """`[batch, heads, queries]`; see :class:`OnlineSoftmax`."""
        return self.softmax.log_sum_exp().view(self.batch, self.kv_heads * self.group, self.queries)
