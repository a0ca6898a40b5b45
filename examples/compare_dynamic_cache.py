"""DynamicCache, StaticCache and MemOSCache on one model: tokens, time per token, KV tax and bytes, by context length.

The KV tax is what the cache adds to a decoding step: milliseconds per step at a context less those at the smallest one.
For each context the text is prefilled once, every cache gets a copy, and then they decode in turn, a step each, in one
process. Greedy tokens are compared as well:

    python examples/compare_dynamic_cache.py --contexts 16 1024 8000 --plot comparison.png
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from cache_argument import cache_argument
from command_line import (
    add_model_options,
    model_from,
    output_file,
    parser_for,
    positive_int,
    print_table,
    verdict,
    write_json,
)
from timing import interleave
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicLayer

from memos_hf import MemOSCache

CHUNK = 256
WARMUP = 5
KV_TAX_BAR = 0.75
SMALLEST_CONTEXT_BAR = 1.03


@dataclass
class Measurement:
    """One cache at one context length."""

    context: int
    cache: str
    step_ms: list[float]
    bytes_held: int
    tokens: list[int]

    @property
    def median_ms(self) -> float:
        """Milliseconds per token."""
        return median(self.step_ms)


class Decoder:
    """Greedy decoding with one cache, a token at a time."""

    def __init__(self, model: PreTrainedModel, cache: Cache, first_token: Tensor) -> None:
        self.model = model
        self.cache = cache
        self.tokens = [first_token]

    def step(self) -> None:
        """Decode one token."""
        logits = self.model(self.tokens[-1], **cache_argument(self.cache), use_cache=True).logits
        self.tokens.append(logits[:, -1:].argmax(dim=-1))


def example_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Ids, `[1, tokens]`, of English text that every Python installation has: the topics of its help system."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text[: 12 * tokens], return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise SystemExit(f"--contexts: the text has {ids.shape[1]} tokens, {tokens} were asked for")
    return ids[:, :tokens]


def prefilled(model: PreTrainedModel, ids: Tensor, contexts: list[int]) -> Iterator[tuple[int, DynamicCache, Tensor]]:
    """For each context length, ascending: the length, the cache filled so far and the token that comes next."""
    cache = DynamicCache(config=model.config)
    done = 0
    for context in contexts:
        chunks = ids[:, done:context].split(CHUNK, dim=1)
        for chunk in tqdm(chunks, desc=f"prefill up to {context:,} tokens", leave=False):
            logits = model(chunk.to(model.device), **cache_argument(cache), use_cache=True).logits
        done = context
        yield context, cache, logits[:, -1:].argmax(dim=-1)


def contenders(model: PreTrainedModel, filled: DynamicCache, room: int, presets: list[str]) -> dict[str, Cache]:
    """A copy of `filled` for each kind of cache and each preset, with room for `room` tokens altogether."""
    caches: dict[str, Cache] = {"DynamicCache": copy.deepcopy(filled)}
    # A static layer cannot take over from a sliding or a recurrent one, which has only a part of the past.
    if all(type(layer) is DynamicLayer for layer in filled.layers):
        static = StaticCache(config=model.config, max_cache_len=room)
        for layer_idx, layer in enumerate(filled.layers):
            static.update(layer.keys, layer.values, layer_idx)
        caches["StaticCache"] = static
    # Room for all rounds, as StaticCache has it: a growth inside them would be spread over far fewer steps than the
    # thousands that pay for it in use. What growing costs in memory is shown by growth.py.
    caches["MemOSCache"] = MemOSCache.from_cache(filled, initial_capacity=room)
    caches["MemOSCache fused"] = MemOSCache.from_cache(filled, initial_capacity=room, fused_attention=True)
    for preset in presets:
        caches[f"MemOSCache {preset}"] = MemOSCache.from_cache(filled, initial_capacity=room, quantization=preset)
    return caches


def measure(
    model: PreTrainedModel, ids: Tensor, contexts: list[int], rounds: int, presets: list[str]
) -> list[Measurement]:
    """Every cache at every context."""
    measurements = []
    for context, filled, token in prefilled(model, ids, contexts):
        caches = contenders(model, filled, context + WARMUP + rounds, presets)
        decoders = {name: Decoder(model, cache, token) for name, cache in caches.items()}
        steps = {name: decoder.step for name, decoder in decoders.items()}
        times = interleave(steps, rounds, model.device, warmup=WARMUP)
        if caches["MemOSCache"].stats.growths:
            raise RuntimeError(f"the cache grew during the timed rounds at {context} tokens")
        for name, decoder in decoders.items():
            tokens = torch.cat(decoder.tokens, dim=1)[0].tolist()
            measurements.append(Measurement(context, name, times[name], bytes_held(decoder.cache), tokens))
    return measurements


def bytes_held(cache: Cache) -> int:
    """Bytes of the storages behind keys and values, unused capacity included."""
    if isinstance(cache, MemOSCache):
        return cache.memory().allocated_bytes
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


class Comparison:
    """What the measurements say about each cache beside DynamicCache."""

    def __init__(self, measurements: list[Measurement]) -> None:
        self.by_place = {(m.cache, m.context): m for m in measurements}
        self.contexts = sorted({m.context for m in measurements})
        self.caches = list(dict.fromkeys(m.cache for m in measurements))

    def kv_tax(self, cache: str, context: int) -> float:
        """Milliseconds per step at `context` less those at the smallest context, of the same cache."""
        return self.by_place[cache, context].median_ms - self.by_place[cache, self.contexts[0]].median_ms

    def kv_tax_ratio(self, cache: str, context: int) -> float:
        """KV tax in units of DynamicCache's."""
        return self.kv_tax(cache, context) / self.kv_tax("DynamicCache", context)

    def step_ratio(self, cache: str, context: int) -> float:
        """Time per token in units of DynamicCache's."""
        return self.by_place[cache, context].median_ms / self.by_place["DynamicCache", context].median_ms

    def same_tokens(self, cache: str, context: int) -> bool:
        """Whether the tokens are DynamicCache's."""
        return self.by_place[cache, context].tokens == self.by_place["DynamicCache", context].tokens

    def print_rows(self) -> None:
        """One row for each context and cache."""
        header = ("cache", "context", "ms/token", "of Dynamic's", "KV tax, ms", "of Dynamic's", "MiB held", "tokens")
        rows = []
        for cache, context in sorted(self.by_place, key=lambda place: place[1]):
            measured = self.by_place[cache, context]
            taxed = context > self.contexts[0]
            rows.append(
                (
                    cache,
                    f"{context:,}",
                    f"{measured.median_ms:.2f}",
                    f"{self.step_ratio(cache, context):.3f}",
                    f"{self.kv_tax(cache, context):.2f}" if taxed else "",
                    f"{self.kv_tax_ratio(cache, context):.3f}" if taxed else "",
                    f"{measured.bytes_held / 2**20:.1f}",
                    "same" if self.same_tokens(cache, context) else "DIFFER",
                )
            )
        print_table(header, rows)
        print("MiB held: with room for the timed steps. A cache that has just grown has up to half as much again.")

    def print_verdicts(self) -> None:
        """What MemOSCache is held to."""
        smallest, largest = self.contexts[0], self.contexts[-1]
        if largest > smallest:
            ratio = self.kv_tax_ratio("MemOSCache", largest)
            print(f"KV tax at {largest:,} tokens, MemOSCache / DynamicCache: {verdict(ratio, KV_TAX_BAR)}")
        ratio = self.step_ratio("MemOSCache", smallest)
        print(f"ms/token at {smallest:,} tokens, MemOSCache / DynamicCache: {verdict(ratio, SMALLEST_CONTEXT_BAR)}")


def draw(comparison: Comparison, path: Path) -> None:
    """Time per token and bytes held over context length, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, bytes_axes = figure.subplots(1, 2)
    for cache in comparison.caches:
        measured = [comparison.by_place[cache, context] for context in comparison.contexts]
        time_axes.plot(comparison.contexts, [m.median_ms for m in measured], marker="o", label=cache)
        bytes_axes.plot(comparison.contexts, [m.bytes_held / 2**20 for m in measured], marker="o", label=cache)
    time_axes.set(title="Time per token", xlabel="tokens of context", ylabel="ms, median", ylim=(0, None))
    bytes_axes.set(title="Keys and values held", xlabel="tokens of context", ylabel="MiB", ylim=(0, None))
    for axes in (time_axes, bytes_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    print(f"written: {path}")


def parsed_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--contexts", type=positive_int, nargs="+", default=[16, 1024, 8000], help="tokens (%(default)s)"
    )
    parser.add_argument(
        "--quantization", nargs="+", default=[], choices=["int8", "int4", "int2", "fp8"], help="presets to compare too"
    )
    parser.add_argument("--rounds", type=positive_int, default=60, help="timed steps of each cache (%(default)s)")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the measurements, every step's time too"
    )
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; install the extra that has it: pip install 'memos_hf[plots]'")
    return options


def main() -> None:
    options = parsed_options()
    model, tokenizer = model_from(options)
    contexts = sorted(set(options.contexts))
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = contexts[-1] + WARMUP + options.rounds
    if positions is not None and needed > positions:
        raise SystemExit(f"--contexts, --rounds: {needed} tokens are needed, the model has {positions} positions")

    with torch.inference_mode():
        measurements = measure(
            model, example_text(tokenizer, contexts[-1]), contexts, options.rounds, options.quantization
        )
    comparison = Comparison(measurements)
    comparison.print_rows()
    print()
    comparison.print_verdicts()
    if options.plot:
        draw(comparison, options.plot)
    write_json(options.json, {"rounds": options.rounds, "measurements": [asdict(m) for m in measurements]})
    if not all(comparison.same_tokens("MemOSCache", context) for context in contexts):
        raise SystemExit("MemOSCache gave other tokens than DynamicCache")


if __name__ == "__main__":
    main()
