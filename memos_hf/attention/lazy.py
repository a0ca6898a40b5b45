"""A tensor that stands for the encoded keys or values of a layer, and has no data.

It has the shape, dtype and device of what it stands for. On the way to attention it is followed through the views that
transformers takes of keys and values (`repeat_kv`: a new axis, expand, reshape). When
`scaled_dot_product_attention` is called with the two stand-ins of one update, attention reads the encoded blocks in
place. Every other operation decodes, and goes on with a plain tensor, so whatever a model does with its keys and values
is right, and the common thing is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Role = Literal["key", "value"]
Stage = Literal["stored", "axis", "repeated over an axis", "repeated"]


class Reading(Protocol):
    """What the two stand-ins of one update read from: a layer as it was left by that update."""

    def shape(self, role: Role) -> tuple[int, int, int, int]:
        """`[batch, kv_heads, tokens, head_dim]` of K or V."""

    def decode(self, role: Role) -> Tensor:
        """All of K or V as a plain tensor. Raises a `RuntimeError` if the layer has changed since."""

    def attend(self, query: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor | None:
        """Attention read in place, `[batch, heads, queries, value_dim]`, or `None` where it has to be decoded."""


class StandIn(Tensor):
    """See the module. Made by :func:`stand_in`."""

    reading: Reading
    role: Role
    stage: Stage
    repeats: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no data, attend in place, or decode and go on with plain tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            follow = _FOLLOWED.get(func)
            if follow is not None:
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
        return f"StandIn({self.role}s, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return decoded(self).clone()  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return decoded(self).__reduce_ex__(protocol)


def stand_in(reading: Reading, role: Role, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that stands for the keys or the values of `reading`."""
    return _made(reading, role, reading.shape(role), dtype, device, "stored", 1)


def decoded(item: Any) -> Any:
    """The plain tensor that a stand-in stands for; anything else as it is."""
    if not isinstance(item, StandIn):
        return item
    states = item.reading.decode(item.role)
    if item.stage == "stored":
        return states
    batch, heads, tokens, head_dim = states.shape
    states = states[:, :, None]
    if item.stage == "axis":
        return states
    states = states.expand(batch, heads, item.repeats, tokens, head_dim)
    return states if item.stage == "repeated over an axis" else states.reshape(item.shape)


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
    return tensor


def _next(item: StandIn, shape: tuple[int, ...], stage: Stage, repeats: int) -> StandIn:
    return _made(item.reading, item.role, shape, item.dtype, item.device, stage, repeats)


def _new_axis(item: Tensor, index: Any) -> StandIn | None:
    whole = slice(None)
    if isinstance(item, StandIn) and item.stage == "stored" and index == (whole, whole, None, whole, whole):
        batch, heads, tokens, head_dim = item.shape
        return _next(item, (batch, heads, 1, tokens, head_dim), "axis", 1)
    return None


def _expand(item: Tensor, *sizes: Any) -> StandIn | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(item, StandIn) or item.stage != "axis" or len(sizes) != 5:
        return None
    shape = tuple(item.shape)
    if (*sizes[:2], *sizes[3:]) != (*shape[:2], *shape[3:]):
        return None
    return _next(item, sizes, "repeated over an axis", sizes[2])


def _reshape(item: Tensor, *sizes: Any) -> StandIn | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(item, StandIn) or item.stage != "repeated over an axis":
        return None
    batch, heads, repeats, tokens, head_dim = item.shape
    if sizes != (batch, heads * repeats, tokens, head_dim):
        return None
    return _next(item, sizes, "repeated", repeats)


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
    if not isinstance(key, StandIn) or not isinstance(value, StandIn) or isinstance(query, StandIn):
        return None
    if key.reading is not value.reading or (key.role, value.role) != ("key", "value"):
        return None
    if key.stage != value.stage or key.repeats != value.repeats or key.stage not in ("stored", "repeated"):
        return None
    if dropout_p or query.ndim != 4 or isinstance(attn_mask, StandIn):
        return None
    if key.stage == "stored" and not enable_gqa and key.shape[1] not in (1, query.shape[1]):
        return None  # for torch to refuse
    return key.reading.attend(query, attn_mask, is_causal, scale)


_FOLLOWED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.nn.functional.scaled_dot_product_attention: _attend,
    Tensor.__getitem__: _new_axis,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
    Tensor.contiguous: _same,
}

_METADATA: set[Callable[..., Any]] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point", "element_size")),
    *(getattr(Tensor, name) for name in ("get_device", "is_inference")),
}
