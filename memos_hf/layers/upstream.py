"""What transformers' own layer classes lack to take part in every operation of a whole cache.

Linear-attention, convolution, hybrid and indexed layers, and those that a model's own file registers, stay the classes
that transformers made for them. These functions add what is missing there: repeating and selecting the rows of
recurrent states, leaving inference mode, and a reset that empties on every supported version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from .base import check_crop_sign

_STATES = ("conv_states", "recurrent_states")


def leave_inference_mode(layer: Any) -> None:
    """Replace recurrent states that were made under `inference_mode` if it is off now.

    These layers write in place, which torch refuses for such tensors outside the mode.
    """
    if torch.is_inference_mode_enabled() or not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    for name in _STATES:
        states = getattr(layer, name)
        for index, state in states.items():
            if state is not None and state.is_inference():
                states[index] = state.clone()


def reset(layer: Any) -> None:
    """Empty the layer. Before transformers 5.18 dynamic layers only zeroed their tensors and kept their length."""
    leave_inference_mode(layer)
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
        if getattr(layer, "is_indexer_initialized", False):
            layer.indexer_keys = None
            layer.is_indexer_initialized = False
    layer.reset()


def repeat_rows(layer: Any, repeats: int) -> None:
    """Repeat every row `repeats` times, recurrent states included."""
    refuse_static(layer, "batch_repeat_interleave")
    _map_states(layer, lambda state: state.repeat_interleave(repeats, dim=0))
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or isinstance(layer, CacheLayerMixin):
        layer.batch_repeat_interleave(repeats)


def select_rows(layer: Any, indices: Tensor) -> None:
    """Keep the rows `indices`, recurrent states included."""
    refuse_static(layer, "batch_select_indices")
    _map_states(layer, lambda state: state[torch.as_tensor(indices, device=state.device)])
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or isinstance(layer, CacheLayerMixin):
        layer.batch_select_indices(indices)


def check_crop(layer: Any, tokens_to_remove: int) -> None:
    """Raise if the layer's `crop` would, or if it would leave a recurrent state that has seen the removed tokens."""
    check_crop_sign(tokens_to_remove)
    if isinstance(layer, StaticLayer) and not hasattr(layer, "crop"):
        raise RuntimeError("crop: this version of transformers cannot crop static layers")
    if not isinstance(layer, LinearAttentionCacheLayerMixin) or not holds_anything(layer):
        return
    if not layer.record_past:
        raise RuntimeError(
            f"crop: a {type(layer).__name__} keeps no past states; call activate_past_recording before the tokens "
            "to be removed come"
        )
    if tokens_to_remove < 0 and any(layer.is_recurrent_states_initialized.values()):
        raise RuntimeError(f"crop: the recurrent state of a {type(layer).__name__} cannot be taken back")


def holds_anything(layer: Any) -> bool:
    """Whether a layer has been written to, so that there is something to crop."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
        return True
    return bool(getattr(layer, "is_initialized", False))


def refuse_static(layer: Any, method: str) -> None:
    """Raise if the layer has a fixed shape, which rows cannot be added to or removed from."""
    if isinstance(layer, StaticLayer):
        raise RuntimeError(f"{method}: a static cache keeps its batch size; build one for the new batch size")


def _map_states(layer: Any, change: Any) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in _STATES:
            states = getattr(layer, name)
            for index, state in states.items():
                if state is not None:
                    states[index] = change(state)
