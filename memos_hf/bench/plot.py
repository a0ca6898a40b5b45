"""The figures of a grid as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PANELS = (
    ("ms_per_token", 1, "ms per token, median"),
    ("bytes_held", 2**20, "MiB held by the cache"),
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time per token and bytes held over context length, a line for each cache, a row of panels for each batch size.

    Parameters
    ----------
    rows : list of dict
        Those of :class:`memos_hf.bench.results.Comparison`.
    path : Path
        Its ending says which kind of picture.
    """
    from matplotlib.figure import Figure

    batch_sizes = sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(11, 4 * len(batch_sizes)), layout="constrained")
    panels = figure.subplots(len(batch_sizes), len(PANELS), squeeze=False)
    for batch_size, line in zip(batch_sizes, panels, strict=True):
        for (name, unit, label), axes in zip(PANELS, line, strict=True):
            for cache in dict.fromkeys(row["cache"] for row in rows):
                chosen = [row for row in rows if row["cache"] == cache and row["batch_size"] == batch_size]
                axes.plot([row["context"] for row in chosen], [row[name] / unit for row in chosen], "o-", label=cache)
            axes.set(title=f"batch size {batch_size}", xlabel="tokens of context", ylabel=label, ylim=(0, None))
            axes.grid(alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=150)
