"""What `memory()` and `stats` say, held against the storages themselves."""

import gc

import pytest
import torch
from tiny import forward, generate, llama, random_states, token_ids

from memos_hf import MemOSCache
from memos_hf.layers.buffer import ALIGNMENT_BYTES

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, float32: one token of one row


def test_used_bytes_are_the_valid_tokens_and_allocated_bytes_the_storages():
    cache = MemOSCache(llama().config, initial_capacity=32)
    with torch.no_grad():
        forward(llama(), token_ids(2, 5), cache)
    report = cache.memory()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in layer.buffer.tensors
    }
    assert report.used_bytes == 5 * 2 * TOKEN_BYTES == report.full_precision_bytes
    assert report.allocated_bytes == sum(storages.values()) == 32 * 2 * TOKEN_BYTES + 6 * ALIGNMENT_BYTES
    assert report.by_device["cpu"].allocated_bytes == report.allocated_bytes
    assert report.shared_bytes == 0
    assert report.ratio == 1.0


def test_an_empty_cache_holds_nothing():
    report = MemOSCache(llama().config).memory()
    assert (report.used_bytes, report.allocated_bytes, report.ratio, report.by_device) == (0, 0, 1.0, {})


def test_a_report_is_a_table_and_a_snapshot():
    cache = MemOSCache(llama().config)
    with torch.no_grad():
        forward(llama(), token_ids(1, 5), cache)
        report, stats = cache.memory(), cache.stats
        forward(llama(), token_ids(1, 500), cache)
    assert report.used_bytes == 5 * TOKEN_BYTES
    assert stats.growths == 0
    assert cache.stats.growths == 1
    assert cache.stats.growths_by_device == {"cpu": 1}
    assert str(report).splitlines()[1].split() == ["cpu", "3.8", "KiB", "192.8", "KiB", "0", "B"]


def test_from_one_token_to_ten_thousand_growths_are_few_and_the_peak_is_one_layer_more():
    """Every tensor that is alive is counted at every allocation."""
    layers, heads, head_dim = 3, 1, 4
    cache = MemOSCache(initial_capacity=256)
    states = random_states(heads=heads, head_dim=head_dim)
    peak = 0
    with torch.no_grad():
        for _ in range(10_000):
            for layer_idx in range(layers):
                cache.update(*states, layer_idx)
                peak = max(peak, cache.memory().allocated_bytes) if layer_idx == 0 else peak
    final = cache.memory().allocated_bytes
    assert cache.stats.growths <= 11
    assert peak <= 1.1 * final
    assert cache.memory().used_bytes == 10_000 * layers * 2 * heads * head_dim * 4


@pytest.mark.slow
def test_the_allocators_peak_while_growing_stays_below_the_final_cache_and_one_layer():
    """As above, but from what the allocator handed out, so that tensors nobody reports are counted too."""
    layers, heads, head_dim = 4, 2, 8
    cache = MemOSCache(initial_capacity=256)
    states = random_states(heads=heads, head_dim=head_dim)
    gc.collect()
    recording = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with recording as profile, torch.no_grad():
        for _ in range(1_000):
            for layer_idx in range(layers):
                cache.update(*states, layer_idx)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    final = cache.memory().allocated_bytes
    assert abs(held - final) < 0.02 * final, "what the allocator still holds is the cache and nothing else"
    assert peak <= 1.1 * final + final / layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_devices_peak_while_growing_stays_below_the_final_cache_and_one_layer():
    layers = 8
    cache = MemOSCache(initial_capacity=256)
    states = [tensor.cuda() for tensor in random_states(heads=8, head_dim=128)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(10_000):
            for layer_idx in range(layers):
                cache.update(*states, layer_idx)
    peak = torch.cuda.max_memory_allocated() - before
    final = cache.memory().allocated_bytes
    assert cache.stats.growths <= 11
    assert cache.stats.growths_by_device == {"cuda:0": cache.stats.growths}
    assert peak <= 1.1 * final + final / layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_growth_does_not_synchronise_the_device():
    cache = MemOSCache(initial_capacity=16)
    states = [tensor.cuda() for tensor in random_states(heads=2, head_dim=64)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for _ in range(200):
                cache.update(*states, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.stats.growths >= 5


def test_twenty_rounds_of_generation_leave_no_bytes_behind():
    model = llama()
    ids = token_ids(1, 8)

    def live_bytes() -> int:
        gc.collect()
        return sum(item.untyped_storage().nbytes() for item in gc.get_objects() if type(item) is torch.Tensor)

    generate(model, ids, MemOSCache(model.config))
    before = live_bytes()
    for _ in range(20):
        generate(model, ids, MemOSCache(model.config))
    assert live_bytes() <= before
