"""Forks: the same tokens, held once, that go on apart; owners that acquire and release."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from families import FAMILIES, Subject
from tiny import LOSSLESS, dynamic, forward, generate, llama, mistral, qwen3_next, random_states, token_ids

from memos_hf import MemOSCache
from memos_hf.layers import BlockLayer, ContiguousLayer

BLOCK = 8
TOKEN_BYTES = 2 * 16 * 4 * 2  # of one layer of `llama()`
LAYERS = 3


def filled(model, tokens, rows=2, sealed=False, **options):
    cache = MemOSCache(model.config, **{"block_size": BLOCK, **options})
    with torch.no_grad():
        forward(model, token_ids(rows, tokens), cache)
    if sealed:
        for layer in cache.layers:
            layer.seal()
    return cache


def storages(*caches):
    """Bytes of all tensors that `caches` hold, each storage once."""
    tensors = (tensor for cache in caches for layer in cache.layers for tensor in layer.held_tensors())
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def content(cache):
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_holds(cache, expected):
    assert all(torch.equal(mine, other) for mine, other in zip(content(cache), expected, strict=True))


@pytest.mark.parametrize("build", [llama, mistral, qwen3_next])
def test_forks_go_on_by_turns_as_separate_caches_do(build, storage):
    model = build()
    cache = filled(model, 45, **storage)
    caches = [cache, *(cache.fork() for _ in range(3))]
    others = [filled(model, 45, **storage) for _ in range(4)]
    with torch.no_grad():
        for turn in range(24):
            for seed, pair in enumerate(zip(caches, others, strict=True)):
                ids = token_ids(2, 1 + (turn + seed) % 3, seed=10 * turn + seed)
                ours, theirs = (forward(model, ids, each).logits for each in pair)
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_fork_answers_as_dynamic_cache_does_and_the_original_stays(name):
    model = llama()
    cache = filled(model, 45, **LOSSLESS[name])
    expected, theirs = content(cache), dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(2, 45), theirs)
    ids = torch.cat([token_ids(2, 45), token_ids(2, 4, seed=1)], dim=1)
    for _ in range(3):
        assert torch.equal(generate(model, ids, cache.fork(), 30), generate(model, ids, copy.deepcopy(theirs), 30))
        assert_holds(cache, expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_forks(family):
    model = Subject(family.build(), family.encoder_features)
    if model.is_encoder_decoder:
        pytest.skip("EncoderDecoderCache has no fork; its two parts have")
    theirs, ours = model.dynamic_cache(), model.memos_cache(block_size=BLOCK)
    for cache in (ours, theirs):
        model.forward(cache, model.prompt(2, 20))
    fork = ours.fork()
    for cache in (fork, theirs):
        model.forward(cache, model.prompt(2, 3))
    model.forward(ours, model.prompt(2, 7))
    last = model.prompt(2, 1)
    torch.testing.assert_close(model.forward(fork, last), model.forward(theirs, last), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, LOSSLESS["blocks"]], ids=["buffers", "blocks"])
def test_a_fork_takes_no_memory_but_for_what_it_writes(options):
    cache = filled(llama(), 1005, rows=1, sealed=bool(options), initial_capacity=8, **options)
    before = storages(cache)
    fork = cache.fork()
    assert storages(cache, fork) == before
    report = fork.memory()
    assert report.used_bytes == cache.memory().used_bytes
    assert report.shared_bytes > 0.99 * report.used_bytes  # all but sinks
    with torch.no_grad():
        forward(llama(), token_ids(1, 1), fork)
    assert storages(cache, fork) - before <= LAYERS * 3 * BLOCK * TOKEN_BYTES + 2 * LAYERS * 128
    assert 0 < fork.memory().shared_bytes < fork.memory().used_bytes
    del fork
    gc.collect()
    assert cache.layers[0]._pool.used == 1005 // BLOCK


def test_what_makes_whole_blocks_is_read_where_it_lies():
    cache = filled(llama(), 45)
    held = cache.layers[1].buffer.tensors[0].data_ptr()
    cache.fork()
    assert isinstance(cache.layers[1], BlockLayer)
    assert cache.layers[1]._pool.keys["codes"].data_ptr() == held
    short = filled(llama(), BLOCK - 1)
    short.fork()
    assert isinstance(short.layers[0], ContiguousLayer)  # there is no whole block


def test_a_crop_and_other_rows_of_a_fork_leave_the_original_alone(storage):
    model = llama()
    cache = filled(model, 45, **storage)
    expected = content(cache)
    fork = cache.fork()
    fork.crop(-30)
    with torch.no_grad():
        forward(model, token_ids(2, 40, seed=2), fork)
        fork.reorder_cache(torch.tensor([1, 1]))
        forward(model, token_ids(2, 9, seed=3), fork)
        fork.batch_select_indices(torch.tensor([0]))
        fork.reset()
    assert_holds(cache, expected)
    with torch.no_grad():
        forward(model, token_ids(2, 9, seed=3), cache)


@pytest.mark.parametrize("options", [{}, LOSSLESS["blocks"]], ids=["buffers", "blocks"])
def test_repeated_rows_hold_their_prompt_once(options):
    model = llama()
    cache = filled(model, 400, rows=1, sealed=bool(options), **options)
    one = cache.memory().used_bytes
    samples = cache.fork(repeats=8)
    ids = token_ids(1, 400).repeat(8, 1)
    answers = generate(model, torch.cat([ids, token_ids(8, 1, seed=4)], dim=1), samples, 20)
    assert samples.memory().used_bytes < 1.8 * one  # eight tails of 21 tokens and less than two blocks
    theirs = dynamic(model)
    with torch.no_grad():
        forward(model, ids, theirs)
    assert torch.equal(generate(model, torch.cat([ids, token_ids(8, 1, seed=4)], dim=1), theirs, 20), answers)
    assert cache.get_seq_length() == 400 and cache.memory().used_bytes == one


def test_the_last_holder_frees_a_block():
    cache = filled(llama(), 45, sealed=True, **LOSSLESS["blocks"])
    pool = cache.layers[0]._pool
    forks = [cache.fork().fork() for _ in range(3)]
    assert {pool.references(block) for block in cache.layers[0]._table[0]} == {4}
    forks.pop().reset()
    assert {pool.references(block) for block in cache.layers[0]._table[0]} == {3}
    cache.reset()
    assert pool.used > 0
    forks.clear()
    gc.collect()
    assert pool.used == 0


def test_threads_each_with_a_fork_of_their_own(storage):
    model, failures = llama(), []
    cache = filled(model, 61, rows=1, **storage)
    prompts = [torch.cat([token_ids(1, 61), token_ids(1, 3, seed=seed)], dim=1) for seed in range(4)]
    expected = [generate(model, ids, filled(model, 61, rows=1, **storage), 40) for ids in prompts]
    start = threading.Barrier(4)

    def go_on(ids, fork, answer):
        try:
            start.wait()
            for _ in range(2):
                assert torch.equal(generate(model, ids, fork.fork(), 40), answer)
        except BaseException as error:
            failures.append(error)

    forks = [cache.fork() for _ in prompts]
    threads = [threading.Thread(target=go_on, args=each) for each in zip(prompts, forks, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    del forks, threads
    gc.collect()
    assert cache.get_seq_length() == 61


def test_growth_of_one_fork_lets_go_of_the_memory_of_all():
    cache = filled(llama(), 45, rows=1, initial_capacity=8)
    fork = cache.fork()
    held = weakref.ref(cache.layers[0]._pool.keys["codes"])
    with torch.no_grad():
        forward(llama(), token_ids(1, 1), cache)
        for _ in range(9):
            forward(llama(), token_ids(1, 30), fork)
    assert cache.layers[0]._pool.growths > 0 and held() is None


def test_a_forked_cache_can_be_quantized_converted_and_forked_again():
    model = llama()
    cache = filled(model, 45)
    fork = cache.fork()
    expected = content(cache)
    fork.quantize("int8")
    assert fork.options.quantization is not None and all(layer.quantization.key_bits == 8 for layer in fork.layers)
    assert_holds(cache, expected)
    assert_holds(MemOSCache.from_cache(cache.fork().fork()), expected)
    dynamic_copy = cache.to_dynamic()
    assert torch.equal(dynamic_copy.layers[1].keys, expected[2])


def test_graphs_and_handed_over_tensors_are_forked_too():
    keys, values = random_states(tokens=20)
    cache = MemOSCache(((keys, values),), block_size=BLOCK)
    fork = cache.fork()
    with torch.no_grad():
        cache.update(*random_states(tokens=3, seed=1), 0)
        fork.update(*random_states(tokens=2, seed=2), 0)
    for each, tokens in ((cache, 23), (fork, 22)):
        assert each.get_seq_length() == tokens
        assert torch.equal(each.layers[0].keys[:, :, :20], keys)
    states = [half.requires_grad_() for half in random_states(tokens=20, seed=3)]
    recorded = MemOSCache(block_size=BLOCK)
    recorded.update(*states, 0)
    twin = recorded.fork()
    twin.layers[0].keys.sum().backward()
    assert torch.equal(states[0].grad, torch.ones_like(states[0]))


# Owners


def test_the_last_release_frees_at_once_and_use_after_it_is_an_error(storage, tmp_path):
    path = tmp_path / "cache"
    model = llama()
    cache = filled(model, 45, **storage)
    held = [weakref.ref(tensor) for layer in cache.layers for tensor in layer.held_tensors()]
    assert cache.acquire() is cache
    cache.release()
    assert cache.get_seq_length() == 45
    cache.release()
    assert not any(tensor() is not None for tensor in held)
    calls = {
        "update": lambda: forward(model, token_ids(2, 1), cache),
        "crop": lambda: cache.crop(-1),
        "reset": cache.reset,
        "fork": cache.fork,
        "acquire": cache.acquire,
        "save": lambda: cache.save(path),
        "select": lambda: cache.batch_select_indices(torch.tensor([0])),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match="the cache was released"):
            call()
    assert not path.exists()
    with pytest.raises(RuntimeError, match="release: the cache was released before"):
        cache.release()


def test_a_released_cache_of_a_hybrid_model_says_so_before_its_first_layer():
    cache = filled(qwen3_next(), 9)
    cache.release()
    with pytest.raises(RuntimeError, match="the cache was released"):
        forward(qwen3_next(), token_ids(2, 1), cache)


def test_a_with_statement_releases(storage):
    with filled(llama(), 30, **storage) as cache:
        assert cache.get_seq_length() == 30
        fork = cache.fork()
    with pytest.raises(RuntimeError, match="the cache was released"):
        cache.fork()
    assert fork.get_seq_length() == 30
    assert_holds(fork, content(filled(llama(), 30, **storage)))
    with fork:
        fork.release()  # twice is one time too many, but not here: the statement sees that it is done


def test_a_static_cache_cannot_be_forked_and_repeats_are_checked():
    with pytest.raises(ValueError, match="fork: a static cache"):
        MemOSCache(llama().config, static=True, max_cache_len=16).fork()
    with pytest.raises(ValueError, match="repeats: expected an int of at least 1, got 0"):
        MemOSCache(llama().config).fork(0)
