"""`attn_implementation="memos"`: models without sdpa read encoded blocks in place."""

import copy
import functools

import pytest
import torch
import transformers
from families import HEAD_DIM, TINY, cache_argument, seeded
from torch.nn import functional as F
from transformers import DynamicCache

from memos_hf import KVQuantizationConfig, MemOSCache
from memos_hf.attention.interface import memos_attention
from memos_hf.attention.scores import Scores

LOSSLESS = KVQuantizationConfig(key_bits="full", value_bits="full", residual_tokens=8)
FULL = {"layer_types": ["full_attention"] * 2}
MODELS = {
    "soft cap": ("Gemma2ForCausalLM", {**HEAD_DIM, **FULL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "sinks": ("GptOssForCausalLM", {**HEAD_DIM, **FULL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "use_cache": True}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "sdpa": ("LlamaForCausalLM", {}),
    "position bias": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2},
    ),
}


@functools.cache
def model(name: str, attention: str):
    class_name, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    return seeded(
        lambda: model_class._from_config(model_class.config_class(**{**TINY, **config}), attn_implementation=attention)
    )


def prompt(padded: bool, rows: int = 2, tokens: int = 40):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :9] = mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def answer(name, attention, cache, inputs, **arguments):
    return model(name, attention).generate(
        **inputs, **cache_argument(cache), max_new_tokens=20, do_sample=False, **arguments
    )


def blocks(config, quantization=LOSSLESS):
    return MemOSCache(config, quantization=quantization, block_size=8)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "position bias"])
def test_blocks_are_read_in_place_and_tokens_are_those_of_eager_attention(name, padded):
    inputs = prompt(padded)
    expected = answer(name, "eager", DynamicCache(config=model(name, "eager").config), inputs)
    cache = blocks(model(name, "memos").config)
    assert torch.equal(answer(name, "memos", cache, inputs), expected)
    assert cache.stats.fused_calls == 2 * 19
    assert cache.stats.materialised_calls == 0


@pytest.mark.parametrize("name", ["soft cap", "sinks", "bloom", "mpt", "gpt_neo"])
def test_the_implementation_works_with_any_cache(name):
    inputs = prompt(padded=True)
    expected = answer(name, "eager", DynamicCache(config=model(name, "eager").config), inputs)
    for make in (DynamicCache, MemOSCache):
        assert torch.equal(answer(name, "memos", make(config=model(name, "memos").config), inputs), expected)


@pytest.mark.parametrize("name", ["soft cap", "sinks", "bloom", "mpt", "gpt_neo"])
def test_beams_and_drafts_are_read_in_place_too(name):
    for arguments in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        rows = 2 if "num_beams" in arguments else 1
        inputs = prompt(padded=False, rows=rows, tokens=13)
        inputs = {name: torch.cat([part] * 3, dim=1) for name, part in inputs.items()}
        expected = answer(name, "eager", DynamicCache(config=model(name, "eager").config), inputs, **arguments)
        cache = blocks(model(name, "memos").config)
        assert torch.equal(answer(name, "memos", cache, inputs, **arguments), expected)
        assert cache.stats.fused_calls > 0
        assert cache.stats.materialised_calls == 0


def test_encoder_decoder_models_with_a_position_bias():
    inputs = prompt(padded=True)
    made = {"min_new_tokens": 20}
    expected = model("position bias", "eager").generate(**inputs, **made, max_new_tokens=20, do_sample=False)
    config = model("position bias", "memos").config
    cache = transformers.EncoderDecoderCache(blocks(config), blocks(config))
    output = answer("position bias", "memos", cache, inputs, **made)
    assert torch.equal(output, expected)
    assert cache.self_attention_cache.stats.fused_calls > 0


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_soft_cap_and_sinks_act_on_encoded_blocks(preset):
    for name in ("soft cap", "sinks"):
        config = model(name, "memos").config
        logits = []
        for attention in ("eager", "memos"):
            with torch.no_grad():
                cache = MemOSCache(config, quantization=preset, block_size=32, initial_capacity=256)
                ids = prompt(padded=False, tokens=300)["input_ids"]
                model(name, attention)(ids, **cache_argument(cache))
                logits.append(model(name, attention)(ids[:, :3], **cache_argument(cache)).logits)
            assert bool(cache.stats.fused_calls) == (attention == "memos")
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_gradients_reach_learned_sinks_through_plain_keys():
    cache = blocks(model("sinks", "memos").config)
    with torch.no_grad():
        model("sinks", "memos")(prompt(padded=False)["input_ids"], **cache_argument(cache))
    model("sinks", "memos")(
        prompt(padded=False, tokens=1)["input_ids"], **cache_argument(cache)
    ).logits.sum().backward()
    sinks = model("sinks", "memos").model.layers[0].self_attn.sinks
    assert sinks.grad is not None and sinks.grad.abs().sum() > 0
    model("sinks", "memos").zero_grad(set_to_none=True)


def test_dropout_decodes():
    cache = filled()
    keys, values = step(cache)
    module = torch.nn.Module().train()
    query = torch.randn(2, 4, 1, 8)
    output, _ = memos_attention(module, query, keys, values, None, scaling=0.5, dropout=1.0, softcap=3.0)
    assert output.abs().sum() == 0
    assert cache.stats.materialised_calls == 1


# Scores that a model computes by itself.


def filled(follow=True):
    config = transformers.LlamaConfig(**{**TINY, "num_hidden_layers": 1, "num_key_value_heads": 4})
    config._attn_implementation = "memos" if follow else "eager"
    cache = blocks(config)
    torch.manual_seed(0)
    cache.update(torch.randn(2, 4, 30, 8), torch.randn(2, 4, 30, 8), 0)
    return cache


def step(cache):
    torch.manual_seed(1)
    return cache.update(torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), 0)


def mask():
    hidden = torch.zeros(2, 1, 1, 31, dtype=torch.bool)
    hidden[0, ..., :5] = True
    return hidden


def additive():
    return mask().float() * torch.finfo(torch.float32).min


FOLLOWED = {
    "plain": lambda q, k, v: F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v,
    "scaled": lambda q, k, v: F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1) @ v,
    "biased": lambda q, k, v: F.softmax(q @ k.transpose(2, 3) * 2 + additive() + bias(), dim=-1) @ v,
    "filled": lambda q, k, v: F.softmax((q @ k.transpose(2, 3)).masked_fill(mask(), -1e9), dim=-1) @ v,
    "chosen": lambda q, k, v: F.softmax(torch.where(~mask(), q @ k.transpose(2, 3), torch.tensor(-1e9)), dim=-1) @ v,
    "cast": lambda q, k, v: F.softmax((q @ k.transpose(2, 3)).float(), dim=-1, dtype=torch.float32).to(v.dtype) @ v,
    "dropped": lambda q, k, v: F.dropout(F.softmax(q @ k.transpose(2, 3), dim=-1), 0.5, training=False) @ v,
    "merged": lambda q, k, v: merged(q, k, v),
}
COMPUTED = {
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.transpose(2, 3)) @ v,
    "scaled after a bias": lambda q, k, v: F.softmax((q @ k.transpose(2, 3) + bias()) * 0.5, dim=-1) @ v,
    "softmax over queries": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), dim=2) @ v,
    "softmax twice": lambda q, k, v: F.softmax(F.softmax(q @ k.transpose(2, 3), dim=-1), dim=-1) @ v,
    "filled with zeros": lambda q, k, v: F.softmax((q @ k.transpose(2, 3)).masked_fill(mask(), 0.0), dim=-1) @ v,
    "no softmax": lambda q, k, v: (q @ k.transpose(2, 3)) @ v,
    "shifted by a number": lambda q, k, v: F.softmax(q @ k.transpose(2, 3) + 1.0, dim=-1) @ v,
    "values with a factor": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), dim=-1) @ (v * 2),
    "weights masked": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), dim=-1).masked_fill(mask(), 0.0) @ v,
    "weights in half precision": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), dim=-1).bfloat16() @ v.bfloat16(),
    "reduced": lambda q, k, v: (q @ k.transpose(2, 3)).amax(dim=-1),
}


def bias():
    return torch.linspace(-1, 1, 4 * 31).view(4, 1, 31)


def merged(query, keys, values):
    query, values = query.reshape(8, -1, 8), values.reshape(8, -1, 8)
    keys = keys.reshape(8, -1, 8).transpose(-1, -2)
    slopes = torch.linspace(-1, 1, 8 * 31).view(8, 1, 31)
    scores = slopes.baddbmm(batch1=query, batch2=keys, beta=0.5, alpha=0.7).view(2, 4, 1, -1) + additive()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights.view(8, 1, -1), values).view(2, 4, 1, 8)


@pytest.mark.parametrize("attention", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_what_models_do_to_scores_is_done_by_the_kernel(attention):
    query, cache = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(5)), filled()
    keys, values = step(cache)
    output = attention(query, keys, values)
    torch.testing.assert_close(output, attention(query, *plain(cache)))
    assert (cache.stats.fused_calls, cache.stats.materialised_calls) == (1, 0)


@pytest.mark.parametrize("attention", COMPUTED.values(), ids=COMPUTED.keys())
def test_any_other_step_computes_the_scores_and_goes_on(attention):
    query, cache = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(5)), filled()
    keys, values = step(cache)
    output = attention(query, keys, values)
    assert type(output) is torch.Tensor
    torch.testing.assert_close(output, attention(query, *plain(cache)))
    assert cache.stats.fused_calls == 0


def test_scores_are_followed_only_where_asked():
    cache = filled(follow=False)
    keys, _ = step(cache)
    scores = torch.randn(2, 4, 1, 8) @ keys.transpose(2, 3)
    assert type(scores) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["soft cap", "sinks", "bloom", "mpt", "gpt_neo", "sdpa"])
def test_half_precision_is_read_in_place_too(name, dtype):
    halved = copy.deepcopy(model(name, "memos")).to(dtype)
    ids = prompt(padded=False, tokens=30)["input_ids"]
    logits = []
    cache, expected = blocks(halved.config), DynamicCache(config=halved.config)
    for each in (cache, expected):
        with torch.no_grad():
            halved(ids, **cache_argument(each))
            logits.append(halved(ids[:, :1], **cache_argument(each)).logits)
    assert (cache.stats.fused_calls, cache.stats.materialised_calls) == (2, 0)
    # As far as the same tokens are from what the model gives in float32.
    exact = model(name, "memos")(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:]
    error, rounding = ((each.float() - exact).abs().max() for each in logits)
    assert error <= 2 * rounding


def test_scores_that_outlive_their_keys_say_so():
    cache = filled()
    keys, _ = step(cache)
    scores = torch.randn(2, 4, 1, 8) @ keys.transpose(2, 3)
    assert isinstance(scores, Scores)
    step(cache)
    with pytest.raises(RuntimeError, match="attention weights cannot be returned"):
        scores.sum()


def plain(cache):
    return cache.layers[0].lent()
