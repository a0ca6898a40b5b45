"""What every attention layer of ours has in common: the protocol of a transformers cache layer over a buffer."""

from __future__ import annotations

import copy
import operator
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..config import CacheOptions
from .buffer import KVBuffer, row_signature
from .state import LayerState, placeholder


class BufferedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer whose K and V lie in a :class:`KVBuffer`.

    Geometry (batch, heads, head dims, dtypes, device) comes from the first K and V, not from a config: K and V may
    differ, layers may differ, tensor parallelism hands over a part of the heads.

    Subclasses say what is visible, what is kept and what masks must cover.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = True
    is_sliding = False
    buffer_class = KVBuffer

    def __init__(self, options: CacheOptions, first_capacity: int) -> None:
        # The inherited constructor would only set `keys` and `values`, which are properties here.
        self.options = options
        self.buffer = self.buffer_class(first_capacity, options.growth_factor, seq_major=options.layout == "seq_major")
        self.is_initialized = False
        self.device: torch.device | None = None
        self._signatures: tuple[tuple[Any, ...], ...] = ()

    @property
    def keys(self) -> Tensor | None:
        """The valid keys, `[batch, heads, tokens, head_dim]`, a view; `None` before the first update."""
        return self._lent(0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign(keys, self._half(1))

    @property
    def values(self) -> Tensor | None:
        """The valid values, `[batch, heads, tokens, head_dim]`, a view; `None` before the first update."""
        return self._lent(1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign(self._half(0), values)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that the next update has to agree with."""
        return self.buffer.length == 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the keys; `None` before the first update."""
        return self.buffer.tensors[0].dtype if self.is_initialized else None

    @property
    @abstractmethod
    def growth_limit(self) -> int | None:
        """Tokens at which growth stops, unless more are needed."""

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` would, and change nothing."""
        removed_tokens(tokens_to_remove)

    def get_max_length(self) -> int:
        """The ceiling in tokens; -1 without one."""
        return self.options.max_cache_len or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next update of `query_length` tokens returns, and the position of its first token."""
        return self.get_seq_length() + query_length, 0

    @abstractmethod
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for K and V of these shapes, dtypes and device; their tokens are counted but not stored."""
        self.is_initialized = False
        self.buffer.allocate(key_states, value_states, self.growth_limit)
        self._take_geometry(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K and V, `[batch, heads, new_tokens, head_dim]`; return what the new tokens may attend to.

        What is returned are views into the buffer that hold until the next call. A refused update changes nothing.
        """
        self.check_update(key_states, value_states)
        if self.is_empty:
            if self.buffer.is_recorded(key_states, value_states):
                self._take_geometry(key_states, value_states)  # `append` will concatenate and needs no buffer
            else:
                self.lazy_initialization(key_states, value_states)
        return self.append(key_states, value_states)

    def _take_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self._signatures = row_signature(key_states), row_signature(value_states)
        self.is_initialized = True

    @abstractmethod
    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """`update` without its checks."""

    def check_update(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise if K and V cannot be appended to what is held."""
        keys, values = key_states.shape, value_states.shape
        if len(keys) != 4 or len(values) != 4:
            raise ValueError(
                "key_states, value_states: expected four dimensions [batch, heads, tokens, head_dim], got shapes "
                f"{tuple(keys)} and {tuple(values)}"
            )
        if keys[2] != values[2] or keys[0] != values[0]:
            raise ValueError(
                f"value_states: expected batch size {keys[0]} and {keys[2]} tokens as in key_states, got {values[0]} "
                f"and {values[2]}"
            )
        if self.buffer.shared:
            self.buffer.check_paired()
        if self.options.max_cache_len is not None:
            self.check_room(keys[2])
        signatures = row_signature(key_states), row_signature(value_states)
        if signatures != self._signatures and not self.is_empty:
            refuse_geometry(self._signatures, signatures)

    def check_room(self, new_tokens: int) -> None:
        """Raise a `ValueError` if `new_tokens` more would pass the ceiling."""
        check_ceiling(self.options.max_cache_len, self.get_seq_length(), new_tokens)

    def reset(self) -> None:
        """Forget all tokens. Memory of our own is kept for the next prompt, tensors handed over are dropped."""
        if self.buffer.shared:
            self.buffer.free()
        self.buffer.clear()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, int64 or a boolean mask over the batch, on any device."""
        if self.is_empty:
            return
        batch = self._signatures[0][0]
        index = torch.as_tensor(indices, device=self.buffer.tensors[0].device).flatten()
        if index.dtype == torch.bool:
            if index.shape[0] != batch:
                raise IndexError(f"indices: expected a boolean mask over {batch} rows, got one over {index.shape[0]}")
            index = index.nonzero().flatten()
        index = index.long() if index.numel() == 0 else index
        self._take_rows(torch.where(index < 0, index + batch, index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        if self.is_empty:
            return
        rows = torch.arange(self._signatures[0][0], device=self.buffer.tensors[0].device)
        self._take_rows(rows.repeat_interleave(repeats))

    def held_tensors(self) -> list[Tensor]:
        """Every tensor that the layer holds."""
        return self.buffer.held_tensors

    @property
    def held_tokens(self) -> int:
        """Tokens of each row that are held: as many as `keys` has."""
        return self.buffer.length

    @property
    def growths(self) -> int:
        """Times that memory ran out and was allocated anew, larger."""
        return self.buffer.growths

    @property
    def used_bytes(self) -> int:
        """Bytes of what is valid."""
        return self.buffer.valid_bytes if self.is_initialized else 0

    def used_by_tier(self) -> dict[str, int]:
        """Bytes of what is valid by where it is: a device or, of what is offloaded, `"cpu"` or `"disk"`."""
        return {str(self.buffer.tensors[0].device): self.used_bytes} if self.is_initialized else {}

    @property
    def shared_bytes(self) -> int:
        """Bytes of what is valid and may be held by others too."""
        return self.buffer.shared_bytes

    @property
    def full_precision_bytes(self) -> int:
        """Bytes that the same tokens take without encoding."""
        return self.used_bytes

    def lent(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        """All K and V, or of the `last` tokens, `[batch, heads, tokens, head_dim]`, that hold until the next call."""
        return self.buffer.view(last)

    def copied(self) -> tuple[Tensor | None, Tensor | None]:
        """All valid K and V, `[batch, heads, tokens, head_dim]`, in tensors of their own; `None` if there are none."""
        if self.is_empty:
            return None, None
        keys, values = self.buffer.view()
        return keys.clone(), values.clone()

    def fork(self) -> BufferedLayer:
        """A layer with the same tokens, and counters of its own. Memory is shared until one of the two writes to it."""
        twin = copy.copy(self)
        twin.buffer = self.buffer.fork()
        return twin

    def free(self) -> None:
        """Forget all tokens, and give back their memory."""
        self.reset()
        self.buffer.free()

    @property
    def saved_as(self) -> str:
        """The kind of layer that files say this one is."""
        return type(self).__name__

    def state(self) -> LayerState:
        """All that is held, to be saved."""
        tensors = {}
        if not self.is_empty:
            self.buffer.check_paired()
            keys, values = self.buffer.view()
            tensors = {"keys": keys.detach(), "values": values.detach()}
        return LayerState(self.saved_as, tensors, {}, self.get_seq_length())

    def check_state(self, state: LayerState) -> None:
        """Raise if this layer, which is empty, cannot take `state`."""
        if state.tensors:
            self.check_update(*state.pair())

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`. This layer is empty, and `check_state` did not raise."""
        if state.tensors:
            keys, values = state.pair()
            self.lazy_initialization(placeholder(keys, device), placeholder(values, device))
            self.buffer.append(keys, values, self.growth_limit)

    def offload(self) -> None:
        """Move the valid tokens to host memory (`offloading=True` of transformers)."""
        self.buffer.move_to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the tokens back to the layer's device."""
        if self.device is not None:
            self.buffer.move_to(self.device)

    def _take_rows(self, index: Tensor) -> None:
        self.buffer.take_rows(index)
        keys, values = self._signatures
        self._signatures = (index.shape[0], *keys[1:]), (index.shape[0], *values[1:])

    def _half(self, half: int) -> Tensor | None:
        """All of K (0) or V (1), whether or not the other one is there."""
        return self.buffer.halves()[half]

    def _lent(self, half: int) -> Tensor | None:
        return self.buffer.halves()[half] if self.is_initialized else None

    def _assign(self, keys: Tensor | None, values: Tensor | None) -> None:
        self.buffer.adopt(keys, values)
        self.is_initialized = keys is not None and values is not None
        if keys is not None and values is not None:
            self._take_geometry(keys, values)


def check_ceiling(ceiling: int | None, held: int, new_tokens: int) -> None:
    """Raise a `ValueError` if `new_tokens` more than the `held` ones would pass the ceiling."""
    if ceiling is not None and held + new_tokens > ceiling:
        raise ValueError(
            f"max_cache_len: the cache may hold {ceiling} tokens, it holds {held} and {new_tokens} more came; "
            "nothing was stored"
        )


def removed_tokens(tokens_to_remove: int) -> int:
    """How many tokens `crop` is to remove: its argument is that number, negative, before 5.18 sometimes in a tensor.

    Raises
    ------
    ValueError
        If the argument is positive, which older versions of transformers took for a final length.
    """
    if tokens_to_remove > 0:
        raise ValueError(
            f"tokens_to_remove: expected a negative int, the number of tokens to remove, or 0, got {tokens_to_remove}"
        )
    return -operator.index(tokens_to_remove)


def refuse_geometry(expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    """Raise for the first difference between the row signatures of K and V that are held and that came."""
    _refuse("key_states", expected[0], got[0])
    _refuse("value_states", expected[1], got[1])


def _refuse(argument: str, expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    for name, want, have in zip(("batch size", "heads", "head dim", "dtype", "device"), expected, got, strict=True):
        if want != have:
            error = {"dtype": TypeError, "device": RuntimeError}.get(name, ValueError)
            raise error(f"{argument}: expected {name} {want}, which the cache already holds, got {have}")
