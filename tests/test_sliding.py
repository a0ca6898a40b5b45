"""Sliding windows: what is returned, what is kept, what can be rolled back."""

import copy

import pytest
import torch
from families import draft_of
from tiny import SHAPE, VERSION, dynamic, forward, generate, mistral, random_states, token_ids
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, MistralForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from memos_hf import CacheOptions, MemOSCache
from memos_hf.layers import SlidingLayer


def alternating():
    """Sliding and full attention in turn, window 8."""
    torch.manual_seed(2)
    config = Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("capacity", [1, 4, 256])
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_every_update_returns_what_transformers_layer_returns(capacity, record, grad):
    ours = SlidingLayer(CacheOptions(initial_capacity=capacity), 8)
    theirs = DynamicSlidingWindowLayer(sliding_window=8)
    if record:
        ours.activate_past_recording()
        theirs.activate_past_recording()
    with torch.set_grad_enabled(grad):
        for step, count in enumerate([3, 1, 1, 5, 1, 20, 1, 7, 8, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 30, 2]):
            states = random_states(batch=2, tokens=count, seed=step)
            sizes = ours.get_mask_sizes(count)
            assert sizes == theirs.get_mask_sizes(count)
            for mine, other in zip(ours.update(*states), theirs.update(*states), strict=True):
                # before 5.18 a recording layer returned more than it announced to the mask
                torch.testing.assert_close(mine, other[:, :, -sizes[0] :], rtol=0, atol=0)
            assert ours.get_seq_length() == theirs.get_seq_length()
            if not record:
                assert ours.keys.shape[2] <= 7
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0)
            if record and step % 3 == 2:
                ours.crop(-2)
                theirs.crop(-2)
                torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0)


def test_a_window_costs_memory_for_two_windows_at_most():
    layer = SlidingLayer(CacheOptions(), 32)
    with torch.no_grad():
        for count in [5, *[1] * 300, 31, *[1] * 50]:
            layer.update(*random_states(tokens=count, head_dim=32))
    assert layer.buffer.capacity <= 64
    assert layer.buffer.growths == 0


def test_copies_to_the_front_happen_once_a_window(monkeypatch):
    layer = SlidingLayer(CacheOptions(), 32)
    moves = []
    original = type(layer.buffer)._move_to_front
    monkeypatch.setattr(type(layer.buffer), "_move_to_front", lambda self: moves.append(1) or original(self))
    with torch.no_grad():
        for _ in range(320):
            layer.update(*random_states(head_dim=32))
    assert len(moves) <= 320 / 32


@pytest.mark.parametrize("model", [mistral, alternating])
def test_prompt_then_a_few_then_one_token_at_a_time_gives_dynamic_caches_logits(model, lossless):
    model = model()
    ours, theirs = MemOSCache(model.config, initial_capacity=4, **lossless), dynamic(model)
    with torch.no_grad():
        for step, count in enumerate([20, 5, *[1] * 12]):
            ids = token_ids(2, count, seed=step)
            sizes = [layer.get_mask_sizes(count) for layer in ours.layers]
            assert sizes == [layer.get_mask_sizes(count) for layer in theirs.layers]
            logits = [forward(model, ids, cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_crop_past_the_window_is_refused_without_recording_and_leaves_all_layers_alone(storage):
    model = alternating()
    cache = MemOSCache(model.config, **storage)
    with torch.no_grad():
        forward(model, token_ids(1, 32), cache)
        forward(model, token_ids(1, 1), cache)
    before = cache.layers[1].copied()
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-20)
    assert [layer.get_seq_length() for layer in cache.layers] == [33, 33, 33]
    assert torch.equal(cache.layers[1].keys, before[0])


def test_crop_further_back_than_recording_began_is_refused():
    layer = SlidingLayer(CacheOptions(), 8)
    with torch.no_grad():
        layer.update(*random_states(tokens=12))
        layer.activate_past_recording()
        layer.update(*random_states(tokens=3))
        with pytest.raises(RuntimeError, match="dropped before recording began"):
            layer.crop(-4)
        layer.crop(-3)
    assert layer.get_seq_length() == 12
    assert layer.keys.shape[2] == 7


@pytest.mark.skipif(VERSION < (5, 24), reason="the draft model's own cache, transformers', fails before")
def test_assisted_decoding_crosses_the_windows_beside_quantized_layers_as_plain_greedy_does():
    model, ids = alternating(), token_ids(1, 300)
    answers = []
    for options in ({}, {"assistant_model": draft_of(model)}):
        cache = MemOSCache(model.config, quantization="int4")
        answers.append(generate(model, ids, cache, new_tokens=30, **options))
        assert cache.stats.seals > 0
    assert torch.equal(*answers)


@pytest.mark.skipif(VERSION < (5, 24), reason="the draft model's own cache, transformers', fails before")
def test_assisted_decoding_crosses_a_window_of_six_as_plain_greedy_does():
    model, draft = mistral(window=6), copy.deepcopy(mistral(window=6))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # so that some drafts are rejected
    ids = token_ids(1, 4)
    plain = generate(model, ids, dynamic(model), new_tokens=30)
    cache = MemOSCache(model.config, initial_capacity=4)
    assert torch.equal(generate(model, ids, cache, new_tokens=30, assistant_model=draft), plain)


def test_a_window_of_one_sees_only_the_new_tokens():
    layer = SlidingLayer(CacheOptions(), 1)
    with torch.no_grad():
        for count in (3, 1, 1):
            assert layer.update(*random_states(tokens=count))[0].shape[2] == count == layer.get_mask_sizes(count)[0]
    assert layer.get_seq_length() == 5
    assert layer.keys.shape[2] == 0


def test_conversion_keeps_the_window_and_the_length():
    model: MistralForCausalLM = mistral()
    theirs: DynamicCache = dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(1, 20), theirs)
    cache = MemOSCache.from_cache(theirs)
    assert cache.is_sliding == [True] * 3
    assert cache.get_seq_length() == 20
    assert cache.to_dynamic().get_mask_sizes(1, 0) == (8, 13)


def test_the_ceiling_counts_the_tokens_that_left_the_window():
    model = mistral()
    cache = MemOSCache(model.config, max_cache_len=12)
    with pytest.raises(ValueError, match="max_cache_len: the cache may hold 12 tokens, it holds 12 and 1 more came"):
        generate(model, token_ids(1, 8), cache, new_tokens=20)
    assert cache.get_seq_length() == cache.get_max_length() == 12
