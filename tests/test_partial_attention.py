"""Attention over parts of the cached tokens: joined, they equal one softmax over all of them in float64."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from attention_cases import CODECS, Case, naive
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memos_hf.attention import cpu, gpu, op, query_tile, reference
from memos_hf.attention.merge import Merge
from memos_hf.attention.op import decode_attention, partial_attention
from memos_hf.attention.reference import Exact, Sealed, Sinks

needs_numba = pytest.mark.skipif(not cpu.available(), reason="numba is not installed")
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
KERNELS = [
    pytest.param(reference.decode_attention, id="reference"),
    pytest.param(cpu.decode_attention, id="cpu", marks=needs_numba),
    pytest.param(gpu.decode_attention, id="gpu"),
]


@pytest.fixture
def interpreted():
    """Triton's interpreter, for the GPU kernels."""
    if not gpu.available() or not gpu._load_kernels().INTERPRETED.value:
        pytest.skip("Triton does not interpret")


@pytest.fixture(params=KERNELS)
def kernel(request):
    """One of the kernels, whatever tensors come."""
    if request.param is gpu.decode_attention:
        request.getfixturevalue("interpreted")
    with patch.object(op, "_kernel_for", lambda *arguments: request.param):
        yield request.param


def entries_of(case, first, last):
    """The entries `first` to `last` of the block table."""
    return replace(case.sealed, table=case.sealed.table[:, first:last], starts=case.sealed.starts[:, first : last + 1])


def parts_of(case, cuts, mask, separate_tail=True):
    """Arguments of a call for each part: the block table cut before these entries, and the tail."""
    parts = []
    sealed_tokens = int(case.sealed.starts[0, -1]) if case.sealed else 0
    if case.sealed:
        edges = [0, *sorted(cuts), case.sealed.table.shape[1]]
        parts = [(None, entries_of(case, *edge), case.sinks, mask) for edge in pairwise(edges)]
    if separate_tail or not parts:
        parts.append((case.tail, None, None, mask if mask is None else mask[..., sealed_tokens:]))
    else:
        parts[-1] = (case.tail, *parts[-1][1:])
    return parts


def joined(case, parts, softcap=0.0, head_sinks=None):
    """What the parts give together."""
    merge = Merge()
    for tail, sealed, sinks, mask in parts:
        merge.add(*partial_attention(case.query, tail, sealed, sinks, mask, case.query.shape[-1] ** -0.5, softcap))
    return merge.result(head_sinks)


def check(case, cuts=(), mask=None, softcap=0.0, head_sinks=None, separate_tail=True, tolerance=2e-5):
    output = joined(case, parts_of(case, cuts, mask, separate_tail), softcap, head_sinks)
    if mask is None:
        mask = torch.ones(case.queries, case.tokens, dtype=torch.bool)
    expected = naive(*case.arguments(mask, softcap, head_sinks))
    assert output.dtype == torch.promote_types(case.query.dtype, torch.float32) and output.shape == expected.shape
    assert (output.double() - expected).abs().max() <= tolerance


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    codecs=st.sampled_from(CODECS),
    mask=st.sampled_from([None, "boolean", "additive"]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_head_sinks=st.booleans(),
    separate_tail=st.booleans(),
    cuts=st.lists(st.integers(0, 4), max_size=3),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    queries=st.integers(1, 5),
    key_dim=st.sampled_from([8, 16, 24, 64]),
    value_dim=st.sampled_from([8, 16, 40]),
    block=st.sampled_from([8, 16, 64, 128]),
    entries=st.integers(0, 5),
    tail=st.integers(6, 150),
    sinks=st.integers(0, 3),
    hidden=st.integers(0, 200),
    seed=st.integers(0, 2**16),
)
def test_parts_of_any_shape_join_to_the_whole(
    kernel, codecs, mask, softcap, with_head_sinks, separate_tail, cuts, **shape
):
    if kernel is gpu.decode_attention:
        # It is interpreted, program after program.
        shape |= {"batch": 1, "kv_heads": 1, "tail": min(shape["tail"], 20), "block": min(shape["block"], 16)}
    case = Case(codecs, **shape)
    head_sinks = case.normal(case.heads) if with_head_sinks else None
    cuts = [min(cut, shape["entries"]) for cut in cuts]
    check(case, cuts, case.mask(mask), softcap, head_sinks, separate_tail)


@pytest.mark.parametrize("codecs", CODECS)
def test_parts_may_be_read_from_copies_of_their_blocks(kernel, codecs):
    """As offloaded blocks are: what a call is given has this part's tokens, sinks and mask alone, from 0 on."""
    case = Case(codecs, batch=1, entries=5, queries=2, shortened=False)
    mask = case.mask("additive")
    parts = [(case.tail, None, None, mask[..., 5 * 16 :])]
    for first, last in ((0, 2), (2, 3), (3, 5)):
        part = entries_of(case, first, last)
        slots = part.table.flatten().long()
        staged = [{name: arena[slots] for name, arena in arenas.items()} for arenas in (part.keys, part.values)]
        table = torch.arange(len(slots), dtype=torch.int32)[None]
        sealed = Sealed(part.key_codec, part.value_codec, *staged, table, part.starts - part.starts[:, :1])
        positions = torch.where(case.sinks.positions >= 0, case.sinks.positions - first * 16, -1)
        sinks = Sinks(case.sinks.keys, case.sinks.values, positions)
        parts.append((None, sealed, sinks, mask[..., first * 16 : last * 16]))
    expected = naive(*case.arguments(mask))
    assert (joined(case, parts).double() - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codecs", [("full", "full"), ("int8 token", "int4 token"), ("fp8 token", "fp8 token")])
def test_half_precision(kernel, dtype, codecs):
    case = Case(codecs, dtype=dtype, queries=3, batch=1)
    check(case, [1], case.mask("boolean"), tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[1]], indirect=True)
def test_parts_of_half_precision_are_not_rounded_before_they_are_joined(kernel, dtype):
    case = Case(("full", "full"), dtype=dtype, queries=3, batch=1)
    check(case, [1], case.mask("boolean"), tolerance=5e-6)


def test_float64_queries_are_computed_in_float64():
    case = Case(("full", "full"), dtype=torch.float64)
    check(case, [1, 2], tolerance=1e-12)


def test_left_padding_hides_whole_parts(kernel):
    case = Case(entries=4, block=8, batch=2, sinks=0)
    mask = torch.ones(2, 1, 1, case.tokens, dtype=torch.bool)
    mask[0, ..., :19] = False
    for given_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        check(case, [1, 2], given_mask)
    check(case, [1, 2], torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min))
    output, log_sum_exp = partial_attention(case.query, None, entries_of(case, 0, 2), None, mask, 0.25)
    assert output[0].eq(0).all() and log_sum_exp[0].eq(-math.inf).all()
    assert output[1].ne(0).any() and log_sum_exp[1].isfinite().all()


def test_rows_that_no_part_allows_are_zero(kernel):
    case = Case(queries=2, batch=1)
    mask = torch.ones(1, 1, 2, case.tokens, dtype=torch.bool)
    mask[0, 0, 1] = False
    for head_sinks in (None, torch.zeros(case.heads)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = joined(case, parts_of(case, [1, 2], mask), head_sinks=head_sinks)
        assert output[:, :, 1].eq(0).all() and output.isfinite().all() and output[:, :, 0].ne(0).any()


def test_rows_may_begin_at_different_tokens_of_their_blocks(kernel):
    case = Case(("int8 token", "int8 token"), batch=3, entries=4, sinks=0)
    case.sealed.starts[:] = torch.tensor([[-21, -5, 5, 10, 26], [-5, 10, 10, 22, 26], [-32, -16, 0, 10, 26]])
    case.tokens = 26 + case.tail.keys.shape[2]
    for separate_tail in (True, False):
        check(case, [1, 3], case.mask("boolean"), separate_tail=separate_tail)
        check(case, [1, 3], None, separate_tail=separate_tail)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_log_sum_exp_is_that_of_the_scores(kernel, softcap):
    case = Case(("full", "full"), entries=0, queries=3, batch=1, group=2)
    mask = case.mask("additive", heads=case.heads)
    scores = case.query.double() @ case.tail.keys.double().repeat_interleave(2, dim=1).transpose(2, 3) * 0.25
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    for given_mask, expected in ((None, scores), (mask, scores + mask)):
        _, log_sum_exp = partial_attention(case.query, case.tail, None, None, given_mask, 0.25, softcap)
        assert log_sum_exp.dtype == torch.float32
        torch.testing.assert_close(log_sum_exp.double(), expected.logsumexp(dim=-1), atol=1e-5, rtol=1e-5)


@needs_numba
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_that_share_a_part_write_one_log_sum_exp(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shape = {"batch": 1, "kv_heads": 3, "group": 3, "queries": 2, "block": 128, "entries": 30, "tail": 130}
    case = Case(("int4 channel 8 hadamard", "int8 token"), **shape)
    check(case, [11], case.mask("boolean"))
    check(case, [11], case.mask("additive"), head_sinks=case.normal(case.heads), separate_tail=False)


def test_a_part_without_tokens_has_no_share(kernel):
    case = Case(batch=1)
    output, log_sum_exp = partial_attention(case.query, None, entries_of(case, 1, 1), case.sinks, None, 0.25)
    assert output.shape == (1, case.heads, 1, 16) and output.eq(0).all() and log_sum_exp.eq(-math.inf).all()


def test_one_part_that_is_the_whole_is_what_a_whole_call_gives_to_the_bit(kernel):
    case = Case(("int4 channel 8 hadamard", "int8 token"))
    whole = decode_attention(*case.arguments())
    output, _ = partial_attention(*case.arguments()[:-1])
    assert torch.equal(output, whole)
    assert torch.equal(decode_attention(*case.arguments()), whole)


@settings(deadline=None, max_examples=25)
@given(
    codecs=st.sampled_from(CODECS),
    mask=st.sampled_from([None, "boolean", "additive"]),
    mask_per_head=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    with_head_sinks=st.booleans(),
    cuts=st.lists(st.integers(0, 4), max_size=3),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    queries=st.integers(op.MOST_QUERIES + 1, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    entries=st.integers(0, 4),
    tail=st.integers(1, 60),
    hidden=st.integers(0, 60),
    seed=st.integers(0, 2**16),
)
def test_many_queries_are_attended_to_in_tiles(codecs, mask, mask_per_head, softcap, with_head_sinks, cuts, **shape):
    case = Case(codecs, **shape)
    mask = case.mask(mask, case.heads if mask_per_head else 1)
    head_sinks = case.normal(case.heads) if with_head_sinks else None
    cuts = [min(cut, shape["entries"]) for cut in cuts]
    with patch.object(query_tile, "SCORES_PER_TILE", 1), patch.object(query_tile, "QUERIES_PER_TILE", 7):
        check(case, cuts, mask, softcap, head_sinks, tolerance=TOLERANCES[case.query.dtype])


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_many_queries_take_bounded_memory():
    shape = {"batch": 1, "kv_heads": 1, "group": 3, "block": 128, "sinks": 0}
    case = Case(queries=1000, entries=40, tail=3000, **shape)
    with LargestTensor() as largest:
        partial_attention(case.query, case.tail, case.sealed, None, None, 0.25)
    assert largest.elements <= query_tile.SCORES_PER_TILE < 3 * 1000 * case.tokens / 50


@pytest.mark.parametrize("codecs", [("full", "full"), ("int4 channel 8 hadamard", "int8 token")])
@pytest.mark.parametrize("kind", [None, "boolean", "additive"])
def test_the_operator_passes_opcheck(codecs, kind):
    case = Case(codecs)
    arguments = op._spelled_out(case.query, case.tail, case.sealed, case.sinks)
    torch.library.opcheck(torch.ops.memos.partial_attention.default, (*arguments, case.mask(kind), 0.25, 2.0))


def test_a_profiler_sees_the_operator():
    case = Case()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        partial_attention(case.query, None, case.sealed, case.sinks, None, 0.25)
    assert any(event.key == "memos::partial_attention" for event in profile.key_averages())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"mask": torch.ones(2, 1, 1, case.tokens - 1, dtype=torch.bool)}, "mask: expected .* or more"),
        (lambda case: {"mask": torch.ones(1, case.tokens, dtype=torch.bool)}, "mask: expected"),
        (lambda case: {"query": case.query[:, :3]}, "query: expected a multiple of 2 heads"),
        (lambda case: {"query": case.query[..., :8]}, "tail keys: expected shape"),
        (lambda case: {"query": case.query[:1], "tail": None}, "block table: expected shape"),
        (lambda case: {"tail": Exact(case.tail.keys, case.tail.values[:, :, :4])}, "tail values: expected shape"),
        (lambda case: {"sealed": replace(case.sealed, starts=case.sealed.starts - 46)}, "and a last of -1"),
        (lambda case: {"tail": None, "sealed": None}, "tail, sealed: expected at least one of them"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    case = Case()
    names = ("query", "tail", "sealed", "sinks", "mask", "scale", "softcap")
    arguments = dict(zip(names, case.arguments()[:-1], strict=True)) | change(case)
    with pytest.raises(ValueError, match=message):
        partial_attention(**arguments)


def test_blocks_that_were_a_part_are_checked_again_as_a_whole():
    case = Case(sinks=0)
    part = entries_of(case, 1, 3)
    partial_attention(case.query, case.tail, part, None, None, 0.25)
    with pytest.raises(ValueError, match="first number is at most 0"):
        decode_attention(case.query, case.tail, part, None, None, 0.25)


def test_parts_join_in_any_order():
    parts = [(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3)) for _ in range(4)]
    weights = torch.stack([log_sum_exp for _, log_sum_exp in parts]).softmax(dim=0)
    expected = sum(weight[..., None] * output for weight, (output, _) in zip(weights, parts, strict=True))
    for order in (parts, parts[::-1]):
        merge = Merge()
        for output, log_sum_exp in order:
            merge.add(output.clone(), log_sum_exp.clone())
        torch.testing.assert_close(merge.result(), expected)


def test_head_sinks_that_are_infinitely_low_change_nothing():
    merge = Merge()
    merge.add(torch.ones(1, 2, 2, 4), torch.tensor([[[1.0, -math.inf], [-5.0, 3.0]]]))
    merge.add(torch.ones(1, 2, 2, 4), torch.tensor([[[2.0, -math.inf], [-math.inf, 3.0]]]))
    torch.testing.assert_close(merge.result(torch.full((2,), -math.inf)), merge.result())


def test_a_merge_refuses_what_does_not_fit():
    merge = Merge()
    with pytest.raises(RuntimeError, match="at least one part"):
        merge.result()
    with pytest.raises(ValueError, match="part: expected"):
        merge.add(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 1))
    merge.add(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="part: expected"):
        merge.add(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1))
