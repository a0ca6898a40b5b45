"""Offloaded caches: within their budget, right, and whole after every failure."""

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from tiny import CACHE_ARGUMENT, dynamic, forward, generate, llama, mistral, random_states, token_ids
from transformers import DynamicCache

from memos_hf import MemoryBudget, MemOSCache, OffloadConfig
from memos_hf.blocks.disk import BlockFile
from memos_hf.blocks.policies import LRU, Pin
from memos_hf.layers import OffloadedLayer
from memos_hf.layers.selection import KeyBounds

BLOCK = 8
# Two KV heads, 16 channels, K and V in float32.
TOKEN_BYTES = 2 * 16 * 4 * 2
BLOCK_BYTES = BLOCK * TOKEN_BYTES
LAYERS = 3


def offloaded(memory=12_000, folder=None, policy=None, active_blocks=None, **options):
    """A cache for `llama()` on a budget of `memory` bytes, or on one that it shares."""
    budget = memory if isinstance(memory, MemoryBudget) else {"cpu": memory}
    config = OffloadConfig(budget, folder, policy, active_blocks)
    return MemOSCache(options.pop("config", llama().config), offload=config, block_size=BLOCK, **options)


def logits(model, ids, cache) -> torch.Tensor:
    return forward(model, ids, cache).logits


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def content(cache) -> list[torch.Tensor]:
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_holds(cache, expected: list[torch.Tensor]):
    assert all(torch.equal(mine, other) for mine, other in zip(content(cache), expected, strict=True))


@pytest.mark.parametrize("policy", ["pin", "lru"])
@pytest.mark.parametrize("blocks", [0, 1, 5, 100])
def test_a_budget_holds_and_tokens_are_those_of_dynamic_cache(blocks, policy):
    model, ids = llama(), token_ids(2, 70)
    beside = 2 * BLOCK * TOKEN_BYTES * 2  # the tail of two rows
    limit = LAYERS * (blocks * BLOCK_BYTES + beside) if blocks else BLOCK_BYTES
    cache = offloaded(limit, policy=policy)
    assert torch.equal(generate(model, ids, cache, 40), generate(model, ids, dynamic(model), 40))
    memory = cache.memory()
    staged = sum(tensor.nbytes for tensor in cache.options.lease.budget.staging_tensors())
    if blocks:
        assert memory.by_device["cpu"].allocated_bytes - staged <= limit + LAYERS * 2 * 128  # alignment
    assert staged <= 2 * max(2 * BLOCK_BYTES, limit / 32)
    assert memory.used_bytes == memory.full_precision_bytes == LAYERS * 2 * 109 * TOKEN_BYTES
    if blocks == 100:
        assert cache.stats.misses == 0 and "disk" not in memory.by_device
    else:
        assert cache.stats.misses > 0 and memory.by_device["disk"].used_bytes > 0
    assert cache.stats.materialised_calls == 0


def test_pin_hits_its_share_of_a_scan_and_moves_no_more_than_the_rest():
    model = llama()
    cache = offloaded(LAYERS * (7 * BLOCK_BYTES + 3 * BLOCK * TOKEN_BYTES), policy="pin")
    generate(model, token_ids(1, 160), cache, 3)
    before = cache.stats
    generate(model, torch.cat([token_ids(1, 160), token_ids(1, 4)], dim=1), cache, 9)
    hits, misses = cache.stats.hits - before.hits, cache.stats.misses - before.misses
    kept = cache.layers[0].tiers.capacity
    assert 7 <= kept < 10
    assert hits / (hits + misses) == pytest.approx(kept / 21, abs=0.02)
    assert cache.stats.evictions == 0


def test_a_scan_longer_than_the_room_for_it_defeats_lru_and_not_pin():
    hits = {}
    for policy in (LRU(), Pin()):
        here, found = set(), 0
        for block in list(range(10)) * 5:
            if block in here:
                found += 1
                policy.use([block])
                continue
            victims = policy.victims(len(here) - 5, {block})
            for victim in victims:
                here.remove(victim)
                policy.discard(victim)
            if len(here) <= 5:
                here.add(block)
                policy.add(block)
        hits[type(policy)] = found
    assert hits == {LRU: 0, Pin: 4 * 6}


def test_lru_gives_way_in_order_of_use_and_spares_what_is_in_use():
    policy = LRU()
    for block in range(5):
        policy.add(block)
    policy.use([0, 1])
    assert policy.victims(2, ()) == [2, 3]
    assert policy.victims(9, {2, 0}) == [3, 4, 1]
    policy.discard(3)
    assert policy.victims(1, {2}) == [4]


def test_a_sliding_window_is_offloaded_too():
    model, ids = mistral(60), token_ids(2, 100)
    cache = offloaded(2 * BLOCK_BYTES, config=model.config)
    assert all(isinstance(layer, OffloadedLayer) for layer in cache.layers)
    assert torch.equal(generate(model, ids, cache, 50), generate(model, ids, dynamic(model), 50))
    assert cache.stats.misses > 0 and cache.stats.materialised_calls == 0
    held = {layer.get_seq_length() for layer in cache.layers}
    assert held == {149} and all(layer.tiers.used <= 2 * 9 for layer in cache.layers)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "memos"])
def test_a_second_turn_of_many_queries_goes_block_by_block(implementation):
    model = copy.deepcopy(llama())
    model.set_attn_implementation(implementation)
    cache, other = offloaded(BLOCK_BYTES, config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in (token_ids(2, 90), token_ids(2, 60, seed=1), token_ids(2, 1)):
            torch.testing.assert_close(logits(model, ids, cache), logits(model, ids, other), rtol=1e-4, atol=1e-4)
    assert (cache.stats.materialised_calls == 0) == (implementation != "eager")


# Several caches


def test_idle_caches_give_way_least_recently_used_first_and_come_back():
    model = llama()
    budget = MemoryBudget({"cpu": LAYERS * 12 * BLOCK_BYTES})
    caches = [offloaded(budget) for _ in range(5)]
    prompts = [token_ids(1, 40, seed=seed) for seed in range(5)]
    texts = [generate(model, prompt, cache, 8) for prompt, cache in zip(prompts, caches, strict=True)]
    device = torch.device("cpu")
    held = [cache.options.lease.held(device) for cache in caches]
    assert held[0] == 0 and held[-1] > 0 and sum(held) <= budget.limit(device)
    assert held == sorted(held)
    for index in (0, 3, 1, 4, 2, 0):
        more = torch.cat([texts[index], token_ids(1, 3, seed=index)], dim=1)
        texts[index] = generate(model, more, caches[index], 8)
        assert budget.held(device) <= budget.limit(device)
        assert caches[index].options.lease.held(device) > 0
    for index, text in enumerate(texts):
        assert torch.equal(generate(model, text[:, :-8], dynamic(model), 8), text), index


def test_everything_moves_out_and_comes_back_when_asked():
    model = llama()
    cache = offloaded(10**6)
    generate(model, token_ids(2, 61), cache, 4)
    expected, on_device = content(cache), cache.memory().by_device["cpu"].used_bytes
    cache.offload_all()
    assert cache.get_seq_length() == 64
    assert set(cache.memory().by_device) == {"disk"} or cache.memory().by_device["cpu"].used_bytes == 0
    assert cache.memory().used_bytes == on_device
    assert repr(cache) and "disk" in cache._repr_html_()
    assert cache.options.lease.held(torch.device("cpu")) == 0  # looking does not bring it back
    cache.prefetch_all()
    assert cache.memory().by_device["cpu"].used_bytes == on_device
    cache.offload_all()
    assert_holds(cache, expected)
    with pytest.raises(ValueError, match="offload_all: expected a cache made with offload"):
        MemOSCache(model.config).offload_all()


def test_threads_with_caches_of_their_own_on_one_budget():
    model, failures = llama(), []
    budget = MemoryBudget({"cpu": LAYERS * 8 * BLOCK_BYTES})
    prompts = [token_ids(1, 30 + 7 * seed, seed=seed) for seed in range(4)]
    expected = [generate(model, prompt, dynamic(model), 30) for prompt in prompts]

    def talk(index):
        try:
            for _ in range(3):
                cache = offloaded(budget)
                assert torch.equal(generate(model, prompts[index], cache, 30), expected[index])
                assert cache.stats.misses + cache.stats.hits > 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    gc.collect()
    assert budget.held(torch.device("cpu")) == 0


# Selected blocks


def test_all_blocks_selected_is_exact():
    model, ids = llama(), token_ids(2, 70)
    cache = offloaded(active_blocks=40)
    assert torch.equal(generate(model, ids, cache, 20), generate(model, ids, dynamic(model), 20))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_selected_blocks_are_those_with_the_highest_bound_and_all_that_is_attended_to(queries, padded):
    cache = offloaded(4 * BLOCK_BYTES, active_blocks=3, config=None)
    keys, values = random_states(batch=2, tokens=8 * BLOCK + 3)
    query = torch.randn(2, 4, queries, keys.shape[-1])
    lengths = torch.tensor([0, 19 if padded else 0])
    allowed = torch.arange(8 * BLOCK + 4)[None] >= lengths[:, None]
    mask = allowed[:, None, None].expand(-1, 1, queries, -1) if padded else None
    new = random_states(batch=2, tokens=1)
    with torch.no_grad():
        cache.update(keys, values, 0)
        ours = torch.nn.functional.scaled_dot_product_attention(
            query, *cache.update(*new, 0), attn_mask=mask, enable_gqa=True
        )
    keys, values = (torch.cat(pair, dim=2) for pair in zip((keys, values), new, strict=True))
    seen = torch.zeros(2, 8 * BLOCK + 4, dtype=torch.bool)
    seen[:, 8 * BLOCK :] = True
    for row in range(2):
        first = int(lengths[row]) // BLOCK
        bounds = []
        for block in range(8):
            part = keys[row, :, block * BLOCK : (block + 1) * BLOCK]
            low, high = part.amin(dim=1), part.amax(dim=1)
            products = query[row].unflatten(0, (2, 2)).unsqueeze(-2)
            best = torch.maximum(products * low[:, None, None, None], products * high[:, None, None, None]).sum(-1)
            bounds.append(float(best.max()))
        ranked = sorted(range(first + 1, 8), key=lambda block: -bounds[block])[:2]
        for block in (first, *ranked):
            seen[row, block * BLOCK : (block + 1) * BLOCK] = True
    visible = (seen & allowed)[:, None, None].expand(-1, 1, queries, -1)
    theirs = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bounds_follow_rows_and_lengths():
    keys, _ = random_states(batch=3, tokens=4 * BLOCK)
    bounds = KeyBounds.of(keys, BLOCK)
    joined = KeyBounds.of(keys[:, :, : 2 * BLOCK], BLOCK).followed_by(KeyBounds.of(keys[:, :, 2 * BLOCK :], BLOCK))
    assert torch.equal(bounds.lowest, joined.lowest) and torch.equal(bounds.highest, joined.highest)
    taken = bounds.rows(torch.tensor([2, 0])).first(3)
    assert torch.equal(taken.highest, bounds.highest[[2, 0], :3])
    assert bounds.first(0) is None


def test_blocks_selected_again_and_again_are_hits_of_lru():
    model = llama()
    cache = offloaded(LAYERS * (9 * BLOCK_BYTES + 3 * BLOCK * TOKEN_BYTES), active_blocks=5)
    generate(model, token_ids(1, 200), cache, 40)
    by_chance = cache.layers[0].tiers.capacity / cache.layers[0].tiers.used
    assert cache.stats.hits / (cache.stats.hits + cache.stats.misses) > 1.2 * by_chance
    assert cache.stats.misses > 0 and cache.stats.evictions > 0


# Failures


def fails_like(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("when", ["prompt", "decoding"])
def test_a_full_disk_refuses_the_step_and_loses_nothing(tmp_path, monkeypatch, when):
    model = llama()
    cache, other = offloaded(BLOCK_BYTES, tmp_path), dynamic(model)
    begun = token_ids(1, 30)
    step = token_ids(1, 40) if when == "prompt" else token_ids(1, 9)
    with torch.no_grad():
        for one in (cache, other):
            forward(model, begun, one)
            forward(model, begun[:, :1], one)
        expected = content(cache)
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", fails_like(OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(OSError, match="do not fit the disk"):
                for _ in range(2):
                    forward(model, step, cache)
                    expected = content(cache)
        assert_holds(cache, expected)
        while other.get_seq_length() < cache.get_seq_length():
            forward(model, step, other)
        torch.testing.assert_close(logits(model, step, cache), logits(model, step, other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", ["pwritev", "preadv"])
def test_an_error_in_the_middle_of_a_step_takes_the_step_back(tmp_path, monkeypatch, broken):
    model = llama()
    cache, other = offloaded(BLOCK_BYTES, tmp_path), dynamic(model)
    with torch.no_grad():
        for one in (cache, other):
            forward(model, token_ids(1, 50), one)
            forward(model, token_ids(1, 7), one)
        expected, calls, real = content(cache), [], getattr(os, broken)

        def fails_later(*args):
            calls.append(args)
            if len(calls) > 2:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, broken, fails_later)
            with pytest.raises(OSError, match="Input/output"):
                for _ in range(3):
                    forward(model, token_ids(1, 9), cache)
                    expected = content(cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {expected[0].shape[2]}
        assert_holds(cache, expected)
        while other.get_seq_length() < cache.get_seq_length():
            forward(model, token_ids(1, 9), other)
        more = token_ids(1, 2)
        torch.testing.assert_close(logits(model, more, cache), logits(model, more, other), rtol=1e-4, atol=1e-4)


def test_a_file_cut_short_is_an_error_and_not_zeros(tmp_path):
    model = llama()
    cache = offloaded(BLOCK_BYTES, tmp_path)
    ids = token_ids(1, 90)
    generate(model, ids, cache, 2)
    (path,) = files(tmp_path)
    os.truncate(path, BLOCK_BYTES // 2)
    with pytest.raises(OSError, match="could not read from the file of a cache"):
        generate(model, torch.cat([ids, token_ids(1, 4)], dim=1), cache, 2)
    assert {layer.get_seq_length() for layer in cache.layers} == {91}
    cache.reset()
    assert torch.equal(generate(model, ids, cache, 9), generate(model, ids, dynamic(model), 9))


def test_a_step_that_cannot_be_taken_back_tears_the_cache_until_it_is_reset(tmp_path, monkeypatch):
    from tiny import qwen3_next

    model = qwen3_next()
    config = OffloadConfig({"cpu": 4 * BLOCK_BYTES}, tmp_path)
    cache = MemOSCache(model.config, offload=config, block_size=BLOCK)
    ids = token_ids(1, 60)
    with torch.no_grad():
        forward(model, ids, cache)
        forward(model, ids[:, :1], cache)
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", fails_like(OSError(errno.EIO, "Input/output error")))
            with pytest.raises(OSError):
                forward(model, ids[:, :1], cache)
        for call in (lambda: forward(model, ids[:, :1], cache), lambda: cache.crop(-1), cache.offload_all):
            with pytest.raises(RuntimeError, match="the cache is torn"):
                call()
    cache.reset()
    assert torch.equal(generate(model, ids, cache), generate(model, ids, dynamic(model)))


def test_options_that_cannot_be_met_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused = [
        (lambda: OffloadConfig({"cpu": "much"}), ValueError, "max_memory\\['cpu'\\]: expected bytes or a size"),
        (lambda: OffloadConfig({"cpu": 0}), ValueError, "expected at least 1 byte"),
        (lambda: OffloadConfig({"tpu": 5}), ValueError, "index of an accelerator, 'mps' or 'cpu', got 'tpu'"),
        (lambda: OffloadConfig("2GiB"), TypeError, "max_memory: expected a mapping"),
        (lambda: OffloadConfig({0: True}), TypeError, "max_memory\\[0\\]"),
        (lambda: OffloadConfig(policy="fifo"), ValueError, "policy: expected one of \\('pin', 'lru'\\)"),
        (lambda: OffloadConfig(active_blocks=0), ValueError, "active_blocks: expected at least 1, got 0"),
        (lambda: OffloadConfig(offload_folder=7), TypeError, "offload_folder: expected a path, got 7"),
        (lambda: OffloadConfig(offload_folder=tmp_path / "file"), NotADirectoryError, "offload_folder"),
        (lambda: OffloadConfig(offload_folder=tmp_path / "file" / "below"), NotADirectoryError, "offload_folder"),
        (lambda: MemOSCache(offload={"cpu": 5}), TypeError, "offload: expected an OffloadConfig"),
        (lambda: offloaded(static=True, max_cache_len=9), ValueError, "static cannot be combined with offload"),
        (lambda: offloaded().quantize("int8"), ValueError, "quantize: expected a cache that is not offloaded"),
    ]
    for call, error, words in refused:
        with pytest.raises(error, match=words):
            call()
    cache = offloaded(BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=f"expected at least {BLOCK_BYTES} bytes for cpu, one block of 8 tokens"):
        forward(llama(), token_ids(1, 3), cache)
    assert cache.get_seq_length() == 0


def test_sizes_are_accelerates():
    budget = MemoryBudget({"cpu": "1.5MiB", 0: "2GB"})
    assert budget.limit(torch.device("cpu")) == 3 << 19
    assert budget.limit(torch.device("cuda", 0)) == 2 * 10**9
    free = MemoryBudget()
    assert 0 < free.limit(torch.device("cpu")) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# What is left behind: nothing


def test_nothing_of_a_cache_lives_on(tmp_path):
    model, threads = llama(), threading.active_count()
    cache = offloaded(BLOCK_BYTES, tmp_path)
    generate(model, token_ids(1, 90), cache, 9)
    assert len(files(tmp_path)) == 1
    watched = [weakref.ref(cache), *(weakref.ref(layer) for layer in cache.layers), weakref.ref(cache.options.lease)]
    del cache
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    assert files(tmp_path) == []
    for _ in range(100):
        if threading.active_count() <= threads:
            break
        threading.Event().wait(0.05)
    assert threading.active_count() <= threads


def test_reset_gives_back_what_is_on_disk(tmp_path):
    cache = offloaded(BLOCK_BYTES, tmp_path)
    generate(llama(), token_ids(1, 90), cache, 3)
    (path,) = files(tmp_path)
    assert path.stat().st_size > 0
    cache.reset()
    assert path.stat().st_size == 0 and "disk" not in cache.memory().by_device


def test_a_copy_is_apart_and_has_a_file_of_its_own(tmp_path):
    model, ids = llama(), token_ids(1, 90)
    cache = offloaded(5 * BLOCK_BYTES, tmp_path, policy="lru")
    generate(model, ids, cache, 3)
    expected = content(cache)
    twin = copy.deepcopy(cache)
    assert len(files(tmp_path)) == 2
    cache.reset()
    del cache
    gc.collect()
    assert len(files(tmp_path)) == 1
    assert_holds(twin, expected)


def test_the_file_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    script = (
        "import sys, time; from memos_hf.blocks.disk import BlockFile\n"
        f"file = BlockFile({str(tmp_path)!r}); file.reserve(4096, 3); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    (left_behind,) = files(tmp_path)
    own = BlockFile(tmp_path)
    own.reserve(64, 1)
    assert left_behind.exists()  # its owner lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    other = BlockFile(tmp_path)
    other.reserve(64, 1)
    assert set(files(tmp_path)) == {own.path, other.path}


def test_records_are_used_again_and_the_file_shrinks_with_the_last(tmp_path):
    file = BlockFile(tmp_path)
    first = file.reserve(100, 3)
    assert first == [0, 100, 200]
    file.release(100, 100)
    assert file.reserve(100, 2) == [100, 300]
    assert file.reserve(7, 1) == [400]
    pieces = [torch.arange(25, dtype=torch.float32)]
    file.write(300, pieces)
    read = torch.empty(25)
    file.read(300, [memoryview(read.view(torch.uint8).numpy())])
    assert torch.equal(read, pieces[0])
    for offset in (0, 100, 200, 300):
        file.release(offset, 100)
    file.release(400, 7)
    assert file.allocated_bytes == 0 and file.path.stat().st_size == 0


def test_a_process_that_is_forked_off_reads_what_is_below():
    cache = offloaded(BLOCK_BYTES)
    generate(llama(), token_ids(1, 90), cache, 3)
    expected = content(cache)
    child = os.fork()
    if child == 0:
        reads = all(torch.equal(*pair) for pair in zip(content(cache), expected, strict=True))
        cache.crop(-80)
        cache.reset()
        try:
            forward(llama(), token_ids(1, 90), cache)
            writes = True
        except OSError:
            writes = False
        os._exit(0 if reads and not writes else 1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child does not come to an end")
    assert os.waitstatus_to_exitcode(status) == 0
    assert_holds(cache, expected)  # whose file the child has not removed


def test_idle_caches_are_not_counted_anew_at_every_step(monkeypatch):
    budget = MemoryBudget({"cpu": LAYERS * 12 * BLOCK_BYTES})
    caches = [offloaded(budget) for _ in range(30)]
    for cache in caches:
        with torch.no_grad():
            forward(llama(), token_ids(1, 40), cache)
    counted, count = [], type(cache.options.lease)._count
    monkeypatch.setattr(type(cache.options.lease), "_count", lambda *args: counted.append(1) or count(*args))
    with torch.no_grad():
        for _ in range(10):
            forward(llama(), token_ids(1, 1), caches[-1])
    assert len(counted) < 10 * 30
    held = sum(cache.options.lease.held(torch.device("cpu")) for cache in caches)
    monkeypatch.undo()
    for cache in caches:
        cache.options.lease.changed()
    assert held == sum(cache.options.lease.held(torch.device("cpu")) for cache in caches)


def test_records_are_released_from_any_thread():
    file, failures = BlockFile(), []

    def reserve_and_release():
        try:
            for _ in range(300):
                for offset in file.reserve(64, 2):
                    file.release(offset, 64)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reserve_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and file.allocated_bytes == 0


def test_a_cache_that_is_loaded_does_not_move_out_meanwhile(tmp_path):
    model, ids = llama(), token_ids(1, 100)
    budget, stop, failures = MemoryBudget({"cpu": 20 * BLOCK_BYTES}), threading.Event(), []
    stored, theirs = MemOSCache.for_model(model, block_size=BLOCK), dynamic(model)
    with torch.no_grad():
        forward(model, ids, stored)
        forward(model, ids, theirs)
        expected = forward(model, ids[:, :1], theirs).logits
    stored.save(tmp_path / "cache")

    def take_room():
        try:
            while not stop.is_set():
                cache = offloaded(budget)
                with torch.no_grad():
                    for seed in range(9):
                        forward(model, token_ids(1, 9, seed=seed), cache)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=take_room)
    thread.start()
    try:
        for _ in range(20):
            loaded = MemOSCache.load(tmp_path / "cache", model, offload=OffloadConfig(budget))
            with torch.no_grad():
                torch.testing.assert_close(logits(model, ids[:, :1], loaded), expected, rtol=1e-3, atol=1e-3)
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


def test_an_offloaded_cache_on_the_cpu_calls_nothing_of_cuda(monkeypatch):
    for name in ("Stream", "Event", "stream", "current_stream", "synchronize", "is_available", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, fails_like(AssertionError("CUDA")))
    cache = offloaded(BLOCK_BYTES)
    with torch.no_grad():
        for _ in range(12):
            cache.update(*random_states(tokens=5, head_dim=16), 0)
        states = cache.update(*random_states(head_dim=16), 0)
        torch.nn.functional.scaled_dot_product_attention(torch.randn(1, 4, 1, 16), *states, enable_gqa=True)
    assert cache.stats.misses > 0


def test_both_spellings_and_the_same_object_come_back():
    cache = offloaded()
    out = llama().generate(
        token_ids(1, 40),
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        **{CACHE_ARGUMENT: cache},
    )
    assert (out.past_key_values if hasattr(out, "past_key_values") else out.cache) is cache
