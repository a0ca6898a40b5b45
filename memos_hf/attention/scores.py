"""Attention that a model computes by itself, followed from the keys to the output without data.

BLOOM, MPT and GPT-Neo call no attention function that could be replaced. Their code is scores, biases and masks, a
softmax, and a product with the values. Where a cache is asked to (`attn_implementation="memos"`), the product of a
query with the stand-in of the keys is :class:`Scores`: a tensor without data that remembers what is done to it. When
it meets the values, the kernel that reads blocks in place does all of it; any step that is not known here computes the
scores and goes on with them.

Not done unasked, because attention weights may be kept by a model that is to return them, and outlive what they would
be computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .lazy import FOLLOWED, NoData, Reading, ReplacedError, StandIn, next_stage

# A mask that overwrites scores is taken as one that is added to them; for numbers below this there is no difference.
HIDING = -1e4


class Scores(NoData):
    """`query @ keys^T * scale + bias` or its softmax, `[batch, heads, queries, tokens]` or `[batch * heads, …]`."""

    reading: Reading
    query: Tensor  # [batch, heads, queries, head_dim]
    scale: float
    bias: Tensor | None  # broadcasts to [batch, heads, queries, tokens]
    are_weights: bool

    def plain(self) -> Tensor:
        """Compute them.

        Raises
        ------
        ReplacedError
            If the cache has changed since: attention weights cannot be kept.
        """
        try:
            keys = self.reading.decode("key")
        except ReplacedError as error:
            raise ReplacedError(
                "attention weights cannot be returned with attn_implementation='memos': they are computed when they "
                "are read, and the cache has changed since. Load the model with attn_implementation='eager'"
            ) from error
        scores = self.query @ keys.to(self.query.dtype).transpose(2, 3) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.are_weights:
            scores = scores.softmax(dim=-1, dtype=torch.float32)
        return scores.to(self.dtype).reshape(self.shape)


def _made(
    reading: Reading,
    query: Tensor,
    scale: float,
    bias: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    are_weights: bool = False,
) -> Scores:
    scores: Scores = Tensor._make_wrapper_subclass(Scores, shape, dtype=dtype, device=query.device)
    scores.reading, scores.query, scores.scale, scores.bias = reading, query, scale, bias
    scores.are_weights = are_weights
    return scores


def _changed(scores: Scores, **changes: Any) -> Scores:
    fields = {name: getattr(scores, name) for name in ("reading", "query", "scale", "bias", "dtype", "are_weights")}
    return _made(**{**fields, "shape": tuple(scores.shape), **changes})


def _transposed(item: Tensor, first: int, second: int) -> StandIn | None:
    if not isinstance(item, StandIn) or item.stage not in ("stored", "merged") or item.role != "key":
        return None
    if not item.reading.follows_scores or {first % item.ndim, second % item.ndim} != {item.ndim - 2, item.ndim - 1}:
        return None
    *rows, tokens, head_dim = item.shape
    return next_stage(item, (*rows, head_dim, tokens), "transposed")


def _reshaped(item: Tensor, *sizes: Any) -> Tensor | None:
    """The heads of keys and values merged with the batch; of scores merged and parted again."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if isinstance(item, StandIn) and item.stage == "stored" and item.reading.follows_scores:
        batch, heads, tokens, head_dim = item.shape
        if sizes in ((batch * heads, -1, head_dim), (batch * heads, tokens, head_dim)):
            return next_stage(item, (batch * heads, tokens, head_dim), "merged")
    if isinstance(item, Scores):
        batch, heads, queries, _ = item.query.shape
        tokens = item.shape[-1]
        for shape in ((batch, heads, queries, tokens), (batch * heads, queries, tokens)):
            if len(sizes) == len(shape) and sizes[:-1] == shape[:-1] and sizes[-1] in (-1, tokens):
                return _changed(item, shape=shape)
    return None


def _score(query: Tensor, keys: Tensor) -> Tensor | None:
    if not isinstance(keys, StandIn) or keys.stage != "transposed" or isinstance(query, NoData):
        return None
    batch, heads, tokens, head_dim = keys.reading.shape("key")
    if query.ndim != keys.ndim or query.dtype != keys.dtype or query.shape[-1] != head_dim:
        return None
    if query.shape[:-2] != keys.shape[:-2]:
        return None
    shape = (*query.shape[:-1], tokens)
    return _made(keys.reading, query.reshape(batch, heads, -1, head_dim), 1.0, None, shape, query.dtype)


def _score_onto(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    scores = _score(batch1, batch2)
    if not isinstance(scores, Scores) or isinstance(bias, NoData) or bias.ndim != 3:
        return None
    return _plus(_changed(scores, scale=float(alpha)), bias * beta)


def _times(scores: Any, factor: Any) -> Tensor | None:
    if not isinstance(scores, Scores) or scores.are_weights or scores.bias is not None:
        return None
    return _changed(scores, scale=scores.scale * factor) if isinstance(factor, (int, float)) else None


def _plus(scores: Any, bias: Any) -> Tensor | None:
    if not isinstance(scores, Scores) or scores.are_weights or not isinstance(bias, Tensor):
        return None
    bias = _as_bias(scores, bias)
    if bias is None or not bias.is_floating_point():
        return None
    return _changed(scores, bias=bias if scores.bias is None else scores.bias + bias)


def _as_bias(scores: Scores, bias: Tensor) -> Tensor | None:
    """`bias`, that broadcasts to `scores`, with four dimensions."""
    batch, heads, queries, tokens = *scores.query.shape[:3], scores.shape[-1]
    if isinstance(bias, NoData) or bias.ndim > scores.ndim or bias.ndim < 2:
        return None
    if scores.ndim == 3 and bias.ndim == 3 and bias.shape[0] != 1:
        bias = bias.view(batch, heads, *bias.shape[1:])
    bias = bias.view((1,) * (4 - bias.ndim) + tuple(bias.shape))
    fits = all(have in (1, want) for have, want in zip(bias.shape, (batch, heads, queries, tokens), strict=True))
    return bias if fits else None


def _masked_fill(scores: Any, mask: Any, value: Any) -> Tensor | None:
    return _where(mask, value, scores)


def _where(condition: Any, chosen: Any, other: Any) -> Tensor | None:
    """Scores overwritten by a number so low that they no longer count."""
    scores, number, hidden = (other, chosen, condition) if isinstance(other, Scores) else (chosen, other, ~condition)
    if not isinstance(scores, Scores) or scores.are_weights or isinstance(number, NoData):
        return None
    hidden = _as_bias(scores, hidden)
    number = torch.as_tensor(number, device=scores.device)
    if hidden is None or number.ndim != 0 or float(number) > HIDING:
        return None
    bias = number.new_zeros((), dtype=scores.dtype) if scores.bias is None else scores.bias
    return _changed(scores, bias=torch.where(hidden, number.to(scores.dtype), bias))


def _softmax(scores: Any, dim: int | None = None, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor | None:
    if not isinstance(scores, Scores) or scores.are_weights or dim not in (-1, scores.ndim - 1):
        return None
    return _changed(scores, are_weights=True, dtype=dtype or scores.dtype)


def _to(item: Any, dtype: Any = None, *others: Any, **more: Any) -> Tensor | None:
    if not isinstance(dtype, torch.dtype) or others or more:
        return None
    if isinstance(item, StandIn):
        # Kernels compute scores in float32 in any case; half precision would lose some of that.
        if item.stage != "stored" or not item.reading.follows_scores or dtype not in (item.dtype, torch.float32):
            return None
        return next_stage(item, tuple(item.shape), "stored", dtype=dtype)
    return _changed(item, dtype=dtype) if isinstance(item, Scores) else None


def _float(item: Any) -> Tensor | None:
    return _to(item, torch.float32)


def _dropout(scores: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    return scores if isinstance(scores, Scores) and (not training or p == 0) else None


def _attend(weights: Any, values: Any) -> Tensor | None:
    if not isinstance(weights, Scores) or not weights.are_weights or not isinstance(values, StandIn):
        return None
    if values.reading is not weights.reading or values.role != "value" or values.dtype != weights.dtype:
        return None
    if (values.stage, weights.ndim) not in (("stored", 4), ("merged", 3)):
        return None
    output = weights.reading.attend(weights.query, weights.bias, False, weights.scale)
    return None if output is None else output.reshape(*weights.shape[:-1], output.shape[-1]).to(weights.dtype)


def register() -> None:
    """Have stand-ins follow these operations."""
    products = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
    followers: dict[Callable[..., Any], tuple[Callable[..., Tensor | None], ...]] = {
        **dict.fromkeys(products, (_score, _attend)),
        **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), (_score_onto,)),
        **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), (_times,)),
        **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), (_plus,)),
        **dict.fromkeys((Tensor.reshape, Tensor.view), (_reshaped,)),
        Tensor.transpose: (_transposed,),
        Tensor.to: (_to,),
        Tensor.float: (_float,),
        Tensor.masked_fill: (_masked_fill,),
        torch.where: (_where,),
        torch.nn.functional.softmax: (_softmax,),
        torch.nn.functional.dropout: (_dropout,),
    }
    for function, follow in followers.items():
        FOLLOWED[function] = (*FOLLOWED.get(function, ()), *follow)
