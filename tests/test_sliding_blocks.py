"""Quantized sliding windows: older tokens of a window in sealed blocks, released when the window has left them."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace

import families
import pytest
import torch
from families import FAMILIES, Family, Subject
from tiny import dynamic, forward, generate, mistral, random_states, token_ids
from transformers.cache_utils import DynamicSlidingWindowLayer

from memos_hf import CacheOptions, KVQuantizationConfig, MemOSCache
from memos_hf.blocks.codecs import BlockCodec
from memos_hf.config import PRESETS
from memos_hf.layers import SlidingBlockLayer, SlidingLayer

LOSSLESS = KVQuantizationConfig("full", "full", residual_tokens=8)
INT8 = KVQuantizationConfig(residual_tokens=8)


def window_layer(window=40, quantization=LOSSLESS, block_size=8, **options):
    return SlidingBlockLayer(
        CacheOptions(quantization=quantization, block_size=block_size, **options), quantization, window
    )


class Walk:
    """One random operation after the other on a layer of ours and on transformers'."""

    def __init__(self, seed, window, residual, block_size):
        self.random = random.Random(seed)
        self.window, self.batch, self.seed = window, self.random.randint(1, 3), 1000 * seed
        quantization = replace(LOSSLESS, residual_tokens=residual)
        self.ours = window_layer(window, quantization, block_size, initial_capacity=self.random.choice([1, 20, 256]))
        self.theirs = DynamicSlidingWindowLayer(sliding_window=window)

    def update(self, tokens):
        self.seed += 1
        states = random_states(self.batch, tokens=tokens, seed=self.seed)
        size, _ = sizes = self.ours.get_mask_sizes(tokens)
        assert sizes == self.theirs.get_mask_sizes(tokens)
        for mine, other in zip(self.ours.update(*states), self.theirs.update(*states), strict=True):
            assert mine.shape[2] == size
            assert torch.equal(mine, other[:, :, -size:])

    def crop(self, tokens):
        tokens = min(tokens, self.ours.get_seq_length())
        remaining = self.ours.get_seq_length() - tokens
        full = self.ours.get_seq_length() >= self.window
        held = self.theirs.keys.shape[2]
        if full and (not self.ours.record_past or held - tokens < min(remaining, self.window - 1)):
            with pytest.raises(RuntimeError):
                self.ours.crop(-tokens)
            return
        self.ours.crop(-tokens)
        self.theirs.crop(-tokens)
        # What no window can need any more is let go of at once.
        assert self.ours._hidden < self.ours.block_size

    def take_rows(self):
        rows = [self.random.randrange(self.batch) for _ in range(self.random.randint(1, 3))]
        for layer in (self.ours, self.theirs):
            layer.batch_select_indices(torch.tensor(rows))
        self.batch = len(rows)

    def record(self):
        self.ours.activate_past_recording()
        self.theirs.activate_past_recording()

    def copy(self):
        original, self.ours = self.ours, copy.deepcopy(self.ours)
        original.reset()

    def step(self):
        kind = self.random.random()
        if kind < 0.6 or not self.ours.get_seq_length():
            self.update(1)
        elif kind < 0.8:
            self.update(self.random.randint(2, 7))
        elif kind < 0.84:
            self.update(self.random.randint(2, self.window - 1))
        elif kind < 0.86:
            self.update(self.random.randint(self.window, 3 * self.window))
        elif kind < 0.94:
            self.crop(self.random.randint(0, 5))
        elif kind < 0.95:
            self.crop(self.random.randint(0, self.window))
        elif kind < 0.97:
            self.take_rows()
        elif kind < 0.99:
            self.copy()
        elif self.random.random() < 0.3:
            self.record()

    def check(self):
        ours, theirs = self.ours, self.theirs
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours._pool.used == len({slot for row in ours._table for slot in row})
        assert ours.used_bytes <= sum(tensor.untyped_storage().nbytes() for tensor in ours.held_tensors())


@pytest.mark.parametrize(("window", "residual", "block_size"), [(9, 0, 8), (40, 8, 8), (26, 16, 8), (67, 16, 16)])
@pytest.mark.parametrize("seed", range(5))
def test_any_operations_give_what_transformers_layer_gives(seed, window, residual, block_size):
    walk = Walk(seed, window, residual, block_size)
    with torch.set_grad_enabled(seed % 2 == 1):
        for _ in range(300):
            walk.step()
            walk.check()
    assert walk.ours.seals > 0


# Crossed by every way of generating below, with blocks sealed and released on the way.
WINDOW, NEW_TOKENS = 40, 60
SLIDING = [
    family
    for family in FAMILIES
    if {"sliding_window", "attention_chunk_size"} & family.config.keys()  # every family that has a window
]


@functools.cache
def subject(family: Family, window: int = WINDOW) -> Subject:
    name = "attention_chunk_size" if "attention_chunk_size" in family.config else "sliding_window"
    config = {**family.config, name: window, "max_position_embeddings": 1024}
    return Subject(replace(family, config=config).build())


def blocks(model, quantization=LOSSLESS, **options):
    return MemOSCache(model.config, **{"quantization": quantization, "block_size": 8, "initial_capacity": 16} | options)


def block_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, SlidingBlockLayer)]


@pytest.mark.parametrize(
    "way",
    [
        *("greedy", "sample", "beams", "left_padding", "second_turn", "chunked_prefill", "prompt_lookup", "assisted"),
        "pieces",
    ],
)
@pytest.mark.parametrize("family", SLIDING, ids=lambda family: family.name)
def test_full_precision_blocks_give_what_dynamic_cache_gives(family, way, monkeypatch):
    monkeypatch.setattr(families, "NEW_TOKENS", NEW_TOKENS)
    model, run = subject(family), getattr(families, way)
    cache = blocks(model.model)
    torch.testing.assert_close(run(model, cache), run(model, model.dynamic_cache()), rtol=1e-4, atol=1e-4)
    assert block_layers(cache)
    if way != "pieces":
        assert all(layer.seals > 0 for layer in block_layers(cache) if layer.is_initialized)


@pytest.mark.parametrize("family", SLIDING, ids=lambda family: family.name)
def test_pieces_of_any_length_give_dynamic_caches_logits(family):
    model = subject(family)
    ours, theirs = blocks(model.model), model.dynamic_cache()
    for step, count in enumerate([30, 1, 1, 20, 1, 39, 1, *[1] * 20, 100, 1, 40, 8, *[1] * 30, 3, 41, 2]):
        ids = model.prompt(2, count, seed=step)
        assert families.mask_sizes(ours, count) == families.mask_sizes(theirs, count)
        logits = [model.forward(cache, ids) for cache in (ours, theirs)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("family", SLIDING, ids=lambda family: family.name)
def test_every_family_runs_in_every_preset(family, preset):
    model = subject(family, window=200)
    cache = blocks(model.model, preset, block_size=32)
    assert model.generate(cache, model.prompt(2, 180), max_new_tokens=40).shape == (2, 220)
    assert {layer.seals for layer in block_layers(cache) if layer.is_initialized} == {2 * 2}


def left_padded(tokens):
    ids, mask = token_ids(2, tokens), torch.ones(2, tokens, dtype=torch.long)
    mask[0, :25] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [30, 100])
def test_decoding_in_sdpa_never_decodes_a_layer(padded, tokens):
    model = mistral(window=WINDOW)
    ids, mask = left_padded(tokens) if padded else (token_ids(2, tokens), torch.ones(2, tokens, dtype=torch.long))
    cache = blocks(model)
    answer = generate(model, ids, cache, 60, attention_mask=mask)
    assert torch.equal(answer, generate(model, ids, dynamic(model), 60, attention_mask=mask))
    assert cache.stats.materialised_calls == 0
    assert cache.stats.fused_calls == 3 * 59


def test_drafts_are_attended_to_in_place():
    model = mistral(window=WINDOW)
    ids = token_ids(1, 6).repeat(1, 8)
    cache = blocks(model)
    answer = generate(model, ids, cache, 60, prompt_lookup_num_tokens=4)
    assert torch.equal(answer, generate(model, ids, dynamic(model), 60))
    assert cache.stats.materialised_calls == 0


def test_one_token_without_a_mask_sees_the_whole_window_in_place():
    ours, theirs = window_layer(), SlidingLayer(CacheOptions(), 40)
    with torch.no_grad():
        for step in range(120):
            states, query = random_states(tokens=1, seed=step), torch.randn(1, 4, 1, 8)
            outputs = [
                torch.nn.functional.scaled_dot_product_attention(query, *layer.update(*states), enable_gqa=True)
                for layer in (ours, theirs)
            ]
            torch.testing.assert_close(*outputs)
    assert (ours.materialised_calls, ours.fused_calls) == (0, 120 - 16)  # the first block is sealed then


def test_eager_attention_decodes_and_is_right():
    model = copy.deepcopy(mistral(window=WINDOW))
    model.set_attn_implementation("eager")
    cache = blocks(model)
    assert torch.equal(
        generate(model, token_ids(2, 40), cache, 40), generate(model, token_ids(2, 40), dynamic(model), 40)
    )
    assert cache.stats.materialised_calls > 0


@pytest.mark.parametrize("quantization", [INT8, *(replace(PRESETS[name], residual_tokens=32) for name in PRESETS)])
def test_a_token_is_encoded_once_and_its_bits_stay(quantization):
    block, window = 32, 200
    layer = window_layer(window, quantization, block)
    tokens = random_states(batch=2, tokens=900, head_dim=32, seed=0)
    with torch.no_grad():
        for end in range(1, 901):
            layer.update(*(states[:, :, end - 1 : end] for states in tokens))
            if end % 100 == 57:
                layer.reorder_cache(torch.tensor([1, 0]))
                layer.reorder_cache(torch.tensor([1, 0]))
    sealed = (899 - layer.residual) // block * block  # as all was when the last token came
    for role, states, held, spec in zip(
        ("key", "value"), tokens, (layer.keys, layer.values), quantization.specs(32, 32, block), strict=True
    ):
        codec = BlockCodec(spec, role, 32, block, torch.float32)
        pieces = [codec.decode(codec.encode(piece)[0]) for piece in states[:, :, :sealed].split(block, dim=2)]
        expected = torch.cat([*pieces, states[:, :, sealed:]], dim=2)[:, :, -(window - 1) :]
        assert torch.equal(held, expected)
    assert layer.seals == 2 * sealed // block


@pytest.mark.parametrize("earlier", [0, 30, 60])
@pytest.mark.parametrize("record", [False, True])
def test_what_has_left_the_window_is_never_encoded(earlier, record):
    layer = window_layer(window=40)
    with torch.no_grad():
        if earlier:
            layer.update(*random_states(tokens=earlier))
        if record:
            layer.activate_past_recording()
        before = layer.seals
        layer.update(*random_states(tokens=1000))
        for _ in range(2):
            if record:
                layer.crop(0)
            layer.update(*random_states())
    # A recorded window is sealed before the prompt comes, one that is not is dropped by it.
    in_the_window_before = max(min(earlier, 39) - 8, 0) // 8 if record else 0
    assert layer.seals - before == in_the_window_before + (39 + 1 - 8) // 8
    assert layer.buffer.capacity <= 32


def test_a_prompt_is_sealed_layer_by_layer():
    model = mistral(window=100)
    cache = blocks(model)
    with torch.no_grad():
        forward(model, token_ids(1, 400), cache)
    # All but the last layer have been sealed when the next one was updated, and none holds more than its window.
    assert [layer.buffer.length for layer in cache.layers] == [8 + 3, 8 + 3, 99]
    assert cache.layers[0].buffer.capacity <= 32


def test_while_the_past_is_recorded_nothing_is_released_and_a_crop_lets_go_of_it():
    layer, theirs = window_layer(), DynamicSlidingWindowLayer(sliding_window=40)
    with torch.no_grad():
        for one in (layer, theirs):
            for step in range(70):
                one.update(*random_states(seed=step))
            one.activate_past_recording()
            for step in range(30):
                one.update(*random_states(seed=step))
            assert one.keys.shape[2] == 39 + 30
            one.crop(-25)
            assert one.keys.shape[2] == 39
        assert torch.equal(layer.keys, theirs.keys)
    assert layer._pool.used == len(layer._entry_tokens)
    assert layer._hidden < 8


def bytes_held(layer):
    return sum(tensor.untyped_storage().nbytes() for tensor in layer.held_tensors())


@pytest.mark.parametrize("prompt", [1, 500, 3000])
def test_a_quantized_window_takes_a_third_of_the_memory_and_no_more_over_time(prompt):
    quantization = KVQuantizationConfig(residual_tokens=32)
    ours, theirs = window_layer(1024, quantization, 32), SlidingLayer(CacheOptions(), 1024)
    held = []
    with torch.no_grad():
        for layer in (ours, theirs):
            layer.update(*random_states(tokens=prompt, head_dim=64))
        for step in range(10_000):
            ours.update(*random_states(head_dim=64))
            if step > 1100:
                held.append(bytes_held(ours))
                assert ours._pool.used <= ours.most_entries
            if step < 1100:
                theirs.update(*random_states(head_dim=64))
    assert held[0] == held[-1] == max(held)
    window_bytes = theirs.used_bytes  # without the room that its buffer has for another window
    assert window_bytes == 1023 * 2 * 2 * 64 * 4
    assert max(held) <= 0.35 * window_bytes
    assert ours.used_bytes <= 0.35 * window_bytes
    assert ours.full_precision_bytes == window_bytes


def test_rows_share_blocks_until_nobody_holds_them():
    cache = blocks(mistral(window=WINDOW))
    with torch.no_grad():
        forward(mistral(window=WINDOW), token_ids(1, 60), cache)
        forward(mistral(window=WINDOW), token_ids(1, 1), cache)
        used = cache.layers[0]._pool.used
        cache.batch_repeat_interleave(8)
        assert cache.layers[0]._pool.used == len(cache.layers[0]._entry_tokens) >= used > 0
        for step in range(40):  # every row goes on by itself, and lets go of what it shared
            forward(mistral(window=WINDOW), token_ids(8, 1, seed=step), cache)
        assert cache.layers[0]._pool.used == 8 * len(cache.layers[0]._entry_tokens)
        cache.batch_select_indices(torch.tensor([3]))
        assert cache.layers[0]._pool.used == len(cache.layers[0]._entry_tokens)
    cache.reset()
    assert all(layer._pool.used == 0 for layer in cache.layers)
    assert cache.memory().used_bytes == 0


def test_short_windows_and_skipped_layers_stay_in_full_precision():
    def kinds(window, **fields):
        quantization = KVQuantizationConfig(residual_tokens=9, **fields)
        cache = MemOSCache(mistral(window=window).config, quantization=quantization, block_size=8)
        return [type(layer).__name__ for layer in cache.layers]

    assert kinds(16 + 8) == ["SlidingLayer"] * 3
    assert kinds(16 + 8 + 1) == ["SlidingBlockLayer"] * 3
    assert kinds(100, skip_layers=(0, 2)) == ["SlidingLayer", "SlidingBlockLayer", "SlidingLayer"]
    with pytest.raises(ValueError, match="sliding_window: expected more than 16 tokens"):
        window_layer(window=16)


@pytest.mark.parametrize("tokens", [0, 5, 30, 300])
def test_a_filled_cache_is_quantized_in_place(tokens):
    model = mistral(window=100)
    ours, theirs = MemOSCache(model.config, block_size=8), dynamic(model)
    with torch.no_grad():
        if tokens:
            for cache in (ours, theirs):
                forward(model, token_ids(2, tokens), cache)
        ours.quantize(LOSSLESS)
        assert all(type(layer) is SlidingBlockLayer for layer in ours.layers)
        assert ours.stats.seals == (3 * 2 * ((min(tokens, 99) - 8) // 8) if tokens > 16 else 0)
        for step in range(3):
            logits = [forward(model, token_ids(2, 4, seed=step), cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_quantizing_takes_less_memory_and_leaves_short_windows_as_they_are():
    model = mistral(window=1000)
    cache = MemOSCache(model.config)
    with torch.no_grad():
        forward(model, token_ids(2, 900), cache)
    before = cache.memory().allocated_bytes
    cache.quantize("int8")
    assert cache.memory().allocated_bytes < 0.6 * before
    assert cache.memory().ratio < 0.6
    short = MemOSCache(mistral().config)
    with torch.no_grad():
        forward(mistral(), token_ids(2, 20), short)
        short.quantize("int8")
        logits = forward(mistral(), token_ids(2, 1), short).logits
    assert logits.isfinite().all()
    assert [type(layer).__name__ for layer in short.layers] == ["SlidingLayer"] * 3


def test_what_cannot_be_quantized_stays_as_it_was():
    model = mistral(window=1000)
    cache = MemOSCache([(*random_states(tokens=300, head_dim=20), torch.tensor(1000))])
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match="rotation: expected a head dim that is a power of two"):
        cache.quantize(KVQuantizationConfig(rotation="hadamard"))
    assert torch.equal(cache.layers[0].keys, before)
    fresh = MemOSCache(model.config, quantization=KVQuantizationConfig(rotation="hadamard"))
    with pytest.raises(ValueError, match="rotation: expected a head dim that is a power of two"):
        fresh.update(*random_states(head_dim=20), 0)
    assert fresh.get_seq_length() == 0


@pytest.mark.parametrize("record", [False, True])
def test_conversion_keeps_the_window_and_the_length(record):
    model = mistral(window=WINDOW)
    theirs = dynamic(model)
    if record:
        theirs.activate_past_recording()
    with torch.no_grad():
        forward(model, token_ids(1, 60), theirs)
        cache = MemOSCache.from_cache(theirs, quantization=LOSSLESS, block_size=8)
        back = cache.to_dynamic()
        rebuilt = MemOSCache(iter(cache), quantization=LOSSLESS, block_size=8)
        assert [type(layer) for layer in (*cache.layers, *rebuilt.layers)] == [SlidingBlockLayer] * 6
        assert cache.get_seq_length() == back.get_seq_length() == 60
        assert [layer.record_past for layer in (*cache.layers, *back.layers)] == [record] * 6
        for mine, other, third in zip(cache.layers, theirs.layers, rebuilt.layers, strict=True):
            assert torch.equal(mine.keys, other.keys)
            assert torch.equal(third.values, other.values[:, :, -39:])
        for one in (theirs, cache, back) if record else ():
            one.crop(0)  # before 5.18 a recording layer of transformers' returns more than it announces
        logits = [forward(model, token_ids(1, 3), one).logits for one in (theirs, cache, back)]
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=1e-4, atol=1e-4)


def test_the_ceiling_counts_the_tokens_that_left_the_window():
    model = mistral(window=WINDOW)
    cache = blocks(model, max_cache_len=70)
    with pytest.raises(ValueError, match="max_cache_len: the cache may hold 70 tokens, it holds 70 and 1 more came"):
        generate(model, token_ids(1, 50), cache, new_tokens=40)
    assert cache.get_seq_length() == cache.get_max_length() == 70
    assert cache.get_max_length(0) == WINDOW


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_and_values_read_a_prompt_exact(name):
    (family,) = (family for family in FAMILIES if family.name == name)
    model = subject(family)
    ids = model.prompt(1, 200)
    logits = [model.forward(cache, ids) for cache in (blocks(model.model, INT8), model.dynamic_cache())]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", ["everything", "layers.0.self_attn.v_proj"])
def test_gradients_reach_what_is_in_the_tail(trained):
    model = copy.deepcopy(mistral(window=WINDOW))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "everything" or trained in name)
    norms = []
    for cache in (blocks(model), dynamic(model)):
        with torch.no_grad():
            forward(model, token_ids(1, 60), cache)
        forward(model, token_ids(1, 5, seed=1), cache).logits.square().mean().backward()
        norms.append(model.model.layers[0].self_attn.v_proj.weight.grad.norm())
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_filled_and_reordered_in_one_mode_it_goes_on_in_another(modes):
    model = mistral(window=WINDOW)
    ours, theirs = blocks(model), dynamic(model)
    for cache in (ours, theirs):
        for mode, seed in zip((*modes, *modes), range(4), strict=True):
            with mode():
                forward(model, token_ids(2, 30, seed=seed), cache)
                cache.reorder_cache(torch.tensor([1, 0]))
                forward(model, token_ids(2, 1, seed=seed), cache)
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_seals_and_reads(dtype):
    model = mistral(window=WINDOW)
    cache = blocks(model, INT8)
    with torch.autocast("cpu", dtype):
        assert generate(model, token_ids(1, 60), cache, 20).shape[1] == 80
    assert cache.stats.seals > 0
    assert cache.stats.materialised_calls == 0


def test_what_an_update_returned_is_refused_after_the_next():
    layer = window_layer()
    with torch.no_grad():
        for step in range(60):
            keys, _ = layer.update(*random_states(seed=step))
        assert torch.equal(keys[:, :, 1:], layer.keys)  # the window, of which one token is dropped by now
        layer.update(*random_states())
    with pytest.raises(RuntimeError, match="holds until the next call"):
        keys.sum()


def test_it_is_allocated_before_the_first_token_for_no_more_than_a_window():
    model = mistral(window=WINDOW)
    cache = MemOSCache.for_model(model, batch_size=2, quantization=LOSSLESS, block_size=8)
    slots = [layer._pool.capacity for layer in cache.layers]
    assert slots == [2 * layer.most_entries for layer in cache.layers] == [2 * 4] * 3
    assert torch.equal(generate(model, token_ids(2, 60), cache, 30), generate(model, token_ids(2, 60), new_tokens=30))
    assert slots == [layer._pool.capacity for layer in cache.layers]
    assert cache.stats.growths == 0
