"""From a call of `scaled_dot_product_attention` to the kernel that reads encoded blocks in place."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import MOST_QUERIES, decode_attention
from .reference import Exact, Sealed, Sinks


def attend_in_place(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    tokens: int,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor | None:
    """What `scaled_dot_product_attention` gives for few queries, or `None` where K and V have to be decoded.

    Parameters
    ----------
    query : Tensor
        `[batch, heads, queries, head_dim]`.
    tail, sealed, sinks
        What is cached; see :mod:`memos_hf.attention.reference`.
    tokens : int
        How many tokens that is, of each row.
    mask, causal, scale
        As `scaled_dot_product_attention` takes them: a mask that broadcasts to `[batch, heads, queries, tokens]`, or
        `causal` from the first token on, or neither: everything is seen.
    softcap, head_sinks
        See :func:`memos_hf.attention.reference.decode_attention`.
    """
    batch, heads, queries, head_dim = query.shape
    if queries > MOST_QUERIES or not can_attend(query, tail, mask, causal, head_sinks):
        return None
    scale = head_dim**-0.5 if scale is None else scale
    if mask is None:
        # The kernels take a missing mask as causal at the end, which one query a head makes the same.
        query = query.reshape(batch, heads * queries, 1, head_dim)
        head_sinks = None if head_sinks is None else head_sinks.repeat_interleave(queries)
    else:
        mask = mask.expand(-1, -1, queries, tokens)
    output = decode_attention(query, tail, sealed, sinks, mask, scale, softcap, head_sinks)
    return output.view(batch, heads, queries, -1)


def can_attend(query: Tensor, tail: Exact, mask: Tensor | None, causal: bool, head_sinks: Tensor | None) -> bool:
    """Whether our kernels give what is asked for, apart from how fast; arguments as for :func:`attend_in_place`."""
    if causal and query.shape[2] > 1:
        return False  # causal from the first token on, which is not how cached tokens are seen
    if mask is not None and (mask.ndim != 4 or mask.requires_grad):
        return False
    states = query, tail.keys, tail.values, head_sinks
    # The kernels compute no gradients.
    return not torch.is_grad_enabled() or not any(state is not None and state.requires_grad for state in states)
