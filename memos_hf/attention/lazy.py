"""A tensor that stands for the encoded keys or values of a layer, and has no data.

It has the shape, dtype and device of what it stands for. On the way to attention it is followed through the views that
transformers takes of keys and values (`repeat_kv`: a new axis, expand, reshape). When
`scaled_dot_product_attention` is called with the two stand-ins of one update, attention reads the encoded blocks in
place. Every other operation decodes, and goes on with a plain tensor, so whatever a model does with its keys and values
is right, and the common thing is fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Role = Literal["key", "value"]
Stage = Literal["stored", "axis", "repeated over an axis", "repeated", "merged", "transposed"]


class ReplacedError(RuntimeError):
    """What a tensor without data stands for is no longer in the cache."""


class Reading(Protocol):
    """What the two stand-ins of one update read from: a layer as it was left by that update.

    Attributes
    ----------
    follows_scores : bool
        Whether scores that a model computes from the keys by itself are followed; see :mod:`.scores`.
    """

    follows_scores: bool

    def shape(self, role: Role) -> tuple[int, int, int, int]:
        """`[batch, kv_heads, tokens, head_dim]` of K or V."""

    def decode(self, role: Role) -> Tensor:
        """All of K or V as a plain tensor. Raises a `ReplacedError` if the layer has changed since."""

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        softcap: float = 0.0,
        head_sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Attention read in place, `[batch, heads, queries, value_dim]`, or `None` where it has to be decoded."""


class NoData(Tensor):
    """A tensor with a shape, dtype and device, whose numbers are computed when an operation asks for them."""

    @abstractmethod
    def plain(self) -> Tensor:
        """The plain tensor that this one stands for."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no data, attend in place, or decode and go on with plain tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            for follow in FOLLOWED.get(func, ()):
                result = follow(*args, **kwargs)
                if result is not None:
                    return result
            # Plain tensors out of plain tensors: with subclasses handled, torch would make stand-ins of the results.
            return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Decode for what did not pass through `__torch_function__`: calls that begin in C++."""
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class StandIn(NoData):
    """Keys or values of a layer; see the module. Made by :func:`stand_in`."""

    reading: Reading
    role: Role
    stage: Stage
    repeats: int
    sizes: torch.Size

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Kept, as asking the tensor would go through `__torch_function__`."""
        return self.sizes

    def plain(self) -> Tensor:
        """Decode."""
        states = self.reading.decode(self.role).to(self.dtype)
        if self.stage == "stored":
            return states
        if self.stage == "merged":
            return states.reshape(self.shape)
        if self.stage == "transposed":
            return states.reshape(*self.shape[:-2], states.shape[2], -1).transpose(-1, -2)
        batch, heads, tokens, head_dim = states.shape
        states = states[:, :, None]
        if self.stage == "axis":
            return states
        states = states.expand(batch, heads, self.repeats, tokens, head_dim)
        return states if self.stage == "repeated over an axis" else states.reshape(self.shape)


def stand_in(reading: Reading, role: Role, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that stands for the keys or the values of `reading`."""
    return _made(reading, role, reading.shape(role), dtype, device, "stored", 1)


def decoded(item: Any) -> Any:
    """The plain tensor that one without data stands for; anything else as it is."""
    return item.plain() if isinstance(item, NoData) else item


def _made(
    reading: Reading,
    role: Role,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    stage: Stage,
    repeats: int,
) -> StandIn:
    tensor: StandIn = Tensor._make_wrapper_subclass(StandIn, shape, dtype=dtype, device=device)
    tensor.reading, tensor.role, tensor.stage, tensor.repeats = reading, role, stage, repeats
    tensor.sizes = torch.Size(shape)
    return tensor


def next_stage(
    item: StandIn, shape: tuple[int, ...], stage: Stage, repeats: int = 1, dtype: torch.dtype | None = None
) -> StandIn:
    """What stands for a view of what `item` stands for, or for that in another dtype."""
    return _made(item.reading, item.role, shape, dtype or item.dtype, item.device, stage, repeats)


def _new_axis(item: Tensor, index: Any) -> StandIn | None:
    whole = slice(None)
    if isinstance(item, StandIn) and item.stage == "stored" and index == (whole, whole, None, whole, whole):
        batch, heads, tokens, head_dim = item.shape
        return next_stage(item, (batch, heads, 1, tokens, head_dim), "axis", 1)
    return None


def _expand(item: Tensor, *sizes: Any) -> StandIn | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(item, StandIn) or item.stage != "axis" or len(sizes) != 5:
        return None
    shape = tuple(item.shape)
    if (*sizes[:2], *sizes[3:]) != (*shape[:2], *shape[3:]):
        return None
    return next_stage(item, sizes, "repeated over an axis", sizes[2])


def _reshape(item: Tensor, *sizes: Any) -> StandIn | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(item, StandIn) or item.stage != "repeated over an axis":
        return None
    batch, heads, repeats, tokens, head_dim = item.shape
    if sizes != (batch, heads * repeats, tokens, head_dim):
        return None
    return next_stage(item, sizes, "repeated", repeats)


def _same(item: Tensor, *args: Any, **kwargs: Any) -> StandIn | None:
    return item if isinstance(item, StandIn) and not args and not kwargs else None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p:
        return None
    if (
        isinstance(key, StandIn)
        and key.stage == "stored"
        and not enable_gqa
        and key.shape[1] not in (1, query.shape[1])
    ):
        return None  # for torch to refuse
    return attend(query, key, value, attn_mask, scale, causal=is_causal)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float = 0.0,
    head_sinks: Tensor | None = None,
    causal: bool = False,
) -> Tensor | None:
    """Attention read in place, if `key` and `value` are the stand-ins of one update and the shapes suit.

    Parameters
    ----------
    query : Tensor
        `[batch, heads, queries, head_dim]`.
    key, value : Tensor
        As they came to attention.
    mask, causal, scale
        As `scaled_dot_product_attention` takes them.
    softcap, head_sinks
        As :func:`memos_hf.attention.reference.decode_attention` takes them.

    Returns
    -------
    Tensor or None
        `[batch, heads, queries, value_dim]`; `None` where keys and values have to be decoded.
    """
    if not isinstance(key, StandIn) or not isinstance(value, StandIn) or isinstance(query, NoData):
        return None
    if key.reading is not value.reading or (key.role, value.role) != ("key", "value"):
        return None
    if key.stage != value.stage or key.repeats != value.repeats or key.stage not in ("stored", "repeated"):
        return None
    if query.ndim != 4 or isinstance(mask, NoData):
        return None
    return key.reading.attend(query, mask, causal, scale, softcap, head_sinks)


# What is followed, and how: the first of these that knows what to do with its arguments says what comes out.
FOLLOWED: dict[Callable[..., Any], tuple[Callable[..., Tensor | None], ...]] = {
    torch.nn.functional.scaled_dot_product_attention: (_attend,),
    Tensor.__getitem__: (_new_axis,),
    Tensor.expand: (_expand,),
    Tensor.reshape: (_reshape,),
    Tensor.contiguous: (_same,),
}

_METADATA: set[Callable[..., Any]] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point", "element_size")),
    *(getattr(Tensor, name) for name in ("get_device", "is_inference")),
}
