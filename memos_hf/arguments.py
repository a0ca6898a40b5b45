"""Types of command-line arguments: what they accept, and what they say where they do not."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch


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


def usable_device(name: str) -> torch.device:
    """The device called `name`, if tensors that can be read back can be put there."""
    try:
        return torch.zeros(1, device=name).cpu().new_empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used here: {str(error).splitlines()[0]}") from None


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
