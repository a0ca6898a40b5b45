"""A document that is far longer than the memory for its cache, read and continued as if there were room for all of it.

A MemOSCache without a limit, and offloaded ones that may have a share of its bytes in memory and keep the rest on disk
(beside a GPU, in host memory first), read the document and then decode, all of them in turn:

    python examples/long_context.py --tokens 3000 --share 0.4 --png memory.png
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import add_model_options, model_from, parser_for, write_json
from compare_dynamic_cache import example_text
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel

from memos_hf import MemOSCache
from memos_hf.arguments import count, output_file, positive_int, share
from memos_hf.bench.decode import WARMUP, Decoder, decode_in_turn
from memos_hf.bench.memory import anonymous_bytes, held_bytes
from memos_hf.bench.timing import time_call
from memos_hf.config import OffloadConfig
from memos_hf.contenders import Room, offloaded
from memos_hf.output import Table
from memos_hf.report import CacheStats

CHUNK = 256
# Tokens in a block where attention chooses some: bounds of larger ones say little about the keys in them.
ACTIVE_BLOCK_SIZE = 32
REFERENCE, RESIDENT = "DynamicCache", "MemOSCache"
MIB = 2**20


@dataclass
class Reader:
    """One cache, what reading and decoding took, and what it held in memory meanwhile.

    Attributes
    ----------
    held : list of (int, int)
        Tokens in the cache and bytes of it on the device, after each chunk and each step.
    after_prompt : CacheStats
        Counters when the document had been read.
    process_bytes : int
        Anonymous memory that the process had for the cache at the end.
    """

    decoder: Decoder
    is_exact: bool = True
    prefill_s: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    after_prompt: CacheStats = field(default_factory=CacheStats)
    stats: CacheStats = field(default_factory=CacheStats)
    disk_bytes: int = 0
    process_bytes: int = 0
    tokens: list[int] = field(default_factory=list)

    def read(self, chunk: Tensor) -> None:
        """Take in a part of the document."""
        self.prefill_s += time_call(partial(self.decoder.feed, chunk), chunk.device) / 1000
        self.look()
        self.after_prompt = _stats(self.decoder.cache)

    def look(self) -> None:
        """Note what the cache holds in memory now."""
        cache = self.decoder.cache
        self.held.append((cache.get_seq_length(), memory_bytes(cache)))

    def close(self) -> None:
        """Keep the figures and let the cache go, to see what that frees."""
        cache = self.decoder.cache
        if isinstance(cache, MemOSCache) and "disk" in cache.memory().by_device:
            self.disk_bytes = cache.memory().by_device["disk"].allocated_bytes
        self.stats, self.tokens = _stats(cache), self.decoder.tokens()[0]
        before = anonymous_bytes()
        del cache, self.decoder
        self.process_bytes = before - anonymous_bytes()

    def decoding(self, name: str) -> int:
        """How far a counter went while tokens were decoded."""
        return int(getattr(self.stats, name) - getattr(self.after_prompt, name))


def _stats(cache: Cache) -> CacheStats:
    return cache.stats if isinstance(cache, MemOSCache) else CacheStats()


def memory_bytes(cache: Cache) -> int:
    """Bytes of a cache on the device of its layers: without a GPU, in RAM."""
    if not isinstance(cache, MemOSCache):
        return held_bytes(cache)
    found = cache.memory().by_device
    device = next((name for name in found if name not in ("cpu", "disk")), "cpu")
    return found[device].allocated_bytes if device in found else 0


def caches_to_compare(config: PretrainedConfig, room: Room, options: argparse.Namespace) -> dict[str, Cache]:
    """An empty cache of each kind by its name, those that are to give the same tokens first."""
    limited = partial(offloaded, config, room, options.share)
    caches: dict[str, Cache] = {REFERENCE: DynamicCache(config=config), RESIDENT: MemOSCache(config)}
    for policy in options.policy:
        caches[f"offloaded, {policy}"] = limited(policy=policy)
    if options.active_blocks:
        caches[f"{options.active_blocks} active blocks"] = limited(
            active_blocks=options.active_blocks, block_size=ACTIVE_BLOCK_SIZE
        )
    return caches


def is_exact(cache: Cache) -> bool:
    """Whether a cache is to give the tokens that DynamicCache gives."""
    offload: OffloadConfig | None = cache.options.offload if isinstance(cache, MemOSCache) else None
    return offload is None or offload.active_blocks is None


def measure(model: PreTrainedModel, ids: Tensor, caches: dict[str, Cache], new_tokens: int) -> dict[str, Reader]:
    """Have every cache read all of `ids`, a chunk each in turn, and then decode, a token each in turn."""
    quiet = not sys.stderr.isatty()
    with torch.inference_mode():
        warm_up = Decoder(model, MemOSCache(model.config))
        warm_up.feed(ids[:, :CHUNK])  # thread pools and kernels are made where nothing is measured
        del warm_up
        readers = {name: Reader(Decoder(model, cache), is_exact(cache)) for name, cache in caches.items()}
        caches.clear()
        chunks = ids.split(CHUNK, dim=1)
        with tqdm(total=len(chunks) * len(readers) + new_tokens, desc="chunks and steps", disable=quiet) as progress:
            order = list(readers.values())
            for chunk in chunks:
                for reader in order:
                    reader.read(chunk)
                    progress.update()
                order.append(order.pop(0))

            def watched() -> Iterator[int]:
                for index in range(new_tokens):
                    yield index
                    for reader in readers.values():
                        reader.look()
                    progress.update()

            times = decode_in_turn({name: reader.decoder for name, reader in readers.items()}, watched(), ids.device)
        order.clear()
        for name, reader in readers.items():
            reader.step_ms = times[name]
            reader.close()
    return readers


def row_of(reader: Reader, readers: dict[str, Reader]) -> dict[str, Any]:
    """The figures of one cache beside the others."""
    resident, step = readers[RESIDENT], median(reader.step_ms)
    hits, misses = reader.decoding("hits"), reader.decoding("misses")
    return {
        "prefill_s": reader.prefill_s,
        "ms_per_token": step,
        "of_resident": step / median(resident.step_ms),
        "memory_bytes": reader.held[-1][1],
        "memory_of_resident": reader.held[-1][1] / resident.held[-1][1],
        "disk_bytes": reader.disk_bytes,
        "process_bytes": reader.process_bytes,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "bytes_moved_per_token": reader.decoding("bytes_moved") / len(reader.tokens),
        "bytes_moved": reader.stats.bytes_moved,
        "same_tokens": reader.tokens == readers[REFERENCE].tokens,
        "step_ms": reader.step_ms,
        "held": reader.held,
    }


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(
        *(("cache", 18), ("prefill, s", 10), ("ms/token", 9), ("of resident", 11), ("MiB in memory", 13)),
        *(("of resident", 11), ("MiB of process", 14), ("hits", 6), ("MiB moved/token", 15), ("tokens", 7)),
    )
    for name, row in rows.items():
        table.add(
            name,
            f"{row['prefill_s']:.1f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['of_resident']:.2f}",
            f"{row['memory_bytes'] / MIB:.1f}",
            f"{row['memory_of_resident']:.2f}",
            f"{row['process_bytes'] / MIB:.1f}",
            "" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}",
            f"{row['bytes_moved_per_token'] / MIB:.1f}",
            "same" if row["same_tokens"] else "differ",
        )


def draw(rows: dict[str, dict[str, Any]], budget: int, path: Path) -> None:
    """Bytes in memory over the tokens read and decoded."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    for name, row in rows.items():
        axes.plot(*zip(*((tokens, held / MIB) for tokens, held in row["held"]), strict=True), label=name)
    axes.axhline(budget / MIB, color="black", linestyle="dotted", label="budget")
    axes.set(xlabel="tokens read, then decoded", ylabel="MiB in memory", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def parsed_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--tokens", type=positive_int, default=3000, help="of the document (%(default)s)")
    parser.add_argument(
        "--share", type=share, default=0.4, help="of the bytes of the whole cache, what may be in memory (%(default)s)"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=["pin", "lru"], default=["pin", "lru"], help="which blocks stay (%(default)s)"
    )
    parser.add_argument(
        "--active-blocks",
        type=count,
        metavar="N",
        help="have another cache attend to N blocks of 32 tokens in each layer, an approximation; 0: none "
        "(a quarter of the document's)",
    )
    parser.add_argument("--new-tokens", type=positive_int, default=20, help="to decode with each cache (%(default)s)")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="draw memory over time (needs matplotlib)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if options.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib; install the extra that has it: pip install 'memos_hf[plots]'")
    if options.active_blocks is None:
        options.active_blocks = max(options.tokens // ACTIVE_BLOCK_SIZE // 4, 1)
    return options


def main() -> None:
    options = parsed_options()
    model, tokenizer = model_from(options)
    room = Room(options.tokens + WARMUP + options.new_tokens, 1, model.device, model.dtype)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and room.tokens > positions:
        raise SystemExit(f"--tokens: {room.tokens} tokens are needed, the model has {positions} positions")
    caches = caches_to_compare(model.config, room, options)
    ids = example_text(tokenizer, options.tokens).to(model.device)
    readers = measure(model, ids, caches, options.new_tokens)

    rows = {name: row_of(reader, readers) for name, reader in readers.items()}
    budget = int(options.share * room.full_bytes(model.config))
    print(f"{options.tokens:,} tokens, {budget / MIB:.1f} MiB of memory for the offloaded caches' keys and values\n")
    print_table(rows)
    print(f"\nit goes on with: {tokenizer.decode(readers[RESIDENT].tokens)!r}")
    wrong = [name for name, reader in readers.items() if reader.is_exact and not rows[name]["same_tokens"]]
    print("all but active blocks gave the same tokens" if not wrong else f"other tokens came from: {', '.join(wrong)}")
    if options.png:
        draw(rows, budget, options.png)
        print(f"written: {options.png}")
    write_json(options.json, {"tokens": options.tokens, "share": options.share, "budget": budget, "caches": rows})
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
