"""The examples run as their help says, and print what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memos_hf.bench.decode import WARMUP

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pytestmark = pytest.mark.slow


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FutureWarning" not in done.stderr
    return done.stdout


def test_generate_answers_and_reports_speed_and_memory():
    printed = run("generate", "--max-new-tokens", "24", "--prompt", "What is the capital of France?")
    assert "Paris" in printed
    assert "tokens per second" in printed
    assert "allocated" in printed
    assert "CacheStats(" in printed


def test_compare_dynamic_cache_prints_a_table_and_writes_figures(tmp_path):
    report, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    printed = run(
        "compare_dynamic_cache",
        "--contexts",
        "16",
        "300",
        "--rounds",
        "3",
        "--json",
        str(report),
        "--plot",
        str(picture),
    )
    for name in ("DynamicCache", "StaticCache", "MemOSCache"):
        assert name in printed
    assert json.loads(report.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_layouts_compares_both():
    printed = run("layouts", "--tokens", "500")
    assert "head_major" in printed
    assert "seq_major" in printed


def test_growth_stays_within_its_bounds():
    printed = run("growth")
    assert "growths" in printed


def test_a_long_context_gives_the_same_tokens_in_a_part_of_the_memory(tmp_path):
    report, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    printed = run(
        "long_context",
        *("--tokens", "1300", "--new-tokens", "3", "--active-blocks", "2"),
        *("--json", str(report), "--png", str(picture)),
    )
    assert "all but active blocks gave the same tokens" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(report.read_text())
    rows = written["caches"]
    assert list(rows) == ["DynamicCache", "MemOSCache", "offloaded, pin", "offloaded, lru", "2 active blocks"]
    resident, pin, lru, active = list(rows.values())[1:]
    for row in (pin, lru, active):
        assert row["memory_of_resident"] < 0.6
        assert row["process_bytes"] < 0.7 * resident["process_bytes"]
        assert row["disk_bytes"] > 0
        assert row["bytes_moved_per_token"] > 0
        assert [tokens for tokens, _ in row["held"]][-1] == 1300 + 3 + WARMUP
    assert resident["hit_rate"] is None
    assert 0 < pin["hit_rate"] == lru["hit_rate"] < 1  # what is on the device is read before it has to give way


def test_conversations_come_back_and_leave_no_files(tmp_path):
    report = tmp_path / "figures.json"
    printed = run(
        "conversations",
        *("--conversations", "3", "--tokens", "700", "--fit", "1", "--turns", "2", "--json", str(report)),
    )
    assert "6 of 6 answers are those of a DynamicCache of its own" in printed
    written = json.loads(report.read_text())
    assert (written["files"], written["files_left"]) == (3, 0)
    assert len(written["first_token_s"]["all"]) == 6
    assert written["disk_bytes"] > 0 < written["misses"]


def test_save_and_resume_answers_from_another_process():
    printed = run("save_and_resume", "--tokens", "300", "--max-new-tokens", "8", "--quantization", "int8")
    assert "the same answer as without saving: yes" in printed


def test_a_prefix_is_found_again_by_the_next_run(tmp_path):
    options = ("--prefix", "300", "--questions", "2", "--full", "2", "--directory", str(tmp_path))
    assert "300 tokens read" in run("prefix_reuse", *options)
    printed = run("prefix_reuse", *options)
    assert "300 tokens found in the store, 1 file read" in printed
    assert "first tokens that are the same: 2 of 2" in printed


def test_samples_from_one_prompt_hold_it_once():
    printed = run("samples_from_one_prompt", "--tokens", "400", "--samples", "3", "--new-tokens", "8")
    assert printed.count("greedy rows that equal the row alone: 3 of 3") == 2


def test_each_claim_is_measured_and_judged(tmp_path):
    report = tmp_path / "claims.json"
    printed = run(
        "seed_claims",
        *("--only", "append", "layout", "overlap", "growth", "bytes", "leaks", "--lengths", "512"),
        *("--rounds", "1", "--requests", "60", "--json", str(report)),
    )
    claims = json.loads(report.read_text())["claims"]
    assert len(claims) == 1 + 2 + 1 + 3 + 1 + 1
    verdicts = {claim["verdict"] for claim in claims}
    assert verdicts <= {"holds", "does not hold", "cannot be had here (GPU)"}
    assert all(claim["measured"] for claim in claims if claim["holds"] is not None)
    for claim in claims:
        assert claim["claim"] in printed and claim["why"] in printed
    assert next(claim for claim in claims if claim["subject"] == "leaks")["holds"]


def test_gpu_check_says_when_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GPU" in run("gpu_check")
