"""The checks that need a CUDA GPU: the tests marked `gpu`, and peak memory of a long growth beside DynamicCache.

Prints one table of each; without a GPU it says so and is done:

    python examples/gpu_check.py --json gpu.json
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from command_line import parser_for, write_json
from growth import feed
from peak_memory import PeakMemory
from transformers import Cache, DynamicCache

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int
from memos_hf.output import print_rows

TESTS = Path(__file__).resolve().parent.parent / "tests"
OUTCOMES = ("passed", "failed", "skipped")
# An 8-billion-parameter Llama's.
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass
class TestResult:
    """One test of the run."""

    name: str
    case: str
    outcome: str
    seconds: float


@dataclass
class GrowthResult:
    """Bytes that one kind of cache took while it grew, a token at a time."""

    cache: str
    final_bytes: int
    peak_bytes: int
    reserved_bytes: int | None


def run_gpu_tests(tests: Path) -> list[TestResult]:
    """Run the tests marked `gpu`, in a process of their own, and read what became of them."""
    # Only the files that have such tests: others may need packages that a machine with a GPU lacks.
    files = [str(path) for path in sorted(tests.glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *files],
            cwd=tests.parent,
            check=False,
        )
        if not report.is_file():
            raise SystemExit(f"pytest could not run the tests in {tests}; what it says is above")
        return [read_result(case) for case in ElementTree.parse(report).iter("testcase")]


def read_result(case: ElementTree.Element) -> TestResult:
    """What a JUnit report says of one test."""
    outcome = "passed"
    if case.find("failure") is not None or case.find("error") is not None:
        outcome = "failed"
    elif case.find("skipped") is not None:
        outcome = "skipped"
    module = case.get("classname", "").rpartition("tests.")[2]
    name = case.get("name", "")
    return TestResult(f"{module}: {name.partition('[')[0]}", name, outcome, float(case.get("time", 0)))


def print_outcomes(results: list[TestResult]) -> None:
    """One row for each test function, with the number of its cases; those that failed by name."""
    by_name: dict[str, list[TestResult]] = defaultdict(list)
    for result in results:
        by_name[result.name].append(result)
    rows = []
    for name, cases in [*by_name.items(), ("all", results)]:
        counts = Counter(case.outcome for case in cases)
        seconds = f"{sum(case.seconds for case in cases):.1f}"
        rows.append({"test": name, **{outcome: counts[outcome] for outcome in OUTCOMES}, "seconds": seconds})
    print_rows(rows)
    for result in results:
        if result.outcome == "failed":
            print(f"failed: {result.name} {result.case}")


def measure_growth(cache: Cache, tokens: int, device: torch.device) -> GrowthResult:
    """Grow `cache` to `tokens`, one at a time, in bfloat16."""
    states = torch.randn(1, KV_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    with torch.inference_mode(), PeakMemory(device) as memory:
        feed(cache, LAYERS, states, tokens)
    return GrowthResult(type(cache).__name__, memory.live_bytes, memory.peak_bytes, memory.reserved_bytes)


def print_growth(results: list[GrowthResult], tokens: int) -> None:
    """One row for each cache."""
    rows = []
    for result in results:
        counts = (result.final_bytes, result.peak_bytes, result.reserved_bytes)
        shown = ("" if count is None else f"{count / 2**20:.1f}" for count in counts)
        rows.append(dict(zip(("cache", "in the end", "at the peak", "reserved"), (result.cache, *shown), strict=True)))
    print(f"{tokens:,} tokens, one at a time, {LAYERS} layers of {KV_HEADS} heads of {HEAD_DIM}, bfloat16; MiB")
    print_rows(rows)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--tokens", type=positive_int, default=8192, help="tokens to grow to (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results with the card's name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so there is nothing to check.")
        write_json(options.json, {"tests": [], "growth": []})
        return

    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, transformers {transformers.__version__}\n", flush=True)
    tests = run_gpu_tests(TESTS)
    device = torch.device("cuda")
    growth = [measure_growth(cache, options.tokens, device) for cache in (DynamicCache(), MemOSCache())]
    print()
    print_outcomes(tests)
    print()
    print_growth(growth, options.tokens)
    write_json(
        options.json, {"tests": [asdict(test) for test in tests], "growth": [asdict(result) for result in growth]}
    )
    if not tests or any(test.outcome == "failed" for test in tests):
        raise SystemExit("some tests failed" if tests else f"there are no tests marked gpu in {TESTS}")


if __name__ == "__main__":
    main()
