"""Decode attention: the reference against a naive computation in float64, every kernel against the reference."""

import copy
import dataclasses
import logging
import math
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from attention_cases import CODECS, Case, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memos_hf.attention import cpu, op, reference
from memos_hf.attention.reference import Exact, Sinks

needs_numba = pytest.mark.skipif(not cpu.available(), reason="numba is not installed")

RUNS = [
    pytest.param(reference.decode_attention, id="reference"),
    pytest.param(cpu.decode_attention, id="cpu", marks=needs_numba),
    pytest.param(op.decode_attention, id="op"),
]
geometry = dict(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    queries=st.integers(1, 5),
    key_dim=st.sampled_from([8, 16, 24, 64]),
    value_dim=st.sampled_from([8, 16, 40]),
    block=st.sampled_from([8, 16, 64, 128]),
    entries=st.integers(0, 4),
    tail=st.integers(6, 150),
    sinks=st.integers(0, 3),
    hidden=st.integers(0, 200),
    seed=st.integers(0, 2**16),
)


@pytest.mark.parametrize("run", RUNS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codecs=st.sampled_from(CODECS),
    mask=st.sampled_from([None, "boolean", "additive"]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_head_sinks=st.booleans(),
    **geometry,
)
def test_any_shape_equals_the_naive_computation(run, codecs, mask, softcap, with_head_sinks, **shape):
    case = Case(codecs, **shape)
    head_sinks = case.normal(case.heads) if with_head_sinks else None
    check(case, run, case.mask(mask), softcap, head_sinks)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("codecs", CODECS)
def test_every_codec_is_read_in_place(run, codecs):
    check(Case(codecs, key_dim=64, value_dim=64, block=128, entries=4), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codecs", [("full", "full"), ("int8 token", "int4 token")])
def test_half_precision_is_computed_in_float32(run, dtype, codecs):
    check(Case(codecs, dtype=dtype, queries=3), run, tolerance=1e-2)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 71), (8, 1), (2, 7), (3, 3)])
def test_any_ratio_of_query_heads_to_kv_heads(run, kv_heads, group):
    check(Case(kv_heads=kv_heads, group=group, key_dim=64, value_dim=64), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(5, 5), (20, 12), (96, 96), (192, 128), (256, 256)])
def test_any_head_dims(run, key_dim, value_dim):
    for codecs in (("int4 token", "int4 token"), ("int8 token", "int2 token")):
        check(Case(codecs, key_dim=key_dim, value_dim=value_dim, block=64), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("queries", [2, 32])
def test_without_a_mask_queries_see_the_tokens_up_to_themselves(run, queries):
    check(Case(queries=queries, tail=40), run)
    check(Case(queries=queries, tail=3, shortened=False), run)  # queries whose own tokens are sealed


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks_broadcast_over_batch_and_heads(run, batch, heads):
    case = Case(queries=3)
    for kind in ("boolean", "additive"):
        check(case, run, case.mask(kind, heads, batch))
        mask = case.mask(kind, heads, 1).expand(case.batch, -1, -1, -1)
        check(case, run, mask)
        check(case, run, case.mask(kind, heads, batch).transpose(2, 3).contiguous().transpose(2, 3))


@pytest.mark.parametrize("run", RUNS)
def test_rows_that_may_see_nothing_are_zero(run):
    case = Case(queries=2, batch=2)
    mask = torch.ones(2, 1, 2, case.tokens, dtype=torch.bool)
    mask[0, 0, 1] = False
    for given_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        output = run(*case.arguments(given_mask))
        assert output[0, :, 1].eq(0).all() and output.isfinite().all() and output[1].ne(0).any()


@pytest.mark.parametrize("run", RUNS)
def test_left_padding_hides_whole_blocks(run):
    case = Case(entries=4, block=8)
    mask = torch.ones(2, 1, 1, case.tokens, dtype=torch.bool)
    mask[0, ..., :19] = False
    check(case, run, mask)


@pytest.mark.parametrize("run", RUNS)
def test_large_scores_do_not_overflow(run):
    case = Case(("int8 token", "int8 token"))
    case.query = case.query * 1e3
    check(case, run, tolerance=1e-3)


@pytest.mark.parametrize("run", RUNS)
def test_a_sink_that_is_not_sealed_yet_is_left_to_the_tail(run):
    case = Case(entries=1, tail=20, sinks=2, shortened=False)
    assert case.sinks is not None
    case.sinks.positions[:] = torch.tensor([[0, 17], [35, 3]])
    check(case, run)


@pytest.mark.parametrize("run", RUNS)
def test_what_lies_behind_valid_tokens_is_never_read(run):
    case = Case(("full", "full"))
    block = int(case.sealed.starts[0, 2] - case.sealed.starts[0, 1])
    for arenas in (case.sealed.keys, case.sealed.values):
        for slot in case.sealed.table[:, 1].tolist():
            arenas["codes"][slot, :, block:] = math.nan
    output = run(*case.arguments())
    assert output.isfinite().all()


def poison(case, entry, tokens):
    """Make NaN of some tokens of an entry, of every row."""
    for codec, arenas in ((case.sealed.key_codec, case.sealed.keys), (case.sealed.value_codec, case.sealed.values)):
        name = "codes" if codec.spec.kind == "full" else "scales"
        along = 2 if codec.role == "value" or codec.spec.kind == "full" else 3
        for slot in case.sealed.table[:, entry].tolist():
            arenas[name][slot : slot + 1].narrow(along, 0, tokens).fill_(math.nan)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("hidden", [1, 7, 64, 65, 127, 128, 129, 300, 509])
def test_tokens_before_the_first_visible_one_have_no_part(run, codecs, hidden):
    shape = {"key_dim": 64, "value_dim": 64, "block": 128, "entries": 4, "hidden": hidden}
    for mask in (None, "boolean"):
        case = Case(codecs, queries=3, **shape)
        check(case, run, case.mask(mask))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("codecs", [("full", "full"), ("int8 token", "int8 token"), ("int4 token", "int4 token")])
@pytest.mark.parametrize("hidden", [16, 21, 31])
def test_tokens_before_the_first_visible_one_are_not_read(run, codecs, hidden):
    case = Case(codecs, hidden=hidden, shortened=False)
    poison(case, 0, 16)
    poison(case, 1, hidden - 16)
    for mask in (None, "additive"):
        check(case, run, case.mask(mask))


@pytest.mark.parametrize("run", RUNS)
def test_rows_may_begin_at_different_tokens_of_their_blocks(run):
    case = Case(("int8 token", "int8 token"), batch=3, entries=4, sinks=0)
    case.sealed.starts[:] = torch.tensor([[-21, -5, 5, 10, 26], [-5, 10, 10, 22, 26], [-32, -16, 0, 10, 26]])
    case.tokens = 26 + case.tail.keys.shape[2]
    check(case, run, case.mask("boolean"))


@pytest.mark.parametrize("run", RUNS)
def test_blocks_may_all_lie_before_the_first_visible_token(run):
    check(Case(sinks=0, hidden=1000, queries=3), run)


@needs_numba
@pytest.mark.parametrize("codecs", CODECS)
def test_a_thread_keeps_to_its_own_memory(monkeypatch, codecs):
    """Many rows and wide heads, so that a thread needs nearly all of its share, whatever shares a scale."""
    held = []

    def scratch(floats):
        held.append(torch.full((floats + 4096,), 7.0))
        return held[-1].data_ptr()

    monkeypatch.setattr(cpu, "_scratch", scratch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    shape = {"group": 4, "queries": 32, "key_dim": 256, "value_dim": 128, "block": 32}
    case = Case(codecs, batch=1, kv_heads=1, **shape)
    check(case, cpu.decode_attention, tolerance=5e-5)
    kept_for_parts = (
        2 * 4 * 32 * (128 + 2)
    )  # behind the thread's share; one part that has all of a pair leaves it alone
    assert (held[0][-4096 - kept_for_parts :] == 7).all()


@needs_numba
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("codecs", [("int8 token", "int8 token"), ("int4 channel 8 hadamard", "int4 token hadamard")])
def test_the_kernel_gives_the_same_on_any_number_of_threads(threads, codecs):
    case = Case(codecs, batch=1, kv_heads=3, group=3, key_dim=64, value_dim=64, block=128, entries=30, tail=130)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(case, cpu.decode_attention)
    finally:
        torch.set_num_threads(before)


@needs_numba
def test_the_kernel_runs_where_torch_brings_no_openmp(monkeypatch):
    monkeypatch.setattr(cpu._load_kernel(), "_parallel", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check(Case(batch=1, block=128, entries=40, key_dim=64, value_dim=64), cpu.decode_attention)


@needs_numba
@pytest.mark.parametrize("own_threads", [False, True])
def test_many_python_threads_may_call_the_kernel_at_once(monkeypatch, own_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if own_threads:
        monkeypatch.setattr(cpu._load_kernel(), "_parallel", None)
    cases = [Case(batch=1, block=128, entries=30, key_dim=64, value_dim=64, seed=seed) for seed in range(6)]
    expected = [reference.decode_attention(*case.arguments()) for case in cases]
    wrong = []

    def call(index):
        for _ in range(10):
            output = cpu.decode_attention(*cases[index].arguments())
            if not torch.allclose(output, expected[index], atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_contiguous_buffers_are_read_by_strides(dtype, tokens):
    query = torch.randn(2, 6, 1, 64).to(dtype)
    keys, values = torch.randn(2, 2, 1024, 2, 64).to(dtype).unbind(3)
    keys, values = keys[:, :, :tokens], values[:, :, :tokens]
    output = cpu.decode_attention(query, Exact(keys, values), None, None, None, query.shape[-1] ** -0.5, 0.0, None)
    stock = torch.nn.functional.scaled_dot_product_attention
    expected = stock(query.double(), keys.double(), values.double(), enable_gqa=True)
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2)


@needs_numba
def test_infinite_half_precision_values_stay_infinite():
    keys = torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    values = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    values[0, 0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    output = cpu.decode_attention(torch.zeros(1, 1, 1, 8), Exact(keys, values), None, None, None, 1.0, 0.0, None)
    assert output[0, 0, 0, :3].tolist()[:2] == [math.inf, -math.inf]
    assert output[0, 0, 0, 2].isnan() and output[0, 0, 0, 3:].eq(1).all()


@pytest.mark.parametrize("codecs", [("full", "full"), ("int4 channel 8 hadamard", "int8 token")])
def test_the_operator_passes_opcheck(codecs):
    case = Case(codecs)
    sealed, sinks = case.sealed, case.sinks
    for mask in (None, case.mask("boolean"), case.mask("additive")):
        torch.library.opcheck(
            torch.ops.memos.decode_attention.default,
            (
                *(case.query, case.tail.keys, case.tail.values),
                *(list(sealed.keys.values()), list(sealed.values.values())),
                *(str(sealed.key_codec.spec), str(sealed.value_codec.spec), sealed.table, sealed.starts),
                *(sinks.keys, sinks.values, sinks.positions, mask, 0.25),
            ),
        )


def test_the_operator_runs_without_sealed_blocks():
    check(Case(entries=0), op.decode_attention)


def shifted(case, tokens):
    return replace(case.sealed, starts=case.sealed.starts + tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"mask": torch.ones(2, 1, 1, case.tokens + 1, dtype=torch.bool)}, "mask: expected"),
        (lambda case: {"mask": torch.ones(2, 3, 1, case.tokens, dtype=torch.bool)}, "mask: expected"),
        (lambda case: {"mask": torch.ones(1, case.tokens, dtype=torch.bool)}, "mask: expected"),
        (lambda case: {"query": case.query[:, :3]}, "query: expected a multiple of 2 heads"),
        (lambda case: {"query": case.query[:1]}, "tail keys: expected shape"),
        (lambda case: {"query": case.query[..., :8]}, "tail keys: expected shape"),
        (lambda case: {"tail": Exact(case.tail.keys, case.tail.values[:, :, :4])}, "tail values: expected shape"),
        (lambda case: {"head_sinks": torch.zeros(3)}, "head_sinks: expected shape"),
        (lambda case: {"sealed": shifted(case, 1)}, "block starts: expected rows whose first number is at most 0"),
        (lambda case: {"sealed": shifted(case, -46)}, "and a last of -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    case = Case()
    names = ("query", "tail", "sealed", "sinks", "mask", "scale", "softcap", "head_sinks")
    arguments = dict(zip(names, case.arguments(), strict=True)) | change(case)
    with pytest.raises(ValueError, match=message):
        op.decode_attention(**arguments)


def test_without_numba_the_reference_runs_and_one_line_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "memos_hf.attention.cpu_kernels", None)
    monkeypatch.delattr("memos_hf.attention.cpu_kernels", raising=False)
    cpu._load_kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            check(Case(), op.decode_attention)
            check(Case(), op.decode_attention)
        assert [record.message for record in caplog.records if "memos_hf[cpu]" in record.message] == caplog.messages
        assert len(caplog.messages) == 1
        with pytest.raises(RuntimeError, match="needs numba"):
            cpu.decode_attention(*Case().arguments())
    finally:
        cpu._load_kernel.cache_clear()


def test_what_a_kernel_noted_about_tensors_is_not_copied_with_them():
    sinks = Sinks(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, dtype=torch.int32))
    sinks.prepared["cpu"] = "the address of its keys"
    assert copy.deepcopy(sinks).prepared == {}
    assert pickle.loads(pickle.dumps(sinks)).prepared == {}
    assert dataclasses.replace(sinks, positions=sinks.positions + 1).prepared == {}


def test_a_profiler_sees_the_operator():
    case = Case()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op.decode_attention(case.query, case.tail, case.sealed, case.sinks, None, 0.25)
    assert any(event.key == "memos::decode_attention" for event in profile.key_averages())
