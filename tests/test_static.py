"""static=True: compiled once, StaticCache's semantics, a full cache refused before anything is written."""

import pytest
import torch
import torch._dynamo
from tiny import VERSION, dynamic, forward, generate, llama, mistral, qwen3_next, random_states, token_ids
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, StaticCache

from memos_hf import MemOSCache


def static(model, tokens=24):
    return MemOSCache(model.config, static=True, max_cache_len=tokens)


def content(cache):
    return [(layer.keys.clone(), layer.values.clone(), int(layer.get_seq_length())) for layer in cache.layers]


def assert_unchanged(cache, before):
    for (keys, values, length), (old_keys, old_values, old_length) in zip(content(cache), before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)
        assert length == old_length


def test_it_says_that_it_can_be_compiled_and_growing_caches_that_they_cannot():
    assert static(llama()).is_compileable
    assert not MemOSCache(llama().config).is_compileable
    assert static(llama()).get_max_length() == 24


@pytest.mark.parametrize("model", [llama, mistral])
def test_generate_gives_dynamic_caches_tokens(model):
    model = model()
    ids = token_ids(2, 5)
    assert torch.equal(generate(model, ids, static(model)), generate(model, ids, dynamic(model)))


@pytest.mark.slow
def test_a_compiled_decode_step_is_compiled_once_and_equals_dynamic_cache_until_the_cache_is_full():
    model = llama()
    ours, theirs = static(model), dynamic(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(model, token_ids(1, 5), cache)
        for position in range(5, 24):
            ids, positions = token_ids(1, 1, seed=position), torch.tensor([[position]])
            compiled = forward(step, ids, ours, position_ids=positions).logits
            expected = forward(model, ids, theirs, position_ids=positions).logits
            torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
        assert counter.frame_count == 1
        before = content(ours)
        with pytest.raises(RuntimeError):
            forward(step, token_ids(1, 1), ours, position_ids=torch.tensor([[24]]))
        assert_unchanged(ours, before)


@pytest.mark.slow
def test_generate_compiles_by_itself_where_it_may_and_refuses_a_full_cache_before_writing():
    model = llama()
    config = CompileConfig()
    config._compile_all_devices = True  # what `generate` does on a GPU without being asked
    ids = token_ids(1, 5)
    answer = generate(model, ids, static(model), compile_config=config)
    assert torch.equal(answer, generate(model, ids, dynamic(model)))
    cache = static(model, tokens=12)
    with pytest.raises(ValueError, match="max_cache_len: the cache may hold 12 tokens, it holds 12 and 1 more came"):
        generate(model, ids, cache, new_tokens=12, compile_config=config)
    assert int(cache.get_seq_length()) == 12


def test_a_full_cache_is_refused_before_anything_is_written():
    model = llama()
    cache = static(model, tokens=8)
    with torch.no_grad():
        forward(model, token_ids(1, 6), cache)
        before = content(cache)
        with pytest.raises(ValueError, match="max_cache_len: the cache may hold 8 tokens, it holds 6 and 3 more came"):
            forward(model, token_ids(1, 3), cache)
        assert_unchanged(cache, before)
        forward(model, token_ids(1, 2), cache)
    assert int(cache.get_seq_length()) == 8


def test_a_hybrid_refuses_before_its_recurrent_layers_write():
    model = qwen3_next()
    for cache in (MemOSCache(model.config, max_cache_len=8), static(model, tokens=8)):
        with torch.no_grad():
            forward(model, token_ids(1, 6), cache)
            state = cache.layers[0].recurrent_states[0].clone()
            with pytest.raises(ValueError, match="max_cache_len"):
                forward(model, token_ids(1, 3, seed=1), cache)
            assert torch.equal(cache.layers[0].recurrent_states[0], state)


def test_rows_cannot_be_repeated_or_selected():
    model = llama()
    cache = static(model)
    with torch.no_grad():
        forward(model, token_ids(2, 5), cache)
    with pytest.raises(RuntimeError, match="a static cache keeps its batch size"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(RuntimeError, match="a static cache keeps its batch size"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ValueError, match="static"):
        cache.to_dynamic()


@pytest.mark.skipif(VERSION < (5, 20), reason="transformers' static layers cannot be cropped before")
def test_crop_and_reset_are_static_caches():
    model = llama()
    ours, theirs = static(model), StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(model, token_ids(1, 9), cache)
            cache.crop(-4)
        logits = [forward(model, token_ids(1, 2, seed=1), cache).logits for cache in (ours, theirs)]
    torch.testing.assert_close(*logits)
    ours.crop(-30)
    assert int(ours.get_seq_length()) == 0
    with torch.no_grad():
        forward(model, token_ids(1, 9), ours)
    ours.reset()
    assert int(ours.get_seq_length()) == 0


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad])
def test_filled_in_one_mode_it_goes_on_in_another(first, second):
    model = llama()
    cache = static(model)
    with first():
        forward(model, token_ids(1, 5), cache)
    with second():
        forward(model, token_ids(1, 5), cache)
        cache.reset()


def test_memory_counts_what_is_valid_and_all_that_is_allocated():
    model = llama()
    cache = MemOSCache.for_model(model, batch_size=2, static=True, max_cache_len=24)
    token = 3 * 2 * 2 * 2 * 16 * 4  # layers, K and V, batch, heads, head dim, float32
    assert cache.memory().allocated_bytes == 24 * token
    assert cache.memory().used_bytes == 0
    with torch.no_grad():
        forward(model, token_ids(2, 5), cache)
    assert cache.memory().used_bytes == 5 * token
    assert cache.memory().allocated_bytes == 24 * token


@pytest.mark.parametrize(
    ("states", "error", "words"),
    [
        (random_states(batch=2, head_dim=16), ValueError, "key_states: expected batch size 1"),
        (tuple(t.double() for t in random_states(head_dim=16)), TypeError, "key_states: expected dtype"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(states, error, words):
    model = llama()
    cache = static(model)
    with torch.no_grad():
        forward(model, token_ids(1, 5), cache)
        before = content(cache)
        with pytest.raises(error, match=words):
            cache.update(*states, 0)
    assert_unchanged(cache, before)


def test_an_eager_call_after_compiled_steps_knows_how_full_the_cache_is():
    model = llama()
    cache = static(model, tokens=20)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        forward(model, token_ids(1, 1), cache)
        for position in range(1, 17):
            forward(step, token_ids(1, 1), cache, position_ids=torch.tensor([[position]]))
        before = content(cache)
        with pytest.raises(ValueError, match="it holds 17 and 5 more came"):
            forward(model, token_ids(1, 5), cache)
    assert_unchanged(cache, before)


def test_conversion_into_a_static_cache_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="a static cache is filled by the model"):
        MemOSCache.from_cache(dynamic(llama()), static=True, max_cache_len=8)
