"""Models of real sizes with random weights: what a cache costs does not depend on what the weights have learned."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    # Without the scaling of Llama 3.1, which costs nothing and means nothing where the weights are random.
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

# The config class of each shape, and where it differs from that class's defaults.
SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama-3-8b": (
        LlamaConfig,
        _LLAMA_3
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "llama-3-70b": (
        LlamaConfig,
        _LLAMA_3
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "qwen3-8b": (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    # Of version 0.3, which has no sliding window.
    "mistral-7b": (
        MistralConfig,
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    # Every sixth layer has full attention, so a model cut to fewer layers has none.
    "gemma-3-4b": (
        Gemma3TextConfig,
        {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
        },
    ),
    "smollm2-135m": (
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def shape_config(name: str, layers: int | None = None, positions: int = 0) -> PretrainedConfig:
    """The config of a shape.

    Parameters
    ----------
    name : str
        One of `SHAPES`.
    layers : int, optional
        Keep the first so many layers.
    positions : int
        Tokens that the model is to be used with. More than it was made for are allowed: weights are random anyhow.

    Raises
    ------
    ValueError
        If there is no such shape, or it has fewer layers.
    """
    if name not in SHAPES:
        raise ValueError(f"shape: expected one of {tuple(SHAPES)}, got {name!r}")
    config_class, options = SHAPES[name]
    most = options["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= most:
        raise ValueError(f"layers: expected 1 to {most} for {name}, got {layers}")
    changed = {
        "num_hidden_layers": layers or most,
        "max_position_embeddings": max(positions, options["max_position_embeddings"]),
    }
    return config_class(**options | changed)


def random_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights, made on `device`; the same ones every time."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
