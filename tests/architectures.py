"""Tiny models of every architecture that transformers can generate text with, made from their config classes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from families import INITIAL_STD, PADDING_ID, TINY, WINDOW, seeded
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

# What fields of these names become, in any config that has them; the first pattern that matches the whole name counts.
SHRUNK: tuple[tuple[str, Any], ...] = (
    ("(src_|tgt_|unpadded_|char_|t2u_)?vocab_size(_per_layer_input)?", TINY["vocab_size"]),
    ("pad_token_id", PADDING_ID),
    ("bos_token_id", 1),
    ("eos_token_id", 2),
    ("decoder_start_token_id|forced_bos_token_id", 3),
    ("(sep|cls)_token_id", 4),
    ("initializer_range|init_std", INITIAL_STD),
    ("(audio_)?hidden_size|d_model|n_embd|emb_dim|embedding_size|word_embed_proj_dim", 32),
    ("(input|output)_embedding_size|hidden_size_global|dim_model_base", 32),
    ("hidden_size_per_layer_input", 8),
    ("num_hidden_layers|num_layers|n_layers?", 4),
    (
        "(num_)?(encoder|decoder)_layers|num_(encoder|decoder)_layers|speech_encoder_layers|depth|n_(in|out)put_layers",
        2,
    ),
    ("num_attention_heads|n_heads?|num_heads|attention_heads|swa_num_attention_heads", 4),
    ("(num_)?(encoder|decoder|speech_encoder)_attention_heads", 4),
    ("num_key_value_heads|swa_num_key_value_heads|num_kv_heads", 2),
    ("(swa_|global_|linear_|attention_)?head_dim|dim_head|kv_channels|attention_head_size|d_kv", 8),
    ("(dense_|moe_|shared_|shared_experts?_|moe_shared_expert_)?intermediate_size(_mlp)?", 48),
    ("((encoder|decoder|speech_encoder)_)?ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|expert_ffn_hidden_size|d_inner", 48),
    ("max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions", 128),
    ("original_max_position_embeddings|max_(encoder|decoder)_position_embeddings|context_length", 128),
    ("sliding_window(_size)?|window_size|attention_window_size|attention_chunk_size|local_attention", WINDOW),
    ("num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    ("zero_expert_num", 1),
    ("num_experts_per_tok|moe_topk|moe_k|top_k_experts", 2),
    ("n_group|topk_group|first_k_dense_replace", 1),
    ("(kv|q|o)_lora_rank", 16),
    ("qk_(rope|nope)_head_dim|v_head_dim", 8),
    ("index_head_dim|index_n_heads|index_topk", 8),
    ("linear_(key|value)_head_dim", 8),
    ("linear_num_(key|value)_heads", 2),
    ("mamba_d_state|state_size|ssm_state_size", 8),
    ("mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    ("mamba_d_head|mamba_head_dim", 8),
    ("mamba_d_ssm", 64),
    ("rotary_dim", 4),
    ("attention_window", WINDOW),
    ("shape_vocab_size|encoder_hash_byte_group_vocab|blank_token_id", 96),
    ("hidden_dim", 32),
    ("is_decoder", True),
    ("n_shared_experts", 1),
)

BERT = {**TINY, "model_type": "bert"}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# What the rules above do not cover, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": [LINEAR, FULL] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (SLIDING, FULL)},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "encoder-decoder": {"encoder": BERT, "decoder": {**BERT, "is_decoder": True, "add_cross_attention": True}},
    "gemma3n_text": {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": [LINEAR, FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 100,
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 5},
    "zamba2": {"layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 5},
    "zaya": {"num_experts_per_tok": 1},
}

# The version of transformers that the list below is complete for.
LISTED_VERSION = (5, 24)
# What does not run through a DynamicCache, or cannot be built so small, and why.
CANNOT_RUN = {
    "blt-BltForCausalLM": "DynamicCache finds no number of layers in its config",
    "gemma3n-Gemma3nForConditionalGeneration": "its vision tower is built by the timm library",
    "gemma4_assistant-Gemma4AssistantForCausalLM": "a draft model: it reads the cache of the model it assists",
    "gemma4_unified_assistant-Gemma4UnifiedAssistantForCausalLM": "a draft model, likewise",
    "minimax-MiniMaxForCausalLM": "takes only the cache class of its own",
    "musicgen_decoder-MusicgenForCausalLM": "generates interleaved audio codes, not text",
    "musicgen_melody_decoder-MusicgenMelodyForCausalLM": "generates interleaved audio codes, not text",
    "openai-gpt-OpenAIGPTLMHeadModel": "has no cache",
    "reformer-ReformerModelWithLMHead": "takes only a cache of its own",
    "rwkv-RwkvForCausalLM": "keeps a recurrent state of its own and ignores the cache",
    "voxtral_realtime-VoxtralRealtimeForConditionalGeneration": "every token needs a piece of audio",
    "xlnet-XLNetLMHeadModel": "keeps a memory of its own and ignores the cache",
    "xlstm-xLSTMForCausalLM": "keeps a recurrent state of its own",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class that generates, and the config to build it from."""

    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]

    @property
    def name(self) -> str:
        return f"{self.config_class.model_type}-{self.model_class.__name__}"

    def build(self) -> PreTrainedModel:
        """The model, tiny and random, or whatever error its classes raise."""
        return seeded(lambda: self.model_class(shrunk(self.config_class)))


def architectures(mapping: Any) -> list[Architecture]:
    """The entries of a mapping of transformers' auto classes, each once."""
    return list(
        dict.fromkeys(
            Architecture(_own_config(config_class, model_class), model_class)
            for config_class, model_classes in mapping.items()
            for model_class in (model_classes if isinstance(model_classes, tuple) else (model_classes,))
        )
    )


def _own_config(config_class: type[PretrainedConfig], model_class: type[PreTrainedModel]) -> type[PretrainedConfig]:
    """The config a model class is built from: of a multimodal one, the part that it asks for."""
    return model_class.config_class if model_class.config_class in config_class.sub_configs.values() else config_class


CAUSAL = architectures(MODEL_FOR_CAUSAL_LM_MAPPING)
SEQUENCE_TO_SEQUENCE = architectures(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)


def shrunk(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """A config of this class that makes a tiny model, its nested configs too."""
    arguments = {}
    for config_field in dataclasses.fields(config_class):
        for pattern, value in SHRUNK:
            if re.fullmatch(pattern, config_field.name):
                arguments[config_field.name] = value
                break
    if "kv_lora_rank" in arguments:  # latent attention has as many KV heads as heads
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    arguments |= OVERRIDES.get(config_class.model_type, {})
    nested = config_class.sub_configs.keys() - arguments.keys()
    if nested:
        default = config_class()
        parts = {name: getattr(default, name, None) for name in nested}
        arguments |= {name: shrunk(type(part)) for name, part in parts.items() if part is not None}
    return config_class(**arguments)
