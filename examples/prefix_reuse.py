"""A long prompt that many questions share: the time to the first token with and without a prefix store.

The questions come one after the other, each behind the same prefix of 2,000 tokens, and are read once in full and once
behind what the store hands out. With --directory the store keeps its caches in files; run it twice, and the second run
reads nothing of the prefix, as it finds it there:

    python examples/prefix_reuse.py --directory prefixes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cache_argument import cache_argument
from command_line import add_model_options, model_from, parser_for, verdict, write_json
from compare_dynamic_cache import example_text
from torch import Tensor
from transformers import PreTrainedModel

from memos_hf import MemOSCache, PrefixStore
from memos_hf.arguments import output_file, positive_int
from memos_hf.config import PRESETS

RATIO_BAR = 0.12


def prompts(ids: Tensor, prefix: int, question: int, count: int) -> list[Tensor]:
    """The first `prefix` of `ids`, `[1, tokens]`, with the next `question` others behind them each time."""
    questions = ids[:, prefix:].split(question, dim=1)[:count]
    return [torch.cat([ids[:, :prefix], own], dim=1) for own in questions]


def timed(generate: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds that a call takes, and what it gives."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = generate()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, output


def fill(store: PrefixStore, model: PreTrainedModel, prefix: Tensor, quantization: str | None) -> None:
    """Read the prefix, `[1, tokens]`, into the store, unless it is there."""
    cache, matched = store.get(torch.cat([prefix, prefix[:, -1:]], dim=1))
    if matched == prefix.shape[1]:
        print(f"prefix: {matched:,} tokens found in the store, {store.stats.loads} file read")
        return
    cache = MemOSCache.for_model(model, quantization=quantization)
    seconds, _ = timed(lambda: model.generate(prefix, **one_token(prefix), **cache_argument(cache)))
    start = time.perf_counter()
    store.put(prefix, cache)
    print(f"prefix: {prefix.shape[1]:,} tokens read in {seconds:.2f} s, put in {time.perf_counter() - start:.2f} s")


def one_token(ids: Tensor) -> dict[str, Any]:
    """Arguments with which `generate` gives the first token."""
    return {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}


def main() -> None:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--prefix", type=positive_int, default=2000, help="tokens that all prompts share (%(default)s)")
    parser.add_argument("--question", type=positive_int, default=30, help="tokens behind them (%(default)s)")
    parser.add_argument("--questions", type=positive_int, default=8, help="how many (%(default)s)")
    parser.add_argument("--full", type=positive_int, default=3, help="of them to read in full too (%(default)s)")
    parser.add_argument("--quantization", choices=list(PRESETS), help="of the caches")
    parser.add_argument("--directory", type=Path, help="keep the prefix in files too, for the next run")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    model, tokenizer = model_from(options)
    ids = example_text(tokenizer, options.prefix + options.question * options.questions).to(model.device)
    asked = prompts(ids, options.prefix, options.question, options.questions)
    cache_options = {"quantization": options.quantization}
    store = PrefixStore(model, options.directory, cache_options=cache_options)

    def in_full(prompt: Tensor) -> Tensor:
        cache = MemOSCache.for_model(model, **cache_options)
        output: Tensor = model.generate(prompt, **one_token(prompt), **cache_argument(cache))
        return output

    full = [timed(lambda prompt=prompt: in_full(prompt)) for prompt in asked[: options.full]]
    fill(store, model, ids[:, : options.prefix], options.quantization)
    behind = [
        timed(lambda prompt=prompt: store.generate(model, prompt, max_new_tokens=1, do_sample=False))
        for prompt in asked
    ]
    report(options, store, full, behind)


def report(
    options: argparse.Namespace,
    store: PrefixStore,
    full: list[tuple[float, Tensor]],
    behind: list[tuple[float, Tensor]],
) -> None:
    """Print medians and whether the first tokens are the same."""
    without, with_store = (statistics.median(seconds for seconds, _ in runs) for runs in (full, behind))
    same = sum(torch.equal(one, other) for (_, one), (_, other) in zip(full, behind, strict=False))
    print(f"\n{options.prefix:,} tokens in common, {options.question} of each prompt's own; medians")
    print(f"  time to first token without the store  {without:8.3f} s, of {len(full)} prompts")
    print(f"  with it                                {with_store:8.3f} s, of {len(behind)}")
    print(f"  with / without: {verdict(with_store / without, RATIO_BAR)}")
    print(f"  first tokens that are the same: {same} of {len(full)}")
    print(store)
    write_json(
        options.json,
        {"without_seconds": without, "with_seconds": with_store, "hits": store.stats.hits, "same": same},
    )


if __name__ == "__main__":
    main()
