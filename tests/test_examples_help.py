"""Every example that is a program says how to use it, at once and without a model."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


def test_there_are_programs_among_the_examples():
    assert {"generate", "compare_dynamic_cache", "seed_claims", "smollm2"} <= {path.stem for path in PROGRAMS}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_begins_with_what_it_is_for_and_shows_a_command(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr()
    purpose = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]
    assert end.value.code == 0
    assert printed.out.startswith("usage:")
    assert purpose.endswith(".")
    assert purpose in printed.out
    assert f"examples/{path.name}" in printed.out
    assert not printed.err
