"""Caches in files: what is loaded goes on as if it had never been saved, and what is damaged is refused."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, Subject
from safetensors.torch import load_file, save_file
from test_architectures import ARCHITECTURES, built_and_run
from test_families import WITHOUT_CUDA, by_name, subject
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
    random_states,
    token_ids,
)
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache

from memos_hf import KVQuantizationConfig, MemOSCache, OffloadConfig
from memos_hf.__main__ import main
from memos_hf.layers import BlockLayer
from memos_hf.layers.upstream import adapted
from memos_hf.store import CacheFileError, Fingerprint, describe, load_input_ids, places, tensors

SHORT_BLOCKS = LOSSY["int4"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def filled(model: Any, tokens: int = 40, rows: int = 2, **options: Any) -> MemOSCache:
    """A cache that has seen a prompt and some single tokens, so that blocks are sealed."""
    cache = MemOSCache.for_model(model, **options)
    with torch.no_grad():
        for ids in (token_ids(rows, tokens - 2), token_ids(rows, 1), token_ids(rows, 1)):
            forward(model, ids, cache)
    return cache


def goes_on(model: Any, cache: Any, rows: int = 2) -> list[torch.Tensor]:
    """Logits of tokens that come one at a time and several at once."""
    with torch.no_grad():
        return [forward(model, token_ids(rows, n, seed=n), cache).logits for n in (1, 5, 1, 30, 1)]


def assert_same_state(ours: MemOSCache, theirs: MemOSCache) -> None:
    """Bit for bit, encoded blocks included."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        states = [adapted(layer).state() for layer in (mine, other)]
        assert states[0].kind == states[1].kind
        assert states[0].numbers == states[1].numbers
        assert states[0].tensors.keys() == states[1].tensors.keys()
        for name, tensor in states[0].tensors.items():
            assert same_bytes(tensor, states[1].tensors[name]), name


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def assert_goes_on_alike(model: Any, cache: MemOSCache, path: Path, rows: int = 2) -> MemOSCache:
    cache.save(path)
    loaded = MemOSCache.load(path, model, offload=cache.options.offload)
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert loaded.is_initialized
    assert_same_state(loaded, cache)
    # Parts are added up that may differ: of what is on the device, and of what rows have in common. It tips few codes.
    in_parts = cache.options.offload or any(
        isinstance(layer, BlockLayer) and layer.buffer.common_tokens for layer in cache.layers
    )
    close = {"rtol": 1e-3, "atol": 5e-3} if in_parts else {}
    torch.testing.assert_close(goes_on(model, loaded, rows), goes_on(model, cache, rows), **close)
    assert_same_state(loaded, cache) if cache.options.quantization is None and not close else None
    return loaded


@pytest.mark.parametrize("model", [llama, mistral, qwen3_next])
def test_what_is_loaded_goes_on_as_if_it_had_never_been_saved(model, storage, path):
    assert_goes_on_alike(model(), filled(model(), **storage), path)


@pytest.mark.parametrize("preset", LOSSY)
def test_long_windows_keep_their_blocks(preset, path):
    model = mistral(40)
    cache = filled(model, 70, **LOSSY[preset])
    assert isinstance(cache.layers[0], BlockLayer)
    assert cache.layers[0].sealed_tokens
    assert_goes_on_alike(model, cache, path)


@pytest.mark.parametrize("options", [{}, SHORT_BLOCKS], ids=["buffers", "int4"])
@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
def test_every_family_gives_the_same_text_after_it(family, options, tmp_path):
    model = subject(family, "cpu")
    cache = model.memos_cache(**options)
    ids = model.prompt(2, 21)
    ids = torch.cat([ids, model.generate(cache, ids)[:, 21:]], dim=1)
    loaded = saved_and_loaded(model, cache, tmp_path)
    assert families.lengths(loaded) == families.lengths(cache)
    assert torch.equal(model.generate(loaded, ids), model.generate(cache, ids))


def saved_and_loaded(model: Subject, cache: Any, folder: Path) -> Any:
    if not model.is_encoder_decoder:
        cache.save(folder / "cache", model=model.model)
        return MemOSCache.load(folder / "cache", model.model)
    parts = []
    for name in ("self", "cross"):
        getattr(cache, f"{name}_attention_cache").save(folder / name, model=model.model)
        parts.append(MemOSCache.load(folder / name, model.model))
    return EncoderDecoderCache(*parts)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_architecture_gives_the_same_text_after_it(architecture, tmp_path):
    try:
        model = Subject(built_and_run(architecture))
    except Exception as error:
        pytest.skip(f"cannot run here: {type(error).__name__}: {error}")
    cache = model.memos_cache()
    # Some models' own config says that no cache is used.
    ids = model.generate(cache, model.prompt(2, 13), max_new_tokens=30, use_cache=True)
    loaded = saved_and_loaded(model, cache, tmp_path)
    # A copy, as some models keep something of what they have seen.
    twin = Subject(copy.deepcopy(model.model))
    texts = [
        each.generate(held, ids, max_new_tokens=30, use_cache=True) for each, held in ((twin, loaded), (model, cache))
    ]
    assert torch.equal(*texts)


@pytest.mark.gpu
@WITHOUT_CUDA
@pytest.mark.parametrize("model", [llama, mistral, qwen3_next])
def test_layers_are_loaded_onto_the_gpu_of_the_model(model, storage, path):
    model = copy.deepcopy(model()).cuda()
    cache = MemOSCache.for_model(model, **storage)
    ids = generate(model, token_ids(2, 40).cuda(), cache)
    cache.save(path, input_ids=ids)
    loaded = MemOSCache.load(path, model)
    assert_same_state(loaded, cache)
    assert list(loaded.memory().by_device) == ["cuda:0"]
    assert torch.equal(generate(model, ids, loaded), generate(model, ids, cache))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_hold_nothing_after_it(name, tmp_path):
    (family,) = (family for family in FAMILIES if family.name == name)
    model = subject(family, "cpu")
    cache = model.memos_cache()
    model.forward(cache, model.prompt(1, 9))
    loaded = saved_and_loaded(model, cache, tmp_path)
    held = [[layer.keys is not None for layer in each.layers] for each in (loaded, cache)]
    assert held[0] == held[1]


@pytest.mark.parametrize(
    "options", [{}, {"initial_capacity": 9000}, {"quantization": "int8"}, {"quantization": "int2"}], ids=str
)
def test_a_file_is_as_large_as_what_is_valid(options, path):
    cache = MemOSCache(llama().config, **options)
    for tokens in (3000, 1):
        for layer_idx in range(3):
            cache.update(*random_states(heads=3, tokens=tokens, head_dim=64), layer_idx)
    cache.save(path)
    assert path.stat().st_size <= 1.02 * cache.memory().used_bytes


def test_a_block_that_many_rows_hold_is_saved_once_and_shared_again(path):
    model = llama()
    cache = filled(model, 41, rows=1, **SHORT_BLOCKS)
    cache.save(path)
    alone = path.stat().st_size
    cache.batch_repeat_interleave(6)
    loaded = assert_goes_on_alike(model, cache, path, rows=6)
    assert path.stat().st_size < 4 * alone
    layer = MemOSCache.load(path, model).layers[0]
    assert layer._pool.used == len(layer._table[0])
    layer.batch_select_indices([1])
    assert layer._pool.used == len(layer._table[0])
    loaded.reset()
    assert loaded.layers[0]._pool.used == 0


def test_what_a_crop_shortened_stays_short(storage, path):
    cache = filled(llama(), **storage)
    cache.crop(-21)
    loaded = assert_goes_on_alike(llama(), cache, path)
    loaded.crop(-30)
    cache.crop(-30)
    lossless = cache.options.quantization is None and cache.options.offload is None
    assert_same_state(loaded, cache) if lossless else None


def test_padded_rows_keep_their_first_real_tokens(path):
    model, ids = llama(), token_ids(2, 40)
    ids[0, :9] = 0
    mask = (ids != 0).long()
    cache = MemOSCache.for_model(model, **SHORT_BLOCKS)
    with torch.no_grad():
        for end in (30, 39, 40):
            forward(model, ids[:, cache.get_seq_length() : end], cache, attention_mask=mask[:, :end])
    assert cache.layers[0].first_tokens.kept.positions[0, 0] == 9
    assert_goes_on_alike(model, cache, path)


def test_a_window_that_records_its_past_goes_on_recording(storage, path):
    model = mistral()
    cache = filled(model, 20, **storage)
    for layer in cache.layers:
        layer.activate_past_recording()
    with torch.no_grad():
        forward(model, token_ids(2, 5), cache)
    cache.save(path)
    loaded = MemOSCache.load(path, model)
    for each in (cache, loaded):
        each.crop(-3)
    torch.testing.assert_close(goes_on(model, loaded), goes_on(model, cache))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
def test_recorded_convolution_states_are_kept(name, tmp_path):
    (family,) = (family for family in FAMILIES if family.name == name)
    model = subject(family, "cpu")
    cache = model.memos_cache()
    model.forward(cache, model.prompt(2, 9))
    cache.activate_past_recording()
    model.forward(cache, model.prompt(2, 3))
    loaded = saved_and_loaded(model, cache, tmp_path)
    assert_same_state(loaded, cache)
    torch.testing.assert_close(model.forward(loaded, model.prompt(2, 2)), model.forward(cache, model.prompt(2, 2)))


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("tokens", [6, 20])
def test_static_caches(model, tokens, path):
    model = model()
    cache = filled(model, tokens, static=True, max_cache_len=70)
    cache.save(path)
    loaded = MemOSCache.load(path, model)
    assert loaded.options.static
    assert int(loaded.get_seq_length()) == tokens
    theirs = filled_static(model, tokens)
    torch.testing.assert_close(goes_on(model, loaded), goes_on(model, theirs))


def filled_static(model: Any, tokens: int) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=70)
    with torch.no_grad():
        for ids in (token_ids(2, tokens - 2), token_ids(2, 1), token_ids(2, 1)):
            forward(model, ids, cache)
    return cache


def test_a_cache_filled_under_inference_mode_goes_on_without(storage, path):
    for model in (llama(), qwen3_next()):
        cache = MemOSCache(model.config, **storage)
        with torch.inference_mode():
            forward(model, token_ids(1, 30), cache)
            cache.save(path)
            loaded = MemOSCache.load(path, model)
        assert torch.equal(*(generate(model, token_ids(1, 31), each, 5) for each in (loaded, cache)))


def test_what_is_loaded_under_inference_mode_is_written_without(storage, path):
    cache = filled(llama(), 30, **storage)
    cache.crop(-29)
    cache.save(path)
    with torch.inference_mode():
        loaded = MemOSCache.load(path, llama())
    close = {"rtol": 1e-3, "atol": 1e-4} if "offload" in storage else {}
    torch.testing.assert_close(goes_on(llama(), loaded), goes_on(llama(), cache), **close)
    assert not any(tensor.is_inference() for layer in loaded.layers for tensor in layer.held_tensors())


def test_an_empty_or_a_reset_cache_stays_empty(storage, path):
    cache = filled(llama(), **storage)
    cache.reset()
    for each in (cache, MemOSCache.for_model(llama(), batch_size=2, **storage)):
        each.save(path)
        loaded = MemOSCache.load(path, llama())
        assert loaded.get_seq_length() == 0
        assert torch.equal(generate(llama(), token_ids(1, 9), loaded), generate(llama(), token_ids(1, 9), each))


@pytest.mark.parametrize("model", [llama, mistral])
def test_caches_without_a_config(model, path):
    model = model()
    theirs = dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(2, 40), theirs)
    open_ended = MemOSCache((layer.keys, layer.values) for layer in theirs.layers)
    for cache in (MemOSCache.from_cache(theirs), open_ended):
        cache.save(path)
        loaded = MemOSCache.load(path, model)
        assert_same_state(loaded, cache)
        assert loaded.fingerprint.weights
    copied = MemOSCache.from_cache(theirs)
    copied.save(path)
    torch.testing.assert_close(goes_on(model, MemOSCache.load(path, model)), goes_on(model, theirs))


def test_layers_that_the_model_appended_come_back(path):
    cache = filled(llama())
    cache.layers.append(copy.deepcopy(cache.layers[0]))
    cache.save(path)
    assert_same_state(MemOSCache.load(path, llama()), cache)


def test_quantized_later_and_saved(path):
    cache = filled(llama(), block_size=8)
    cache.quantize(KVQuantizationConfig(residual_tokens=0))
    assert_goes_on_alike(llama(), cache, path)


def test_options_of_the_file_rule_and_new_ones_may_be_given(path):
    cache = filled(llama(), growth_factor=2.0, max_cache_len=90)
    cache.save(path)
    assert MemOSCache.load(path, llama()).options == cache.options
    loaded = MemOSCache.load(path, llama(), growth_factor=3, max_cache_len=None, layout="seq_major", quantization=None)
    assert (loaded.options.growth_factor, loaded.options.max_cache_len) == (3, None)
    torch.testing.assert_close(goes_on(llama(), loaded)[0], goes_on(llama(), cache)[0])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quantization": "int8"}, "quantization: expected None, as the cache was saved with, got 'int8'; load it as"),
        ({"block_size": 64}, "block_size: expected 128, as the cache was saved with, got 64"),
        ({"static": True}, "static: expected False"),
        ({"max_cache_len": 39}, "max_cache_len: the cache may hold 39 tokens"),
        ({"growth_factor": 0}, "growth_factor: expected a finite number above 1"),
    ],
)
def test_options_that_the_file_does_not_allow_are_refused(given, expected, path):
    filled(llama()).save(path)
    with pytest.raises(ValueError, match=expected):
        MemOSCache.load(path, llama(), **given)


def other_model(seed: int = 1, **fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | fields)).eval()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: other_model(), "weights: 2[0-9] of 30 parameters"),
        (
            lambda: copy.deepcopy(llama()).bfloat16(),
            "dtype: the cache was .* float32, the model has bfloat16",
        ),
        (lambda: other_model(num_hidden_layers=4), "number of layers: the cache was computed with 3, the model has 4"),
        (lambda: other_model(num_key_value_heads=4), "number of key-value heads: the cache was .* 2, the model has 4"),
        (lambda: other_model(rms_norm_eps=1e-3), "config, rms_norm_eps: the cache was"),
        (lambda: mistral(), "model_type: the cache was computed with llama, the model has mistral"),
    ],
    ids=["weights", "dtype", "layers", "heads", "config", "type"],
)
def test_another_model_is_refused_and_what_differs_is_named(model, expected, path):
    filled(llama()).save(path)
    with pytest.raises(CacheFileError, match=expected):
        MemOSCache.load(path, model())
    assert MemOSCache.load(path, copy.deepcopy(llama())).get_seq_length() == 40


def test_a_cache_made_from_a_config_knows_its_model_only_if_it_is_told(path):
    cache = MemOSCache(llama().config)
    with torch.no_grad():
        forward(llama(), token_ids(1, 9), cache)
    cache.save(path)
    assert MemOSCache.load(path, other_model()).get_seq_length() == 9
    with pytest.raises(CacheFileError, match="number of layers"):
        MemOSCache.load(path, other_model(num_hidden_layers=4))
    with pytest.raises(CacheFileError, match="dtype: the cache was computed with float32"):
        MemOSCache.load(path, copy.deepcopy(llama()).half())
    cache.save(path, model=llama())
    with pytest.raises(CacheFileError, match="weights"):
        MemOSCache.load(path, other_model())


def test_without_a_config_the_number_of_layers_is_compared(path):
    theirs = dynamic(llama())
    with torch.no_grad():
        forward(llama(), token_ids(1, 9), theirs)
    MemOSCache.from_cache(theirs).save(path)
    with pytest.raises(CacheFileError, match="number of layers: the cache has 3, the model 4"):
        MemOSCache.load(path, other_model(num_hidden_layers=4))


def test_another_format_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(tensors, "FORMAT_VERSION", 2)
    filled(llama()).save(path)
    monkeypatch.undo()
    with pytest.raises(CacheFileError, match="format version: expected 1, got 2"):
        MemOSCache.load(path, llama())


def test_any_safetensors_reader_can_read_it(path):
    cache = filled(llama())
    cache.save(path)
    read = load_file(path)
    assert torch.equal(read["0.keys"], cache.layers[0].keys)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(CacheFileError, match="a safetensors file of something else"):
        MemOSCache.load(path, llama())


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 5, "torch"])
def test_a_pickle_is_refused_and_nothing_in_it_runs(protocol, path):
    marker = path.with_name("ran")
    if protocol == "torch":
        torch.save({"keys": Trap(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Trap(marker), protocol))
    for refused in (lambda: MemOSCache.load(path, llama()), lambda: describe(path), lambda: load_input_ids(path)):
        with pytest.raises(CacheFileError, match="expected a saved cache"):
            refused()
    assert not marker.exists()


@pytest.mark.parametrize("options", [{}, SHORT_BLOCKS], ids=["buffers", "int4"])
def test_a_file_that_is_cut_off_anywhere_is_refused(options, path):
    filled(llama(), rows=1, **options).save(path)
    whole = path.read_bytes()
    offsets = {0, 1, 7, 8, 9, len(whole) - 1, *range(0, len(whole), len(whole) // 60)}
    for offset in offsets:
        path.write_bytes(whole[:offset])
        with pytest.raises(CacheFileError):
            MemOSCache.load(path, llama())
    path.write_bytes(whole + b"\0")
    with pytest.raises(CacheFileError):
        MemOSCache.load(path, llama())


@pytest.mark.parametrize("options", [{}, SHORT_BLOCKS], ids=["buffers", "int4"])
def test_a_flipped_byte_is_found_wherever_it_is(options, path):
    filled(llama(), rows=1, **options).save(path, input_ids=token_ids(1, 40))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    offsets = [*range(16), *chance.sample(range(header), 150), *chance.sample(range(header, len(whole) - 400), 80)]
    for offset in offsets:
        flipped = bytearray(whole)
        flipped[offset] ^= chance.choice((1, 2, 4, 32, 128, 255))
        path.write_bytes(flipped)
        with pytest.raises(CacheFileError):
            MemOSCache.load(path, llama())


def test_the_checksums_of_tensors_can_be_left_out(path):
    cache = filled(llama())
    cache.save(path)
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    assert MemOSCache.load(path, llama(), verify=False).get_seq_length() == 40
    with pytest.raises(CacheFileError, match=r"damaged: tensor 2\.values"):
        MemOSCache.load(path, llama())


def test_what_a_file_says_is_checked_before_anything_is_built(path, monkeypatch):
    """Even where all checksums are right: a file may be made by anybody."""
    cache = filled(llama(), **SHORT_BLOCKS)
    state = BlockLayer.state
    for change in (
        {"table": [[0, 0, 0, 0], [0, 0, 0, 0]]},
        {"table": [[-1] * 4, [0] * 4]},
        {"table": None},
        {"entry_tokens": [8, 8, 8, 9]},
        {"entry_tokens": [True, 8, 8, 8]},
        {"padding_noted": 3},
    ):
        monkeypatch.setattr(BlockLayer, "state", lambda self, change=change: changed(state(self), change))
        cache.save(path)
        monkeypatch.setattr(tensors.TensorFile, "read", lambda *_, **__: pytest.fail("read"))
        with pytest.raises(CacheFileError, match="layer 0: " + next(iter(change))):
            MemOSCache.load(path, llama())
        monkeypatch.undo()


def changed(state: Any, numbers: dict[str, Any]) -> Any:
    state.numbers.update(numbers)
    return state


def test_a_missing_file_or_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        MemOSCache.load(tmp_path / "none", llama())
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        filled(llama()).save(tmp_path / "none" / "cache")
    with pytest.raises(IsADirectoryError):
        filled(llama()).save(tmp_path)
    with pytest.raises(TypeError, match="model: expected a transformers model, got dict"):
        MemOSCache.load(tmp_path / "none", {})


def test_a_smaller_cache_replaces_a_larger_one(path):
    filled(llama(), 300).save(path)
    large = path.stat().st_size
    filled(llama(), 10).save(path)
    assert path.stat().st_size < large / 10
    assert MemOSCache.load(path, llama()).get_seq_length() == 10


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    cache = filled(llama())
    cache.save(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        filled(llama(), 50).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_what_a_killed_process_left_is_removed_at_the_next_save_but_not_what_a_running_one_writes(path):
    abandoned = path.with_name(f".1234{places.UNFINISHED}")
    abandoned.write_bytes(b"half")
    with places.writing(path.with_name("other")) as file:
        file.write(b"being written")
        filled(llama()).save(path)
        assert not abandoned.exists()
    assert sorted(os.listdir(path.parent)) == [path.name, "other"]


def test_a_link_is_followed(path):
    path.with_name("real").write_bytes(b"")
    path.symlink_to("real")
    filled(llama()).save(path)
    assert path.is_symlink()
    assert path.with_name("real").stat().st_size > 0


def save_for_ever(path: Path) -> None:
    caches = [filled(llama(), tokens) for tokens in (20, 400)]
    while True:
        for cache in caches:
            cache.save(path)


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_process_killed_while_saving_leaves_the_old_file_or_the_new_one(rounds, path):
    llama()
    filled(llama(), 20).save(path)
    chance, lengths, orphans = random.Random(rounds), [], 0
    for _ in range(rounds):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:  # until it has begun to save
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        orphans += len(os.listdir(path.parent)) - 1
        lengths.append(MemOSCache.load(path, llama()).get_seq_length())
    assert set(lengths) <= {20, 400}
    filled(llama(), 20).save(path)
    assert os.listdir(path.parent) == [path.name]
    if rounds == 50:
        assert set(lengths) == {20, 400}
        assert orphans > 0


def test_urls_are_read_and_written_through_fsspec(storage, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = filled(llama(), **storage)
    cache.save("memory://caches/one.safetensors", input_ids=token_ids(2, 40))
    loaded = MemOSCache.load("memory://caches/one.safetensors", llama())
    assert_same_state(loaded, cache)
    assert torch.equal(load_input_ids("memory://caches/one.safetensors"), token_ids(2, 40))
    assert describe("memory://caches/one.safetensors")["input_ids"] == [2, 40]
    assert not list(Path(tempfile.gettempdir()).glob(f"*{places.UNFINISHED}"))
    files = fsspec.filesystem("memory")
    assert files.ls("/caches", detail=False) == ["/caches/one.safetensors"]
    with pytest.raises(FileNotFoundError):
        MemOSCache.load("memory://caches/none", llama())


def test_a_url_without_fsspec_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(ImportError, match="pip install fsspec"):
        filled(llama()).save("s3://bucket/cache")


def test_a_file_url_is_a_path(path):
    filled(llama()).save(f"file://{path}")
    assert MemOSCache.load(f"file://{path}", llama()).get_seq_length() == 40


def test_token_ids_go_with_the_cache(path):
    ids = token_ids(2, 12)
    cache = MemOSCache.for_model(llama())
    output = generate(llama(), ids, cache, 5)
    cache.save(path, input_ids=output)
    assert torch.equal(load_input_ids(path), output[:, :16])
    cache.save(path)
    assert load_input_ids(path) is None
    for wrong, expected in ((ids, "at least the 16 tokens"), (output[:1], "2 rows"), (output[None], "batch, tokens")):
        with pytest.raises(ValueError, match=f"input_ids: expected .*{expected}"):
            cache.save(path, input_ids=wrong)
    with pytest.raises(TypeError, match="input_ids: expected a tensor of ints, got list"):
        cache.save(path, input_ids=[1])


def test_inspect_prints_what_is_in_a_file(path, capsys):
    filled(qwen3_next(), **SHORT_BLOCKS).save(path, input_ids=token_ids(2, 40))
    main(["inspect", str(path)])
    printed = capsys.readouterr().out
    for word in ("LinearAttentionLayer", "BlockLayer", "int4 channel 8 hadamard", "qwen3_next", "2 rows of 40"):
        assert word in printed
    main(["inspect", str(path), "--json"])
    described = json.loads(capsys.readouterr().out)
    assert described == describe(path)
    assert described["file_bytes"] == path.stat().st_size
    assert [row["layers"] for row in described["layers"]] == [2, 1]
    path.write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"inspect: .*expected a saved cache"):
        main(["inspect", str(path)])


def test_lossless_options_are_what_they_were(lossless, path):
    cache = filled(llama(), **lossless)
    cache.save(path)
    assert replace(MemOSCache.load(path, llama()).options, offload=cache.options.offload) == cache.options
    assert lossless in LOSSLESS.values()
    assert isinstance(cache.fingerprint, Fingerprint)
    assert isinstance(MemOSCache.load(path, llama()).to_dynamic(), DynamicCache)


@pytest.mark.parametrize("quantization", [None, LOSSY["int8"]["quantization"]], ids=["exact", "int8"])
@pytest.mark.parametrize("removed", [0, 11])
def test_a_loaded_cache_chooses_among_all_its_blocks(quantization, removed, path):
    model = llama()
    options = {"quantization": quantization, "block_size": 8}
    offload = OffloadConfig({"cpu": "1MB"}, active_blocks=3)
    saved = filled(model, 150, rows=1, offload=offload, **options)
    saved.crop(-removed)
    saved.save(path)
    # Also one that was in memory when it was saved.
    resident = filled(model, 150, rows=1, **options)
    resident.crop(-removed)
    resident.save(path.with_name("resident"))
    loaded = [MemOSCache.load(each, model, offload=offload) for each in (path, path.with_name("resident"))]

    def read(cache):
        stats = cache.stats
        return stats.hits + stats.misses

    with torch.no_grad():
        for step in range(40):  # more blocks are sealed on the way
            before = [read(cache) for cache in (saved, *loaded)]
            for cache in (saved, *loaded):
                forward(model, token_ids(1, 1, seed=step), cache)
            assert {read(cache) - count for cache, count in zip((saved, *loaded), before, strict=True)} == {3 * 3}
    for mine, other in zip(loaded[0].layers, saved.layers, strict=True):
        assert mine._bounds.lowest.shape[1] == len(mine._entry_tokens)
        # The bounds of an encoded block are those of what it decodes to, and of its valid tokens.
        if quantization is not None and removed == 0:
            for bound, exact in zip(mine._bounds.tensors, other._bounds.tensors, strict=True):
                assert (bound - exact).abs().mean() < 0.05
