"""The command line of the measurements of quality: `python -m memos_hf eval`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..arguments import DTYPES, add_parser, at_least_zero, count, output_file, positive_int, share
from ..config import PRESETS
from ..contenders import NAMES, REFERENCE, Room, available
from ..output import JsonReport, environment, in_one_line, print_rows, say
from .generation import long_generation
from .haystack import DEPTHS, found_by_depth, needle
from .teacher_forcing import evaluate
from .text import CHARACTERS_PER_TOKEN, first_ids, read_text

Report = dict[str, list[dict[str, Any]]]
EXAMPLES = """\
python -m memos_hf eval --model HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt --caches memos-int8 memos-int4
python -m memos_hf eval --model Qwen/Qwen3-8B --text Salesforce/wikitext:wikitext-2-raw-v1:test --needle 4000 16000"""
# Of a chat template, the question and the answer, beside a haystack.
PROMPT_ROOM = 128


def add_command(commands: Any) -> None:
    """Add `eval` to the subparsers of a command line."""
    parser = add_parser(
        commands,
        "eval",
        help="quality of caches against DynamicCache on a text",
        description="Quality against DynamicCache on a text: teacher-forced perplexity, KL divergence (nats a token) "
        "and top-1 agreement; with --generate the same on generated tokens, and how long free generation stays the "
        "same; with --needle whether a fact in a long context is found.",
        examples=EXAMPLES,
    )
    parser.add_argument("--model", metavar="ID_OR_FOLDER", required=True, help="a causal language model")
    parser.add_argument(
        "--text", required=True, help="a file, or a data set on the hub as name[:config[:split]], split train"
    )
    presets = [f"memos-{preset}" for preset in PRESETS]
    parser.add_argument("--column", default="text", help="of the data set, the text (%(default)s)")
    parser.add_argument(
        "--caches",
        nargs="+",
        metavar="NAME",
        default=presets,
        help=f"some of {', '.join(NAMES)} ({' '.join(presets)})",
    )
    parser.add_argument("--tokens", type=count, default=2048, help="of the text to read; 0: none (%(default)s)")
    parser.add_argument("--skip", type=count, default=256, help="first positions that are not counted (%(default)s)")
    parser.add_argument("--chunk", type=positive_int, default=64, help="tokens in one call of the model (%(default)s)")
    parser.add_argument(
        "--skipped-chunk",
        type=positive_int,
        metavar="CHUNK",
        help="tokens in one call while none of the text counts, where --chunk is 1, say (as --chunk)",
    )
    parser.add_argument("--generate", type=count, default=0, metavar="TOKENS", help="to generate, such as 500 (none)")
    parser.add_argument("--prompt", type=positive_int, default=512, help="tokens of the text before them (%(default)s)")
    parser.add_argument(
        "--temperature", type=at_least_zero, default=0.0, help="of generation; 0 is greedy (%(default)s)"
    )
    parser.add_argument(
        "--needle", type=positive_int, nargs="+", default=[], metavar="TOKENS", help="of haystacks (none)"
    )
    parser.add_argument(
        "--depths",
        type=share,
        nargs="+",
        metavar="DEPTH",
        default=list(DEPTHS),
        help=f"of the fact ({' '.join(map(str, DEPTHS))})",
    )
    parser.add_argument("--device", default=_accelerator(), help="such as cuda:1, or auto: all of them (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure what the options ask for, print tables and write JSON; end the program where that cannot be."""
    try:
        measurements = _Measurements(options)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"eval: {in_one_line(error)}") from None
    settings = {name: value for name, value in vars(options).items() if name not in ("run", "json")}
    report = JsonReport(options.json, {"options": settings, "environment": environment(measurements.model.device)})
    for wanted, measure in (
        (options.tokens, measurements.read),
        (options.generate, measurements.generate),
        (options.needle, measurements.search),
    ):
        if wanted:
            report.contents.update(measure())
            report.save()


class _Measurements:
    """The model, the text and the caches that the options name, and what is measured with them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), device_map=options.device
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        contenders, left_out = available(options.caches, self.model.config, self.model.device)
        for name, reason in left_out.items():
            say(f"left out: {name}: {reason}")
        tokens = max(options.tokens, options.prompt + options.generate, PROMPT_ROOM + max(options.needle, default=0))
        room = Room(tokens, device=self.model.device, dtype=self.model.dtype)
        self.caches = {
            name: partial(contender.make, self.model.config, room)
            for name, contender in contenders.items()
            if name != REFERENCE
        }
        _check_lengths(options, getattr(self.model.config.get_text_config(), "max_position_embeddings", None))
        longest = max(options.tokens, options.prompt if options.generate else 0, *options.needle, 1)
        self.text = read_text(options.text, column=options.column, characters=CHARACTERS_PER_TOKEN * longest)
        self.ids = first_ids(self.tokenizer, self.text, longest).to(self.model.device)
        self.common: dict[str, Any] = {"chunk": options.chunk, "progress": sys.stderr.isatty()}

    def read(self) -> Report:
        ids = self.ids[:, : self.options.tokens]
        skipped = {"skip": self.options.skip, "skipped_chunk": self.options.skipped_chunk}
        qualities = evaluate(self.model, ids, self.caches, **skipped, **self.common)
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
    say(f"\n{title}:")
    print_rows(rows)


def _check_lengths(options: argparse.Namespace, positions: int | None) -> None:
    """Raise if an option leaves nothing to count, or asks for more tokens than the model has positions."""
    if not (options.tokens or options.generate or options.needle):
        raise ValueError("--tokens: expected more than 0, or --generate or --needle: there is nothing to measure")
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
