"""A tiny random model, and the ways tests call it, for tests that do not depend on the model family."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from memos_hf import KVQuantizationConfig, OffloadConfig
from memos_hf.config import PRESETS

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# The argument of `generate` and of models: renamed in 5.24, where the old name warns.
CACHE_ARGUMENT = "cache" if VERSION >= (5, 24) else "past_key_values"

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,  # wide, so that no two logits are nearly equal
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}

# The presets keep 128 tokens exact; these do the same with blocks of 8 or 16 tokens after some ten.
SHORT = {
    name: replace(preset, residual_tokens=8, group_size=preset.group_size and 8) for name, preset in PRESETS.items()
}
# Options of caches that give what DynamicCache gives; the blocks are sealed as early as can be.
# Of two layers of `llama()`, one block each beside the tail.
BYTES_FOR_FEW_BLOCKS = 12_000
LOSSLESS: dict[str, dict[str, Any]] = {
    "buffers": {},
    "blocks": {
        "quantization": KVQuantizationConfig("full", "full", sink_tokens=2, residual_tokens=0),
        "block_size": 8,
    },
    "offloaded": {"offload": OffloadConfig({"cpu": BYTES_FOR_FEW_BLOCKS}), "block_size": 8},
}
LOSSY: dict[str, dict[str, Any]] = {name: {"quantization": short, "block_size": 8} for name, short in SHORT.items()}
LOSSY["offloaded int8"] = {**LOSSY["int8"], "offload": OffloadConfig({"cpu": BYTES_FOR_FEW_BLOCKS}, policy="lru")}


@functools.cache
def llama() -> LlamaForCausalLM:
    """Full attention with grouped KV heads."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@functools.cache
def mistral(window: int = 8) -> MistralForCausalLM:
    """Sliding attention."""
    torch.manual_seed(1)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window)).eval()


@functools.cache
def qwen3_next() -> Qwen3NextForCausalLM:
    """Recurrent layers around one of full attention."""
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SHAPE,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    ).eval()


def token_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids, `[batch, tokens]`, none of them the padding id."""
    return torch.randint(3, 101, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, cache: Cache | None = None, new_tokens: int = 12, **kwargs: Any) -> Any:
    """Greedy generation of exactly `new_tokens`, through `cache`; without one, transformers' default."""
    if cache is not None:
        kwargs[CACHE_ARGUMENT] = cache
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def forward(model: Any, ids: torch.Tensor, cache: Cache, **kwargs: Any) -> Any:
    """One call of the model through `cache`."""
    return model(ids, **{CACHE_ARGUMENT: cache}, **kwargs)


def dynamic(model: Any) -> DynamicCache:
    """What we are compared with."""
    return DynamicCache(config=model.config)


def random_states(
    batch: int = 1, heads: int = 2, tokens: int = 1, head_dim: int = 8, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V, `[batch, heads, tokens, head_dim]`."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
