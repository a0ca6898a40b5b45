"""Quantized storage: sealed blocks, encoded once, read in place."""

from __future__ import annotations

import copy
import functools
import shutil
from dataclasses import replace

import families
import pytest
import torch
from families import FAMILIES, Family, Subject
from reference_cache import ReferenceCache
from tiny import LOSSY, SHORT, dynamic, forward, generate, llama, random_states, token_ids
from transformers import EncoderDecoderCache

from memos_hf import KVQuantizationConfig, MemOSCache, OffloadConfig
from memos_hf.blocks.codecs import BlockCodec
from memos_hf.config import PRESETS
from memos_hf.layers import BlockLayer
from memos_hf.layers.blocks import _say_that_decoding_decodes

LOSSLESS = KVQuantizationConfig("full", "full", sink_tokens=2, residual_tokens=0)
INT8 = KVQuantizationConfig(sink_tokens=2, residual_tokens=8)


def blocks(model, quantization=LOSSLESS, **options):
    return MemOSCache(model.config, quantization=quantization, block_size=8, initial_capacity=16, **options)


@functools.cache
def subject(family: Family) -> Subject:
    return Subject(family.build(), family.encoder_features)


def cache_for(model: Subject, quantization: KVQuantizationConfig, **options):
    def build():
        return blocks(model.model, quantization, **options)

    return EncoderDecoderCache(build(), build()) if model.is_encoder_decoder else build()


@pytest.mark.parametrize(
    "way", ["greedy", "beams", "left_padding", "second_turn", "prompt_lookup", "assisted", "pieces"]
)
@pytest.mark.parametrize("offload", [None, OffloadConfig({"cpu": 9_000})], ids=["resident", "offloaded"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_full_precision_blocks_give_what_dynamic_cache_gives(family, offload, way):
    model, run = subject(family), getattr(families, way)
    try:
        expected = run(model, model.dynamic_cache())
    except ValueError:  # stateful models refuse drafts; test_families says which
        with pytest.raises(ValueError):
            run(model, cache_for(model, LOSSLESS, offload=offload))
        return
    cache = cache_for(model, LOSSLESS, offload=offload)
    torch.testing.assert_close(run(model, cache), expected, rtol=1e-4, atol=1e-4)
    # T5's draft is right at once: no update comes that could seal
    assert seals_if_it_can(cache) or (family.name, way) == ("t5", "assisted")


def seals_if_it_can(cache) -> bool:
    """Whether something was sealed, or there is no layer of blocks."""
    cache = getattr(cache, "self_attention_cache", cache)
    return cache.stats.seals > 0 or not any(isinstance(layer, BlockLayer) for layer in cache.layers)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_gives_in_every_preset_what_the_reference_gives(family, preset, monkeypatch):
    # A preset adapts to the head dims of any model. This one keeps no residual window of 128 tokens, to seal early.
    short = replace(PRESETS[preset], residual_tokens=0)
    monkeypatch.setitem(PRESETS, preset, short)
    model = subject(family)

    def reference():
        return ReferenceCache(model.model.config, short, 8)

    ours = cache_for(model, preset)
    theirs = EncoderDecoderCache(reference(), reference()) if model.is_encoder_decoder else reference()
    for step, tokens in enumerate((9, 1, 8, 1, 3, 1)):
        logits = [model.forward(cache, model.prompt(2, tokens, seed=step)) for cache in (ours, theirs)]
        # rounding in attention tips a code of the layer above now and then
        torch.testing.assert_close(*logits, rtol=0, atol=2e-3)
    assert seals_if_it_can(ours)


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


def test_eager_attention_decodes_is_right_and_says_so_once(caplog):
    _say_that_decoding_decodes.cache_clear()
    model = copy.deepcopy(llama())
    model.set_attn_implementation("eager")
    ids = token_ids(2, 40)
    cache = blocks(model)
    assert torch.equal(generate(model, ids, cache, 20), generate(model, ids, dynamic(model), 20))
    assert cache.stats.fused_calls == 0
    assert cache.stats.materialised_calls > 0
    assert ["attn_implementation='memos'" in message for message in caplog.messages] == [True]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled, on a CPU by g++")
def test_flex_attention_is_given_plain_keys_and_values():
    model = copy.deepcopy(llama())
    model.set_attn_implementation("flex_attention")
    cache = blocks(model)
    assert all(type(states) is torch.Tensor for states in cache.update(*random_states(heads=2, tokens=40), 0))
    cache.reset()
    ids = token_ids(1, 40)
    assert torch.equal(generate(model, ids, cache, 6), generate(model, ids, dynamic(model), 6))
    assert cache.stats.seals > 0
    assert cache.stats.materialised_calls > 0


@pytest.mark.parametrize("quantization", [INT8, "int8", "int4", "int2", "fp8"])
def test_what_was_sealed_decodes_to_the_same_bits_after_two_thousand_steps(quantization):
    cache = MemOSCache(initial_capacity=16, quantization=quantization, block_size=8)
    generator = torch.Generator().manual_seed(0)
    first = {}  # what each of two tokens was decoded to, rows in their present order
    with torch.no_grad():
        for step in range(2000):
            cache.update(*(torch.randn(2, 2, 1, 16, generator=generator) for _ in range(2)), 0)
            (layer,) = cache.layers
            for token in (5, 130):
                if token not in first and token < layer.sealed_tokens:
                    first[token] = [half[:, :, token] for half in (layer.keys, layer.values)]
            if step % 50 == 7:
                order = torch.tensor([1, 1] if step == 1507 else [1, 0])
                cache.reorder_cache(order)
                first = {token: [half[order] for half in halves] for token, halves in first.items()}
                cache.crop(-3)
            if step % 400 == 399:
                cache.crop(-150)  # into sealed blocks
    assert cache.get_seq_length() == 2000 - 40 * 3 - 5 * 150
    assert sorted(first) == [5, 130]
    for token, halves in first.items():
        for old, half in zip(halves, (layer.keys, layer.values), strict=True):
            assert torch.equal(half[:, :, token], old)


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


@pytest.mark.parametrize("prompt", [5, 40])
@pytest.mark.parametrize("residual", [0, 1, 16])
def test_at_every_step_what_is_exact_is_the_sinks_and_the_documented_window(prompt, residual):
    cache = MemOSCache(quantization=KVQuantizationConfig(2, 2, sink_tokens=3, residual_tokens=residual), block_size=8)
    keys, values = random_states(tokens=prompt + 40, head_dim=16, seed=0)
    window = -(-residual // 8) * 8
    with torch.no_grad():
        for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + 40))]:
            cache.update(keys[:, :, start:end], values[:, :, start:end], 0)
            layer = cache.layers[0]
            for held, given in ((layer.keys, keys), (layer.values, values)):
                exact = (held == given[:, :, :end]).all(dim=-1).all(dim=1)[0]
                # what was there before the update, down to the window, and less than a block beside it
                sealed = max(start - window, 0) // 8 * 8
                assert exact.tolist() == [at < 3 or at >= sealed for at in range(end)]


@pytest.mark.parametrize(
    ("quantization", "outlier"),
    [
        ("int8", "varies"),
        ("fp8", "varies"),
        (KVQuantizationConfig(4, 4, key_axis="channel", group_size=32), "varies"),
        # a rotation shares out what varies; a channel that is large throughout, as in models, it only shifts
        ("int4", "is large throughout"),
        ("int2", "is large throughout"),
    ],
)
def test_a_channel_a_hundred_times_the_others_leaves_them_usable(quantization, outlier):
    cache = MemOSCache(quantization=quantization)
    keys, values = random_states(tokens=400, head_dim=64, seed=0)
    keys[..., 7] = 100 * keys[..., 7] if outlier == "varies" else 100 + keys[..., 7]
    with torch.no_grad():
        cache.update(keys, values, 0)
        cache.update(*random_states(head_dim=64), 0)
    assert cache.layers[0].sealed_tokens == 256
    others = [channel for channel in range(64) if channel != 7]
    held, exact = (states[:, :, 4:256, others] for states in (cache.layers[0].keys, keys))
    assert (held - exact).norm() < (0.4 if quantization == "int2" else 0.25) * exact.norm()


def no_memory(*args):
    raise MemoryError


def test_an_error_while_sealing_leaves_the_layer_as_it_was(monkeypatch, lossy):
    cache, twin = MemOSCache(**lossy), MemOSCache(**lossy)
    prompt, new = random_states(batch=2, tokens=45, seed=0), random_states(batch=2, seed=1)
    with torch.no_grad():
        for one in (cache, twin):
            one.update(*prompt, 0)
            one.update(*new, 0)
            one.update(*prompt, 0)
        before, memory = cache.layers[0].copied(), cache.memory()
        monkeypatch.setattr(type(cache.layers[0]._pool), "store", no_memory)
        with pytest.raises(MemoryError):
            cache.update(*new, 0)
        monkeypatch.undo()
        for old, held in zip(before, cache.layers[0].lent(), strict=True):
            assert torch.equal(old, held)
        assert cache.get_seq_length() == 91
        assert cache.memory() == memory
        for one in (cache, twin):
            one.update(*new, 0)
    for mine, other in zip(cache.layers[0].lent(), twin.layers[0].lent(), strict=True):
        assert torch.equal(mine, other)


def mean_kl(logits, others):
    """Nats a token, of the second from the first."""
    first, second = logits.log_softmax(-1), others.log_softmax(-1)
    return float((first.exp() * (first - second)).sum(-1).mean())


# How far two schedules of calls may lead apart, in nats a token, in a random model whose logits vary by 2.5. Texts
# that have nothing to do with each other are 5 apart.
SCHEDULES_APART = {"int8": 0.005, "fp8": 0.1, "int4": 0.5, "int2": 2.0}


def in_pieces(cache, ids, tokens, drafts=0):
    """Logits of `ids`, so many tokens in a call, each call followed by a draft that is rejected."""
    logits = []
    with torch.no_grad():
        for part in ids.split(tokens, dim=1):
            logits.append(forward(llama(), part, cache).logits)
            if drafts:
                forward(llama(), token_ids(ids.shape[0], drafts, seed=int(part.sum())), cache)
                cache.crop(-drafts)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("preset", SHORT)
def test_one_token_a_call_and_many_are_near_each_other(preset):
    ids = token_ids(2, 120)
    single = in_pieces(MemOSCache(llama().config, **LOSSY[preset]), ids, 1)
    for tokens in (3, 8, 33, 120):
        pieces = in_pieces(MemOSCache(llama().config, **LOSSY[preset]), ids, tokens)
        assert mean_kl(single, pieces) < SCHEDULES_APART[preset]
    unrelated = in_pieces(MemOSCache(llama().config, **LOSSY[preset]), token_ids(2, 120, seed=1), 1)
    assert mean_kl(single, unrelated) > 2 * SCHEDULES_APART[preset]


def test_a_rejected_draft_leaves_no_trace(lossy):
    if "offload" in lossy:
        pytest.skip("which blocks are on the device then differs, and with it rounding, which codes multiply")
    ids = token_ids(2, 60)
    caches = [MemOSCache(llama().config, **lossy) for _ in range(2)]
    plain, drafted = in_pieces(caches[0], ids, 1), in_pieces(caches[1], ids, 1, drafts=5)
    assert torch.equal(plain, drafted)
    for mine, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(mine.keys, other.keys)


def ask(cache, question):
    """Logits of a question of 20 tokens and of 20 more, which are then taken back."""
    ids = torch.cat([token_ids(1, 20, seed=question), token_ids(1, 20, seed=99)], dim=1)
    with torch.no_grad():
        logits = [forward(llama(), part, cache).logits for part in (ids[:, :20], *ids[:, 20:].split(1, dim=1))]
    cache.crop(-40)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("context", "sealed_by_a_question"), [(300, False), (360, True)])
@pytest.mark.parametrize("preset", PRESETS)
def test_questions_to_one_context_do_not_disturb_each_other(preset, context, sealed_by_a_question):
    def fresh():
        cache = MemOSCache(llama().config, quantization=preset)
        with torch.no_grad():
            forward(llama(), token_ids(1, context, seed=7), cache)
        return cache

    alone = [ask(fresh(), question) for question in (1, 2)]
    in_order, reverse = fresh(), fresh()
    answers = [ask(in_order, 1), ask(in_order, 2)], [ask(reverse, 2), ask(reverse, 1)][::-1]
    for cache in (in_order, reverse):
        assert [layer.get_seq_length() for layer in cache.layers] == [context] * 3
        assert {half.dtype for layer in cache.layers for half in (layer.keys, layer.values)} == {torch.float32}
        assert (cache.layers[0].sealed_tokens == 256) == sealed_by_a_question
    for given in answers:
        for expected, answer in zip(alone, given, strict=True):
            if sealed_by_a_question:  # the next one finds a block encoded that a fresh cache still has exact
                assert mean_kl(expected, answer) < SCHEDULES_APART[preset]
            else:
                assert torch.equal(expected, answer)


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


@pytest.mark.parametrize("between", ["nothing", "crop", "crop and refill", "reorder", "reset"])
def test_encoding_ahead_of_an_update_changes_nothing(between):
    def run(ahead: bool):
        cache = MemOSCache(quantization="int4", block_size=8)
        cache.update(*random_states(batch=2, tokens=160, head_dim=16, seed=0), 0)
        layer = cache.layers[0]
        if ahead:
            layer.encode_ahead()
        if between == "crop":
            cache.crop(-9)
        elif between == "crop and refill":
            cache.crop(-30)
            layer.encode_ahead()
            cache.update(*random_states(batch=2, tokens=30, head_dim=16, seed=2), 0)
        elif between == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif between == "reset":
            cache.reset()
        cache.update(*random_states(batch=2, tokens=1, head_dim=16, seed=1), 0)
        return layer, cache.stats.seals

    (plain, plain_seals), (layer, seals) = run(False), run(True)
    assert seals == plain_seals
    for held, expected in zip(layer.lent(), plain.lent(), strict=True):
        assert torch.equal(held, expected)


def test_what_was_encoded_ahead_is_stored_and_not_encoded_again(monkeypatch):
    cache = MemOSCache(quantization="int8", block_size=8)
    cache.update(*random_states(tokens=160, head_dim=16, seed=0), 0)
    cache.layers[0].encode_ahead()
    monkeypatch.setattr(BlockCodec, "encode", None)
    cache.update(*random_states(head_dim=16, seed=1), 0)
    assert cache.stats.seals > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_blocks_are_encoded_on_a_side_stream_while_the_layer_before_computes():
    model = copy.deepcopy(llama()).cuda()
    ids = token_ids(2, 40).cuda()
    cache = blocks(model)
    assert torch.equal(generate(model, ids, cache, 60), generate(model, ids, dynamic(model), 60))
    assert cache.stats.seals > 0
    assert cache.stats.materialised_calls == 0


def test_a_prompt_is_sealed_layer_by_layer_and_its_tail_shrinks():
    cache = blocks(llama(), INT8)
    with torch.no_grad():
        forward(llama(), token_ids(1, 400), cache)
    # all but the last layer have been sealed when the next one was updated
    assert [layer.buffer.length for layer in cache.layers] == [8, 8, 400]
    assert cache.layers[0].buffer.capacity <= 32


def test_a_refused_update_seals_nothing_of_the_prompt_before_it():
    cache = blocks(llama(), KVQuantizationConfig(2, 2, residual_tokens=8), max_cache_len=110)
    states = random_states(batch=2, tokens=100, head_dim=16, seed=0)
    with torch.no_grad():
        for layer_idx in range(3):
            cache.update(*states, layer_idx)
        for refused in (random_states(batch=1, head_dim=16), random_states(batch=2, tokens=11, head_dim=16)):
            with pytest.raises(ValueError, match=r"batch size|max_cache_len"):
                cache.update(*refused, 0)
            assert torch.equal(cache.layers[2].keys, states[0])
        cache.update(*random_states(batch=2, head_dim=16), 0)
    assert cache.layers[2].sealed_tokens == 88


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
        ({"value_group_size": "as_keys"}, "value_group_size: expected 'as keys', an int or None"),
        ({"key_bits": 8.0}, "key_bits: expected one of"),
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


def padded_caches(model, **options):
    """Caches that have seen the same left-padded prompt, and the mask of the next token."""
    ids, mask = left_padded()
    caches = MemOSCache(model.config, **options), dynamic(model)
    with torch.no_grad():
        for cache in caches:
            forward(model, ids, cache, attention_mask=mask)
    return *caches, torch.cat([mask, mask[:, -1:]], dim=1)


@pytest.mark.parametrize("way", ["quantize", "from_cache", "eager first"])
def test_a_padded_cache_that_is_quantized_later_is_still_right(way):
    model = copy.deepcopy(llama())
    if way == "eager first":
        model.set_attn_implementation("eager")
        ours, theirs, mask = padded_caches(model, quantization=LOSSLESS, block_size=8)
        with torch.no_grad():
            for cache in (ours, theirs):
                forward(model, token_ids(2, 1), cache, attention_mask=mask)
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        model.set_attn_implementation("sdpa")
    else:
        ours, theirs, mask = padded_caches(model, block_size=8)
        if way == "quantize":
            ours.quantize(LOSSLESS)
        else:
            ours = MemOSCache.from_cache(theirs, quantization=LOSSLESS, block_size=8)
    with torch.no_grad():
        logits = [forward(model, token_ids(2, 1), cache, attention_mask=mask).logits for cache in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "batch"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 2),
        (lambda cache: cache.batch_repeat_interleave(2), 4),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
        (lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), 0),
    ],
)
def test_rows_change_when_a_crop_has_left_no_tail(change, batch):
    model = llama()
    ours, theirs = blocks(model), dynamic(model)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(model, token_ids(2, 60), cache)
            forward(model, token_ids(2, 1), cache)
            cache.crop(-45)
            change(cache)
        assert ours.layers[0].keys.shape == theirs.layers[0].keys.shape
        if batch:
            new = token_ids(batch, 2, seed=3)
            logits = [forward(model, new, cache).logits for cache in (ours, theirs)]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", ["everything", "layers.0.self_attn.v_proj"])
def test_gradients_reach_what_is_in_the_tail(trained):
    model = copy.deepcopy(llama())
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


@pytest.mark.parametrize("preset", ["int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_seals_and_reads(preset, dtype):
    cache = MemOSCache(llama().config, quantization=preset, block_size=16)
    with torch.autocast("cpu", dtype):
        answer = generate(llama(), token_ids(1, 300), cache, 20)
    assert answer.shape[1] == 320
    assert cache.stats.seals > 0


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_filled_and_reordered_in_one_mode_it_seals_in_another(modes):
    model = llama()
    ours, theirs = blocks(model), dynamic(model)
    for cache in (ours, theirs):
        for mode, seed in zip((*modes, *modes), range(4), strict=True):
            with mode():
                forward(model, token_ids(2, 30, seed=seed), cache)
                cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)


def test_halves_assigned_one_after_the_other_replace_everything():
    model = llama()
    ours, theirs = blocks(model), dynamic(model)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(model, token_ids(2, 60), cache)
            forward(model, token_ids(2, 1), cache)
            for layer in cache.layers:
                layer.keys = layer.keys[:, :, :13]
                layer.values = layer.values[:, :, :13]
        logits = [forward(model, token_ids(2, 2, seed=3), cache).logits for cache in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_layers_without_a_config_are_quantized_by_their_index():
    data = [random_states(tokens=300) for _ in range(2)]
    filled = MemOSCache(data, quantization="int8")
    grown = MemOSCache(quantization=KVQuantizationConfig(skip_layers=(0,)))
    for layer_idx in range(2):
        grown.update(*data[layer_idx], layer_idx)
    assert [type(layer).__name__ for layer in filled.layers] == ["BlockLayer", "BlockLayer"]
    assert [type(layer).__name__ for layer in grown.layers] == ["ContiguousLayer", "BlockLayer"]


def test_layers_to_skip_must_exist():
    with pytest.raises(ValueError, match="skip_layers: expected indices of at least 0"):
        KVQuantizationConfig(skip_layers=(-1,))
    for wrong in (1, (True,), ("0",)):
        with pytest.raises(TypeError, match="skip_layers: expected a tuple of layer indices"):
            KVQuantizationConfig(skip_layers=wrong)
    with pytest.raises(ValueError, match="skip_layers: expected indices below the 3 layers"):
        MemOSCache(llama().config, quantization=KVQuantizationConfig(skip_layers=(99,)))


@pytest.mark.parametrize("shape", [(2, 1, 5, 1), (1, 1, 1, 1), (1, 1, 5, 66)])
def test_a_mask_is_broadcast_as_torch_does(shape):
    model = llama()
    ours, theirs = blocks(model), dynamic(model)
    mask = torch.ones(shape, dtype=torch.bool)
    with torch.no_grad():
        for cache in (ours, theirs):
            forward(model, token_ids(2, 60), cache)
            forward(model, token_ids(2, 1), cache)
        logits = [forward(model, token_ids(2, 5), cache, attention_mask=mask).logits for cache in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_layers_that_share_keys_and_values_read_a_prompt_exact():
    (family,) = (family for family in FAMILIES if family.name == "gemma4")
    model = subject(family)
    ids = model.prompt(1, 400)
    logits = [model.forward(cache, ids) for cache in (cache_for(model, INT8), model.dynamic_cache())]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["int3", ["int8"], {"key_bits": 8}, 8])
def test_a_quantization_of_another_kind_is_refused(wrong):
    with pytest.raises(ValueError, match="quantization: expected a KVQuantizationConfig or one of"):
        MemOSCache(quantization=wrong)


def test_no_rows_are_sealed_as_no_rows():
    cache = blocks(llama(), INT8)
    with torch.no_grad():
        forward(llama(), token_ids(2, 20), cache)
        cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
        for _ in range(2):
            cache.update(*random_states(batch=0, heads=2, tokens=20, head_dim=16), 0)
    assert cache.layers[0].keys.shape == (0, 2, 60, 16)


def test_after_a_crop_to_nothing_nothing_counts_as_used():
    cache = blocks(llama(), INT8)
    with torch.no_grad():
        forward(llama(), token_ids(2, 60), cache)
    cache.crop(-60)
    assert cache.memory().used_bytes == 0


def test_a_copy_of_a_cache_knows_the_attention_of_the_model():
    config = copy.deepcopy(llama().config)
    config._attn_implementation = "memos"
    copied = MemOSCache.from_cache(MemOSCache(config), quantization="int8")
    assert copied.options.attention == "memos"
    assert MemOSCache.from_cache(dynamic(llama()), config=config, quantization="int8").options.attention == "memos"
