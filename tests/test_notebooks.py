"""The notebooks are committed executed, small and without warnings, and run from top to bottom."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra `notebooks`")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra `notebooks`")

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
LARGEST_BYTES = 300_000


def outputs(notebook) -> list[list]:
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook) -> list[list[list[str]]]:
    """What each cell shows: names of streams, types of what is displayed."""
    return [[sorted(out.get("data", {})) or [out.get("name", "")] for out in cell] for cell in outputs(notebook)]


def verdicts(notebook) -> list[str]:
    """The lines that say whether tokens are the same."""
    printed = "".join(out.get("text", "") for cell in outputs(notebook) for out in cell)
    return [line for line in printed.splitlines() if line.startswith("same ")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert path.stat().st_size < LARGEST_BYTES
    assert not any(out.get("name") == "stderr" for cell in outputs(notebook) for out in cell)
    assert all(line.endswith(": True") for line in verdicts(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_is_committed(path, monkeypatch):
    pytest.importorskip("matplotlib", reason="notebooks draw with the extra `plots`")
    monkeypatch.setenv("MEMOS_HF_QUICK_NOTEBOOKS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in conftest.py: two test processes are not to fight over the cores
    notebook = nbformat.read(path, as_version=4)
    committed = kinds(notebook), verdicts(notebook)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    assert (kinds(notebook), verdicts(notebook)) == committed
