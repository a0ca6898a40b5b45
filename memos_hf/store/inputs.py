"""What a prefix store takes: ids of one row that say all there is to know of a prompt, and caches that can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_file_size_to_int
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ..cache import MemOSCache
from .file import checked_ids
from .keys import TokenIds

# Arguments of `generate` that a prefix store cannot go along with, and why.
REFUSED = {
    **dict.fromkeys(("cache", "past_key_values", "cache_implementation"), "the store says which cache is used"),
    **dict.fromkeys(("inputs", "inputs_embeds"), "prefixes are found by their token ids"),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "it computes cached tokens again"),
    "prefill_chunk_size": "some versions of transformers then read cached tokens again",
    **dict.fromkeys(("adapter_names", "alora_offsets"), "keys and values depend on it and token ids do not say it"),
}


def one_row(input_ids: Any) -> TokenIds:
    """Token ids as int64 `[tokens]`.

    Raises
    ------
    TypeError, ValueError
        If they are not ints, are none, or are of several rows.
    """
    if isinstance(input_ids, (list, tuple)):
        try:
            input_ids = torch.tensor(input_ids, dtype=None if input_ids else torch.long)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError("input_ids: expected a tensor or a list of ints, got a list of something else") from None
    if not isinstance(input_ids, Tensor) or input_ids.dtype.is_floating_point or input_ids.dtype.is_complex:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: expected a tensor or a list of ints, got {kind}")
    if input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids: expected a tensor or a list of ints, got {input_ids.dtype}")
    if input_ids.ndim not in (1, 2):
        raise ValueError(f"input_ids: expected [1, tokens] or [tokens], got {tuple(input_ids.shape)}")
    if input_ids.ndim == 2 and input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one row, as prefixes are kept row by row, got {input_ids.shape[0]}")
    if input_ids.numel() == 0:
        raise ValueError("input_ids: expected at least one token, got none")
    ids: TokenIds = input_ids.detach().cpu().long().reshape(-1).numpy().astype(np.int64, copy=True)
    return ids


def cached_row(input_ids: Any, cache: Any) -> TokenIds:
    """The ids of the tokens that are in `cache`; ids behind them are left out.

    Raises
    ------
    TypeError, ValueError
        If the cache is none that can be kept, or does not belong to the ids.
    """
    if not isinstance(cache, MemOSCache):
        advice = "; MemOSCache.from_cache makes one" if hasattr(cache, "layers") else ""
        raise TypeError(f"cache: expected a MemOSCache, got {type(cache).__name__}{advice}")
    if cache.options.static:
        raise ValueError("cache: expected one that grows, got a static one, whose buffers cannot be shared")
    ids = one_row(input_ids)
    if not _holds_tokens(cache):
        raise ValueError("cache: expected one that holds tokens, got an empty one")
    row: TokenIds = checked_ids(torch.from_numpy(ids)[None], cache)[0].numpy()
    return row


def _holds_tokens(cache: MemOSCache) -> bool:
    counted = [int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return any(counted) or (not counted and any(layer.is_initialized for layer in cache.layers))


def generate_arguments(ids: Tensor, arguments: Mapping[str, Any], defaults: GenerationConfig) -> dict[str, Any]:
    """Arguments of `generate` for `ids`, `[1, tokens]`, with a mask.

    Parameters
    ----------
    ids : Tensor
    arguments : mapping
        What was asked for.
    defaults : GenerationConfig
        The model's own.

    Raises
    ------
    ValueError
        Naming an argument that brings something which token ids do not say, or takes the cache away.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    config = given.get("generation_config")
    for name, reason in REFUSED.items():
        value = given.get(name, getattr(config, name, None))
        if value is not None:
            raise ValueError(f"{name}: not an argument of store.generate, as {reason}")
        if name != "cache_implementation" and getattr(defaults, name, None) is not None:
            raise ValueError(f"{name}: set in model.generation_config, but not for store.generate, as {reason}")
    if given.get("use_cache", True) is not True:
        raise ValueError(f"use_cache: expected True, as the store keeps what is cached, got {given['use_cache']!r}")
    mask = given.pop("attention_mask", None)
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    if mask is not None and (tuple(mask.shape) != tuple(ids.shape) or not bool((mask == 1).all())):
        raise ValueError(
            f"attention_mask: expected ones for all {ids.shape[1]} tokens, as a prefix has no padding, got "
            f"{tuple(mask.shape)} with {int((mask != 1).sum())} other than 1"
        )
    for name, value in given.items():
        if isinstance(value, Tensor) or (
            isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
        ):
            raise ValueError(f"{name}: expected token ids alone, as they are what prefixes are found by, got a tensor")
    return {**given, "attention_mask": torch.ones_like(ids), "use_cache": True}


def checked_model(model: Any) -> Any:
    """`model`, if it is one that a prefix store can be for."""
    if not isinstance(getattr(model, "config", None), PretrainedConfig):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, got {type(model).__name__}, which has an encoder too")
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"model: expected adapters that change weights, got {type(adapter).__name__}, whose virtual tokens are "
            "cached too, though not among the token ids that prefixes are found by"
        )
    return model


def checked_bytes(name: str, size: Any) -> int:
    """A number of bytes, from an int or from a size such as `"4GiB"`."""
    try:
        count = size if isinstance(size, int) else convert_file_size_to_int(size)
    except (ValueError, TypeError, AttributeError):
        count = None
    if isinstance(size, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}: expected bytes or a size such as '4GiB', got {size!r}")
    return count


def checked_options(model: Any, cache_options: Any) -> dict[str, Any]:
    """Options of the caches that a store makes, if they are possible."""
    if not isinstance(cache_options, Mapping):
        raise TypeError(f"cache_options: expected a mapping, got {type(cache_options).__name__}")
    if cache_options.get("static"):
        raise ValueError("cache_options: static: a static cache has buffers that cannot be shared")
    MemOSCache(model.config, **cache_options)
    return dict(cache_options)
