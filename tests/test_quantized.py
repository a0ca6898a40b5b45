"""Quantized storage: sealed blocks, encoded once, read in place."""

from __future__ import annotations

import copy
import functools

import families
import pytest
import torch
from families import FAMILIES, Family, Subject
from tiny import dynamic, forward, generate, llama, random_states, token_ids
from transformers import EncoderDecoderCache

from memos_hf import KVQuantizationConfig, MemOSCache

LOSSLESS = KVQuantizationConfig("full", "full", sink_tokens=2, residual_tokens=8)
INT8 = KVQuantizationConfig(sink_tokens=2, residual_tokens=8)


def blocks(model, quantization=LOSSLESS, **options):
    return MemOSCache(model.config, quantization=quantization, block_size=8, initial_capacity=16, **options)


@functools.cache
def subject(family: Family) -> Subject:
    return Subject(family.build(), family.encoder_features)


def cache_for(model: Subject, quantization: KVQuantizationConfig):
    def build():
        return blocks(model.model, quantization)

    return EncoderDecoderCache(build(), build()) if model.is_encoder_decoder else build()


@pytest.mark.parametrize(
    "way", ["greedy", "beams", "left_padding", "second_turn", "prompt_lookup", "assisted", "pieces"]
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_full_precision_blocks_give_what_dynamic_cache_gives(family, way):
    model, run = subject(family), getattr(families, way)
    try:
        expected = run(model, model.dynamic_cache())
    except ValueError:  # stateful models refuse drafts; test_families says which
        with pytest.raises(ValueError):
            run(model, cache_for(model, LOSSLESS))
        return
    torch.testing.assert_close(run(model, cache_for(model, LOSSLESS)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_runs_in_every_preset(family, preset):
    model = subject(family)
    cache = cache_for(model, preset)
    answer = model.generate(cache, model.prompt(2, 40))
    assert answer.shape[1] >= 40 + families.NEW_TOKENS  # some begin with a token of their own


def left_padded(batch=2, tokens=60):
    ids, mask = token_ids(batch, tokens), torch.ones(batch, tokens, dtype=torch.long)
    mask[0, :25] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_in_sdpa_never_decodes_a_layer(padded):
    model = llama()
    ids, mask = left_padded() if padded else (token_ids(2, 60), torch.ones(2, 60, dtype=torch.long))
    cache = blocks(model)
    assert torch.equal(
        generate(model, ids, cache, 30, attention_mask=mask),
        generate(model, ids, dynamic(model), 30, attention_mask=mask),
    )
    assert cache.stats.seals > 0
    assert cache.stats.fused_calls >= 3 * 28
    assert cache.stats.materialised_calls == 0


def test_drafts_are_attended_to_in_place():
    model = llama()
    ids = token_ids(1, 6).repeat(1, 8)
    cache = blocks(model)
    answer = generate(model, ids, cache, 30, prompt_lookup_num_tokens=4)
    assert torch.equal(answer, generate(model, ids, dynamic(model), 30))
    assert cache.stats.materialised_calls == 0


def test_eager_attention_decodes_and_is_right():
    model = copy.deepcopy(llama())
    model.set_attn_implementation("eager")
    ids = token_ids(2, 40)
    cache = blocks(model)
    assert torch.equal(generate(model, ids, cache, 20), generate(model, ids, dynamic(model), 20))
    assert cache.stats.fused_calls == 0
    assert cache.stats.materialised_calls > 0


@pytest.mark.parametrize("quantization", [INT8, "int8", "int4", "int2", "fp8"])
def test_what_was_sealed_decodes_to_the_same_bits_for_ever(quantization):
    cache = MemOSCache(initial_capacity=16, quantization=quantization, block_size=8)
    with torch.no_grad():
        cache.update(*random_states(batch=2, tokens=300, head_dim=16, seed=0), 0)
        cache.update(*random_states(batch=2, tokens=1, head_dim=16, seed=1), 0)
        first = [half[:, :, [5, 130]].clone() for half in (cache.layers[0].keys, cache.layers[0].values)]
        for step in range(200):
            cache.update(*random_states(batch=2, tokens=1, head_dim=16, seed=step), 0)
            if step % 20 == 7:
                cache.reorder_cache(torch.tensor([1, 0]))
                cache.reorder_cache(torch.tensor([1, 0]))
                cache.crop(-3)
        later = [half[:, :, [5, 130]] for half in (cache.layers[0].keys, cache.layers[0].values)]
    for old, new in zip(first, later, strict=True):
        assert torch.equal(old, new)


def test_sinks_and_the_newest_tokens_are_exact():
    cache = MemOSCache(quantization=KVQuantizationConfig(2, 2, sink_tokens=4, residual_tokens=16), block_size=8)
    keys, values = random_states(tokens=100, head_dim=16, seed=0)
    with torch.no_grad():
        cache.update(keys, values, 0)
        cache.update(*random_states(head_dim=16), 0)
    held = cache.layers[0].keys
    assert torch.equal(held[:, :, :4], keys[:, :, :4])
    assert torch.equal(held[:, :, -17:-1], keys[:, :, -16:])
    assert not torch.equal(held[:, :, 4:80], keys[:, :, 4:80])


def test_the_sinks_of_a_padded_row_are_its_first_real_tokens():
    model = llama()
    ids, mask = left_padded()
    cache, exact = blocks(model, KVQuantizationConfig(2, 2, sink_tokens=4, residual_tokens=8)), dynamic(model)
    for one in (cache, exact):
        generate(model, ids, one, 10, attention_mask=mask)
    for row, first in ((0, 25), (1, 0)):
        held, expected = (one.layers[0].keys[row, :, first : first + 6] for one in (cache, exact))
        torch.testing.assert_close(held[:, :4], expected[:, :4])
        assert not torch.allclose(held[:, 4:], expected[:, 4:], atol=1e-3)


@pytest.mark.parametrize("removed", [1, 8, 11, 20, 40])
def test_a_crop_into_sealed_blocks_shortens_an_entry(removed):
    model = llama()
    cache, exact = blocks(model), dynamic(model)
    with torch.no_grad():
        for one in (cache, exact):
            forward(model, token_ids(2, 50), one)
            forward(model, token_ids(2, 2, seed=1), one)
            one.crop(-removed)
            forward(model, token_ids(2, 30, seed=2), one)
            logits = forward(model, token_ids(2, 1, seed=3), one).logits
            if one is cache:
                ours = logits
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.layers[1].keys, exact.layers[1].keys, rtol=1e-4, atol=1e-4)


def test_rows_share_blocks_until_nobody_holds_them():
    cache = blocks(llama())
    with torch.no_grad():
        forward(llama(), token_ids(1, 50), cache)
        forward(llama(), token_ids(1, 1), cache)
        before = cache.memory().used_bytes
        cache.batch_repeat_interleave(8)
        tail_and_sinks = (cache.layers[0].buffer.length + 3) * 3 * 2 * 2 * 16 * 4
        assert cache.memory().used_bytes < before + 7 * tail_and_sinks
        assert cache.memory().full_precision_bytes == 8 * 51 * 3 * 2 * 2 * 16 * 4
        cache.batch_select_indices(torch.tensor([3]))
    assert cache.memory().used_bytes == before
    cache.reset()
    assert all(layer._pool.used == 0 for layer in cache.layers)


def test_a_deep_copy_goes_its_own_way():
    model = llama()
    cache = blocks(model)
    with torch.no_grad():
        forward(model, token_ids(1, 50), cache)
        twin = copy.deepcopy(cache)
        before = cache.layers[0].keys.clone()
        forward(model, token_ids(1, 40, seed=1), twin)
    assert torch.equal(cache.layers[0].keys, before)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (50, 90)


@pytest.mark.parametrize("head_dim", [5, 20, 64, 96])
@pytest.mark.parametrize("preset", ["int8", "int4", "int2", "fp8"])
def test_any_head_dim_is_stored(head_dim, preset):
    cache = MemOSCache(quantization=preset, block_size=16)
    keys, values = random_states(batch=2, tokens=400, head_dim=head_dim, seed=0)
    with torch.no_grad():
        cache.update(keys, values, 0)
        cache.update(*random_states(batch=2, head_dim=head_dim), 0)
    bound = {"int8": 0.02, "fp8": 0.05, "int4": 0.15, "int2": 0.6}[preset]
    for held, exact in ((cache.layers[0].keys, keys), (cache.layers[0].values, values)):
        assert held.dtype == exact.dtype
        assert (held[:, :, :-1] - exact).norm() < bound * exact.norm()


def test_a_token_that_is_not_finite_spoils_no_other_and_is_counted():
    cache = MemOSCache(quantization="int8", block_size=8)
    keys, values = random_states(tokens=300, head_dim=16, seed=0)
    keys[0, 1, 50, 3] = float("nan")
    with torch.no_grad():
        cache.update(keys, values, 0)
        cache.update(*random_states(head_dim=16), 0)
    held = cache.layers[0].keys
    assert held.isfinite().all()
    torch.testing.assert_close(held[:, :, 51:100], keys[:, :, 51:100], atol=0.05, rtol=0)
    assert cache.stats.damaged_tokens == 1


def test_a_prompt_is_sealed_layer_by_layer_and_its_tail_shrinks():
    cache = blocks(llama(), INT8)
    with torch.no_grad():
        forward(llama(), token_ids(1, 400), cache)
    # all but the last layer have been sealed when the next one was updated
    assert [layer.buffer.length for layer in cache.layers] == [8, 8, 400]
    assert cache.layers[0].buffer.capacity <= 32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization": "int3"}, ValueError, "quantization: expected a KVQuantizationConfig or one of"),
        ({"quantization": 8}, ValueError, "quantization"),
        ({"quantization": "int8", "block_size": 7}, ValueError, "block_size: expected a power of two"),
        ({"quantization": "int8", "layout": "seq_major"}, ValueError, "quantization cannot be combined with layout"),
        ({"quantization": "int8", "static": True, "max_cache_len": 8}, ValueError, "static cannot be combined"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        MemOSCache(llama().config, **options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key_bits": 3}, "key_bits: expected one of"),
        ({"value_axis": "channel"}, "value_axis"),
        ({"key_axis": "head"}, "key_axis"),
        ({"group_size": 0}, "group_size"),
        ({"value_group_size": 0}, "value_group_size"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"rotation": "random"}, "rotation"),
    ],
)
def test_bad_fields_of_a_quantization_are_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        KVQuantizationConfig(**fields)


def test_what_a_codec_cannot_encode_is_refused_at_the_first_update():
    for quantization, states in (
        (KVQuantizationConfig(rotation="hadamard"), random_states(head_dim=20)),
        (KVQuantizationConfig(group_size=24), random_states(head_dim=64)),
    ):
        cache = MemOSCache(quantization=quantization)
        with pytest.raises(ValueError, match="expected"):
            cache.update(*states, 0)
        assert cache.get_seq_length() == 0
    with pytest.raises(TypeError, match="expected a floating dtype"):
        MemOSCache(quantization="int8").update(*(states.int() for states in random_states()), 0)


def test_skipped_layers_stay_in_full_precision():
    model = llama()
    cache = MemOSCache(model.config, quantization=KVQuantizationConfig(skip_layers=(0,)))
    assert [type(layer).__name__ for layer in cache.layers] == ["ContiguousLayer", "BlockLayer", "BlockLayer"]


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_a_filled_cache_is_quantized_in_place_as_if_it_had_been_from_the_start(preset):
    model = llama()
    ids = token_ids(2, 300)
    converted, fresh = MemOSCache(model.config), MemOSCache(model.config, quantization=preset)
    with torch.no_grad():
        for cache in (converted, fresh):
            forward(model, ids, cache)
        before = converted.memory().allocated_bytes
        converted.quantize(preset)
        assert converted.memory().ratio < 0.9
        assert converted.memory().allocated_bytes < before
        logits = [forward(model, token_ids(2, 1, seed=1), cache).logits for cache in (converted, fresh)]
    torch.testing.assert_close(*logits)
    with pytest.raises(ValueError, match="quantized already"):
        converted.quantize("int8")


def test_what_cannot_be_quantized_stays_as_it_was():
    cache = MemOSCache()
    cache.update(*random_states(tokens=300, head_dim=20), 0)
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match="rotation: expected a head dim that is a power of two"):
        cache.quantize(KVQuantizationConfig(rotation="hadamard"))
    assert torch.equal(cache.layers[0].keys, before)
    assert cache.options.quantization is None
    with pytest.raises(ValueError, match="static cannot be combined with quantization"):
        MemOSCache(llama().config, static=True, max_cache_len=8).quantize("int8")


def test_conversion_from_and_to_dynamic_cache():
    model = llama()
    theirs = dynamic(model)
    with torch.no_grad():
        forward(model, token_ids(2, 300), theirs)
    cache = MemOSCache.from_cache(theirs, quantization="int8")
    assert cache.stats.seals == 3 * 2
    back = cache.to_dynamic()
    for exact, decoded in zip(theirs.layers, back.layers, strict=True):
        torch.testing.assert_close(exact.keys, decoded.keys, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("chunk", [4, 8, 16, 60])
def test_the_sinks_of_a_padded_row_are_found_when_it_comes_in_chunks(chunk):
    model = llama()
    ids, mask = left_padded()
    cache, exact = blocks(model, KVQuantizationConfig(2, 2, sink_tokens=4, residual_tokens=8)), dynamic(model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for start in range(0, 60, chunk):
            part = slice(start, start + chunk)
            for one in (cache, exact):
                forward(
                    model, ids[:, part], one, attention_mask=mask[:, : start + chunk], position_ids=positions[:, part]
                )
        forward(model, token_ids(2, 1), cache)
    for row, first in ((0, 25), (1, 0)):
        held, expected = (one.layers[0].keys[row, :, first : first + 6] for one in (cache, exact))
        torch.testing.assert_close(held[:, :4], expected[:, :4])
        assert not torch.allclose(held[:, 4:], expected[:, 4:], atol=1e-3)
