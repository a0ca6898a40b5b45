"""What transformers' own layer classes lack to take part in every operation of a whole cache.

Linear-attention, convolution, hybrid, indexed and static layers, and those that a model's own file registers, stay the
classes that transformers made for them. What is missing there is added from outside: repeating and selecting the rows
of recurrent states, leaving inference mode, a reset that empties on every supported version, a crop that is refused
before any layer has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from .base import BufferedLayer, removed_tokens


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
        """Remove the last `-tokens_to_remove` tokens."""
        if not self._is_empty():
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
