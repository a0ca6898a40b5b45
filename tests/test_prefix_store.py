"""Prefixes that are kept: what comes back goes on as if it had just been computed, or nothing comes back."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    LOSSLESS,
    LOSSY,
    SHAPE,
    dynamic,
    forward,
    generate,
    llama,
    mistral,
    qwen3_next,
    token_ids,
)
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from memos_hf import MemOSCache, OffloadConfig, PrefixStore, PrefixStoreStats, generate_batch
from memos_hf.store import folder, keys, places
from memos_hf.store.keys import HASH_TOKENS

MODELS = [llama, mistral, qwen3_next]
PREFIX = token_ids(1, 50, seed=50)


def prompt(question: int = 0, tokens: int = 9, prefix: torch.Tensor = PREFIX) -> torch.Tensor:
    """A prefix and a question of its own behind it."""
    return torch.cat([prefix, token_ids(1, tokens, seed=1000 + question)], dim=1)


def read(model: Any, ids: torch.Tensor = PREFIX, **options: Any) -> MemOSCache:
    """A cache that holds `ids`."""
    cache = MemOSCache.for_model(model, **options)
    with torch.no_grad():
        forward(model, ids, cache)
    return cache


def put(store: PrefixStore, ids: torch.Tensor = PREFIX, **options: Any) -> MemOSCache:
    cache = read(store.model, ids, **options)
    store.put(ids, cache)
    return cache


def logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return forward(model, ids, cache).logits


def bytes_of(tokens: int, **options: Any) -> int:
    return read(llama(), token_ids(1, tokens), **options).memory().used_bytes


def counts(store: PrefixStore) -> tuple[int, int, int]:
    return store.stats.hits, store.stats.misses, store.stats.tokens_matched


# What comes back


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("where", ["memory", "files"])
def test_what_comes_back_goes_on_as_the_cache_that_was_put(model, where, storage, tmp_path):
    model = model()
    store = PrefixStore(model, tmp_path)
    cache = put(store, **storage)
    if where == "files":
        store = PrefixStore(model, tmp_path, cache_options=storage)
    found, matched = store.get(prompt())
    assert matched == 50
    assert found.get_seq_length() == 50
    close = {"rtol": 1e-3, "atol": 1e-4} if "offload" in storage else {}
    question = prompt()[:, 50:]
    torch.testing.assert_close(logits(model, found, question), logits(model, cache, question), **close)
    assert counts(store) == (1, 0, 50)
    assert store.stats.loads == (where == "files")


@pytest.mark.parametrize("model", MODELS)
def test_generating_behind_a_prefix_gives_the_same_text(model, lossless, tmp_path):
    model = model()
    store = PrefixStore(model, tmp_path, cache_options=lossless)
    put(store, **lossless)
    for question in range(3):
        expected = generate(model, prompt(question), dynamic(model))
        assert torch.equal(store.generate(model, prompt(question), max_new_tokens=12, do_sample=False), expected)
    assert counts(store) == (3, 0, 150)
    restarted = PrefixStore(model, tmp_path)
    output = restarted.generate(model, prompt(), max_new_tokens=12, do_sample=False)
    assert torch.equal(output, generate(model, prompt(), dynamic(model)))
    assert restarted.stats.hits == restarted.stats.loads == 1


@pytest.mark.parametrize("preset", LOSSY)
def test_a_hit_in_a_quantized_mode_is_close_to_a_fresh_run(preset):
    model, options = llama(), LOSSY[preset]
    store = PrefixStore(model, cache_options=options)
    put(store, **options)
    fresh = logits(model, MemOSCache(model.config, **options), prompt())[:, -1].log_softmax(-1)
    found, matched = store.get(prompt())
    assert matched == 50
    hit = logits(model, found, prompt()[:, 50:])[:, -1].log_softmax(-1)
    exact = logits(model, dynamic(model), prompt())[:, -1].log_softmax(-1)
    # What the fresh run reads exactly, its own prompt, the hit reads encoded.
    bound = 0.02 + 1.5 * divergence(
        exact, logits(model, read(model, **options), prompt()[:, 50:])[:, -1].log_softmax(-1)
    )
    assert divergence(fresh, hit) <= bound


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.kl_div(other, one, log_target=True, reduction="batchmean"))


def test_the_longest_common_prefix_counts_down_to_the_token(storage):
    model = llama()
    store = PrefixStore(model)
    put(store, **storage)
    for common in (1, 7, HASH_TOKENS, 31, 33, 49):
        ids = prompt(prefix=PREFIX[:, :common])
        ids[0, common] = (PREFIX[0, common] - 3 + 1) % 98 + 3
        found, matched = store.get(ids)
        assert (matched, found.get_seq_length()) == (common, common)
        if storage in LOSSLESS.values():
            whole = logits(model, dynamic(model), ids)[:, common:]
            torch.testing.assert_close(logits(model, found, ids[:, common:]), whole, rtol=1e-3, atol=1e-4)


def test_of_several_entries_the_one_with_most_in_common_is_taken():
    store = PrefixStore(llama())
    for ids in (PREFIX[:, :20], prompt(1, 30), PREFIX[:, :40], prompt(2, 30)):
        put(store, ids)
    assert store.get(prompt(2, 40))[1] == 80
    assert store.get(prompt(3, 40, PREFIX[:, :45]))[1] == 45
    assert store.get(token_ids(1, 70, seed=9))[1] in (0, 1)


@pytest.mark.parametrize("model", [mistral, qwen3_next])
def test_full_windows_and_recurrent_states_are_found_at_their_own_length_alone(model):
    store = PrefixStore(model())
    for tokens in (20, 40):
        put(store, PREFIX[:, :tokens])
    assert [store.get(PREFIX[:, :tokens])[1] for tokens in (20, 21, 40, 41, 50)] == [0, 20, 20, 40, 40]


def test_a_window_that_is_not_full_can_be_cut():
    store = PrefixStore(mistral(100))
    put(store)
    found, matched = store.get(PREFIX[:, :30])
    assert matched == 29
    expected = logits(mistral(100), dynamic(mistral(100)), PREFIX[:, :30])[:, -1:]
    torch.testing.assert_close(logits(mistral(100), found, PREFIX[:, 29:30]), expected)


@pytest.mark.parametrize("model", MODELS)
def test_at_least_one_token_is_left(model):
    store = PrefixStore(model())
    put(store)
    cropped = 49 if model is llama else 0
    assert store.get(PREFIX)[1] == cropped
    assert store.get(PREFIX[:, :1])[1] == 0
    assert store.get(prompt(tokens=1))[1] == 50


def test_nothing_known_gives_an_empty_cache():
    store = PrefixStore(llama(), cache_options={"quantization": "int8"})
    cache, matched = store.get(PREFIX)
    assert (matched, cache.get_seq_length(), cache.options.quantization.key_bits) == (0, 0, 8)
    assert counts(store) == (0, 1, 0)


def test_ids_may_be_lists_and_one_dimensional_and_go_on_behind_what_is_cached():
    store = PrefixStore(llama())
    cache = MemOSCache.for_model(llama())
    output = generate(llama(), PREFIX, cache, 5)
    store.put(output[0].tolist(), cache)
    assert store.get(output[0].int())[1] == 54
    assert store.get(torch.cat([output, PREFIX], dim=1))[1] == 54


def test_hashes_are_chained_and_depend_on_model_and_storage():
    ids = PREFIX[0].numpy()
    hashes = keys.boundary_hashes("model", "storage", ids)
    assert len(hashes) == 1 + 50 // HASH_TOKENS
    changed = ids.copy()
    changed[HASH_TOKENS] += 1
    other = keys.boundary_hashes("model", "storage", changed)
    assert [one == two for one, two in zip(hashes, other, strict=True)] == [True, True, False, False]
    assert not set(hashes) & set(keys.boundary_hashes("model", "other", ids))
    names = [keys.file_name("a" * 16, "b" * 8, ids[:tokens]) for tokens in range(51)]
    assert len(set(names)) == 51
    assert all(keys.NAME.fullmatch(name) for name in names)


# What is stored does not change


@pytest.mark.parametrize("tokens", [50, 200])
@pytest.mark.parametrize("model", MODELS)
def test_what_the_user_does_with_his_cache_does_not_change_what_is_stored(model, tokens, storage):
    model, prefix = model(), token_ids(1, tokens)
    store = PrefixStore(model)
    cache = put(store, prefix, **storage)
    question = prompt()[:, 50:]
    expected = logits(model, store.get(prompt(prefix=prefix))[0], question)
    before = store.stats.memory_bytes
    logits(model, cache, token_ids(1, 60, seed=3))
    cache.reset()
    logits(model, cache, token_ids(1, 30, seed=4))
    for round_ in range(3):
        found, matched = store.get(prompt(prefix=prefix))
        assert matched == tokens
        torch.testing.assert_close(logits(model, found, question), expected)
        logits(model, found, token_ids(1, 40 + round_, seed=5))
        if model is llama():
            found.crop(-70)
            logits(model, found, token_ids(1, 20, seed=6))
        found.batch_repeat_interleave(3)
        found.release() if round_ == 1 else None
    assert store.stats.memory_bytes == before


def test_a_cache_that_was_handed_out_outlives_the_store():
    store = PrefixStore(llama())
    put(store)
    found, _ = store.get(prompt())
    store.clear()
    del store
    torch.testing.assert_close(
        logits(llama(), found, prompt()[:, 50:]), logits(llama(), dynamic(llama()), prompt())[:, 50:]
    )


# Which model


def other_model(seed: int = 1, **fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | fields)).eval()


@pytest.mark.parametrize("directory", [False, True])
def test_weights_that_are_trained_make_a_miss(directory, tmp_path):
    model = copy.deepcopy(llama())
    store = PrefixStore(model, tmp_path if directory else None)
    put(store)
    assert store.get(prompt())[1] == 50
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    assert store.get(prompt())[1] == 0
    put(store)
    assert store.get(prompt())[1] == 50
    assert len(store) == 2
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.copy_(llama().model.layers[1].self_attn.k_proj.weight)
    assert store.get(prompt())[1] == 50


def test_a_cache_of_the_model_as_it_was_is_refused():
    model = copy.deepcopy(llama())
    cache = read(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="cache: expected one of the model as it is now; weights: 1 of"):
        PrefixStore(model).put(PREFIX, cache)


def test_another_dtype_or_autocast_makes_a_miss(tmp_path):
    put(PrefixStore(llama(), tmp_path))
    half = copy.deepcopy(llama()).bfloat16()
    assert PrefixStore(half, tmp_path).get(prompt())[1] == 0
    store = PrefixStore(llama(), tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert store.get(prompt())[1] == 0
        cache = read(llama())
    store.put(prompt(), read(llama(), prompt()))
    store.put(PREFIX, cache)
    assert store.get(prompt(1))[0].layers[0].values.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert store.get(prompt(1))[0].layers[0].values.dtype == torch.bfloat16


class Lora(torch.nn.Module):
    """A layer with adapters as PEFT has them."""

    adapter_layer_names = ("lora_A",)

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.active_adapters, self.scaling = base, [], {"law": 2.0}
        torch.manual_seed(0)
        self.lora_A = torch.nn.ModuleDict({"law": torch.nn.Linear(base.in_features, base.out_features)})

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base(states) + sum(self.lora_A[name](states) for name in self.active_adapters)


def test_each_adapter_has_prefixes_of_its_own(tmp_path):
    model = copy.deepcopy(llama())
    lora = model.model.layers[0].self_attn.v_proj = Lora(model.model.layers[0].self_attn.v_proj)
    store = PrefixStore(model, tmp_path)
    put(store)
    lora.active_adapters = ["law"]
    assert store.get(prompt())[1] == 0
    put(store, PREFIX[:, :30])
    assert store.get(prompt())[1] == 30
    lora.active_adapters = []
    assert store.get(prompt())[1] == 50
    for adapters in ([], ["law"]):
        lora.active_adapters = adapters
        expected = generate(model, prompt(), dynamic(model))
        assert torch.equal(store.generate(model, prompt(), max_new_tokens=12, do_sample=False), expected)


def test_quantizations_and_block_sizes_are_kept_apart(tmp_path):
    store = PrefixStore(llama(), tmp_path)
    for tokens, name in ((50, "int8"), (30, "int4"), (40, "blocks")):
        put(store, PREFIX[:, :tokens], **(LOSSLESS | LOSSY)[name])
    assert store.get(prompt())[0].options.quantization == LOSSY["int8"]["quantization"]
    assert store.get(prompt(), cache_options=LOSSY["int4"])[1] == 30
    assert PrefixStore(llama(), tmp_path, cache_options=LOSSLESS["blocks"]).get(prompt())[1] == 40
    assert PrefixStore(llama(), tmp_path, cache_options={}).get(prompt())[1] == 0
    assert PrefixStore(llama(), tmp_path, cache_options={"quantization": "int8"}).get(prompt())[1] == 0


def test_options_of_the_store_are_those_of_the_caches_it_hands_out(tmp_path):
    put(PrefixStore(llama(), tmp_path))
    offload = OffloadConfig({"cpu": 100_000})
    store = PrefixStore(llama(), tmp_path, cache_options={"offload": offload, "max_cache_len": 70})
    cache, matched = store.get(prompt())
    assert (matched, cache.options.max_cache_len, cache.options.offload) == (50, 70, offload)
    assert PrefixStore(llama(), tmp_path, cache_options={"max_cache_len": 49}).get(prompt())[1] == 0
    assert len(store) == 1


# Budgets


def test_the_least_recently_used_leaves_memory():
    model = llama()
    store = PrefixStore(model, max_bytes=3 * bytes_of(50))
    prefixes = [token_ids(1, 50, seed=seed) for seed in range(4)]
    for ids in prefixes[:3]:
        put(store, ids)
    assert store.get(prompt(prefix=prefixes[0]))[1] == 50
    put(store, prefixes[3])
    assert [store.get(prompt(prefix=ids))[1] >= 50 for ids in prefixes] == [True, False, True, True]
    put(store, prefixes[2])
    put(store, prefixes[1])
    assert [store.get(prompt(prefix=ids))[1] >= 50 for ids in prefixes] == [False, True, True, True]
    assert (store.stats.evictions, len(store)) == (2, 3)
    assert store.stats.memory_bytes <= store.max_bytes


def test_what_leaves_memory_stays_in_its_file(tmp_path):
    store = PrefixStore(llama(), tmp_path, max_bytes=2 * bytes_of(50), max_disk_bytes="1MB")
    prefixes = [token_ids(1, 50, seed=seed) for seed in range(4)]
    for ids in prefixes:
        put(store, ids)
    assert (store.stats.evictions, len(store)) == (2, 4)
    assert all(store.get(prompt(prefix=ids))[1] == 50 for ids in prefixes)
    assert store.stats.loads == 4
    assert store.stats.memory_bytes <= store.max_bytes


def test_the_least_recently_used_file_is_removed(tmp_path):
    prefixes = [token_ids(1, 50, seed=seed) for seed in range(4)]
    store = PrefixStore(llama(), tmp_path)
    put(store, prefixes[0])
    size = store.stats.disk_bytes
    store = PrefixStore(llama(), tmp_path, max_disk_bytes=3 * size + size // 2)
    for ids in prefixes[1:3]:
        put(store, ids)
    assert PrefixStore(llama(), tmp_path).get(prompt(prefix=prefixes[0]))[1] == 50  # used by another process
    put(store, prefixes[3])
    restarted = PrefixStore(llama(), tmp_path)
    assert [restarted.get(prompt(prefix=ids))[1] >= 50 for ids in prefixes] == [True, False, True, True]
    assert store.stats.disk_evictions == 1
    assert store.stats.disk_bytes <= store.max_disk_bytes


def test_what_is_too_large_is_not_kept_and_drops_nothing(tmp_path, caplog):
    store = PrefixStore(llama(), tmp_path, max_bytes=bytes_of(50) + 10_000)
    put(store)
    put(store, token_ids(1, 200, seed=1))
    assert "is not kept" in caplog.text
    assert store.get(prompt())[1] == 50
    assert len(store) == 1
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    memory_alone = PrefixStore(llama(), max_bytes=100)
    put(memory_alone)
    assert (len(memory_alone), memory_alone.get(prompt())[1]) == (0, 0)


def test_a_file_that_is_too_large_with_its_header_goes_again(tmp_path):
    store = PrefixStore(llama(), tmp_path, max_bytes=bytes_of(50) + 50 * 8)
    put(store)
    assert list(tmp_path.glob("*.safetensors")) == []
    assert store.get(prompt())[1] == 50


def test_a_prefix_is_written_once(tmp_path):
    store = PrefixStore(llama(), tmp_path)
    put(store)
    (path,) = tmp_path.glob("*.safetensors")
    written = path.stat().st_ino
    put(store)
    put(PrefixStore(llama(), tmp_path))
    assert path.stat().st_ino == written
    path.unlink()
    put(store)
    assert path.exists()


def test_clear_forgets_everything_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    store = PrefixStore(llama(), tmp_path)
    put(store)
    put(PrefixStore(other_model(), tmp_path))
    assert len(store) == 2
    store.clear()
    assert (len(store), store.get(prompt())[1]) == (0, 0)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["notes.txt"]
    put(store)
    assert store.get(prompt())[1] == 50


def test_stats_are_a_snapshot_and_the_repr_says_it_all(tmp_path):
    store = PrefixStore(llama(), tmp_path)
    empty = store.stats
    put(store)
    store.get(prompt())
    store.get(token_ids(1, 3, seed=77))
    assert empty == PrefixStoreStats()
    assert store.stats == PrefixStoreStats(
        hits=store.stats.hits,
        misses=2 - store.stats.hits,
        tokens_matched=store.stats.tokens_matched,
        entries=1,
        memory_bytes=bytes_of(50),
        disk_bytes=next(tmp_path.glob("*.safetensors")).stat().st_size,
    )
    for part in ("LlamaForCausalLM", "1 prefixes", "of 4.00 GiB in memory", str(tmp_path), "hits"):
        assert part in repr(store)
    assert PrefixStore(llama())


# Files


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "renamed", "pickle", "header"])
def test_a_damaged_file_is_dropped_and_counts_as_a_miss(damage, tmp_path, caplog):
    put(PrefixStore(llama(), tmp_path))
    (path,) = tmp_path.glob("*.safetensors")
    whole = bytearray(path.read_bytes())
    if damage == "flipped":
        whole[-2000] ^= 1
    elif damage == "header":
        whole[300] ^= 1
    elif damage == "renamed":
        path = path.rename(path.with_name(path.name.replace(path.name[40:44], "0000")))
    path.write_bytes({"cut": whole[:-100], "empty": b"", "pickle": b"\x80\x04K\x01."}.get(damage, whole))
    store = PrefixStore(llama(), tmp_path)
    assert store.get(prompt())[1] == 0
    assert counts(store) == (0, 1, 0)
    assert "dropped" in caplog.text
    assert not path.exists()
    put(store)
    assert PrefixStore(llama(), tmp_path).get(prompt())[1] == 50


def test_behind_a_damaged_file_the_next_best_is_found(tmp_path):
    store = PrefixStore(llama(), tmp_path)
    put(store, PREFIX[:, :30])
    kept = set(tmp_path.glob("*.safetensors"))
    put(store)
    (path,) = set(tmp_path.glob("*.safetensors")) - kept
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))
    restarted = PrefixStore(llama(), tmp_path)
    assert restarted.get(prompt())[1] == 30
    assert counts(restarted) == (1, 0, 30)


def test_a_file_that_another_process_removed_is_a_miss(tmp_path):
    put(PrefixStore(llama(), tmp_path))
    store, restarted = PrefixStore(llama(), tmp_path), PrefixStore(llama(), tmp_path)
    store.get(prompt())
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert restarted.get(prompt())[1] == 0
    assert store.get(prompt())[1] == 50  # in memory still


def test_a_file_that_is_removed_between_look_up_and_reading_is_a_miss(tmp_path, monkeypatch, caplog):
    store = PrefixStore(llama(), tmp_path)
    put(store)
    restarted = PrefixStore(llama(), tmp_path)
    load = MemOSCache.load

    def removed_before(path: Path, *arguments: Any, **options: Any) -> MemOSCache:
        path.unlink()
        return load(path, *arguments, **options)

    monkeypatch.setattr(MemOSCache, "load", removed_before)
    assert restarted.get(prompt())[1] == 0
    assert caplog.text == ""


def test_half_written_and_foreign_files_are_ignored(tmp_path):
    put(PrefixStore(llama(), tmp_path))
    (tmp_path / f".0123{places.UNFINISHED}").write_bytes(b"half")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    store = PrefixStore(llama(), tmp_path)
    assert len(store) == 1
    assert store.get(prompt())[1] == 50
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / f".0123{places.UNFINISHED}").exists()


def test_a_full_disk_is_said_and_what_is_in_memory_stays(tmp_path, monkeypatch, caplog):
    store = PrefixStore(llama(), tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemOSCache, "save", full)
    with pytest.raises(OSError, match="No space left"):
        put(store)
    assert store.get(prompt())[1] == 50
    expected = generate(llama(), PREFIX.flip(1), dynamic(llama()))
    assert torch.equal(store.generate(llama(), PREFIX.flip(1), max_new_tokens=12, do_sample=False), expected)
    assert "could not be written" in caplog.text
    monkeypatch.undo()
    put(store)
    assert store.stats.disk_bytes > 0


def test_urls_are_shared_and_only_ids_are_read_until_there_is_a_hit(monkeypatch):
    url = f"memory://prefixes-{random.random()}"
    first, second = PrefixStore(llama(), url), PrefixStore(llama(), url)
    put(first)
    read_bytes = []
    outline = folder._copy_outline
    monkeypatch.setattr(
        folder, "_copy_outline", lambda file, copy, name: (outline(file, copy, name), read_bytes.append(copy.tell()))
    )
    assert second.get(token_ids(1, 9, seed=4).flip(1))[1] in (0, 1)
    assert len(read_bytes) == 1
    assert second.get(prompt())[1] == 50
    assert counts(second)[0] >= 1
    second.clear()
    assert PrefixStore(llama(), url).get(prompt())[1] == 0


def test_files_behind_a_url_are_evicted_and_dropped_when_damaged(caplog):
    import fsspec

    url = f"memory://prefixes-{random.random()}"
    store = PrefixStore(llama(), url)
    put(store)
    size = store.stats.disk_bytes
    store = PrefixStore(llama(), url, max_disk_bytes=int(2.5 * size))
    prefixes = [token_ids(1, 50, seed=seed) for seed in (1, 2)]
    put(store, prefixes[0])
    assert store.get(prompt())[1] == 50
    put(store, prefixes[1])
    restarted = PrefixStore(llama(), url)
    assert [restarted.get(prompt(prefix=ids))[1] >= 50 for ids in (PREFIX, *prefixes)] == [True, False, True]
    files, root = fsspec.core.url_to_fs(url)
    for entry in files.ls(root, detail=False):
        files.pipe_file(entry, files.cat_file(entry)[:-700])
    assert PrefixStore(llama(), url).get(prompt())[1] == 0
    assert "dropped" in caplog.text
    assert files.ls(root) == []


# Threads and processes


def test_threads_share_a_store(tmp_path):
    model = llama()
    store = PrefixStore(model, tmp_path, max_bytes=3 * bytes_of(70))
    expected = {question: generate(model, prompt(question), dynamic(model)) for question in range(6)}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(8):
                question = chance.randrange(6)
                output = store.generate(model, prompt(question), max_new_tokens=12, do_sample=False)
                assert torch.equal(output, expected[question])
                put(store, token_ids(1, 40, seed=chance.randrange(4)))
                len(store)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.stats.hits + store.stats.misses == 32
    assert store.stats.memory_bytes <= store.max_bytes


def test_a_file_is_read_once_for_threads_that_come_together(tmp_path):
    put(PrefixStore(llama(), tmp_path))
    store = PrefixStore(llama(), tmp_path)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(store.get(prompt())[1])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [50] * 6
    assert store.stats.loads == 1


def put_and_get(directory: Path, seed: int, results: Any) -> None:
    """What one of several processes does; ends with an error if anything that comes back is wrong."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    store = PrefixStore(llama(), directory, max_disk_bytes="1MB")
    prompts = {name: prompt(prefix=token_ids(1, 50, seed=name)) for name in range(5)}
    expected = {name: logits(llama(), dynamic(llama()), ids)[:, -1] for name, ids in prompts.items()}
    found = 0
    for _ in range(15):
        name = chance.randrange(5)
        cache, matched = store.get(prompts[name])
        if matched >= 50:
            found += 1
        else:
            put(store, prompts[name][:, :50])
        ids = prompts[name][:, matched:]
        torch.testing.assert_close(logits(llama(), cache, ids)[:, -1], expected[name], rtol=1e-3, atol=1e-4)
    results.put((found, store.stats.misses))


def test_four_processes_at_once_use_what_the_others_have_put(tmp_path):
    llama()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=put_and_get, args=(tmp_path, seed, results)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    found = [results.get(timeout=10) for _ in workers]
    # Each of the five is computed once, or by several who began at the same time.
    assert sum(hits for hits, _ in found) >= 40
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_a_process_finds_what_another_has_just_put(tmp_path):
    store = PrefixStore(llama(), tmp_path)
    assert store.get(prompt())[1] == 0

    def other() -> None:
        put(PrefixStore(llama(), tmp_path))

    worker = multiprocessing.get_context("fork").Process(target=other)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert store.get(prompt())[1] == 50


def put_for_ever(directory: Path, seed: int) -> None:
    torch.set_num_threads(1)
    store = PrefixStore(llama(), directory, max_disk_bytes=400_000)
    for step in range(10_000):
        put(store, token_ids(1, 60, seed=seed * 10_000 + step))


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_store_survives_kill_at_any_moment(rounds, tmp_path):
    llama()
    chance = random.Random(rounds)
    for round_ in range(rounds):
        worker = multiprocessing.get_context("fork").Process(target=put_for_ever, args=(tmp_path, round_))
        worker.start()
        time.sleep(chance.uniform(0.05, 0.6))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        store = PrefixStore(llama(), tmp_path)
        names = list(tmp_path.glob("*.safetensors"))
        for step in range(len(names)):
            cache, matched = store.get(prompt(prefix=token_ids(1, 60, seed=round_ * 10_000 + step)))
            if matched >= 60:
                ids = prompt(prefix=token_ids(1, 60, seed=round_ * 10_000 + step))
                expected = logits(llama(), dynamic(llama()), ids)[:, 60:]
                torch.testing.assert_close(logits(llama(), cache, ids[:, 60:]), expected, rtol=1e-3, atol=1e-4)
        assert len(list(tmp_path.glob("*.safetensors"))) == len(names), "no file was damaged"
        assert not list(tmp_path.glob(f".*{places.UNFINISHED}"))
        assert sum(path.stat().st_size for path in names) <= 400_000
    assert names


# store.generate


def test_generate_keeps_the_prompt_and_finds_it_again(storage):
    for model in (llama(), mistral(), qwen3_next()):
        store = PrefixStore(model, cache_options=storage)
        first = store.generate(model, PREFIX, max_new_tokens=5, do_sample=False)
        assert store.get(PREFIX)[1] == 49
        again = store.generate(model, PREFIX, max_new_tokens=5, do_sample=False)
        turn = store.generate(model, torch.cat([first, PREFIX], dim=1), max_new_tokens=5, do_sample=False)
        assert counts(store)[:2] == (3, 1)
        assert again.shape == first.shape
        assert turn.shape[1] == 110
        if storage in LOSSLESS.values():
            assert torch.equal(first, again)
            # Without a mask generate takes a generated 0, the id of padding, for padding.
            everything = torch.ones_like(turn[:, :105])
            expected = generate(model, turn[:, :105], dynamic(model), 5, attention_mask=everything)
            assert torch.equal(turn, expected)


def test_a_question_behind_a_long_prefix_is_not_kept():
    store = PrefixStore(llama())
    put(store, token_ids(1, 200))
    store.generate(llama(), prompt(prefix=token_ids(1, 200)), max_new_tokens=3)
    assert len(store) == 1
    store.generate(llama(), prompt(tokens=20, prefix=token_ids(1, 200)), max_new_tokens=3)
    assert len(store) == 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 3}, {"num_beams": 1}], ids=str
)
def test_beams_go_on_from_a_prefix(model, options):
    model = model()
    store = PrefixStore(model)
    for question in (0, 1, 0):
        expected = generate(model, prompt(question), dynamic(model), **options)
        assert torch.equal(
            store.generate(model, prompt(question), max_new_tokens=12, do_sample=False, **options), expected
        )
    assert store.stats.hits >= (2 if model is llama() else 1)


def test_several_samples_of_a_prompt_are_those_without_the_store():
    store = PrefixStore(llama())
    put(store)
    sampled = []
    for run in (llama().generate, lambda ids, **kwargs: store.generate(llama(), ids, **kwargs)):
        torch.manual_seed(0)
        sampled.append(run(prompt(), do_sample=True, num_return_sequences=4, max_new_tokens=10))
    assert torch.equal(*sampled)
    config = GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=3)
    assert store.generate(llama(), prompt(), generation_config=config).shape == (2, 62)


def test_generate_returns_what_generate_returns():
    store = PrefixStore(llama())
    mask = torch.ones_like(PREFIX)
    output = store.generate(
        llama(), PREFIX, attention_mask=mask, return_dict_in_generate=True, output_logits=True, max_new_tokens=3
    )
    assert len(output.logits) == 3
    assert store.generate(llama(), PREFIX[:, :1], max_new_tokens=3).shape == (1, 4)


def test_generate_takes_the_fingerprint_of_the_model_it_is_given():
    store = PrefixStore(llama())
    put(store)
    other = other_model()
    output = store.generate(other, prompt(), max_new_tokens=12, do_sample=False)
    assert torch.equal(output, generate(other, prompt(), dynamic(other)))
    assert counts(store) == (0, 1, 0)
    output = store.generate(copy.deepcopy(llama()), prompt(), max_new_tokens=12, do_sample=False)
    assert torch.equal(output, generate(llama(), prompt(), dynamic(llama())))
    assert counts(store)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pixel_values": torch.zeros(1, 3, 2, 2)}, "pixel_values: expected token ids alone"),
        ({"image_features": [torch.zeros(2)]}, "image_features: expected token ids alone"),
        ({"inputs_embeds": torch.zeros(1, 50, 64)}, "inputs_embeds: not an argument .*found by their token ids"),
        ({"past_key_values": 1}, "past_key_values: not an argument .*says which cache"),
        ({"cache": 1}, "cache: not an argument"),
        ({"use_cache": False}, "use_cache: expected True"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: .*computes cached tokens again"),
        ({"generation_config": GenerationConfig(prefill_chunk_size=4)}, "prefill_chunk_size: not an argument"),
        ({"adapter_names": ["law"]}, "adapter_names: .*keys and values depend on it"),
        ({"attention_mask": torch.tensor([[0] + [1] * 49])}, "attention_mask: expected ones .* with 1 other than 1"),
        ({"attention_mask": torch.ones(1, 49)}, r"attention_mask: expected ones for all 50 tokens.*\(1, 49\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_token_ids_do_not_say_is_refused(arguments, expected):
    store = PrefixStore(llama())
    with pytest.raises(ValueError, match=expected):
        store.generate(llama(), PREFIX, **arguments)
    assert store.stats == PrefixStoreStats()


@pytest.mark.parametrize(
    ("ids", "error", "expected"),
    [
        (token_ids(2, 50), ValueError, "input_ids: expected one row, .* got 2"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "input_ids: expected at least one token"),
        ([], ValueError, "input_ids: expected at least one token"),
        (torch.zeros(1, 1, 50, dtype=torch.long), ValueError, r"expected \[1, tokens\] or \[tokens\]"),
        (torch.zeros(1, 50), TypeError, "input_ids: expected a tensor or a list of ints, got torch.float32"),
        (torch.ones(50, dtype=torch.bool), TypeError, "got torch.bool"),
        ("fifty", TypeError, "got str"),
        (["fifty"], TypeError, "got a list of something else"),
        ([1.5], TypeError, "got torch.float32"),
        (None, TypeError, "got NoneType"),
    ],
    ids=str,
)
def test_wrong_ids_are_refused(ids, error, expected):
    store = PrefixStore(llama())
    for call in (store.get, lambda ids: store.put(ids, read(llama())), lambda ids: store.generate(llama(), ids)):
        with pytest.raises(error, match=expected):
            call(ids)
    assert store.stats == PrefixStoreStats()


@pytest.mark.parametrize(
    ("cache", "error", "expected"),
    [
        (lambda: dynamic(llama()), TypeError, "expected a MemOSCache, got DynamicCache; MemOSCache.from_cache"),
        (lambda: None, TypeError, "expected a MemOSCache, got NoneType"),
        (lambda: MemOSCache(llama().config), ValueError, "expected one that holds tokens, got an empty one"),
        (lambda: MemOSCache(llama().config, static=True, max_cache_len=60), ValueError, "got a static one"),
        (lambda: read(llama(), token_ids(1, 60)), ValueError, "input_ids: expected at least the 60 tokens"),
        (lambda: read(llama(), token_ids(2, 50)), ValueError, "input_ids: expected 2 rows, as the cache has, got 1"),
        (lambda: read(mistral()), ValueError, "cache: expected one of the model as it is now; config, model_type"),
    ],
    ids=["DynamicCache", "none", "empty", "static", "longer", "rows", "model"],
)
def test_caches_that_cannot_be_kept_are_refused(cache, error, expected, tmp_path):
    store = PrefixStore(llama(), tmp_path)
    with pytest.raises(error, match=expected):
        store.put(PREFIX, cache())
    assert len(store) == 0


def test_a_released_cache_is_refused():
    cache = read(llama())
    cache.release()
    with pytest.raises((RuntimeError, ValueError)):
        PrefixStore(llama()).put(PREFIX, cache)


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"model": "llama"}, TypeError, "model: expected a transformers model, got str"),
        ({"max_bytes": "much"}, ValueError, "max_bytes: expected bytes or a size such as '4GiB', got 'much'"),
        ({"max_bytes": 0}, ValueError, "max_bytes: expected"),
        ({"max_bytes": True}, ValueError, "max_bytes: expected"),
        ({"max_disk_bytes": -1}, ValueError, "max_disk_bytes: expected"),
        ({"cache_options": "int8"}, TypeError, "cache_options: expected a mapping, got str"),
        ({"cache_options": {"static": True, "max_cache_len": 9}}, ValueError, "cache_options: static"),
        ({"cache_options": {"quantization": "int9"}}, ValueError, "quantization"),
        ({"directory": 3}, TypeError, "directory: expected a path or a URL, got int"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments, error, expected):
    with pytest.raises(error, match=expected):
        PrefixStore(**{"model": llama(), **arguments})


def test_a_directory_is_made_and_a_file_in_its_place_is_an_error(tmp_path):
    put(PrefixStore(llama(), tmp_path / "new" / "prefixes"))
    assert PrefixStore(llama(), str(tmp_path / "new" / "prefixes")).get(prompt())[1] == 50
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        PrefixStore(llama(), tmp_path / "file")


def test_inference_mode_does_not_matter(tmp_path):
    for model in (llama(), qwen3_next()):
        store = PrefixStore(model, tmp_path)
        with torch.inference_mode():
            put(store)
            assert store.get(prompt())[1] == 50
        for each in (store, PrefixStore(model, tmp_path)):
            found, _ = each.get(prompt())
            whole = logits(model, dynamic(model), prompt())[:, 50:]
            torch.testing.assert_close(logits(model, found, prompt()[:, 50:]), whole, rtol=1e-3, atol=2e-4)


# generate_batch


class Letters:
    """As much of a tokenizer as token ids need."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> Any:
        raise AssertionError("token ids need no tokenizer")

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("options", [{}, LOSSLESS["blocks"]], ids=["buffers", "blocks"])
def test_batches_look_their_prefix_up_and_keep_it(model, options, tmp_path):
    model = model()
    store = PrefixStore(model, tmp_path, cache_options=options)
    prefix = token_ids(1, 150, seed=7)
    prompts = [prompt(question, 9, prefix)[0].tolist() for question in range(4)]
    alone = generate_batch(model, Letters(), prompts, max_new_tokens=6, do_sample=False, progress=False)
    for round_ in range(2):
        outputs = generate_batch(
            model, Letters(), prompts, max_new_tokens=6, do_sample=False, progress=False, prefix_store=store
        )
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
        assert counts(store)[:2] == (round_, 1)
    assert store.stats.tokens_matched == 150
    assert PrefixStore(model, tmp_path).get(prompt(9, 9, prefix))[1] == 150


def test_batches_refuse_the_store_of_another_model():
    for store, error in ((PrefixStore(other_model()), ValueError), ("store", TypeError)):
        with pytest.raises(error, match="prefix_store: expected"):
            generate_batch(llama(), Letters(), [[5, 6]], prefix_store=store, progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_moves_finds_its_prefixes_where_it_is(model, storage, tmp_path):
    model = copy.deepcopy(model())
    store = PrefixStore(model, tmp_path)
    put(store, **storage)
    model.cuda()
    found, matched = store.get(prompt().cuda())
    assert matched == 50
    assert next(iter(found.memory().by_device)) == "cuda:0"
    assert logits(model, found, prompt()[:, 50:].cuda()).is_cuda


def test_drafts_that_the_models_own_config_asks_for_are_refused():
    model = copy.deepcopy(llama())
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: set in model"):
        PrefixStore(model).generate(model, token_ids(1, 24), max_new_tokens=4, do_sample=False)
