"""Tiny random models of many families, and the ways of running one that a cache has to survive.

A way is a function of a subject (a model and its prompts) and a cache. It returns everything that must not depend on
the kind of cache, so that a test runs it with two kinds and compares.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny import CACHE_ARGUMENT
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from memos_hf import MemOSCache

# Crossed by every prompt and its answer, where a family has one.
WINDOW = 8
NEW_TOKENS = 10
# Small, so that buffers grow in every way of generating.
INITIAL_CAPACITY = 4
PADDING_ID = 0
# With the usual 0.02 the next token of so small a model would hardly depend on what is in the cache.
INITIAL_STD = 0.2


def cache_argument(cache: Cache) -> dict[str, Cache]:
    """The keyword argument that passes a cache to `generate` or to a model, without a deprecation warning."""
    return {CACHE_ARGUMENT: cache}


@dataclass(frozen=True, eq=False)  # the same object or not, so that it can be a key
class Family:
    """How to build a tiny model of one family, and what it reads.

    Parameters
    ----------
    model_class : str
        Name of the class in transformers.
    config : dict
        Arguments for the model's config, beside `TINY`.
    encoder_features : tuple of int
        Shape of what the encoder reads for one row, where that is not token ids.
    """

    name: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    encoder_features: tuple[int, ...] = ()

    def build(self) -> PreTrainedModel:
        """The model, random but the same every time, in float32 and evaluation mode."""
        model_class = getattr(transformers, self.model_class)
        return seeded(lambda: model_class(model_class.config_class(**{**TINY, **self.config})))


def seeded(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """What `build` makes from a fixed seed, in float32 and evaluation mode, which never ends an answer by itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().float().eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = PADDING_ID
    model.generation_config.decoder_start_token_id = 3
    model.generation_config.max_length = None
    return model


TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": INITIAL_STD,
    "tie_word_embeddings": False,
    "pad_token_id": PADDING_ID,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# For configs whose head dim is not the hidden size divided by the heads.
HEAD_DIM = {"head_dim": 8}
ALTERNATING: dict[str, Any] = {
    **HEAD_DIM,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# The last two layers of Gemma 3n and 4 read what the first two cached.
SHARING = {**ALTERNATING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": INITIAL_STD,
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3ForCausalLM", HEAD_DIM),
    Family("mistral", "MistralForCausalLM", {"sliding_window": WINDOW}),
    Family("mixtral", "MixtralForCausalLM", EXPERTS),
    Family("gemma2", "Gemma2ForCausalLM", ALTERNATING),
    Family("gemma3", "Gemma3ForCausalLM", ALTERNATING),
    Family("gemma3n", "Gemma3nForCausalLM", {**SHARING, "laurel_rank": 4}),
    Family("gemma4", "Gemma4ForCausalLM", {**SHARING, "global_head_dim": 16}),
    Family("phi", "PhiForCausalLM"),
    Family("phi3", "Phi3ForCausalLM"),
    Family("gpt2", "GPT2LMHeadModel"),
    Family("gpt_neox", "GPTNeoXForCausalLM"),
    Family("gptj", "GPTJForCausalLM", {"rotary_dim": 4}),
    Family("opt", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": INITIAL_STD}),
    Family("bloom", "BloomForCausalLM"),
    Family("falcon", "FalconForCausalLM", {"multi_query": True, "new_decoder_architecture": False}),
    Family("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    Family("olmo2", "Olmo2ForCausalLM"),
    Family("cohere2", "Cohere2ForCausalLM", ALTERNATING),
    Family("gpt_oss", "GptOssForCausalLM", {**ALTERNATING, **EXPERTS}),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    Family(
        "llama4",
        "Llama4ForCausalLM",
        {
            **HEAD_DIM,
            **EXPERTS,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
        },
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **HEAD_DIM,
            **EXPERTS,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "bamba",
        "BambaForCausalLM",
        {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    Family("lfm2", "Lfm2ForCausalLM", {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 8}),
    Family("t5", "T5ForConditionalGeneration", {"d_kv": 8, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    Family("bart", "BartForConditionalGeneration", BART),
    Family(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 128,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        encoder_features=(8, 20),
    ),
)


@dataclass(frozen=True)
class Subject:
    """A model, its prompts, and the caches made for it."""

    model: PreTrainedModel
    encoder_features: tuple[int, ...] = ()

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def dynamic_cache(self) -> Cache:
        return self._cache(lambda: DynamicCache(config=self.model.config))

    def memos_cache(self, **options: Any) -> Cache:
        return self._cache(lambda: MemOSCache(self.model.config, initial_capacity=INITIAL_CAPACITY, **options))

    def _cache(self, build: Callable[[], Cache]) -> Cache:
        return EncoderDecoderCache(build(), build()) if self.is_encoder_decoder else build()

    def prompt(self, rows: int, tokens: int, seed: int = 0) -> Tensor:
        """Random ids, `[rows, tokens]`, none of them special."""
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, vocabulary, (rows, tokens), generator=generator).to(self.model.device)

    def inputs(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """Arguments that make `ids` the tokens that are cached: those of the decoder, if there is an encoder too."""
        if not self.is_encoder_decoder:
            return {"input_ids": ids, "attention_mask": mask}
        inputs = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if not self.encoder_features:
            return {**inputs, "input_ids": self.prompt(ids.shape[0], 9, seed=1)}
        features = torch.randn(ids.shape[0], *self.encoder_features, generator=torch.Generator().manual_seed(1))
        return {**inputs, "input_features": features.to(self.model.device)}

    def generate(self, cache: Cache, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """The ids of prompt and answer, `NEW_TOKENS` longer than `ids`."""
        inputs = self.inputs(ids, torch.ones_like(ids) if mask is None else mask)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
        # Not the model's own method: Whisper's is about long recordings and refuses the decoder's ids.
        answer: Tensor = GenerationMixin.generate(self.model, **inputs, **cache_argument(cache), **options)
        return answer

    def forward(self, cache: Cache, ids: Tensor) -> Tensor:
        """Logits, `[rows, tokens, vocabulary]`, of tokens that follow what is cached."""
        with torch.no_grad():
            logits: Tensor = self.model(**self.inputs(ids), **cache_argument(cache)).logits
        return logits


Way = Callable[[Subject, Cache], list[Any]]


def greedy(subject: Subject, cache: Cache) -> list[Any]:
    return [subject.generate(cache, subject.prompt(2, 5)), lengths(cache)]


def sample(subject: Subject, cache: Cache) -> list[Any]:
    torch.manual_seed(0)
    return [subject.generate(cache, subject.prompt(2, 5), do_sample=True, num_return_sequences=3), lengths(cache)]


def beams(subject: Subject, cache: Cache) -> list[Any]:
    return [subject.generate(cache, subject.prompt(2, 5), num_beams=3), lengths(cache)]


def left_padding(subject: Subject, cache: Cache) -> list[Any]:
    ids = subject.prompt(2, 7)
    ids[0, :4] = PADDING_ID
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return [subject.generate(cache, ids, mask), lengths(cache)]


def second_turn(subject: Subject, cache: Cache) -> list[Any]:
    first = subject.generate(cache, subject.prompt(2, 5))
    second = subject.generate(cache, torch.cat([first, subject.prompt(2, 4, seed=2)], dim=1))
    return [first, second, lengths(cache)]


def chunked_prefill(subject: Subject, cache: Cache) -> list[Any]:
    return [subject.generate(cache, subject.prompt(2, 11), prefill_chunk_size=3), lengths(cache)]


def prompt_lookup(subject: Subject, cache: Cache) -> list[Any]:
    # A prompt that repeats itself, so that there is something to find.
    ids = subject.prompt(1, 5).repeat(1, 3)
    return [subject.generate(cache, ids, prompt_lookup_num_tokens=3), lengths(cache)]


def assisted(subject: Subject, cache: Cache) -> list[Any]:
    draft = draft_of(subject.model)
    return [subject.generate(cache, subject.prompt(1, 5), assistant_model=draft), lengths(cache)]


def pieces(subject: Subject, cache: Cache) -> list[Any]:
    result = []
    for index, count in enumerate((1, 4, 1, 7, 3)):
        result.append(mask_sizes(cache, count))
        result.append(subject.forward(cache, subject.prompt(2, count, seed=index)))
        result.append(lengths(cache))
    return result


def attention_layers(cache: Cache) -> list[int]:
    cache = getattr(cache, "self_attention_cache", cache)
    return [index for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


def lengths(cache: Cache) -> list[int]:
    """Tokens seen by each layer that counts them."""
    # Transformers 5.17 makes them tensors when it takes back a draft.
    return [int(cache.get_seq_length(index)) for index in attention_layers(cache)]


def holds_anything(cache: Cache) -> bool:
    """Whether anything was written, recurrent states included."""
    cache = getattr(cache, "self_attention_cache", cache)
    recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return any(lengths(cache)) or any(any(layer.has_previous_state.values()) for layer in recurrent)


def mask_sizes(cache: Cache, tokens: int) -> list[tuple[int, int]]:
    """What each layer that is masked says of an update of so many tokens."""
    return [cache.get_mask_sizes(tokens, index) for index in attention_layers(cache)]


@functools.cache
def draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model: the model with noise on its weights, so that some of what it proposes is accepted, but not all."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in draft.parameters():
            noise = torch.randn(weights.shape, generator=generator).to(weights.device)
            weights += 0.1 * weights.std(correction=0) * noise
    return draft
