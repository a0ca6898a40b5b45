"""Attention over cached tokens that come in parts: some blocks in place, others through staging buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .dispatch import attend_in_place
from .merge import Merge
from .op import MOST_QUERIES, partial_attention
from .reference import Exact, Sealed, Sinks


@dataclass(frozen=True)
class Part:
    """Some of the cached tokens of each row.

    Attributes
    ----------
    tail, sealed, sinks
        As :func:`memos_hf.attention.op.partial_attention` takes them, with positions that count the tokens of the part.
    positions : Tensor, optional
        int64 `[tokens]`, or `[batch, tokens]` where rows differ: which of the visible tokens they are, those of the
        tail last. `None`: all of them.
    """

    tail: Exact | None
    sealed: Sealed | None
    sinks: Sinks | None
    positions: Tensor | None


def attend_in_parts(
    query: Tensor,
    parts: Iterable[Part],
    tokens: int,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor:
    """What `scaled_dot_product_attention` gives over all parts; for arguments that `can_attend` accepts.

    Parameters are those of :func:`memos_hf.attention.dispatch.attend_in_place`. The parts are asked for one after the
    other: when the next one is, the one before has been read, or is going to be before later work of its device.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    mask = None if mask is None else mask.expand(-1, -1, query.shape[2], tokens)
    merge = Merge()
    for part in parts:
        own = mask if mask is None or part.positions is None else _columns(mask, part.positions)
        merge.add(*partial_attention(query, part.tail, part.sealed, part.sinks, own, factor, softcap))
    return merge.result(head_sinks).to(query.dtype)


def attend_to_part(
    query: Tensor,
    part: Part,
    tokens: int,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
) -> Tensor | None:
    """The same where one part with a tail is all there is, by the kernel that needs no merging.

    `None` for more queries than it takes.
    """
    if query.shape[2] > MOST_QUERIES or part.tail is None:
        return None
    if mask is not None and part.positions is not None:
        mask = _columns(mask.expand(-1, -1, query.shape[2], tokens), part.positions)
        tokens = mask.shape[-1]
    return attend_in_place(query, part.tail, part.sealed, part.sinks, tokens, mask, causal, scale, softcap, head_sinks)


def _columns(mask: Tensor, positions: Tensor) -> Tensor:
    if positions.ndim == 1:
        return mask.index_select(3, positions)
    batch = positions.shape[0]
    index = positions[:, None, None].expand(batch, mask.shape[1], mask.shape[2], -1)
    return mask.expand(batch, -1, -1, -1).gather(3, index)
