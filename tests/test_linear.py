"""Layers that stay transformers' own: recurrent states, hybrids, layers without a cache."""

import pytest
import torch
from tiny import CACHE_ARGUMENT, SHAPE, dynamic, forward, generate, qwen3_next, token_ids
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.cache_utils import LinearAttentionLayer

from memos_hf import MemOSCache
from memos_hf.layers import ContiguousLayer


def bamba():
    torch.manual_seed(0)
    shape = SHAPE | {"initializer_range": 0.1}
    return BambaForCausalLM(
        BambaConfig(
            **shape, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_chunk_size=4
        )
    ).eval()


def falcon_h1():
    """Every layer has both a recurrent state and full attention."""
    torch.manual_seed(0)
    shape = SHAPE | {"initializer_range": 0.1}
    return FalconH1ForCausalLM(
        FalconH1Config(
            **shape, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4
        )
    ).eval()


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=101, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0, eos_token_id=None
        )
    ).eval()


HYBRIDS = [qwen3_next, bamba, falcon_h1]


def test_attention_layers_of_a_hybrid_are_ours_and_the_others_are_transformers():
    cache = MemOSCache(qwen3_next().config)
    assert [type(layer) for layer in cache.layers] == [LinearAttentionLayer, ContiguousLayer, LinearAttentionLayer]


@pytest.mark.parametrize("build", HYBRIDS)
def test_prefill_decode_beams_and_reset_equal_dynamic_cache(build, lossless):
    model = build()
    ids = token_ids(2, 9)
    cache = MemOSCache(model.config, initial_capacity=4, **lossless)
    expected = generate(model, ids, dynamic(model))
    assert torch.equal(generate(model, ids, cache), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, cache), expected)
    caches = MemOSCache(model.config, **lossless), dynamic(model)
    beams = [generate(model, ids, cache, num_beams=3) for cache in caches]
    assert torch.equal(*beams)


@pytest.mark.parametrize("build", HYBRIDS)
def test_repeated_and_selected_rows_go_on_like_the_rows_they_came_from(build, storage):
    model = build()
    ids = token_ids(2, 27)
    cache, plain = MemOSCache(model.config, **storage), MemOSCache(model.config, **storage)
    with torch.no_grad():
        for one in (cache, plain):
            forward(model, ids, one)
            forward(model, ids[:, :1], one)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
        rows = torch.tensor([1, 0, 1])
        new = token_ids(2, 1, seed=4)
        logits = forward(model, new[rows], cache).logits
        torch.testing.assert_close(logits, forward(model, new, plain).logits[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [*HYBRIDS, mamba])
@pytest.mark.parametrize("modes", [("inference", "no_grad"), ("no_grad", "inference")])
def test_a_recurrent_state_filled_in_one_mode_goes_on_in_another(build, modes, lossless):
    model = build()
    context = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    cache, expected = MemOSCache(model.config, **lossless), dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(1, 16), expected)
        reference = forward(model, token_ids(1, 1, seed=1), expected).logits
    with context[modes[0]]():
        forward(model, token_ids(1, 16), cache)
    with context[modes[1]]():
        logits = forward(model, token_ids(1, 1, seed=1), cache).logits
        cache.reset()
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", HYBRIDS)
def test_a_recurrent_state_cannot_be_cropped_and_no_layer_is(build, storage):
    model = build()
    cache = MemOSCache(model.config, **storage)
    cache.activate_past_recording()
    with torch.no_grad():
        forward(model, token_ids(1, 26), cache)
    with pytest.raises(RuntimeError, match="recurrent state"):
        cache.crop(-2)
    assert cache.get_seq_length() == 26
    with pytest.raises(ValueError, match=r"[Aa]ssisted"):
        generate(model, token_ids(1, 6), MemOSCache(model.config, **storage), prompt_lookup_num_tokens=2)


def test_a_model_without_attention_takes_it_too():
    model = mamba()
    ids = token_ids(2, 6)
    argument = "cache_params" if CACHE_ARGUMENT == "past_key_values" else "cache"
    answers = [
        model.generate(ids, max_new_tokens=8, do_sample=False, **{argument: cache})
        for cache in (MemOSCache(model.config), DynamicCache(config=model.config))
    ]
    assert torch.equal(*answers)


def test_conversion_copies_recurrent_states(lossless):
    model = qwen3_next()
    cache = MemOSCache(model.config, **lossless)
    with torch.no_grad():
        forward(model, token_ids(1, 6), cache)
        copies = [MemOSCache.from_cache(cache, **lossless), cache.to_dynamic()]
        expected = forward(model, token_ids(1, 1, seed=1), cache).logits
        for copied in copies:
            torch.testing.assert_close(forward(model, token_ids(1, 1, seed=1), copied).logits, expected)
    assert cache.memory().used_bytes > cache.layers[1].keys.numel() * 8


@pytest.mark.parametrize("build", HYBRIDS)
def test_every_kind_of_layer_heeds_the_ceiling(build, lossless):
    model = build()
    cache = MemOSCache(model.config, max_cache_len=10, **lossless)
    with pytest.raises(ValueError, match="max_cache_len: the cache may hold 10 tokens"):
        generate(model, token_ids(1, 8), cache, new_tokens=20)
    assert cache.get_seq_length() == 10
