"""The benchmarks measure what they say, at sizes that take seconds."""

import json
import subprocess
import sys
import time

import pytest
import torch
from tiny import llama, mistral, token_ids
from transformers import DynamicCache

from memos_hf import MemOSCache
from memos_hf import contenders as contenders_module
from memos_hf.__main__ import main
from memos_hf.bench import end_to_end, kernel, offload
from memos_hf.bench.budget import Budget
from memos_hf.bench.calls import Geometry, RandomCalls
from memos_hf.bench.decode import WARMUP
from memos_hf.bench.grid import Grid, measure
from memos_hf.bench.memory import PeakMemory, anonymous_bytes, held_bytes
from memos_hf.bench.offload import OffloadSizes
from memos_hf.bench.results import Comparison, Measurement, Place
from memos_hf.bench.shapes import SHAPES, random_model, shape_config
from memos_hf.bench.suite import QUICK, GpuSuite
from memos_hf.bench.timing import device_times, interleave
from memos_hf.contenders import BLOCK_SIZE, CONTENDERS, REFERENCE, Contender, Room, available, contender, offloaded
from memos_hf.output import JsonReport

CPU = torch.device("cpu")
CACHES = ["static", "memos", "memos-int8", "memos-int2", "memos-offload", "memos-active-2"]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    return folder


def bench(*arguments):
    main(["bench", *map(str, arguments)])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit):
        bench(*arguments)
    return capsys.readouterr().err


def test_a_model_that_is_not_there_is_said_in_a_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit, match=r"^bench: [^\n]+$"):
        bench("--model", "no/such/folder")


class Clock:
    """A clock that goes on by one second whenever it is looked at."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 1
        return self.seconds


@pytest.fixture(scope="module")
def grid_report(tiny_llama, tmp_path_factory):
    report = tmp_path_factory.mktemp("report") / "grid.json"
    bench(
        *("--model", tiny_llama, "--contexts", 600, "--batch-sizes", 1, 2, "--repeats", 3, "--chunk", 256),
        *("--caches", *CACHES, "--device", "cpu", "--json", report),
    )
    return json.loads(report.read_text())


def test_every_combination_is_measured(grid_report):
    places = {(row["cache"], row["batch_size"], row["context"]) for row in grid_report["results"]}
    assert places == {(cache, rows, n) for cache in ("dynamic", *CACHES) for rows in (1, 2) for n in (16, 600)}
    assert len(grid_report["results"]) == len(places)
    for row in grid_report["results"]:
        assert len(row["step_ms"]) == 3
        assert min(row["step_ms"]) <= row["ms_per_token"] <= max(row["step_ms"])
        assert row["prefill_ms"] > 0
        assert row["prompt_peak_bytes"] >= 0


def test_the_kv_tax_is_over_the_same_cache_at_16_tokens(grid_report):
    rows = {(row["cache"], row["batch_size"], row["context"]): row for row in grid_report["results"]}
    for (cache, batch_size, context), row in rows.items():
        if context == 16:
            assert row["kv_tax_ms"] is None and row["kv_tax_ratio"] is None
            continue
        tax = row["ms_per_token"] - rows[cache, batch_size, 16]["ms_per_token"]
        assert row["kv_tax_ms"] == pytest.approx(tax)
        reference = rows["dynamic", batch_size, context]
        assert row["step_ratio"] == pytest.approx(row["ms_per_token"] / reference["ms_per_token"])
        if reference["kv_tax_ms"] > 0:
            assert row["kv_tax_ratio"] == pytest.approx(tax / reference["kv_tax_ms"])
        else:
            assert row["kv_tax_ratio"] is None


def test_bytes_and_tokens_are_the_caches_own(grid_report):
    config = llama().config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for rows in (1, 2):
        held = {
            row["cache"]: row["bytes_held"]
            for row in grid_report["results"]
            if (row["batch_size"], row["context"]) == (rows, 600)
        }
        assert held["dynamic"] == per_token * rows * (600 + WARMUP + 3)
        assert held["static"] - held["dynamic"] < 1000  # and a length for each layer
        assert held["memos"] >= held["dynamic"] > held["memos-int8"] > held["memos-int2"]
    exact = [row for row in grid_report["results"] if row["cache"] in (REFERENCE, "static", "memos", "memos-offload")]
    assert len(exact) == 16 and all(row["same_tokens"] for row in exact)


def test_an_offloaded_cache_is_read_in_place(grid_report):
    rows = [row for row in grid_report["results"] if row["cache"] in ("memos-offload", "memos-active-2")]
    assert len(rows) == 8 and all(row["materialised_calls"] == 0 for row in rows)


def test_a_budget_is_a_share_of_what_will_be_held_but_a_block_of_each_layer_at_least():
    config, cpu = llama().config, torch.device("cpu")
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def limit(room, **options):
        return offloaded(config, room, **options).options.lease.budget.limit(cpu)

    assert limit(Room(1000, rows=3)) == int(0.4 * 3000 * per_token)
    assert limit(Room(1000), share=0.25) == 250 * per_token
    assert limit(Room(1000, dtype=torch.bfloat16)) == int(0.4 * 500 * per_token)
    assert limit(Room(10, rows=2)) == 2 * BLOCK_SIZE * per_token


def test_a_cache_of_active_blocks_is_named_by_their_number():
    cache = contender("memos-active-12").make(llama().config, Room(1000))
    assert (cache.options.offload.active_blocks, cache.options.block_size) == (12, BLOCK_SIZE)
    cache = contender("memos-active-12x32").make(llama().config, Room(1000))
    assert (cache.options.offload.active_blocks, cache.options.block_size) == (12, 32)
    for name in ("memos-active-0", "memos-active-", "memos-active-2x", "memos-active-2x33"):
        with pytest.raises(ValueError, match="caches: expected some of"):
            contender(name)


def test_the_report_says_what_gave_it(grid_report):
    assert grid_report["environment"]["torch"] == torch.__version__
    assert grid_report["layers"] == 3
    assert grid_report["dtype"] == "float32"
    assert "resident set" in grid_report["peak_memory"]


def test_a_shape_is_cut_and_a_picture_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "figures.png"
    bench(
        *("--shape", "smollm2-135m", "--layers", 1, "--contexts", 40, "--repeats", 1),
        *("--caches", "memos", "--device", "cpu", "--dtype", "bfloat16", "--png", picture),
    )
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split()[:3] for line in printed.splitlines()[1:5]] == [
        [cache, "1", context] for context in ("16", "40") for cache in ("dynamic", "memos")
    ]


def test_every_round_makes_each_call_once_and_begins_with_another():
    made = []
    times = interleave({name: lambda name=name: made.append(name) for name in "abc"}, range(4), CPU)
    assert "".join(made) == "abc" + "bca" + "cab" + "abc"
    assert [len(times[name]) for name in "abc"] == [4, 4, 4]


def test_a_gpus_events_are_the_clock_and_begin_behind_the_lead(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    call, lead = (lambda name=name: done.append(name) for name in ("call", "lead"))
    assert device_times(call, torch.device("cuda"), samples=2, calls=3, lead=lead) == [2.0, 2.0]
    assert done == ["call", *["lead", "event", "call", "call", "call", "event"] * 2]


def test_caches_take_chunks_and_steps_in_turn():
    order = []

    class Recording(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            if layer_idx == 0:
                order.append((self.name, keys.shape[2]))
            return super().update(keys, values, layer_idx, *args, **kwargs)

    def contender(name):
        def make(config, room):
            cache = Recording(config=config)
            cache.name = name
            return cache

        return Contender(name, make, lambda device: None)

    ticks = []
    grid = Grid((40,), repeats=2, chunk=30)
    pair = {name: contender(name) for name in ("dynamic", "other")}
    *_, last = measure(llama(), token_ids(1, 40), pair, grid, lambda: ticks.append(0))
    one, other = "dynamic", "other"
    chunks = [(one, 30), (other, 30), (other, 10), (one, 10)]
    uncounted, counted = [one, other, other, one, one, other], [one, other, other, one]
    assert order[-14:] == [*chunks, *((name, 1) for name in (*uncounted, *counted))]
    assert len(ticks) == grid.turns()
    assert last[0].tokens == last[1].tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "llama-9"), "--shape: expected one of ('llama-3-8b'"),
        (("--shape", "smollm2-135m", "--layers", 31), "--layers: expected 1 to 30 for smollm2-135m, got 31"),
        (("--shape", "smollm2-135m", "--caches", "dynamo"), "--caches: expected some of ('dynamic'"),
        (("--suite", "gpu", "--device", "cpu"), "with --quick the same runs at toy sizes"),
        (("--suite", "gpu", "--quick", "--png", "x.png"), "--png: expected without --suite"),
        (("--suite", "gpu", "--layers", 2), "--layers: expected with --shape"),
        (("--shape", "smollm2-135m", "--quick"), "--quick: expected with --suite"),
        (("--shape", "smollm2-135m", "--contexts", 0), "expected an int of at least 1, got '0'"),
        (("--shape", "smollm2-135m", "--device", "abacus"), "'abacus' cannot be used here"),
        (("--shape", "smollm2-135m", "--device", "meta"), "'meta' cannot be used here"),
        (("--shape", "smollm2-135m", "--json", "."), "expected a file, not a folder"),
        (("--shape", "smollm2-135m", "--json", "no/such/x.json"), "there is no folder 'no/such'"),
        (("--shape", "smollm2-135m", "--seconds", 5), "--seconds: expected with --suite"),
        (("--suite", "gpu", "--quick", "--seconds", "nan"), "expected a finite number of at least 0, got 'nan'"),
        ((), "one of the arguments --model --shape --suite is required"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refused(capsys, *arguments)


def test_more_tokens_than_a_model_has_positions_are_refused(capsys, tiny_llama):
    printed = refused(capsys, "--model", tiny_llama, "--contexts", 4096)
    assert "--contexts: 4119 tokens with those of the steps, but the model has 4096 positions" in printed


def test_what_is_not_installed_is_said(capsys, monkeypatch, tiny_llama):
    monkeypatch.setattr(contenders_module, "is_hqq_available", lambda: False)
    bench("--model", tiny_llama, "--contexts", 16, "--repeats", 1, "--caches", "memos", "hqq-4", "--device", "cpu")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "left out: hqq-4: hqq is not installed: pip install hqq"
    assert second.startswith("cache")


def test_what_a_model_does_not_allow_is_left_out(monkeypatch):
    monkeypatch.setattr(contenders_module, "_fp8", lambda device: None)
    names = ["memos", "transformers-fp8"]
    runnable, left_out = available(names, mistral().config, CPU)
    assert list(runnable) == ["dynamic", "memos"]
    assert left_out.keys() == {"transformers-fp8"}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_sizes_of_their_models(name):
    with torch.device("meta"):
        model = random_model(shape_config(name), torch.device("meta"), torch.bfloat16)
    sizes = {"llama-3-8b": 8.0, "llama-3-70b": 70.6, "qwen3-8b": 8.2, "mistral-7b": 7.2, "gemma-3-4b": 3.9}
    assert model.num_parameters() / 1e9 == pytest.approx(sizes.get(name, 0.135), rel=0.02)
    assert shape_config(name, layers=1, positions=10**6).max_position_embeddings == 10**6


def test_bytes_are_counted_once_and_inside_quantized_tensors():
    class Packed:
        def __init__(self, *parts):
            self.parts = parts

        def __tensor_flatten__(self):
            return ["parts"], None

    cache = DynamicCache()
    keys = torch.zeros(1, 2, 8, 4)
    cache.update(keys, keys.clone(), 0)
    layer = cache.layers[0]
    assert held_bytes(cache) == 2 * keys.nbytes
    layer.values = layer.keys[:, :, :3]
    layer.encoded = Packed(torch.zeros(16), {"scale": torch.zeros(2)})
    assert held_bytes(cache) == keys.nbytes + 72
    ours = MemOSCache()
    ours.update(keys, keys, 0)
    assert held_bytes(ours) == ours.memory().allocated_bytes


def test_peak_memory_leaves_out_what_others_took_in_between():
    count = 32 * 2**20
    memory = PeakMemory(CPU)
    with memory:
        kept = torch.ones(count, dtype=torch.uint8)
    others = torch.ones(2 * count, dtype=torch.uint8)
    with memory:
        passing = torch.ones(2 * count, dtype=torch.uint8)
        time.sleep(0.05)
        del passing
    assert memory.peak_bytes == pytest.approx(3 * count, rel=0.15)
    assert kept.numel() + others.numel() == 3 * count


def test_peak_memory_of_a_gpu_is_the_allocators(monkeypatch):
    allocated, peaks = iter([100, 150, 350, 360]), iter([180, 400])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    memory = PeakMemory(torch.device("cuda"))
    for peak in (80, 100):  # the first block left 50, to which the second added 50
        with memory:
            pass
        assert memory.peak_bytes == peak
    assert "max_memory_allocated" in PeakMemory.method(memory.device)


def test_a_comparison_without_dynamic_cache_has_no_ratios():
    row = Comparison().add([Measurement("memos", 1, 600, [1.0, 3.0, 2.0], 5, [[1]])])[0]
    assert row["ms_per_token"] == 2
    assert row["step_ratio"] is row["kv_tax_ms"] is row["kv_tax_ratio"] is row["same_tokens"] is None


def test_a_report_is_whole_at_every_moment(tmp_path):
    report = JsonReport(tmp_path / "b.json", {"rows": []})
    report.contents["rows"].append(1)
    assert json.loads((tmp_path / "b.json").read_text()) == {"rows": []}
    report.save()
    assert json.loads((tmp_path / "b.json").read_text()) == {"rows": [1]}
    assert [path.name for path in (tmp_path).iterdir()] == ["b.json"]


def test_a_budget_ends():
    budget = Budget(5, Clock())
    assert list(budget.rounds(10)) == [0, 1, 2, 3, 4]
    assert budget.is_spent()
    assert list(budget.rounds(10, at_least=2)) == [0, 1]
    assert budget.part(100).is_spent()


@pytest.fixture(scope="module")
def suite_report(tmp_path_factory):
    report = tmp_path_factory.mktemp("suite") / "card.json"
    bench("--suite", "gpu", "--quick", "--device", "cpu", "--json", report)
    return json.loads(report.read_text())


def test_the_suite_finds_the_kernel_right_for_every_codec(suite_report):
    rows = suite_report["correctness"]
    assert {row["codec"] for row in rows} == kernel.CODECS.keys()
    assert sum(row["calls"] for row in rows) == QUICK.check_rounds * len(kernel.CODECS)
    assert all(row["passed"] and 0 <= row["largest_error"] <= row["tolerance"] for row in rows)
    assert suite_report["problems"] == suite_report["left_out"] == []


def test_the_suite_measures_bandwidth(suite_report):
    rows = {row["storage"]: row for row in suite_report["bandwidth"]}
    assert list(rows) == list(kernel.STORAGES)
    sizes = QUICK.long_cache
    exact = 2 * 2 * sizes.batch * sizes.tokens * sizes.kv_heads * sizes.head_dim
    sinks = 2 * 2 * sizes.batch * 4 * sizes.kv_heads * sizes.head_dim
    assert rows["one buffer"]["bytes"] == exact
    assert rows["bfloat16 blocks"]["bytes"] == exact + sinks
    assert exact / 2 < rows["int8"]["bytes"] < 0.7 * exact
    assert rows["int2"]["bytes"] < rows["int4"]["bytes"] < rows["int8"]["bytes"]
    for row in rows.values():
        assert row["of_copy"] == pytest.approx(row["bytes"] / row["ms"] / 1e6 / row["copy_gb_per_s"])
        assert row["speedup"] > 0


def test_the_suite_decodes_from_an_offloaded_cache(suite_report):
    found = suite_report["offload"]
    assert (found["context"], found["layers"], found["left_out"]) == (QUICK.offload.context, QUICK.offload.layers, None)
    assert 0 <= found["largest_error"] <= found["tolerance"]
    rows = {row["cache"]: row for row in found["rows"]}
    assert list(rows) == [offload.RESIDENT, offload.AHEAD, offload.NOT_AHEAD]
    assert rows[offload.RESIDENT]["of_resident"] == 1
    assert rows[offload.RESIDENT]["gb_per_s"] is rows[offload.RESIDENT]["hit_rate"] is None
    for name in (offload.AHEAD, offload.NOT_AHEAD):
        row = rows[name]
        assert len(row["step_ms"]) == QUICK.offload.rounds
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / found["copy_gb_per_s"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_moved_per_token"] * 3 / sum(row["step_ms"]) / 1e6)
        assert 0 < row["hit_rate"] < 1


def test_a_device_without_room_for_the_offload_part_is_said(monkeypatch):
    monkeypatch.setattr(offload, "free_bytes", lambda device: 1000)
    model = random_model(shape_config("smollm2-135m", layers=1), CPU, torch.bfloat16)
    found = offload.measure(model, OffloadSizes(context=600), Budget(60))
    assert "are free" in found["left_out"] and found["rows"] == []


def test_a_wrong_offloaded_cache_is_found():
    sizes = OffloadSizes(context=600, share=0.4, rounds=1, piece=200)
    model = random_model(shape_config("smollm2-135m", layers=2), CPU, torch.bfloat16)
    with torch.inference_mode():
        caches = offload.filled_caches(model, sizes)
        assert offload.largest_error(model, caches[offload.AHEAD], caches[offload.RESIDENT]) < 0.02
        layer = caches[offload.AHEAD].layers[1]
        layer.keys = layer.keys.flip(2)
        assert offload.largest_error(model, caches[offload.AHEAD], caches[offload.RESIDENT]) > 0.02


def test_nothing_is_read_ahead_where_that_is_asked_for():
    from memos_hf.blocks.staging import Staging

    begin = Staging.begin
    with offload.nothing_read_ahead():
        assert Staging.begin is not begin
    assert Staging.begin is begin


def test_anonymous_memory_follows_what_is_held():
    count = 64 * 2**20
    before = anonymous_bytes()
    held = torch.ones(count, dtype=torch.uint8)
    assert anonymous_bytes() - before == pytest.approx(count, rel=0.2)
    del held
    assert anonymous_bytes() - before == pytest.approx(0, abs=count * 0.2)


def test_the_suite_decodes_from_filled_caches(suite_report):
    rows = {(row["cache"], row["context"], row["batch_size"]): row for row in suite_report["end_to_end"]}
    assert rows.keys() == {
        (cache, place.context, place.batch_size)
        for cache in end_to_end.SHARE_OF_FULL_PRECISION
        for place in QUICK.places
    }
    for (cache, context, _), row in rows.items():
        assert len(row["step_ms"]) == QUICK.rounds
        assert row["materialised_calls"] == (0 if "int" in cache else None)
        assert row["same_tokens"] or cache not in ("dynamic", "memos")
        assert context == 16 or row["step_ratio"] > 0


def test_the_suite_leaves_out_what_it_has_no_time_for(tmp_path):
    report = GpuSuite(CPU, QUICK, 0.001, tmp_path / "x.json").run()
    assert report == json.loads((tmp_path / "x.json").read_text())
    assert any(line.startswith("bandwidth: the time was spent") for line in report["left_out"])
    assert any(line.startswith("end to end: the time was spent") for line in report["left_out"])


def test_the_suite_goes_on_where_a_part_fails(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("memos_hf.bench.calls.decode_attention", broken)
    monkeypatch.setattr(end_to_end, "decode", broken)
    report = GpuSuite(CPU, QUICK, 60).run()
    assert report["correctness"] and not any(row["passed"] for row in report["correctness"])
    assert all(row["largest_error"] is None and "no such kernel" in row["call"] for row in report["correctness"])
    raised = {row["storage"]: row["raised"] for row in report["bandwidth"]}
    assert raised.pop(kernel.STOCK) is None
    assert raised and set(raised.values()) == {"RuntimeError: no such kernel"}
    assert "bandwidth: int8: RuntimeError: no such kernel" in report["problems"]
    assert "end to end: RuntimeError: no such kernel" in report["problems"]


def test_a_wrong_kernel_is_found(monkeypatch):
    call = RandomCalls(CPU).plain(Geometry(1, 2, 2, head_dim=64, block=16), kernel.CODECS["int8"])
    assert call.error() < 0.02
    monkeypatch.setattr("memos_hf.bench.calls.decode_attention", lambda query, *others: query * torch.nan)
    assert call.error() == torch.inf


def test_caches_that_do_not_fit_side_by_side_are_grouped():
    assert end_to_end.groups_that_fit({"a": 4, "b": 4, "c": 11, "d": 3, "e": 9}, 10) == (
        [["a", "b"], ["d"], ["e"]],
        ["c"],
    )


def test_what_does_not_fit_is_left_out(monkeypatch):
    model = random_model(shape_config("smollm2-135m", layers=1), CPU, torch.bfloat16)
    place = Place(256, 1)
    shares = end_to_end.SHARE_OF_FULL_PRECISION
    needed = {name: end_to_end.needed_bytes(name, model.config, place, model.dtype) for name in shares}
    monkeypatch.setattr(end_to_end, "free_bytes", lambda device: int(needed["dynamic"] / end_to_end.USABLE) + 1)
    outcome = end_to_end.decode_at(model, place, 1, 100, Budget(60))
    assert {measured.cache for measured in outcome.measurements} == needed.keys() - {"memos"}
    assert "are free" in outcome.left_out["memos"]


def test_a_cache_that_raises_does_not_take_the_others_with_it(monkeypatch):
    def broken(config, room):
        raise RuntimeError("no such kernel")

    model = random_model(shape_config("smollm2-135m", layers=1), CPU, torch.bfloat16)
    monkeypatch.setitem(CONTENDERS, "memos", Contender("memos", broken, lambda device: None))
    outcome = end_to_end.decode_at(model, Place(64, 1), 1, 64, Budget(60))
    assert outcome.failed == {"memos": "RuntimeError: no such kernel"}
    assert [measured.cache for measured in outcome.measurements] == ["dynamic", "memos-int8", "memos-int4"]


def test_a_filled_cache_takes_no_more_than_was_reckoned():
    config = shape_config("smollm2-135m", layers=4)
    for name in end_to_end.SHARE_OF_FULL_PRECISION:
        cache = CONTENDERS[name].make(config, Room(0))
        place = Place(4000, 1)
        end_to_end.fill(cache, config, place, CPU, torch.bfloat16, piece=500)
        assert cache.get_seq_length() == 4000
        assert held_bytes(cache) <= end_to_end.needed_bytes(name, config, place, torch.bfloat16)


def test_the_suite_needs_neither_datasets_nor_numba(tmp_path):
    script = (
        "import sys; sys.modules['datasets'] = sys.modules['numba'] = sys.modules['matplotlib'] = None\n"
        "from memos_hf.__main__ import main; main(sys.argv[1:])"
    )
    report = tmp_path / "card.json"
    command = [sys.executable, "-c", script, "bench", "--suite", "gpu", "--quick", "--device", "cpu"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(report.read_text())["end_to_end"]


def test_eval_does_not_import_what_only_the_benchmarks_need():
    script = (
        "import sys, memos_hf.__main__\n"
        "assert not {'memos_hf.bench.suite', 'memos_hf.bench.grid', 'matplotlib', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_fused_cache_needs_numba_on_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(contenders_module, "find_spec", lambda name: None)
    assert "numba is not installed" in CONTENDERS["memos-fused"].missing(CPU)
    assert CONTENDERS["memos-fused"].missing(torch.device("cuda")) is None


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(capsys):
    pytest.importorskip("matplotlib")
    assert "'x.foo': expected one of" in refused(capsys, "--shape", "smollm2-135m", "--png", "x.foo")
