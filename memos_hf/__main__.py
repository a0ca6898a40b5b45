"""The command line: `python -m memos_hf eval`."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .bench.command import add_command
from .cache import MemOSCache
from .config import PRESETS
from .evaluate import evaluate

LOSSLESS = "none"


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m memos_hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_eval(commands)
    add_command(commands)
    options = parser.parse_args(arguments)
    options.run(options)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="quality of quantized caches against DynamicCache on a text",
        description="Teacher-forced perplexity, KL divergence (nats a token) and top-1 agreement against DynamicCache.",
    )
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--text", required=True, help="a text file, or a data set on the hub with a column `text`")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (%(default)s)")
    parser.add_argument("--modes", nargs="+", default=list(PRESETS), choices=[LOSSLESS, *PRESETS], help="to compare")
    parser.add_argument("--chunk", type=int, default=64, help="tokens in one call of the model (%(default)s)")
    parser.add_argument("--skip", type=int, default=256, help="first positions that are not counted (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the model (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    ids = _text_ids(options.text, tokenizer, options.tokens).to(model.device)
    modes = {f"MemOSCache {mode}": None if mode == LOSSLESS else mode for mode in options.modes}
    caches = {name: partial(MemOSCache, model.config, quantization=mode) for name, mode in modes.items()}
    results = evaluate(model, ids, caches, chunk=options.chunk, skip=options.skip, progress=sys.stderr.isatty())
    print(f"{'cache':20}{'perplexity':>12}{'KL':>12}{'top-1':>9}{'bytes':>9}")
    for row in (result.row() for result in results):
        print(f"{row['cache']:20}{row['perplexity']:12.4f}{row['kl']:12.6f}{row['top1']:9.4f}{row['bytes']:9.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps([result.row() for result in results], indent=2) + "\n")


def _text_ids(source: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """The first `tokens` ids, `[1, tokens]`, of a text file or of a data set's `text` column."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SystemExit("eval reads texts with datasets: pip install 'memos_hf[data]'") from error
    if Path(source).is_file():
        rows = load_dataset("text", data_files=source, split="train", sample_by="document")
    else:
        rows = load_dataset(source, split="train", streaming=True)
    text = ""
    for row in rows:
        text += row["text"] + "\n"
        if len(text) > 12 * tokens:
            break
    ids: Tensor = tokenizer(text[: 12 * tokens], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"--tokens: expected at most the {ids.shape[1]} tokens of {source}, got {tokens}")
    return ids


if __name__ == "__main__":
    main()
