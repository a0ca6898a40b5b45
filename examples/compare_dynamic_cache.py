"""DynamicCache, StaticCache and MemOSCache on one model and a text: tokens, time per token, KV tax and bytes.

For each context the text is prefilled once and every cache gets a copy; then they decode in turn, as in
`python -m memos_hf bench`, which also measures prompts and compares more kinds of caches. Greedy tokens are compared,
and MemOSCache's figures with what it is held to:

    python examples/compare_dynamic_cache.py --contexts 1024 8000 --plot comparison.png
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import pydoc_data.topics
from collections.abc import Iterator

import torch
from command_line import add_model_options, model_from, parser_for, verdict, write_json
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicLayer

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int
from memos_hf.bench.decode import WARMUP, Decoder, decode_in_turn
from memos_hf.bench.memory import held_bytes
from memos_hf.bench.plot import draw
from memos_hf.bench.results import BASE_CONTEXT, Comparison, ComparisonTable, Measurement

CHUNK = 256
KV_TAX_BAR = 0.75
BASE_BAR = 1.03


def example_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Ids, `[1, tokens]`, of English text that every Python installation has: the topics of its help system."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text[: 12 * tokens], return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise SystemExit(f"--contexts: the text has {ids.shape[1]} tokens, {tokens} were asked for")
    return ids[:, :tokens]


def prefilled(model: PreTrainedModel, ids: Tensor, contexts: list[int]) -> Iterator[tuple[int, DynamicCache, Tensor]]:
    """For each context length, ascending: the length, the cache filled so far and the token that comes next."""
    decoder = Decoder(model, DynamicCache(config=model.config))
    done = 0
    for context in contexts:
        chunks = ids[:, done:context].split(CHUNK, dim=1)
        for chunk in tqdm(chunks, desc=f"prefill up to {context:,} tokens", leave=False, disable=None):
            decoder.feed(chunk.to(model.device))
        done = context
        yield context, decoder.cache, decoder.next_ids


def contenders(model: PreTrainedModel, filled: DynamicCache, room: int, presets: list[str]) -> dict[str, Cache]:
    """A copy of `filled` for each kind of cache and each preset, with room for `room` tokens altogether."""
    caches: dict[str, Cache] = {"dynamic": copy.deepcopy(filled)}
    # A static layer cannot take over from a sliding or a recurrent one, which has only a part of the past.
    if all(type(layer) is DynamicLayer for layer in filled.layers):
        static = StaticCache(config=model.config, max_cache_len=room)
        for layer_idx, layer in enumerate(filled.layers):
            static.update(layer.keys, layer.values, layer_idx)
        caches["static"] = static
    # Room for all rounds, as StaticCache has it: a growth inside them would be spread over far fewer steps than the
    # thousands that pay for it in use. What growing costs in memory is shown by growth.py.
    caches["memos"] = MemOSCache.from_cache(filled, initial_capacity=room)
    caches["memos-fused"] = MemOSCache.from_cache(filled, initial_capacity=room, fused_attention=True)
    for preset in presets:
        caches[f"memos-{preset}"] = MemOSCache.from_cache(filled, initial_capacity=room, quantization=preset)
    return caches


def measure(
    model: PreTrainedModel, ids: Tensor, contexts: list[int], rounds: int, presets: list[str]
) -> Iterator[list[Measurement]]:
    """Every cache, a context at a time."""
    for context, filled, token in prefilled(model, ids, contexts):
        caches = contenders(model, filled, context + WARMUP + rounds, presets)
        decoders = {name: Decoder(model, cache, token) for name, cache in caches.items()}
        times = decode_in_turn(decoders, range(rounds), model.device)
        if caches["memos"].stats.growths:
            raise RuntimeError(f"the cache grew during the timed rounds at {context} tokens")
        yield [
            Measurement(name, 1, context, times[name], held_bytes(decoder.cache), decoder.tokens())
            for name, decoder in decoders.items()
        ]


def print_verdicts(comparison: Comparison) -> None:
    """The caches in full precision beside DynamicCache, and what MemOSCache is held to."""
    rows = {(row["cache"], row["context"]): row for row in comparison.rows}
    longest = max(context for _, context in rows)
    for name, cache in (("memos", "MemOSCache"), ("static", "StaticCache")):
        row = rows.get((name, longest))
        if row is not None and longest > BASE_CONTEXT:
            ratio = row["kv_tax_ratio"]
            shown = "DynamicCache's was not above 0" if ratio is None else f"{ratio:.3f}"
            if ratio is not None and name == "memos":
                shown = verdict(ratio, KV_TAX_BAR)
            print(f"KV tax at {longest:,} tokens, {cache} / DynamicCache: {shown}")
    ratio = rows["memos", BASE_CONTEXT]["step_ratio"]
    print(f"ms/token at {BASE_CONTEXT} tokens, MemOSCache / DynamicCache: {verdict(ratio, BASE_BAR)}")


def parsed_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--contexts", type=positive_int, nargs="+", default=[1024, 8000], help="tokens, beside 16 (%(default)s)"
    )
    parser.add_argument(
        "--quantization",
        nargs="+",
        default=[],
        choices=["int8", "int4", "int2", "fp8"],
        help="presets to compare too (none)",
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
    contexts = sorted({BASE_CONTEXT, *options.contexts})
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = contexts[-1] + WARMUP + options.rounds
    if positions is not None and needed > positions:
        raise SystemExit(f"--contexts, --rounds: {needed} tokens are needed, the model has {positions} positions")

    ids = example_text(tokenizer, contexts[-1])
    comparison, table = Comparison(), ComparisonTable(prompts=False)
    with torch.inference_mode():
        for measurements in measure(model, ids, contexts, options.rounds, options.quantization):
            table.add(comparison.add(measurements))
    print("MiB held: with room for the timed steps. A cache that has just grown has up to half as much again.\n")
    print_verdicts(comparison)
    if options.plot:
        draw(comparison.rows, options.plot)
        print(f"written: {options.plot}")
    write_json(options.json, {"rounds": options.rounds, "measurements": comparison.rows})
    if not all(row["same_tokens"] for row in comparison.rows if row["cache"] == "memos"):
        raise SystemExit("MemOSCache gave other tokens than DynamicCache")


if __name__ == "__main__":
    main()
