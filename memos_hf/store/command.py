"""The command line that shows what is in a saved cache: `python -m memos_hf inspect`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..arguments import add_parser
from ..output import in_one_line, print_rows, say
from ..report import format_bytes
from .description import describe


def add_command(commands: Any) -> None:
    """Add `inspect` to the subparsers of a command line."""
    parser = add_parser(
        commands,
        "inspect",
        help="what is in a saved cache",
        description="What is in a file that MemOSCache.save wrote: layers by kind, tokens, bytes, codecs, options, and "
        "what is known of the model. No tensor is read.",
        examples="python -m memos_hf inspect rivers.safetensors --json",
    )
    parser.add_argument("file", metavar="FILE", help="a path, or a URL that fsspec knows")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what the file says; end the program where there is no such file or it is no cache."""
    try:
        described = describe(options.file)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"inspect: {in_one_line(error)}") from None
    if options.json:
        say(json.dumps(described, indent=2))
    else:
        _print(described)


def _print(described: dict[str, Any]) -> None:
    say(
        f"{described['file']}: {format_bytes(described['file_bytes'])}, {format_bytes(described['tensor_bytes'])} of "
        f"them tensors; format {described['format']}, transformers {described['transformers']}\n"
    )
    if described["layers"]:
        print_rows([{**row, "bytes": f"{row['bytes']:,}"} for row in described["layers"]])
    given = {name: value for name, value in described["options"].items() if value not in (None, False)}
    say("\noptions: " + ", ".join(f"{name}={value}" for name, value in given.items()))
    say(f"model: {_model(described['fingerprint'])}")
    ids = described["input_ids"]
    say("token ids: " + (f"{ids[0]} rows of {ids[1]}" if ids else "none"))


def _model(fingerprint: dict[str, Any]) -> str:
    """What is known of the model, in a line."""
    config = fingerprint["config"]
    if config is None:
        return "not known"
    parts = [f"{config.get('model_type')}, {config.get('num_hidden_layers')} layers"]
    parts += [fingerprint["dtype"]] if fingerprint["dtype"] else []
    parts += [f"adapters {', '.join(fingerprint['adapters'])}"] if fingerprint["adapters"] else []
    weights = fingerprint["weights"]
    parts.append("weights not known" if weights is None else f"weights {weights[:8]}… ({len(weights) // 8} parameters)")
    return ", ".join(parts)
