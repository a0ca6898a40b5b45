"""What transformers' own layer classes lack to take part in every operation of a whole cache.

Linear-attention, convolution, hybrid, indexed and static layers, and those that a model's own file registers, stay the
classes that transformers made for them. What is missing there is added from outside: repeating and selecting the rows
of recurrent states, leaving inference mode, a reset that empties on every supported version, a crop that is refused
before any layer has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from .base import BufferedLayer, removed_tokens
from .state import LayerState, placeholder

# What `lazy_initialization` sets from the first tensors, so that it need not be saved.
SET_AT_FIRST = ("device", "dtype", "batch_size", "num_heads", "k_head_dim", "v_head_dim")
# What a config decides, so that it is compared and not taken.
SET_BY_CONFIG = ("sliding_window", "max_cache_len", "number_of_states", "compress_rate")


class UpstreamLayer:
    """A layer of transformers', seen through the protocol of :class:`~memos_hf.layers.BufferedLayer`.

    Parameters
    ----------
    layer : object
        Any member of `Cache.layers` that is not one of ours. It is changed, never replaced.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._is_recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
        # Hybrid layers are both; purely recurrent ones have none of the methods of attention layers.
        self._is_attention = isinstance(layer, CacheLayerMixin) or not self._is_recurrent

    def reset(self) -> None:
        """Empty the layer. Before transformers 5.18 dynamic layers only zeroed their tensors and kept their length."""
        if isinstance(self.layer, DynamicLayer):
            self.layer.keys = self.layer.values = None
            self.layer.is_initialized = False
            if getattr(self.layer, "is_indexer_initialized", False):
                self.layer.indexer_keys = None
                self.layer.is_indexer_initialized = False
        self.layer.reset()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` would, or if it would leave a recurrent state that has seen the removed tokens."""
        removed = removed_tokens(tokens_to_remove)
        name = type(self.layer).__name__
        if isinstance(self.layer, StaticLayer) and not hasattr(self.layer, "crop"):
            raise RuntimeError(f"crop: this version of transformers cannot crop a {name}")
        if not self._is_recurrent or self._is_empty():
            return
        if not self.layer.record_past:
            raise RuntimeError(
                f"crop: a {name} keeps no past states; call activate_past_recording before the tokens to be "
                "removed come"
            )
        if removed > 0 and any(self.layer.is_recurrent_states_initialized.values()):
            raise RuntimeError(f"crop: the recurrent state of a {name} cannot be taken back")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, or all where there are fewer."""
        if self._is_empty():
            return
        if isinstance(self.layer, StaticLayer):  # it would count below 0
            tokens_to_remove = max(tokens_to_remove, -int(self.layer.get_seq_length()))
        self.layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` what row `beam_idx[i]` was."""
        self.layer.reorder_cache(beam_idx)
        self.leave_inference_mode()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, recurrent states included."""
        self._refuse_static("batch_repeat_interleave")
        self._map_states(lambda state: state.repeat_interleave(repeats, dim=0))
        if self._is_attention:
            self.layer.batch_repeat_interleave(repeats)
        self.leave_inference_mode()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, recurrent states included."""
        self._refuse_static("batch_select_indices")
        self._map_states(lambda state: state[torch.as_tensor(indices, device=state.device)])
        if self._is_attention:
            self.layer.batch_select_indices(indices)
        self.leave_inference_mode()

    def leave_inference_mode(self) -> None:
        """Replace recurrent states that were made under `inference_mode` by ordinary tensors.

        Layers and models write them in place, which torch refuses for such tensors once the mode is left.
        """
        if torch.compiler.is_compiling():
            return
        with torch.inference_mode(False):
            self._map_states(lambda state: state.clone() if state.is_inference() else state)

    def state(self) -> LayerState:
        """All that is held, to be saved: tensors and numbers by the names of the layer's attributes."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for name, value in self._attributes():
            if isinstance(value, Tensor):
                tensors[name] = value.detach()
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers[name] = value
        if isinstance(self.layer, StaticLayer) and "keys" in tensors:
            held = min(int(self.layer.get_seq_length()), self.layer.max_cache_len)
            tensors.update(keys=tensors["keys"][:, :, :held], values=tensors["values"][:, :, :held])
        tokens = int(self.layer.get_seq_length()) if isinstance(self.layer, CacheLayerMixin) else None
        return LayerState(type(self.layer).__name__, tensors, numbers, tokens)

    def check_state(self, state: LayerState) -> None:
        """Raise if this layer, which is empty, cannot take `state`."""
        own = dict(self._attributes())
        for name in (*state.tensors, *state.numbers):
            if name not in own:
                raise ValueError(f"{name}: a {state.kind} of this version of transformers has no such state")
        for name, value in state.numbers.items():
            if name in SET_BY_CONFIG and value != own[name]:
                raise ValueError(f"{name}: expected {own[name]}, got {value}")
            if value is not None and own[name] is not None and type(value) is not type(own[name]):
                raise ValueError(f"{name}: expected a {type(own[name]).__name__}, got {value!r}")
        if "keys" in state.tensors and state.numbers.get("is_initialized"):
            keys, values = state.pair()
            if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    "keys, values: expected [batch, heads, tokens, head_dim] with the same heads and tokens, got "
                    f"{tuple(keys.shape)} and {tuple(values.shape)}"
                )
            if isinstance(self.layer, StaticLayer) and keys.shape[2] > self.layer.max_cache_len:
                raise ValueError(f"keys: expected at most {self.layer.max_cache_len} tokens, got {keys.shape[2]}")

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`. This layer is empty, and `check_state` did not raise."""
        # What is written later, in whatever mode, must not be made under inference mode.
        with torch.inference_mode(False):
            self._initialize_like(state, device)
            for name, value in state.numbers.items():
                if name not in SET_BY_CONFIG:
                    self._set(name, value)
            for name, tensor in state.tensors.items():
                self._put(name, tensor, device)

    def _initialize_like(self, state: LayerState, device: torch.device) -> None:
        """Let the layer allocate, and note devices and dtypes, as at its first update."""
        if "keys" in state.tensors and state.numbers.get("is_initialized"):
            self.layer.lazy_initialization(*(placeholder(half, device) for half in state.pair()))
        if "indexer_keys" in state.tensors:
            self.layer.lazy_initialization_indexer(placeholder(state.tensors["indexer_keys"], device))
        states = [name for name in state.tensors if name.startswith(("conv_states.", "recurrent_states."))]
        if self._is_recurrent and states:
            self.layer.device = device
            self.layer.dtype = self.layer.dtype or state.tensors[states[0]].dtype

    def _put(self, name: str, tensor: Tensor, device: torch.device) -> None:
        """Copy a tensor in place where the layer has allocated for it: compiled steps know the address."""
        own = dict(self._attributes()).get(name)
        if isinstance(own, Tensor) and own.shape == tensor.shape:
            own.copy_(tensor)
        elif isinstance(own, Tensor) and isinstance(self.layer, StaticLayer) and name in ("keys", "values"):
            own[:, :, : tensor.shape[2]].copy_(tensor)
        else:
            taken = tensor.to(device, copy=True)
            if self._is_recurrent and not self.layer.record_past:
                torch._dynamo.mark_static_address(taken)
            self._set(name, taken)

    def _set(self, name: str, value: Any) -> None:
        attribute, _, key = name.partition(".")
        if key:
            entries = getattr(self.layer, attribute)
            entries[next(own for own in entries if str(own) == key)] = value
        else:
            setattr(self.layer, attribute, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """What the layer's attributes hold, by name, the entries of dicts as `"attribute.key"`."""
        for name, value in vars(self.layer).items():
            if isinstance(value, dict):
                yield from ((f"{name}.{key}", entry) for key, entry in value.items())
            elif name not in SET_AT_FIRST:
                yield name, value

    def _is_empty(self) -> bool:
        if self._is_recurrent and any(self.layer.has_previous_state.values()):
            return False
        return not getattr(self.layer, "is_initialized", False)

    def _refuse_static(self, method: str) -> None:
        if isinstance(self.layer, StaticLayer):
            raise RuntimeError(f"{method}: a static cache keeps its batch size; build one for the new batch size")

    def _map_states(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._is_recurrent:
            for states in (self.layer.conv_states, self.layer.recurrent_states):
                for index, state in states.items():
                    if state is not None:
                        states[index] = change(state)


def adapted(layer: Any) -> BufferedLayer | UpstreamLayer:
    """`layer` itself if it is one of ours, else a view of it with the same methods."""
    return layer if isinstance(layer, BufferedLayer) else UpstreamLayer(layer)
