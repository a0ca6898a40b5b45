"""What the command lines of the examples have in common: options, tables and files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from smollm2 import HUB_ID, load_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memos_hf.arguments import DTYPES, positive_int, usable_device
from memos_hf.output import JsonReport, environment


def parser_for(docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the docstring of the example."""
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and what `add_device_options` adds."""
    parser.add_argument("--model", metavar="ID_OR_FOLDER", help=f"hub id or folder of a causal LM (default: {HUB_ID})")
    add_device_options(parser)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--dtype`."""
    parser.add_argument(
        "--device", type=usable_device, default=default_device(), help="where to run, such as cpu or cuda (%(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, keys and values (%(default)s)")


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of a cache, SmolLM2-135M's by default, and what `add_device_options` adds."""
    parser.add_argument("--layers", type=positive_int, default=30, help="layers of the model (%(default)s)")
    parser.add_argument("--kv-heads", type=positive_int, default=3, help="key-value heads of a layer (%(default)s)")
    parser.add_argument("--head-dim", type=positive_int, default=64, help="size of a head (%(default)s)")
    add_device_options(parser)


def random_states(options: argparse.Namespace, heads: int, tokens: int) -> Tensor:
    """Normally distributed `[1, heads, tokens, head_dim]` for a model of the shape that the options say."""
    shape = (1, heads, tokens, options.head_dim)
    return torch.randn(shape, dtype=getattr(torch, options.dtype), device=options.device)


def model_from(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that the options name, on their device, and its tokenizer; ends the program if there is none."""
    try:
        model, tokenizer = load_model(options.model, getattr(torch, options.dtype))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model: {error}") from None
    return model.to(options.device), tokenizer


def default_device() -> str:
    """CUDA where there is a GPU, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results to `path` with what gave them, device and versions; nothing if no path was asked for."""
    if path is not None:
        JsonReport(path, {"environment": environment(torch.device(default_device())), **results})
        print(f"written: {path}")


def verdict(figure: float, bar: float, *, at_least: bool = False) -> str:
    """`figure` beside the bar it is held against."""
    reached = figure >= bar if at_least else figure <= bar
    shown = figure if isinstance(figure, int) else f"{figure:.3f}"
    return f"{shown} (bar: {'at least' if at_least else 'at most'} {bar:g}; {'reached' if reached else 'MISSED'})"
