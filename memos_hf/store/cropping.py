"""Which caches can be cut to any number of tokens: those that still hold each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ..layers import BufferedLayer
from ..layers.blocks import BlockLayer
from ..layers.contiguous import ContiguousLayer
from ..layers.sliding import WindowedLayer
from ..layers.state import LayerState

if TYPE_CHECKING:
    from ..cache import MemOSCache

# Layers that hold something of their own; those that share what others hold are of neither kind.
HOLDING = (CacheLayerMixin, LinearAttentionCacheLayerMixin)
# What files call layers of full attention.
FULL = (ContiguousLayer.__name__, BlockLayer.__name__)


def can_be_cropped(cache: MemOSCache) -> bool:
    """Whether no layer has dropped a token: full attention, windows that are not yet full."""
    return all(
        layer.cumulative_length < layer.sliding_window
        if isinstance(layer, WindowedLayer)
        else isinstance(layer, BufferedLayer) or not isinstance(layer, HOLDING)
        for layer in cache.layers
    )


def attends_to_all(cache: MemOSCache) -> bool:
    """Whether no layer ever drops a token, however many come."""
    return can_be_cropped(cache) and not any(isinstance(layer, WindowedLayer) for layer in cache.layers)


def has_recurrent_states(cache: MemOSCache) -> bool:
    """Whether a layer keeps a state instead of tokens."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def saved_can_be_cropped(layers: list[LayerState]) -> bool:
    """The same of what is in a file."""
    return all(
        state.count("cumulative_length") < state.count("sliding_window")
        if "sliding_window" in state.numbers
        else state.kind in FULL
        for state in layers
    )
