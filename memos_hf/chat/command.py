"""The command line that talks to a model: `python -m memos_hf generate`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import DTYPES, add_json_option, add_parser, at_least_zero, device_map, positive_int
from ..cache_options import add_cache_options, cache_options
from ..output import in_one_line, write_json

if TYPE_CHECKING:
    from .conversation import Conversation

EXAMPLES = """\
python -m memos_hf generate --model HuggingFaceTB/SmolLM2-135M-Instruct --quantization int8
python -m memos_hf generate --model HuggingFaceTB/SmolLM2-135M-Instruct --prompt "Why is the sky blue?" --json
cat notes.txt | python -m memos_hf generate --model Qwen/Qwen3-8B --offload 2GiB --max-new-tokens 500"""


def add_command(commands: Any) -> None:
    """Add `generate` to the subparsers of a command line."""
    parser = add_parser(
        commands,
        "generate",
        help="talk to a model at the terminal",
        description="A chat at the terminal, whose cache is kept over the turns: each computes its new tokens alone. "
        "With --prompt, or text on standard input, one answer.",
        examples=EXAMPLES,
    )
    parser.add_argument("--model", metavar="ID_OR_FOLDER", required=True, help="a causal language model")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave (a chat, or what is piped in)")
    parser.add_argument("--system", metavar="TEXT", help="system message (that of the chat template)")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=512, metavar="N", help="tokens of an answer (%(default)s)"
    )
    parser.add_argument("--temperature", type=at_least_zero, metavar="T", help="0: greedy (the model's own)")
    parser.add_argument("--seed", type=int, metavar="N", help="of sampling (a new one every time)")
    parser.add_argument(
        "--device", type=device_map, help="such as cuda:1, or auto: all of them (the accelerator, or cpu)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the model (float32 on a CPU, else bfloat16)")
    add_json_option(parser)
    add_cache_options(parser)
    parser.set_defaults(run=lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check what argparse cannot, then answer or chat; end the program where model or cache cannot be had."""
    try:
        cache = cache_options(options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    except OSError as error:
        raise SystemExit(f"generate: {in_one_line(error)}") from None
    prompt = _prompt(options.prompt)
    if prompt is None and options.json is not None:
        parser.error("--json: expected with --prompt, or with text on standard input")
    if prompt == "":
        parser.error("--prompt: expected some text, got none")
    try:
        conversation = _conversation(options, cache)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"generate: {in_one_line(error)}") from None
    if prompt is None:
        from .terminal import chat

        chat(conversation)
    else:
        _answer(options, conversation, prompt)


def _prompt(given: str | None) -> str | None:
    """What is asked for, or piped in; `None` at a terminal."""
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    try:
        text = given if given is not None else sys.stdin.read().strip() if sys.stdin is not None else ""
        text.encode()
    except UnicodeError as error:
        raise SystemExit(f"generate: prompt: expected text in UTF-8, got {in_one_line(error)}") from None
    return text


def _conversation(options: argparse.Namespace, cache: dict[str, Any]) -> Conversation:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .conversation import Conversation

    if options.seed is not None:
        torch.manual_seed(options.seed)
    device = options.device or str(torch.accelerator.current_accelerator() or "cpu")
    dtype = getattr(torch, options.dtype or ("float32" if device == "cpu" else "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map=device).eval()
    return Conversation(
        model,
        AutoTokenizer.from_pretrained(options.model),
        cache,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        system=options.system,
    )


def _answer(options: argparse.Namespace, conversation: Conversation, prompt: str) -> None:
    from .terminal import show, stopped_by_ctrl_c

    quiet = str(options.json) == "-"
    try:
        with stopped_by_ctrl_c(conversation):
            answer = conversation.answer(prompt, (lambda text: None) if quiet else show)
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"generate: {in_one_line(error)}") from None
    if not quiet:
        print()
    memory = conversation.cache.memory()
    report = {"model": options.model, "prompt": prompt, **asdict(answer)}
    report |= {"memory": {**asdict(memory), "ratio": memory.ratio}, "stats": asdict(conversation.cache.stats)}
    write_json(options.json, report)
