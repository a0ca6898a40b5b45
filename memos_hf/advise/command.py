"""The command line that says which mode fits: `python -m memos_hf advise`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from ..arguments import DTYPES, add_json_option, add_parser, positive_int, size
from ..output import in_one_line, print_rows, say, write_json
from ..report import format_bytes
from .modes import Outlook, advise
from .probe import probe

EXAMPLES = """\
python -m memos_hf advise --model HuggingFaceTB/SmolLM2-135M-Instruct --context 8000 --memory 512MiB
python -m memos_hf advise --model meta-llama/Llama-3.1-8B --context 131072 --batch 4 --memory 80GiB --weights"""


def add_command(commands: Any) -> None:
    """Add `advise` to the subparsers of a command line."""
    parser = add_parser(
        commands,
        "advise",
        help="which cache fits into how much memory",
        description="Which mode of MemOSCache fits a model, a context and a device, from the model's config alone: no "
        "weights are read. It prints what each mode will use and allocate, and the line of code that makes the cache.",
        examples=EXAMPLES,
    )
    parser.add_argument("--model", metavar="ID_OR_FOLDER", required=True, help="hub id, or a folder with a config")
    parser.add_argument("--context", type=positive_int, required=True, metavar="N", help="tokens of the prompt")
    parser.add_argument(
        "--new-tokens",
        type=positive_int,
        default=1,
        metavar="N",
        help="tokens that come after it and are cached too (%(default)s)",
    )
    parser.add_argument("--batch", type=positive_int, default=1, metavar="B", help="rows (%(default)s)")
    parser.add_argument(
        "--memory", type=size, required=True, metavar="SIZE", help="of the device, for the cache: bytes, or 24GiB"
    )
    parser.add_argument(
        "--weights", action="store_true", help="the memory is for the weights too: take off their bytes, in --dtype"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights, keys and values (that of the config)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the modes and the advice; end the program where the config cannot be had, or says too little."""
    try:
        config = AutoConfig.from_pretrained(options.model)
        found = probe(config, getattr(torch, options.dtype) if options.dtype else None)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"advise: {in_one_line(error)}") from None
    memory = options.memory - (found.weight_bytes if options.weights else 0)
    if memory < 1:
        raise SystemExit(f"advise: the weights take {format_bytes(found.weight_bytes)}, more than the memory there is")
    advice = advise(
        found, memory=memory, context=options.context, new_tokens=options.new_tokens, batch_size=options.batch
    )
    notes = [*found.notes, *_positions(config, options.context + options.new_tokens)]
    report = {
        "model": options.model,
        "context": options.context,
        "new_tokens": options.new_tokens,
        "batch": options.batch,
        "dtype": str(found.dtype).removeprefix("torch."),
        "weight_bytes": found.weight_bytes,
        "memory_bytes": memory,
        "modes": [_row(outlook) for outlook in advice.outlooks],
        "advice": None if advice.chosen is None else advice.chosen.mode.name,
        "reason": advice.reason,
        "code": None if advice.chosen is None else advice.chosen.code,
        "notes": notes,
    }
    if not write_json(options.json, report):
        _print(report)


def _row(outlook: Outlook) -> dict[str, Any]:
    prediction, mode = outlook.prediction, outlook.mode
    row: dict[str, Any] = {"mode": mode.name, "fits": outlook.fits}
    sizes = ("used_bytes", "allocated_bytes", "peak_bytes", "below_bytes", "least_bytes", "full_precision_bytes")
    row |= {name: None if prediction is None else getattr(prediction, name) for name in (*sizes, "ratio")}
    quality = {"kl": mode.quality.kl, "top1": mode.quality.top1}
    return row | quality | {"code": outlook.code, "refused": outlook.refusal or None}


def _positions(config: PretrainedConfig, tokens: int) -> list[str]:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return [] if positions is None or tokens <= positions else [f"the model was made for {positions} positions"]


def _print(report: dict[str, Any]) -> None:
    say(
        f"{report['model']}: {report['batch']} x ({report['context']:,} + {report['new_tokens']:,}) tokens in "
        f"{report['dtype']}, {format_bytes(report['memory_bytes'])} for the cache; the weights take "
        f"{format_bytes(report['weight_bytes'])}\n"
    )
    sizes = {"used_bytes": "used", "allocated_bytes": "allocated", "peak_bytes": "at most", "below_bytes": "below"}
    print_rows(
        [
            {"mode": row["mode"]}
            | {title: "-" if row[name] is None else format_bytes(row[name]) for name, title in sizes.items()}
            | {"of full": row["ratio"], "KL": row["kl"], "top-1": row["top1"], "fits": row["fits"]}
            for row in report["modes"]
        ]
    )
    say(
        "\nused: valid bytes, on all tiers. allocated, at most: of the device, the second while one layer is in full "
        "precision beside it. below: in host memory or on disk. KL (nats a token) and top-1: of SmolLM2-135M."
    )
    for row in report["modes"]:
        if row["refused"]:
            say(f"{row['mode']}: {row['refused']}")
    for note in report["notes"]:
        say(f"Note: {note}.")
    taken = f"Take {report['advice']}. " if report["advice"] else ""
    say(f"\n{taken}{report['reason']}")
    if report["code"]:
        say(f"\n    {report['code']}")
