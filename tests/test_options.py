"""Bad input is refused with a sentence that names it, and changes nothing."""

import pytest
import torch
from tiny import CACHE_ARGUMENT, forward, generate, llama, mistral, random_states, token_ids
from transformers import EncoderDecoderCache, LlamaConfig, MllamaTextConfig

from memos_hf import MemOSCache


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layout": "column_major"}, ValueError, "layout: expected one of"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor: expected a finite number above 1, got 1.0"),
        ({"growth_factor": float("nan")}, ValueError, "growth_factor"),
        ({"growth_factor": "fast"}, TypeError, "growth_factor: expected a number, got 'fast'"),
        ({"initial_capacity": 0}, ValueError, "initial_capacity: expected at least 1, got 0"),
        ({"initial_capacity": -4}, ValueError, "initial_capacity"),
        ({"initial_capacity": 2.5}, TypeError, "initial_capacity: expected an int or None, got 2.5"),
        ({"initial_capacity": True}, TypeError, "initial_capacity"),
        ({"max_cache_len": 0}, ValueError, "max_cache_len"),
        ({"initial_capacity": 64, "max_cache_len": 32}, ValueError, r"max_cache_len: expected at least .*64.*32"),
        ({"static": True}, ValueError, "static=True: expected max_cache_len"),
        ({"static": "yes", "max_cache_len": 8}, TypeError, "static: expected True or False"),
        ({"static": True, "max_cache_len": 8, "layout": "seq_major"}, ValueError, "static cannot be combined"),
        ({"static": True, "max_cache_len": 8, "initial_capacity": 4}, ValueError, "static cannot be combined"),
        ({"static": True, "max_cache_len": 8, "offloading": True}, ValueError, "static cannot be combined"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        MemOSCache(llama().config, **options)


def test_static_refuses_flash_attention():
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="static cannot be combined with flash attention"):
        MemOSCache(config, static=True, max_cache_len=8)


def test_static_without_a_config_and_with_data_are_refused():
    with pytest.raises(ValueError, match="expected a config"):
        MemOSCache(static=True, max_cache_len=8)
    with pytest.raises(ValueError, match="per-layer data"):
        MemOSCache([random_states()], config=llama().config, static=True, max_cache_len=8)


@pytest.mark.parametrize("source", [3, "llama", 2.5, llama])
def test_a_first_argument_of_the_wrong_kind_is_refused(source):
    with pytest.raises(TypeError, match="expected a PretrainedConfig"):
        MemOSCache(source)


def test_a_config_of_the_wrong_kind_or_given_twice_is_refused():
    with pytest.raises(TypeError, match="config: expected a PretrainedConfig"):
        MemOSCache(config={"num_hidden_layers": 2})
    with pytest.raises(TypeError, match="given twice"):
        MemOSCache(llama().config, config=llama().config)


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="offloading is refused only where nothing can be offloaded"
)
def test_offloading_without_an_accelerator_is_refused():
    with pytest.raises(RuntimeError, match="offloading=True"):
        MemOSCache(llama().config, offloading=True)


def filled_cache(**options) -> MemOSCache:
    """One with blocks that the next update will seal, if it is allowed."""
    cache = MemOSCache(llama().config, initial_capacity=4, **options)
    with torch.no_grad():
        cache.update(*random_states(batch=2, tokens=45, seed=0), 0)
    return cache


@pytest.mark.parametrize(
    ("states", "error", "words"),
    [
        (random_states(batch=1), ValueError, "key_states: expected batch size 2, .* got 1"),
        (random_states(batch=2, heads=3), ValueError, "key_states: expected heads 2, .* got 3"),
        (random_states(batch=2, head_dim=4), ValueError, "key_states: expected head dim 8, .* got 4"),
        ((random_states(batch=2)[0], random_states(batch=2, head_dim=4)[1]), ValueError, "value_states: .*head dim"),
        (tuple(t.double() for t in random_states(batch=2)), TypeError, "key_states: expected dtype torch.float32"),
        (tuple(t.to("meta") for t in random_states(batch=2)), RuntimeError, "key_states: expected device cpu"),
        ((random_states(2, tokens=2)[0], random_states(2, tokens=1)[1]), ValueError, "value_states: expected batch"),
        (tuple(t[0] for t in random_states(batch=2)), ValueError, "expected four dimensions"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_states_that_do_not_fit_are_refused_and_change_nothing(states, error, words, grad, storage):
    cache = filled_cache(**storage)
    before = cache.layers[0].copied()
    with torch.set_grad_enabled(grad), pytest.raises(error, match=words):
        cache.update(*states, 0)
    assert cache.get_seq_length() == 45
    for old, new in zip(before, cache.layers[0].lent(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True])
def test_repeats_must_be_a_positive_int(repeats):
    with pytest.raises(ValueError, match="repeats: expected an int of at least 1"):
        filled_cache().batch_repeat_interleave(repeats)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_batch_size_must_be_a_positive_int(batch_size):
    with pytest.raises(ValueError, match="batch_size: expected an int of at least 1"):
        MemOSCache.for_model(llama(), batch_size=batch_size)


def test_rows_that_do_not_exist_are_refused_and_change_nothing(storage):
    cache = filled_cache(**storage)
    with torch.no_grad():
        cache.update(*random_states(batch=2), 0)
        before = cache.layers[0].copied()
        with pytest.raises((IndexError, RuntimeError)):
            cache.batch_select_indices(torch.tensor([0, 7]))
        for old, new in zip(before, cache.layers[0].lent(), strict=True):
            assert torch.equal(old, new)
        cache.update(*random_states(batch=2), 0)
    assert cache.get_seq_length() == 47


def test_the_ceiling_reached_in_the_middle_of_generation_keeps_what_was_generated(storage):
    cache = MemOSCache(llama().config, max_cache_len=30, **storage)
    ids = token_ids(1, 20)
    with pytest.raises(ValueError, match=r"max_cache_len: the cache may hold 30 tokens, it holds 30 and 1 more came"):
        generate(llama(), ids, cache, new_tokens=20)
    assert [layer.get_seq_length() for layer in cache.layers] == [30, 30, 30]
    cache.crop(-1)
    assert cache.get_seq_length() == 29


def test_a_ceiling_that_one_layer_reaches_stops_all_layers(storage):
    model = mistral()
    options = {"max_cache_len": 52, "initial_capacity": 4, **storage}
    cache = MemOSCache(model.config, **options)
    # a full-attention layer behind sliding ones, which never reach a ceiling
    cache.layers[2] = MemOSCache(llama().config, **options).layers[2]
    states = random_states(tokens=46, head_dim=16)
    with torch.no_grad():
        cache.activate_past_recording()
        for layer_idx in range(3):
            cache.update(*states, layer_idx)
        before = cache.layers[2].copied()
        with pytest.raises(ValueError, match="max_cache_len"):
            cache.update(*random_states(tokens=7, head_dim=16), 0)
        assert [layer.get_seq_length() for layer in cache.layers] == [46, 46, 46]
        for old, new in zip(before, cache.layers[2].lent(), strict=True):
            assert torch.equal(old, new)
        cache.crop(-1)
        assert [layer.get_seq_length() for layer in cache.layers] == [45, 45, 45]


def test_a_default_capacity_above_the_ceiling_starts_at_the_ceiling():
    cache = MemOSCache(llama().config, max_cache_len=32)
    with torch.no_grad():
        cache.update(*random_states(), 0)
    assert cache.layers[0].buffer.capacity == 32


def test_an_encoder_decoder_cache_is_converted_by_its_halves():
    pair = EncoderDecoderCache(MemOSCache(llama().config), MemOSCache(llama().config))
    with pytest.raises(TypeError, match="expected a DynamicCache or MemOSCache, got EncoderDecoderCache"):
        MemOSCache.from_cache(pair)


def test_a_batch_of_one_is_not_broadcast_over_three_rows(storage):
    model = llama()
    cache = MemOSCache(model.config, **storage)
    forward(model, token_ids(1, 5), cache)
    with pytest.raises(ValueError, match=r"key_states: expected batch size 1, .* got 3"):
        model.generate(
            token_ids(1, 8), do_sample=True, num_return_sequences=3, max_new_tokens=2, **{CACHE_ARGUMENT: cache}
        )
    assert cache.get_seq_length() == 5


def test_layers_that_hold_an_image_do_not_count_towards_the_ceiling(storage):
    config = MllamaTextConfig(num_hidden_layers=2, cross_attention_layers=[1], hidden_size=32, num_attention_heads=2)
    cache = MemOSCache(config, max_cache_len=8, **storage)
    cache.update(*random_states(tokens=5), 0)
    cache.update(*random_states(tokens=1601), 1)
    cache.update(*random_states(tokens=3), 0)
    with pytest.raises(ValueError, match="max_cache_len"):
        cache.update(*random_states(tokens=1), 0)
