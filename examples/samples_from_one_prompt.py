"""Several samples from one long prompt, which is read and held once: `cache.fork(repeats=8)`.

A prompt of 4,000 tokens is read into a cache of one row. A fork of eight rows is sampled from, and another one is
generated from greedily, to see that each row is what one row alone gives. Printed is what eight rows hold, against one:

    python examples/samples_from_one_prompt.py --samples 8
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from cache_argument import cache_argument
from command_line import add_model_options, model_from, parser_for, verdict, write_json
from compare_dynamic_cache import example_text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int

CHUNK = 512
BARS = {"full precision": 1.4, "int8": 2.0}


def filled(model: PreTrainedModel, ids: Tensor, quantization: str | None) -> MemOSCache:
    """A cache of one row that holds all of `ids`, `[1, tokens]`, but the last, from which `generate` goes on."""
    cache = MemOSCache.for_model(model, quantization=quantization)
    with torch.inference_mode():
        for chunk in ids[:, :-1].split(CHUNK, dim=1):
            model(chunk, **cache_argument(cache), logits_to_keep=1)
    return cache


def generate(model: PreTrainedModel, ids: Tensor, cache: MemOSCache, rows: int, **options: Any) -> Tensor:
    """New tokens, `[rows, new_tokens]`, of `rows` rows that all begin with `ids`, `[1, tokens]`."""
    ids = ids.expand(rows, -1)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), **options)
    new_ids: Tensor = output[:, ids.shape[1] :]
    return new_ids


def compare(
    options: argparse.Namespace,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    quantization: str | None,
) -> dict[str, Any]:
    """Sample, generate greedily, and print what rows hold and whether greedy ones agree."""
    mode = quantization or "full precision"
    start = time.perf_counter()
    cache = filled(model, ids, quantization)
    print(f"{mode}: {ids.shape[1]:,} tokens read in {time.perf_counter() - start:.1f} s")
    limits = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}

    rows = cache.fork(repeats=options.samples)
    row = rows.fork()
    row.batch_select_indices(torch.tensor([0]))
    forked = rows.memory().used_bytes / row.memory().used_bytes
    torch.manual_seed(options.seed)
    samples = generate(model, ids, rows, options.samples, do_sample=True, **limits)
    for text in tokenizer.batch_decode(samples[:3], skip_special_tokens=True):
        print(f"  {text!r}")
    print(f"  different samples: {len({tuple(row) for row in samples.tolist()})} of {options.samples}")

    alone = cache.fork()
    greedy = generate(model, ids, alone, 1, do_sample=False, **limits)
    together = generate(model, ids, cache.fork(repeats=options.samples), options.samples, do_sample=False, **limits)
    equal = sum(torch.equal(row, greedy[0]) for row in together)
    print(f"  greedy rows that equal the row alone: {equal} of {options.samples}")

    held, one = rows.memory().used_bytes, alone.memory().used_bytes
    print(f"  bytes held by {options.samples} rows over those of one, when forked: {verdict(forked, BARS[mode])}")
    print(f"  with {options.new_tokens} new tokens each, {held:,} over {one:,}: {verdict(held / one, BARS[mode])}")
    return {"forked_ratio": forked, "one_row_bytes": one, "rows_bytes": held, "equal_rows": equal}


def main() -> None:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--tokens", type=positive_int, default=4000, help="of the prompt (%(default)s)")
    parser.add_argument("--samples", type=positive_int, default=8, help="of each prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=positive_int, default=32, help="of each sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    model, tokenizer = model_from(options)
    ids = example_text(tokenizer, options.tokens).to(model.device)
    write_json(
        options.json,
        {str(mode): compare(options, model, tokenizer, ids, mode) for mode in (None, "int8")},
    )


if __name__ == "__main__":
    main()
