"""From transformers' layers to ours and back, with what they hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..config import UNENCODED, CacheOptions
from .base import BufferedLayer
from .blocks import BlockLayer
from .contiguous import ContiguousLayer
from .offloaded import OffloadedLayer, OffloadedSlidingLayer
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
    """One contiguous buffer, or sealed blocks where quantization or offload asks for them."""
    encoding = options.encoding(layer_idx)
    if encoding is None:
        return ContiguousLayer(options)
    return BlockLayer(options, encoding) if options.lease is None else OffloadedLayer(options, encoding)


def sliding_layer(options: CacheOptions, layer_idx: int, sliding_window: int) -> SlidingLayer | SlidingBlockLayer:
    """One buffer, or sealed blocks where they are asked for and the window is long enough to hold any."""
    encoding = options.encoding(layer_idx)
    if encoding is None or not SlidingBlockLayer.seals_any(options, encoding, sliding_window):
        return SlidingLayer(options, sliding_window)
    kind = SlidingBlockLayer if options.lease is None else OffloadedSlidingLayer
    return kind(options, encoding, sliding_window)


def layer_of_kind(kind: str, options: CacheOptions, layer_idx: int, sliding_window: int | None) -> BufferedLayer | None:
    """A new layer of ours that takes what is saved of a layer of `kind`; `None` if `options` ask for another."""
    layer = (
        full_attention_layer(options, layer_idx)
        if sliding_window is None
        else sliding_layer(options, layer_idx, sliding_window)
    )
    return layer if layer.saved_as == kind else None


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


def in_blocks(layer: Any) -> Any:
    """A layer that can share its tokens: what is contiguous becomes blocks, without a copy, if there is a whole one.

    Tokens that a graph goes through stay as they are.
    """
    if isinstance(layer, BlockLayer) and layer.quantization is UNENCODED:
        layer.seal()  # tails are copied, and this one can be sealed without anybody seeing it
    if type(layer) is not ContiguousLayer or layer.buffer.length < layer.options.block_size:
        return layer
    if any(half.requires_grad for half in layer.buffer.tensors):
        return layer
    blocks = BlockLayer(layer.options, UNENCODED)
    blocks.take_over(layer.buffer)
    return blocks


def forked(layer: Any) -> Any:
    """A layer with the same tokens as one that `in_blocks` gave; of transformers' kinds, a copy."""
    return layer.fork() if isinstance(layer, BufferedLayer) else copy.deepcopy(layer)


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


def is_exact(layer: Any) -> bool:
    """Whether a layer of ours keeps its tokens as they are, and can be quantized."""
    return isinstance(layer, (ContiguousLayer, SlidingLayer)) or (
        isinstance(layer, BlockLayer) and layer.quantization is UNENCODED
    )


def check_quantizable(layer: BufferedLayer, options: CacheOptions, layer_idx: int) -> None:
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
