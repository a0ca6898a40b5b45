"""The GPU kernels against a naive computation in float64: on a GPU where there is one, else by Triton's interpreter."""

import copy
import dataclasses
import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import CODECS, Case, check, naive
from tiny import forward, generate, llama, token_ids

from memos_hf import MemOSCache
from memos_hf.attention import gpu, op
from memos_hf.attention.reference import Exact

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
needs_triton = pytest.mark.skipif(not gpu.available(), reason="triton 3.6 or newer is not installed")
MORE_CODECS = [
    ("int8 channel", "int8 token 16"),
    ("int4 token", "int4 token 16"),
    ("int4 tensor", "int2 tensor"),
    ("int4 channel 32 hadamard", "int4 token hadamard symmetric"),
    ("int2 channel 16 hadamard", "int2 token 16 hadamard"),
]
# Halves round weights, rotated queries, and scales that the channels of a token do not share.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device(request):
    if not gpu.available():
        pytest.skip("triton 3.6 or newer is not installed")
    if request.param == "interpreter" and not gpu._load_kernels().INTERPRETED.value:
        pytest.skip("the GPU runs these tests" if CUDA else "triton was imported before TRITON_INTERPRET was set")
    return "cpu" if request.param == "interpreter" else "cuda"


@pytest.fixture
def run(device):
    """The kernels, with arguments and result taken to the device and back."""
    return lambda *arguments: gpu.decode_attention(*(moved(argument, device) for argument in arguments)).cpu()


def moved(item, device):
    """A tensor, or what holds tensors, on a device."""
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {name: moved(part, device) for name, part in item.items()}
    if dataclasses.is_dataclass(item):
        fields = [field.name for field in dataclasses.fields(item) if field.init]
        return type(item)(**{name: moved(getattr(item, name), device) for name in fields})
    return item


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("codecs", CODECS + MORE_CODECS)
def test_every_codec_is_read_in_place(run, codecs, dtype):
    case = Case(codecs, batch=1, kv_heads=1, queries=2, key_dim=32, value_dim=64, block=32, entries=2, dtype=dtype)
    tolerance = 3 * TOLERANCES[dtype] if "int2 tensor" in codecs else TOLERANCES[dtype]  # values of up to 12.7
    check(case, run, tolerance=tolerance)


@pytest.mark.parametrize("codecs", [CODECS[0], CODECS[1], CODECS[5]])
@pytest.mark.parametrize("hidden", [1, 31, 32, 70])
def test_tokens_before_the_first_visible_one_are_not_read(run, codecs, hidden):
    shape = {"kv_heads": 1, "key_dim": 32, "value_dim": 32, "block": 32, "entries": 4, "shortened": False}
    case = Case(codecs, hidden=hidden, **shape)
    for arena in (case.sealed.keys, case.sealed.values):
        if arena["codes"].dtype.is_floating_point:
            for slot in case.sealed.table[:, : hidden // 32].flatten().tolist():
                arena["codes"][slot] = torch.nan
    check(case, run, mask=case.mask("boolean"))


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes(run, seed):
    choice = random.Random(seed)
    case = Case(
        choice.choice(CODECS),
        batch=choice.randint(1, 2),
        kv_heads=choice.randint(1, 2),
        group=choice.randint(1, 5),
        queries=choice.randint(1, 5),
        key_dim=choice.choice([8, 16, 24, 64]),
        value_dim=choice.choice([8, 16, 40]),
        block=choice.choice([8, 16, 64, 128]),
        entries=choice.randint(0, 4),
        tail=choice.randint(6, 150),
        sinks=choice.randint(0, 3),
        seed=seed,
    )
    head_sinks = case.normal(case.heads) if choice.random() < 0.5 else None
    check(case, run, case.mask(choice.choice([None, "boolean", "additive"])), choice.choice([0.0, 2.0]), head_sinks)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 71), (8, 1), (2, 7)])
def test_any_ratio_of_query_heads_to_kv_heads(run, kv_heads, group):
    check(Case(kv_heads=kv_heads, group=group, batch=1, key_dim=64, value_dim=64), run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(5, 5), (20, 12), (96, 96), (192, 128), (256, 256)])
def test_any_head_dims(run, key_dim, value_dim, dtype):
    for codecs in (("int4 token", "int4 token"), ("int8 token", "int2 token")):
        case = Case(codecs, batch=1, kv_heads=1, key_dim=key_dim, value_dim=value_dim, block=64, entries=2, dtype=dtype)
        check(case, run, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("queries", [2, 32])
def test_without_a_mask_queries_see_the_tokens_up_to_themselves(run, queries):
    check(Case(batch=1, queries=queries, tail=40), run)
    check(Case(batch=1, queries=queries, tail=3, shortened=False), run)  # queries whose own tokens are sealed


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks_broadcast_over_batch_and_heads(run, batch, heads):
    for queries, kind in ((1, "boolean"), (3, "additive"), (2, "boolean")):
        case = Case(queries=queries, entries=2)
        check(case, run, case.mask(kind, heads, batch))
    check(case, run, case.mask("additive", heads, batch).transpose(2, 3).contiguous().transpose(2, 3))


def test_rows_that_may_see_nothing_are_zero(run):
    case = Case(queries=2, batch=2)
    mask = torch.ones(2, 1, 2, case.tokens, dtype=torch.bool)
    mask[0, 0, 1] = False
    for given_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        output = run(*case.arguments(given_mask))
        assert output[0, :, 1].eq(0).all() and output.isfinite().all() and output[1].ne(0).any()


def test_left_padding_hides_whole_blocks(run):
    case = Case(entries=4, block=8)
    mask = torch.ones(2, 1, 1, case.tokens, dtype=torch.bool)
    mask[0, ..., :19] = False
    check(case, run, mask)


def test_large_scores_do_not_overflow(run):
    case = Case()
    case.query = case.query * 1e3
    check(case, run, tolerance=1e-3)


@pytest.mark.parametrize("codecs", [("int8 channel", "int8 token 8"), ("int4 channel 16 hadamard", "int4 token")])
@pytest.mark.parametrize("magnitude", [1e-4, 1e4])
def test_float16_keeps_the_range_of_scales(run, codecs, magnitude):
    case = Case(codecs, batch=1, dtype=torch.float16)
    for codec, arenas in ((case.sealed.key_codec, case.sealed.keys), (case.sealed.value_codec, case.sealed.values)):
        arenas.update(codec.encode(codec.decode(arenas).float() * magnitude)[0])
    case.query = case.query / magnitude if magnitude > 1 else case.query
    error = run(*case.arguments()).double() - naive(*case.arguments())
    assert error.abs().max() <= 2e-3 * max(magnitude, 1)


def test_a_sink_that_is_not_sealed_yet_is_left_to_the_tail(run):
    case = Case(entries=1, tail=20, sinks=2, shortened=False)
    case.sinks.positions[:] = torch.tensor([[0, 17], [35, 3]])
    check(case, run)


def test_more_sinks_than_a_tile_has(run):
    check(Case(sinks=19, batch=1, kv_heads=1), run)


def test_what_lies_behind_valid_tokens_is_never_read(run):
    case = Case(("full", "full"))
    valid = int(case.sealed.starts[0, 2] - case.sealed.starts[0, 1])
    for arenas in (case.sealed.keys, case.sealed.values):
        for slot in case.sealed.table[:, 1].tolist():
            arenas["codes"][slot, :, valid:] = math.nan
    assert run(*case.arguments()).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
def test_contiguous_buffers_are_read_by_strides(device, dtype, tokens):
    query = torch.randn(2, 6, 1, 40, device=device).to(dtype)
    keys, values = torch.randn(2, 2, 333, 2, 40, device=device).to(dtype).unbind(3)
    keys, values = keys[:, :, :tokens], values[:, :, :tokens]
    output = gpu.decode_attention(query, Exact(keys, values), None, None, None, 40**-0.5, 0.0, None)
    stock = torch.nn.functional.scaled_dot_product_attention
    expected = stock(query.double(), keys.double(), values.double(), enable_gqa=True)
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_queries_and_exact_tokens_may_have_different_dtypes(run, dtypes):
    case = Case(batch=1, dtype=dtypes[1])
    case.query = case.query.to(dtypes[0])
    check(case, run, tolerance=TOLERANCES[torch.bfloat16])


def test_no_tokens_and_no_rows(run):
    case = Case(batch=1, entries=0, tail=0)
    assert run(*case.arguments()).eq(0).all()
    empty = torch.empty(0, 2, 1, 16)
    assert gpu.decode_attention(empty, Exact(empty, empty), None, None, None, 1.0, 0.0, None).shape == (0, 2, 1, 16)


def test_what_the_kernels_take():
    query, keys = torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 8, 64)
    assert gpu.supports(query, keys, keys.half())
    assert not gpu.supports(query.double(), keys, keys)
    assert not gpu.supports(query, keys, keys.expand(1, 2, 8, 64).repeat(1, 1, 1, 9))


def test_without_triton_one_line_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu._load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not gpu.available() and not gpu.available()
        assert len(caplog.messages) == 1 and "memos_hf[gpu]" in caplog.messages[0]
        with pytest.raises(RuntimeError, match="needs triton"):
            gpu.decode_attention(*Case().arguments())
    finally:
        gpu._load_kernels.cache_clear()


@needs_triton
def test_the_kernels_compile_without_a_gpu_and_growth_compiles_nothing(tmp_path):
    script = Path(__file__).with_name("compile_gpu_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


def on_the_gpu(case, mask=None):
    return [moved(argument, "cuda") for argument in case.arguments(mask)]


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_growth_compiles_nothing():
    kernels = gpu._load_kernels()

    def variants():
        return sum(
            len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (kernels.attend, kernels.combine)
        )

    counts = []
    for entries, tail in [(3, 20), (1, 1), (2, 16), (17, 33), (64, 128), (300, 5)]:
        case = Case(entries=entries, tail=tail, block=16, batch=1, dtype=torch.bfloat16)
        for kind in (None, "boolean"):
            gpu.decode_attention(*on_the_gpu(case, case.mask(kind)))
        counts.append(variants())
    assert len(set(counts)) == 1


@pytest.mark.gpu
@needs_gpu
@needs_triton
def test_nothing_waits_for_the_device():
    arguments = on_the_gpu(Case(("int4 channel 8 hadamard", "int4 token hadamard symmetric"), entries=9))
    op.decode_attention(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.decode_attention(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("codecs", [("full", "full"), ("int4 channel 8 hadamard", "int8 token")])
def test_the_operator_passes_opcheck(codecs):
    case = Case(codecs)
    for mask in (None, case.mask("boolean"), case.mask("additive")):
        query, tail, sealed, sinks, mask, *_ = on_the_gpu(case, mask)
        torch.library.opcheck(
            torch.ops.memos.decode_attention.default,
            (
                *(query, tail.keys, tail.values, list(sealed.keys.values()), list(sealed.values.values())),
                *(str(sealed.key_codec.spec), str(sealed.value_codec.spec), sealed.table, sealed.starts),
                *(sinks.keys, sinks.values, sinks.positions, mask, 0.25),
            ),
        )


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("preset", ["int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_decodes_in_place(preset, dtype):
    model = copy.deepcopy(llama()).to("cuda", dtype)
    cache = MemOSCache(model.config, quantization=preset)
    answer = generate(model, token_ids(2, 400).cuda(), cache, 30)
    assert answer.shape == (2, 430)
    assert cache.stats.fused_calls >= 3 * 28
    assert cache.stats.materialised_calls == 0


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_a_model_gives_on_the_gpu_what_it_gives_on_the_cpu(preset):
    logits = []
    for place in ("cuda", "cpu"):
        model = copy.deepcopy(llama()).to(place)
        cache = MemOSCache(model.config, quantization=preset)
        with torch.no_grad():
            forward(model, token_ids(2, 400).to(place), cache)
            logits.append(forward(model, token_ids(2, 3, seed=1).to(place), cache).logits.cpu())
        assert cache.stats.materialised_calls == 0
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
