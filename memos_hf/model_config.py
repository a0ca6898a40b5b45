"""What a cache reads in a model's config: which layers there are, and how they attend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    get_layer_types_and_kwargs,
)
from transformers.utils.generic import is_flash_attention_requested

from .config import CacheOptions
from .layers import convert


def attention_of(config: PretrainedConfig) -> str | None:
    """Name of the attention implementation that the model runs; `None` where the config does not say."""
    name: str | None = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    return name


def shares_layers(config: PretrainedConfig) -> bool:
    """Whether layers of the model read the keys and values of other layers."""
    text_config = config.get_text_config(decoder=True)
    return bool(getattr(text_config, "kv_sharing_modes", None) or getattr(text_config, "num_kv_shared_layers", None))


def asks_for_flash(config: PretrainedConfig) -> bool:
    """Whether the model of this config runs some flash attention."""
    return getattr(config, "_attn_implementation", None) is not None and bool(is_flash_attention_requested(config))


def layers_for(config: PretrainedConfig, options: CacheOptions) -> list[Any]:
    """One layer for each layer of the model, as transformers would choose, ours where it is full or sliding."""
    text_config = config.get_text_config(decoder=True)
    layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
    if isinstance(layer_kwargs, dict):  # one dict for all layers before transformers 5.19
        layer_kwargs = [layer_kwargs] * len(layer_types)
    skipped = options.quantization.skip_layers if options.quantization is not None else ()
    if any(layer_idx >= len(layer_types) for layer_idx in skipped):
        raise ValueError(f"skip_layers: expected indices below the {len(layer_types)} layers there are, got {skipped}")
    if options.static:
        return [
            STATIC_LAYER_TYPE_MAPPING[layer_type](max_cache_len=options.max_cache_len, **kwargs)
            for layer_type, kwargs in zip(layer_types, layer_kwargs, strict=True)
        ]
    # Layers of a decoder that attend to an image (Mllama) hold its tokens, not those that the ceiling counts.
    cross_attention = getattr(text_config, "cross_attention_layers", None) or ()
    unlimited = replace(options, max_cache_len=None)
    return [
        convert.replacement_for(
            DYNAMIC_LAYER_TYPE_MAPPING[layer_type],
            unlimited if layer_idx in cross_attention else options,
            layer_idx,
            kwargs,
        )
        for layer_idx, (layer_type, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True))
    ]
