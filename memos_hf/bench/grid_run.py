"""A run over a grid: a table that grows, a progress bar, a JSON report and a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..contenders import Contender
from ..output import JsonReport, environment, say
from .grid import Grid, measure
from .memory import PeakMemory
from .results import Comparison, ComparisonTable


def run_grid(
    model: PreTrainedModel,
    name: str,
    contenders: Mapping[str, Contender],
    left_out: Mapping[str, str],
    grid: Grid,
    *,
    input_ids: Tensor | None = None,
    json: Path | None = None,
    png: Path | None = None,
) -> Comparison:
    """Measure a grid; print a table and say where everything was written.

    Parameters
    ----------
    model : PreTrainedModel
    name : str
        What the report calls it.
    contenders : mapping of str to Contender
        DynamicCache first.
    left_out : mapping of str to str
        Reasons why others are missing, which are said first.
    grid : Grid
    input_ids : Tensor, optional
        int64 `[largest batch size, longest context or more]`; random ids by default.
    json, png : Path, optional
        Where to write the figures, and a picture of them.
    """
    for cache, reason in left_out.items():
        say(f"left out: {cache}: {reason}")
    method = PeakMemory.method(model.device)
    report = JsonReport(
        json,
        {
            "environment": environment(model.device),
            "model": name,
            "layers": model.config.get_text_config().num_hidden_layers,
            "dtype": str(model.dtype).removeprefix("torch."),
            "repeats": grid.repeats,
            "chunk": grid.chunk,
            "peak_memory": method,
            "left_out": dict(left_out),
            "results": [],
        },
    )
    ids = random_ids(model, max(grid.batch_sizes), grid.longest) if input_ids is None else input_ids
    comparison, table = Comparison(), ComparisonTable()
    with tqdm(total=grid.turns(), desc="chunks and rounds", disable=not sys.stderr.isatty()) as progress:
        try:
            for measurements in measure(model, ids, contenders, grid, progress.update):
                rows = comparison.add(measurements)
                table.add(rows)
                report.contents["results"] += rows
                report.save()
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"out of memory, what was measured before that is above: {error}") from None
    say(f"peak of prompt: {method}")
    if png is not None:
        from .plot import draw

        draw(comparison.rows, png)
    for path in (json, png):
        if path is not None:
            say(f"written: {path}")
    return comparison


def random_ids(model: PreTrainedModel, batch_size: int, tokens: int) -> Tensor:
    """Random ids of a model's vocabulary, int64 `[batch_size, tokens]`; the same ones every time."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch_size, tokens), generator=torch.Generator().manual_seed(0))
