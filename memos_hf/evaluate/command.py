"""The command line of the measurements of quality: `python -m memos_hf eval`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import __version__
from ..config import PRESETS
from ..table import print_table
from .contenders import MODES, caches_for
from .generation import long_generation
from .haystack import DEPTHS, found_by_depth, needle
from .teacher_forcing import evaluate
from .text import CHARACTERS_PER_TOKEN, first_ids, read_text

Report = dict[str, list[dict[str, Any]]]
DTYPES = ("float32", "bfloat16", "float16")
# Of a chat template, the question and the answer, beside a haystack.
PROMPT_ROOM = 128


def add_command(commands: Any) -> None:
    """Add `eval` to the subparsers of a command line."""
    parser = commands.add_parser(
        "eval",
        help="quality of caches against DynamicCache on a text",
        description="Quality against DynamicCache on a text: teacher-forced perplexity, KL divergence (nats a token) "
        "and top-1 agreement; with --generate the same on generated tokens, and how long free generation stays the "
        "same; with --needle whether a fact in a long context is found.",
    )
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument(
        "--text", required=True, help="a file, or a data set on the hub as name[:config[:split]], split train"
    )
    parser.add_argument("--column", default="text", help="of the data set, the text (%(default)s)")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(PRESETS),
        choices=MODES,
        metavar="MODE",
        help=f"to compare, of {', '.join(MODES)} ({' '.join(PRESETS)})",
    )
    parser.add_argument("--tokens", type=_count, default=2048, help="of the text to read, or 0 (%(default)s)")
    parser.add_argument("--skip", type=_count, default=256, help="first positions that are not counted (%(default)s)")
    parser.add_argument("--chunk", type=_positive, default=64, help="tokens in one call of the model (%(default)s)")
    parser.add_argument("--generate", type=_count, default=0, metavar="TOKENS", help="to generate, such as 500")
    parser.add_argument("--prompt", type=_positive, default=512, help="tokens of the text before them (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of generation; 0 is greedy (%(default)s)")
    parser.add_argument("--needle", type=_positive, nargs="+", default=[], metavar="TOKENS", help="of haystacks")
    parser.add_argument(
        "--depths",
        type=_share,
        nargs="+",
        metavar="DEPTH",
        default=list(DEPTHS),
        help=f"of the fact ({' '.join(map(str, DEPTHS))})",
    )
    parser.add_argument("--device", default=_accelerator(), help="or auto: over all there are (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (%(default)s)")
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="write the figures here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure what the options ask for, print tables and write JSON; end the program where that cannot be."""
    try:
        measurements = _Measurements(options)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"eval: {error}") from None
    report: Report = {}
    if options.tokens:
        report |= measurements.read()
    if options.generate:
        report |= measurements.generate()
    if options.needle:
        report |= measurements.search()
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name not in ("run", "command", "json")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "memos_hf": __version__}
        content = {"options": settings, "versions": versions, **report}
        options.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Measurements:
    """The model, the text and the caches that the options name, and what is measured with them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), device_map=options.device
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.caches = caches_for(self.model, options.modes)
        _check_lengths(options, getattr(self.model.config.get_text_config(), "max_position_embeddings", None))
        longest = max(options.tokens, options.prompt if options.generate else 0, *options.needle, 1)
        self.text = read_text(options.text, column=options.column, characters=CHARACTERS_PER_TOKEN * longest)
        self.ids = first_ids(self.tokenizer, self.text, longest).to(self.model.device)
        self.common: dict[str, Any] = {"chunk": options.chunk, "progress": sys.stderr.isatty()}

    def read(self) -> Report:
        ids = self.ids[:, : self.options.tokens]
        qualities = evaluate(self.model, ids, self.caches, skip=self.options.skip, **self.common)
        rows = [quality.row() for quality in qualities]
        _print(f"Reading {self.options.tokens} tokens", rows)
        return {"quality": rows}

    def generate(self) -> Report:
        new_tokens, temperature = self.options.generate, self.options.temperature
        ids = self.ids[:, : self.options.prompt]
        runs = long_generation(
            self.model, ids, self.caches, new_tokens=new_tokens, temperature=temperature, **self.common
        )
        rows = [one.row() for one in runs]
        _print(f"Generating {new_tokens} tokens", rows)
        windows = [row for one in runs[1:] for row in one.window_rows()]
        _print("By windows, each cache fed DynamicCache's tokens", windows)
        return {"generation": rows, "windows": windows}

    def search(self) -> Report:
        rows = []
        for tokens in self.options.needle:
            results = needle(
                self.model,
                self.tokenizer,
                self.text,
                self.caches,
                tokens=tokens,
                depths=self.options.depths,
                **self.common,
            )
            _print(f"A fact in {tokens} tokens, found at these depths", found_by_depth(results))
            rows += [result.row() for result in results]
        return {"needle": rows}


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}:")
    print_table(rows)


def _check_lengths(options: argparse.Namespace, positions: int | None) -> None:
    """Raise if an option leaves nothing to count, or asks for more tokens than the model has positions."""
    if 0 < options.tokens <= options.skip + 1:
        raise ValueError(f"--tokens: expected more than the {options.skip + 1} that --skip leaves out")
    needed = {
        "--tokens": options.tokens,
        "--prompt with --generate": options.prompt + options.generate if options.generate else 0,
        "--needle": max(options.needle) + PROMPT_ROOM if options.needle else 0,
    }
    for option, tokens in needed.items():
        if positions is not None and tokens > positions:
            raise ValueError(f"{option}: expected at most the {positions} positions of the model, {tokens} are needed")


def _accelerator() -> str:
    return str(torch.accelerator.current_accelerator() or "cpu")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an int of at least 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an int of at least 1, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return float(text)


def _output_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path
