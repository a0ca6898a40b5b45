"""What a run leaves: tables, printed row by row or at once, and a JSON file that is whole at every moment."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from . import __version__


def say(line: str) -> None:
    """Print a line, above a progress bar if there is one, at once: a run may be cut off at any time."""
    tqdm.write(line)
    sys.stdout.flush()


class Table:
    """Rows under a header, the first column to the left, the others to the right; printed as they come.

    Parameters
    ----------
    *columns : tuple of str and int
        Title and least width of each.
    """

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._titles = [title for title, _ in columns]
        self._widths = [max(len(title), width) for title, width in columns]
        self._begun = False

    def add(self, *cells: object) -> None:
        """Print a row, after the header if it is the first."""
        if not self._begun:
            self._begun = True
            self._line(*self._titles)
        self._line(*cells)

    def _line(self, *cells: object) -> None:
        first, *others = (str(cell) for cell in cells)
        shown = [first.ljust(self._widths[0])]
        shown += [cell.rjust(width) for cell, width in zip(others, self._widths[1:], strict=True)]
        say("  ".join(shown).rstrip())


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of the first one's columns, all of them at once."""
    cells = [[_shown(row[name]) for name in rows[0]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = Table(*zip(rows[0], widths, strict=True))
    for row in cells:
        table.add(*row)


def _shown(value: Any) -> str:
    """`value` in a cell: four decimals, or two digits of what would be lost in them; empty for `None`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value.is_integer():
            return f"{value:.0f}"
        return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value)


def in_one_line(error: BaseException) -> str:
    """The message of an error, for people at a terminal."""
    return " ".join(str(error).split())


def write_json(target: Path | None, contents: dict[str, Any]) -> bool:
    """Write what `--json [FILE]` asks for; whether it went to standard output, where nothing else is to go."""
    if target is not None and str(target) == "-":
        say(json.dumps(contents, indent=2))
        return True
    JsonReport(target, contents)
    return False


class JsonReport:
    """A JSON object that is written anew whenever it has changed, so that a run that is cut off leaves what it has.

    Parameters
    ----------
    path : Path, optional
        `None`: nothing is written.
    contents : dict
        Changed by the caller, who then calls `save`.
    """

    def __init__(self, path: Path | None, contents: dict[str, Any]) -> None:
        self.path, self.contents = path, contents
        self.save()

    def save(self) -> None:
        """Write what there is now."""
        if self.path is None:
            return
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        unfinished.write_text(json.dumps(self.contents, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def environment(device: torch.device) -> dict[str, Any]:
    """What gave the figures: device and versions."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda if on_gpu else None,
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "transformers": transformers.__version__,
        "memos_hf": __version__,
    }


def _triton_version() -> str | None:
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return None
