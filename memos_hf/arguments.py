"""What the commands have in common: types of arguments, what they say of others, and how help looks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int

DTYPES = ("float32", "bfloat16", "float16")


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps everything but text that has lines of its own."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_parser(commands: Any, name: str, *, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command, added to the subparsers of a command line; its help ends with `examples`, one a line."""
    lines = "\n".join(f"  {line}" for line in examples.splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, epilog=f"examples:\n{lines}", formatter_class=_HelpFormatter
    )
    return parser


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json [FILE]`, for :func:`memos_hf.output.write_json`."""
    parser.add_argument(
        "--json",
        type=json_target,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write JSON to this file too; without a FILE, print JSON and nothing else",
    )


def positive_int(text: str) -> int:
    """An int of at least 1."""
    return _int(text, 1)


def count(text: str) -> int:
    """An int of at least 0."""
    return _int(text, 0)


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def at_least_zero(text: str) -> float:
    """A finite number of at least 0."""
    return _number(text, 0.0, math.inf, "a finite number of at least 0")


def size(text: str) -> int:
    """Bytes, as a number or in accelerate's units: `"24GiB"` are 24 · 2³⁰, `"24GB"` 24 · 10⁹."""
    try:
        count = int(text) if text.isdecimal() else convert_file_size_to_int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected bytes or a size such as 24GiB, got {text!r}")
    return count


def json_target(text: str) -> Path:
    """As :func:`output_file`, or `-`: standard output."""
    return Path(text) if text == "-" else output_file(text)


def usable_device(name: str) -> torch.device:
    """The device called `name`, if tensors that can be read back can be put there."""
    try:
        return torch.zeros(1, device=name).cpu().new_empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def device_map(text: str) -> str:
    """As :func:`usable_device`, or `auto`: accelerate chooses."""
    return text if text == "auto" else str(usable_device(text))


def output_file(text: str) -> Path:
    """The path of a file that can be created: asked for before the work, not after it."""
    path = Path(text)
    if path.is_dir() or not path.name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file, not a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path


def _int(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an int of at least {least}, got {text!r}")
    return int(text)


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number
