"""Texts to measure on: local files and data sets on the hub, read with datasets, and their first tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

# More than tokens have in any text that models are measured on: enough of it is read, and not all.
CHARACTERS_PER_TOKEN = 12
# How datasets reads a local file, by its suffix; anything else is plain text.
_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def read_text(source: str, *, column: str = "text", characters: int) -> str:
    """The first `characters` of a text; rows of a data set are joined by empty lines.

    Parameters
    ----------
    source : str
        A local file (`.json`, `.jsonl`, `.csv`, `.parquet`, or plain text), or a data set on the hub as
        `name[:config[:split]]`, such as `wikitext:wikitext-2-raw-v1:test`; without a split `train` is read.
    column : str
        Column of the data set with the text.
    characters : int

    Raises
    ------
    ImportError
        If datasets is not installed.
    ValueError
        If there is no such column, config or split.
    OSError
        If there is no such file or data set, or the hub cannot be reached.
    """
    rows = _rows(source)
    parts: list[str] = []
    missing = characters
    for row in rows:
        if column not in row:
            raise ValueError(f"column: expected one of {tuple(row)}, got {column!r}")
        parts.append(row[column])
        missing -= len(parts[-1]) + 2
        if missing <= 0:
            break
    return "\n\n".join(parts)[:characters]


def first_ids(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> Tensor:
    """The first `tokens` ids of `text`, int64 `[1, tokens]`; a special token at the beginning counts.

    Raises
    ------
    ValueError
        If it has fewer.
    """
    ids: Tensor = tokenizer(text[: CHARACTERS_PER_TOKEN * tokens], return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens: expected at most the {ids.shape[1]} that the text has, got {tokens}")
    return ids[:, :tokens]


def _rows(source: str) -> Any:
    """Rows as datasets reads them, one after another; of a plain text a single one."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("texts are read with datasets: pip install 'memos_hf[data]'") from error
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"text: expected a file or a data set on the hub, got the folder {source!r}")
    if path.is_file():
        reader = _READERS.get(path.suffix, "text")
        options = {"sample_by": "document"} if reader == "text" else {}
        return load_dataset(reader, data_files=str(path), split="train", streaming=True, **options)
    name, config, split = [*source.split(":"), "", ""][:3]
    return load_dataset(name, config or None, split=split or "train", streaming=True)
