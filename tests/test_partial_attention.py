"""Attention over parts of the cached tokens: joined, they equal one softmax over all of them in float64."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from attention_cases import CODECS, Case, naive
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memos_hf.attention import cpu, gpu, op, reference
from memos_hf.attention.merge import Merge
from memos_hf.attention.op import partial_attention

needs_numba = pytest.mark.skipif(not cpu.available(), reason="numba is not installed")
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-6}
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
        shape |= {"batch": 1, "tail": min(shape["tail"], 20), "block": min(shape["block"], 16)}  # it is interpreted
    case = Case(codecs, **shape)
    head_sinks = case.normal(case.heads) if with_head_sinks else None
    cuts = [min(cut, shape["entries"]) for cut in cuts]
    check(case, cuts, case.mask(mask), softcap, head_sinks, separate_tail)


@pytest.mark.parametrize("codecs", [("full", "full"), ("int4 channel 8 hadamard", "int8 token")])
@pytest.mark.parametrize("kind", [None, "boolean", "additive"])
def test_the_operator_passes_opcheck(codecs, kind):
    case = Case(codecs)
    arguments = op._spelled_out(case.query, case.tail, case.sealed, case.sinks)
    torch.library.opcheck(torch.ops.memos.partial_attention.default, (*arguments, case.mask(kind), 0.25, 2.0))
