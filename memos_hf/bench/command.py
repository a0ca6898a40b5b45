"""The command line of the benchmarks: `python -m memos_hf bench`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..arguments import DTYPES, add_parser, at_least_zero, output_file, positive_int, usable_device
from ..contenders import NAMES, available
from ..output import in_one_line
from .shapes import SHAPES, random_model, shape_config

SUITES = ("gpu",)
SUITE_SECONDS = 420.0
EXAMPLES = """\
python -m memos_hf bench --model HuggingFaceTB/SmolLM2-135M-Instruct --contexts 1024 4096 --batch-sizes 1 4
python -m memos_hf bench --shape llama-3-8b --layers 2 --caches static memos memos-int8 --json grid.json
python -m memos_hf bench --suite gpu --json card.json"""


def add_command(commands: Any) -> None:
    """Add `bench` to the subparsers of a command line."""
    parser = add_parser(
        commands,
        "bench",
        help="time and memory of caches on a model, or the checks of a GPU",
        description="Caches beside DynamicCache on one model: time for the prompt and per token, what the cache adds "
        "to a step (KV tax: over the same step at 16 tokens), bytes held, peak memory of the prompt. All caches take "
        "each chunk of the prompt, and then each step, in turn. The prompt is read once; steps are medians.",
        examples=EXAMPLES,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="ID_OR_FOLDER", help="a causal language model")
    what.add_argument("--shape", metavar="NAME", help=f"random weights in the shape of {', '.join(SHAPES)}")
    what.add_argument(
        "--suite",
        choices=SUITES,
        help="gpu: the decode kernel's correctness and bandwidth, and decoding with llama-3-8b, also from a cache that "
        "is mostly in host memory, in one short run",
    )
    parser.add_argument("--layers", type=positive_int, metavar="N", help="of --shape: keep the first N layers (all)")
    parser.add_argument("--caches", nargs="+", metavar="NAME", help=f"some of {', '.join(NAMES)} (all that run here)")
    parser.add_argument(
        "--contexts", type=positive_int, nargs="+", metavar="N", default=[1024, 4096], help="tokens (1024 4096)"
    )
    parser.add_argument("--batch-sizes", type=positive_int, nargs="+", metavar="N", default=[1], help="rows (1)")
    parser.add_argument("--repeats", type=positive_int, default=20, help="timed steps of each cache (%(default)s)")
    parser.add_argument(
        "--chunk",
        type=positive_int,
        default=2048,
        help="tokens of a prompt that the model is given at a time; transformers' quantized caches encode all anew "
        "with every chunk (%(default)s)",
    )
    parser.add_argument("--device", type=usable_device, help="such as cuda:1 (cuda where there is a GPU, else cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model (float32 on a CPU, else bfloat16)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures, as soon as they are there")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="draw the figures (needs matplotlib)")
    parser.add_argument("--seconds", type=at_least_zero, help=f"of --suite: seconds to spend ({SUITE_SECONDS:.0f})")
    parser.add_argument("--quick", action="store_true", help="of --suite: toy sizes, on any device")
    parser.set_defaults(run=lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check what argparse cannot, and hand over; what only a run needs is imported here."""
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.layers is not None and options.shape is None:
        parser.error("--layers: expected with --shape, whose layers are cut")
    if options.suite is None:
        _run_grid(parser, options)
    else:
        _run_suite(parser, options)


def _run_suite(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from .suite import QUICK, GpuSuite, Sizes

    if options.device.type != "cuda" and not options.quick:
        parser.error("--suite gpu: expected a CUDA GPU; with --quick the same runs at toy sizes on a CPU")
    if options.png is not None:
        parser.error("--png: expected without --suite, which draws nothing")
    seconds = SUITE_SECONDS if options.seconds is None else options.seconds
    report = GpuSuite(options.device, QUICK if options.quick else Sizes(), seconds, options.json).run()
    if report["problems"]:
        raise SystemExit(f"problems: {len(report['problems'])}, the first: {report['problems'][0]}")


def _run_grid(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from .grid import Grid
    from .grid_run import run_grid

    if options.quick:
        parser.error("--quick: expected with --suite; the sizes of a grid are options")
    if options.seconds is not None:
        parser.error("--seconds: expected with --suite; a grid takes as long as it takes")
    if options.png is not None:
        _check_picture(parser, options.png)
    grid = Grid(tuple(options.contexts), tuple(options.batch_sizes), options.repeats, options.chunk)
    try:
        config = _config(options, grid.room(grid.longest))
        contenders, left_out = available(options.caches, config, options.device)
    except ValueError as error:  # its message begins with the option's name
        parser.error(f"--{error}")
    model, name = _model(options, config), options.model or options.shape
    run_grid(model, name, contenders, left_out, grid, json=options.json, png=options.png)


def _config(options: argparse.Namespace, tokens: int) -> PretrainedConfig:
    """The config of the model that is asked for, if it has positions for so many tokens."""
    if options.shape is not None:
        return shape_config(options.shape, options.layers, tokens)
    try:
        config = AutoConfig.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench: {in_one_line(error)}") from None
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(f"contexts: {tokens} tokens with those of the steps, but the model has {positions} positions")
    return config


def _model(options: argparse.Namespace, config: PretrainedConfig) -> PreTrainedModel:
    dtype = getattr(torch, options.dtype or ("float32" if options.device.type == "cpu" else "bfloat16"))
    if options.shape is not None:
        return random_model(config, options.device, dtype)
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()


def _check_picture(parser: argparse.ArgumentParser, path: Path) -> None:
    """Refuse a file that matplotlib cannot draw, before anything is measured."""
    if find_spec("matplotlib") is None:
        parser.error("--png: matplotlib is not installed: pip install 'memos_hf[plots]'")
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.removeprefix(".") not in FigureCanvasBase.filetypes:
        parser.error(f"--png: {str(path)!r}: expected one of {', '.join(sorted(FigureCanvasBase.filetypes))}")
