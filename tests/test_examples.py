"""The examples run as their help says, and print what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNNABLE = [
    "generate",
    "compare_dynamic_cache",
    "layouts",
    "growth",
    "gpu_check",
    "batch_dataset",
    "batch_speed",
    "save_and_resume",
    "smollm2",
]

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
    assert "growths" in printed


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


def test_save_and_resume_answers_from_another_process():
    printed = run("save_and_resume", "--tokens", "300", "--max-new-tokens", "8", "--quantization", "int8")
    assert "the same answer as without saving: yes" in printed


def test_gpu_check_says_when_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GPU" in run("gpu_check")


@pytest.mark.parametrize("name", RUNNABLE[:-1])
def test_every_example_says_how_to_use_it(name):
    printed = run(name, "--help")
    assert printed.startswith("usage:")
    assert f"examples/{name}.py" in printed
