"""Ways to generate, each giving the tokens that DynamicCache gives."""

import contextlib
import copy

import pytest
import torch
import torch._dynamo
from families import draft_of
from tiny import CACHE_ARGUMENT, LOSSLESS, LOSSY, VERSION, dynamic, forward, generate, llama, mistral, token_ids
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig

from memos_hf import MemOSCache

# Transformers 5.17 takes cached tokens for new ones where prefill is chunked or assisted, with any cache.
RESUMES_RIGHT = VERSION >= (5, 24)


def small(model, **options):
    return MemOSCache(model.config, initial_capacity=4, **options)


@pytest.mark.parametrize("layout", ["head_major", "seq_major"])
@pytest.mark.parametrize("model", [llama, mistral])
def test_around_every_growth_boundary_the_shorter_answer_begins_the_longer(model, layout):
    model = model()
    ids = token_ids(1, 3)
    full = generate(model, ids, dynamic(model), new_tokens=40)
    for new_tokens in range(1, 40):
        cache = small(model, layout=layout)
        answer = generate(model, ids, cache, new_tokens=new_tokens)
        assert torch.equal(answer, full[:, : 3 + new_tokens])
        assert cache.get_seq_length() == 2 + new_tokens
    assert small(llama()).get_mask_sizes(7, 0) == (7, 0)


def test_around_every_sealing_the_shorter_answer_begins_the_longer(storage):
    model = llama()
    ids = token_ids(1, 3)
    full = generate(model, ids, small(model, **storage), new_tokens=40)
    for new_tokens in (*range(4, 8), *range(12, 16), 23, 24):
        cache = small(model, **storage)
        assert torch.equal(generate(model, ids, cache, new_tokens=new_tokens), full[:, : 3 + new_tokens])
        assert cache.get_seq_length() == 2 + new_tokens
        assert cache.get_mask_sizes(7, 0) == (2 + new_tokens + 7, 0)


@pytest.mark.parametrize("spelling", ["past_key_values", "cache"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_both_spellings_of_the_argument_work_and_give_back_the_object_passed(spelling, storage):
    if spelling == "cache" and CACHE_ARGUMENT != "cache":
        pytest.skip("transformers before 5.24 knows past_key_values only")
    model = llama()
    cache = small(model, **storage)
    output = model.generate(
        token_ids(1, 5), max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **{spelling: cache}
    )
    assert output[CACHE_ARGUMENT] is cache
    assert forward(model, token_ids(1, 1), cache)[CACHE_ARGUMENT] is cache


def left_padded():
    ids = token_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("model", [llama, mistral])
def test_left_padded_rows_and_a_padded_second_turn(model, lossless):
    model = model()
    answers = []
    for cache in (small(model, **lossless), dynamic(model)):
        ids, mask = left_padded()
        first = generate(model, ids, cache, attention_mask=mask)
        turn, turn_mask = left_padded()
        mask = torch.cat([mask, torch.ones(2, first.shape[1] - 7, dtype=mask.dtype), turn_mask], dim=1)
        answers.append(generate(model, torch.cat([first, turn], dim=1), cache, attention_mask=mask))
    assert torch.equal(*answers)


def test_a_padded_row_answers_as_it_does_alone(lossless):
    model = llama()
    ids, mask = left_padded()
    together = generate(model, ids, small(model, **lossless), attention_mask=mask)
    for row in range(2):
        alone = generate(model, ids[row : row + 1, mask[row] == 1], small(model, **lossless))
        assert torch.equal(together[row, 7:], alone[0, int(mask[row].sum()) :])


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("full_ids", [True, False])
def test_a_cached_prefix_is_continued_by_all_ids_or_by_the_new_ones(model, full_ids, lossless):
    model = model()
    ids = token_ids(1, 16)
    cache = small(model, **lossless)
    with torch.no_grad():
        forward(model, ids[:, :11], cache)
    given = ids if full_ids else ids[:, 11:]
    answer = generate(model, given, cache, attention_mask=torch.ones_like(ids))
    expected = generate(model, ids, dynamic(model))
    assert torch.equal(answer[:, given.shape[1] :], expected[:, 16:])


def test_a_quantized_prefix_answers_the_same_to_all_ids_and_to_the_new_ones(lossy):
    model = llama()
    ids = token_ids(1, 40)
    answers = []
    for given in (ids, ids[:, 30:]):
        cache = small(model, **lossy)
        with torch.no_grad():
            forward(model, ids[:, :30], cache)
        answers.append(generate(model, given, cache, 20, attention_mask=torch.ones_like(ids))[:, -20:])
        assert cache.stats.seals > 0
    assert torch.equal(*answers)


def test_passing_exactly_the_cached_ids_leaves_the_content_alone(lossless):
    model = llama()
    ids = token_ids(1, 16)
    cache = small(model, **lossless)
    with torch.no_grad():
        forward(model, ids, cache)
    before = cache.layers[0].keys.clone()
    # the errors with which transformers' own code may answer to having nothing to compute
    with contextlib.suppress(ValueError, RuntimeError, IndexError):
        generate(model, ids, cache, new_tokens=2)
    assert torch.equal(cache.layers[0].keys[:, :, :16], before)


@pytest.mark.parametrize("model", [llama, mistral])
@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
@pytest.mark.parametrize("start", ["fresh", "resumed", "padded"])
def test_prefill_in_chunks_gives_what_prefill_at_once_gives(model, chunk, start, lossless):
    model = model()
    ids, mask = (token_ids(2, 11), torch.ones(2, 11, dtype=torch.long)) if start != "padded" else left_padded()
    answers = []
    for cache in (small(model, **lossless), dynamic(model)):
        if start == "resumed":
            with torch.no_grad():
                forward(model, ids[:, :4], cache)
        answers.append(generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=chunk))
    assert torch.equal(*answers)
    if start != "resumed" or RESUMES_RIGHT:
        assert torch.equal(answers[0], generate(model, ids, dynamic(model), attention_mask=mask))


@pytest.mark.parametrize("model", [llama, mistral])
def test_prompt_lookup_from_a_cache_that_is_not_empty(model, lossless):
    model = model()
    ids = token_ids(1, 6).repeat(1, 3)
    plain = generate(model, ids, dynamic(model), new_tokens=20)
    answers, lengths = [], []
    for cache in (small(model, **lossless), dynamic(model)):
        with torch.no_grad():
            forward(model, ids[:, :9], cache)
        # The new ids alone: given all of them, transformers' assisted decoding computes the cached ones again.
        options = {"attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3}
        answers.append(generate(model, ids[:, 9:], cache, 20, **options))
        lengths.append(int(cache.get_seq_length()))
    assert torch.equal(*answers)
    assert lengths[0] == lengths[1]
    if RESUMES_RIGHT:
        assert torch.equal(answers[0][:, 9:], plain[:, 18:])


PRESETS = ["int8", "fp8", "int4", "int2"]
GUESSES = {"prompt look-up": {"prompt_lookup_num_tokens": 4}, "assisted": {"assistant_model": draft_of(llama())}}


@pytest.mark.skipif(not RESUMES_RIGHT, reason="transformers itself computes cached tokens again")
@pytest.mark.parametrize("guesses", GUESSES)
@pytest.mark.parametrize("preset", PRESETS)
def test_guesses_behind_a_quantized_prefix_give_what_greedy_decoding_gives(preset, guesses):
    model = llama()
    ids = token_ids(1, 40).repeat(1, 8)
    answers = []
    for options in ({}, GUESSES[guesses]):
        cache = MemOSCache(model.config, quantization=preset)
        with torch.no_grad():
            forward(model, ids[:, :300], cache)
        answers.append(generate(model, ids[:, 300:], cache, 40, attention_mask=torch.ones_like(ids), **options))
        assert cache.get_seq_length() == 320 + 39  # the last token was not computed, as with any cache
        assert cache.stats.seals > 0
    assert torch.equal(*answers)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("guesses", GUESSES)
@pytest.mark.parametrize("preset", PRESETS)
def test_guesses_are_attended_to_in_place(preset, guesses, padded):
    model = llama()
    ids = token_ids(1, 40).repeat(1, 8)
    mask = torch.ones_like(ids)
    mask[:, : 140 if padded else 0] = 0
    ids = ids.masked_fill(mask == 0, 0)
    cache = MemOSCache(model.config, quantization=preset)
    generate(model, ids, cache, 40, attention_mask=mask, **GUESSES[guesses])
    assert cache.stats.seals > 0
    assert cache.stats.fused_calls > 0
    assert cache.stats.materialised_calls == 0


def test_beams_and_several_return_sequences(lossless):
    model = llama()
    ids = token_ids(2, 5)
    for kwargs in ({"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}):
        answers = [generate(model, ids, cache, **kwargs) for cache in (small(model, **lossless), dynamic(model))]
        assert torch.equal(*answers)


def test_a_prefix_repeated_for_several_samples_equals_dynamic_cache(lossless):
    model = llama()
    ids = token_ids(1, 19)
    answers = []
    for cache in (small(model, **lossless), dynamic(model)):
        with torch.no_grad():
            forward(model, ids[:, :15], cache)
            forward(model, ids[:, 15:16], cache)
        cache.batch_repeat_interleave(3)
        torch.manual_seed(7)
        answers.append(
            model.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=8, **{CACHE_ARGUMENT: cache})
        )
    assert torch.equal(*answers)


def test_a_stored_prefix_is_handed_out_three_times_and_stays_the_same(storage):
    model = llama()
    ids = token_ids(1, 39)
    stored = small(model, **storage)
    with torch.no_grad():
        forward(model, ids[:, :35], stored)
        forward(model, ids[:, 35:36], stored)
    before, memory = stored.layers[0].keys.clone(), stored.memory()
    answers = [generate(model, ids, copy.deepcopy(stored), new_tokens=20) for _ in range(3)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(stored.layers[0].keys, before)
    if "offload" in storage:  # copies share its budget
        assert stored.memory().used_bytes == memory.used_bytes
    else:
        assert stored.memory() == memory
    assert stored.get_seq_length() == 36


def test_a_compiled_model_works_with_a_growing_cache_and_recompiles_a_bounded_number_of_times():
    model = llama()
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, backend=counter)
    ours, theirs = small(model), dynamic(model)
    frames = []
    with torch.no_grad():
        for position in range(30):
            ids = token_ids(1, 1, seed=position)
            compiled = forward(step, ids, ours).logits
            torch.testing.assert_close(compiled, forward(model, ids, theirs).logits)
            frames.append(counter.frame_count)
    assert frames[-1] == frames[len(frames) // 2], f"still compiling after 15 steps: {frames}"


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", [LOSSY["int4"], LOSSLESS["offloaded"]], ids=["int4", "offloaded"])
def test_a_compiled_model_works_with_blocks_and_is_not_compiled_anew_when_they_are_sealed(options, dynamic):
    model = llama()
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, backend=counter, dynamic=dynamic)
    caches = [small(model, **options) for _ in range(2)]
    frames = []
    with torch.no_grad():
        for position in range(60):
            ids = token_ids(1, 1 if position else 40, seed=position)
            logits = [forward(run, ids, cache).logits for run, cache in zip((step, model), caches, strict=True)]
            torch.testing.assert_close(*logits)
            frames.append(counter.frame_count)
    assert [layer.get_seq_length() for layer in caches[0].layers] == [40 + 59] * 3
    assert caches[0].stats == caches[1].stats
    assert frames[-1] == frames[30], f"still compiling after the second sealing: {frames}"


def test_generate_does_not_try_to_compile_what_grows(storage, monkeypatch):
    model = llama()
    config = CompileConfig()
    config._compile_all_devices = True  # what `generate` does on a GPU without being asked
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    cache = small(model, **storage)
    generate(model, token_ids(1, 5), cache, compile_config=config)
    assert not cache.is_compileable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_give_dynamic_caches_logits(dtype):
    model = copy.deepcopy(llama()).to(dtype)
    caches = small(model), dynamic(model)
    with torch.no_grad():
        for step, count in enumerate([5, 1, 9, 1]):
            logits = [forward(model, token_ids(2, count, seed=step), cache).logits for cache in caches]
            torch.testing.assert_close(*logits)
    assert caches[0].layers[0].keys.dtype == dtype


@pytest.mark.parametrize("padded", [False, True])
def test_fused_attention_over_full_precision_buffers_gives_the_same_tokens(padded):
    pytest.importorskip("numba")
    model = llama()
    ids = token_ids(2, 300)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :100] = 0
    caches = MemOSCache(model.config, fused_attention=True), dynamic(model)
    answers = [generate(model, ids, cache, 30, attention_mask=mask) for cache in caches]
    assert torch.equal(*answers)
    assert caches[0].stats.fused_calls == 3 * 29


def test_fused_attention_leaves_gradients_and_short_contexts_to_the_stock_kernels():
    model = llama()
    cache = MemOSCache(model.config, fused_attention=True)
    forward(model, token_ids(1, 300), cache)
    forward(model, token_ids(1, 1), cache).logits.sum().backward()
    model.zero_grad(set_to_none=True)
    generate(model, token_ids(1, 20), MemOSCache(model.config, fused_attention=True))
    assert cache.stats.fused_calls == 0
