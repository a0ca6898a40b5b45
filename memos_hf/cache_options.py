"""Options of a cache on a command line: one flag each, named as the argument of `MemOSCache`."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import positive_int, size
from .blocks.budget import memory_key
from .config import PRESETS, CacheOptions, OffloadConfig


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`cache_options` reads."""
    group = parser.add_argument_group("cache")
    group.add_argument("--quantization", choices=tuple(PRESETS), help="of sealed blocks (full precision, no blocks)")
    group.add_argument(
        "--offload",
        type=_max_memory,
        metavar="MAX_MEMORY",
        help="keep blocks within so many bytes of the device, as 2GiB, or by device as 0=2GiB,cpu=8GiB; the others go "
        "to host memory and disk (everything on the device)",
    )
    group.add_argument("--offload-folder", metavar="FOLDER", help="for the file of --offload (a temporary folder)")
    group.add_argument(
        "--active-blocks",
        type=positive_int,
        metavar="N",
        help="of --offload: blocks that a token attends to; an approximation (all)",
    )
    group.add_argument("--block-size", type=positive_int, metavar="N", help="tokens in a block, a power of two (128)")
    group.add_argument("--initial-capacity", type=positive_int, metavar="N", help="tokens to allocate at first (256)")
    group.add_argument("--max-cache-len", type=positive_int, metavar="N", help="tokens at most (no limit)")
    group.add_argument("--fused-attention", action="store_true", help="our kernel for full precision on the CPU (off)")
    group.add_argument("--static", action="store_true", help="fixed shapes, with --max-cache-len (off)")


def cache_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `MemOSCache` from what :func:`add_cache_options` added, those alone that were given.

    Raises
    ------
    TypeError, ValueError, OSError
        If they mean nothing, or cannot be combined.
    """
    names = ("quantization", "block_size", "initial_capacity", "max_cache_len", "fused_attention", "static")
    found = {name: value for name in names if (value := getattr(options, name)) not in (None, False)}
    of_offload = {"offload_folder": options.offload_folder, "active_blocks": options.active_blocks}
    if options.offload is not None:
        found["offload"] = OffloadConfig(options.offload, **of_offload)
    elif any(value is not None for value in of_offload.values()):
        raise ValueError("offload_folder, active_blocks: expected with offload")
    if isinstance(found.get("quantization"), str):
        CacheOptions(**{**found, "quantization": PRESETS[found["quantization"]]})
    else:
        CacheOptions(**found)
    return found


def _max_memory(text: str) -> dict[int | str, int]:
    """`2GiB`, or `0=2GiB,cpu=8GiB`."""
    if "=" not in text:
        return {memory_key(): size(text)}
    found: dict[int | str, int] = {}
    for entry in text.split(","):
        device, _, amount = entry.partition("=")
        if not (device.isdecimal() or device in ("cpu", "mps")):
            raise argparse.ArgumentTypeError(f"expected the index of an accelerator, mps or cpu, got {device!r}")
        found[int(device) if device.isdecimal() else device] = size(amount)
    return found
