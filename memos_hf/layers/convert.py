"""From transformers' layers to ours and back, with what they hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..config import CacheOptions
from .base import BufferedLayer
from .blocks import BlockLayer
from .contiguous import ContiguousLayer
from .sliding import SlidingLayer, WindowedLayer
from .sliding_blocks import SlidingBlockLayer


def replacement_for(layer_class: type, options: CacheOptions, layer_idx: int, layer_kwargs: dict[str, Any]) -> Any:
    """The layer to use where transformers would use `layer_class`: one of ours for full and sliding attention."""
    if layer_class is DynamicLayer:
        return full_attention_layer(options, layer_idx)
    if layer_class is DynamicSlidingWindowLayer:
        return sliding_layer(options, layer_idx, layer_kwargs["sliding_window"])
    return layer_class(**layer_kwargs)


def full_attention_layer(options: CacheOptions, layer_idx: int) -> ContiguousLayer | BlockLayer:
    """One contiguous buffer, or sealed blocks where quantization asks for them."""
    quantization = options.quantization
    if quantization is None or layer_idx in quantization.skip_layers:
        return ContiguousLayer(options)
    return BlockLayer(options, quantization)


def sliding_layer(options: CacheOptions, layer_idx: int, sliding_window: int) -> SlidingLayer | SlidingBlockLayer:
    """One buffer, or sealed blocks where quantization asks for them and the window is long enough to hold any."""
    quantization = options.quantization
    if quantization is None or layer_idx in quantization.skip_layers:
        return SlidingLayer(options, sliding_window)
    if not SlidingBlockLayer.seals_any(options, quantization, sliding_window):
        return SlidingLayer(options, sliding_window)
    return SlidingBlockLayer(options, quantization, sliding_window)


def layer_of_kind(kind: str, options: CacheOptions, layer_idx: int, sliding_window: int | None) -> BufferedLayer | None:
    """A new layer of ours whose class is called `kind`, or `None` if `options` ask for no such layer."""
    layer = (
        full_attention_layer(options, layer_idx)
        if sliding_window is None
        else sliding_layer(options, layer_idx, sliding_window)
    )
    return layer if type(layer).__name__ == kind else None


def from_dynamic(layer: Any, options: CacheOptions, layer_idx: int) -> Any:
    """A layer of ours with a copy of what `layer`, of any dynamic class or ours, holds; other classes are copied."""
    if isinstance(layer, WindowedLayer) or type(layer) is DynamicSlidingWindowLayer:
        sliding = sliding_layer(options, layer_idx, layer.sliding_window)
        sliding.record_past = layer.record_past
        _fill(sliding, layer)
        sliding.cumulative_length = layer.cumulative_length
        if isinstance(sliding, BlockLayer):
            sliding.seal()
        return sliding
    if isinstance(layer, (ContiguousLayer, BlockLayer)) or type(layer) is DynamicLayer:
        full = full_attention_layer(options, layer_idx)
        full.check_room(layer.get_seq_length())
        _fill(full, layer)
        if isinstance(full, BlockLayer):
            full.seal()
        return full
    return copy.deepcopy(layer)


def to_dynamic(layer: Any) -> Any:
    """The transformers layer that stands where `layer` stood, with a copy of what it holds."""
    if isinstance(layer, WindowedLayer):
        sliding = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        sliding.record_past = layer.record_past
        sliding.cumulative_length = layer.cumulative_length
        return _copied(layer, sliding)
    if isinstance(layer, (ContiguousLayer, BlockLayer)):
        return _copied(layer, DynamicLayer())
    return copy.deepcopy(layer)


def check_quantizable(layer: ContiguousLayer | SlidingLayer, options: CacheOptions, layer_idx: int) -> None:
    """Raise if what `layer` holds cannot be encoded as `options` ask."""
    target: BufferedLayer
    if isinstance(layer, SlidingLayer):
        target = sliding_layer(options, layer_idx, layer.sliding_window)
    else:
        target = full_attention_layer(options, layer_idx)
    if layer.held_tokens > 0:
        target.check_update(*layer.lent())


def _fill(layer: BufferedLayer, source: Any) -> None:
    if source.get_seq_length() == 0:
        return
    keys, values = source.lent() if isinstance(source, BufferedLayer) else (source.keys, source.values)
    layer.check_update(keys, values)
    # The memory is new, so that only a graph behind the tensors themselves stands against writing in place.
    with torch.set_grad_enabled(torch.is_grad_enabled() and keys.requires_grad):
        layer.lazy_initialization(keys, values)
        layer.buffer.append(keys, values, layer.growth_limit)


def _copied(source: BufferedLayer, layer: Any) -> Any:
    keys, values = source.copied()
    if keys is not None and values is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return layer
