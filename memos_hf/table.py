"""Rows of figures as a table of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of the first one's columns: texts to the left, everything else to the right."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    aligned = [_aligned(name, values) for name, values in columns.items()]
    for line in zip(*aligned, strict=True):
        print("  ".join(line).rstrip())


def _aligned(name: str, values: list[Any]) -> list[str]:
    cells = [name, *map(shown, values)]
    width = max(map(len, cells))
    texts = all(isinstance(value, str) for value in values)
    return [cell.ljust(width) if texts else cell.rjust(width) for cell in cells]


def shown(value: Any) -> str:
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
