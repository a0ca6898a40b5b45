"""Head-major against sequence-major: time of one attention pass over every layer's cached keys and values.

A MemOSCache of each layout is filled, then one query token attends to what the layers return, through transformers' own
attention function, the two layouts in turn. The default shape is SmolLM2-135M's:

    python examples/layouts.py --tokens 8000
"""

from __future__ import annotations

import argparse
import functools
from statistics import median
from types import SimpleNamespace

import torch
from command_line import (
    add_shape_options,
    parser_for,
    random_states,
    verdict,
    write_json,
)
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int
from memos_hf.bench.timing import interleave
from memos_hf.output import print_rows

LAYOUTS = ("head_major", "seq_major")
WARMUP = 3
SPEEDUP_BAR = 1.4


def filled_cache(layout: str, states: list[tuple[Tensor, Tensor]]) -> MemOSCache:
    """A cache of this layout with the keys and values of `states`, one pair a layer."""
    cache = MemOSCache(layout=layout)
    for layer_idx, (keys, values) in enumerate(states):
        cache.update(keys, values, layer_idx)
    return cache


def attend(cache: MemOSCache, query: Tensor) -> list[Tensor]:
    """Attention of `query`, `[1, heads, 1, head_dim]`, to every layer of the cache."""
    groups = query.shape[1] // cache.layers[0].keys.shape[1]
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    return [sdpa_attention_forward(module, query, layer.keys, layer.values, None)[0] for layer in cache.layers]


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of every pass over each layout, which must give the same output."""
    torch.manual_seed(0)
    query = random_states(options, options.query_heads, 1)
    shape = (options.kv_heads, options.tokens)
    states = [(random_states(options, *shape), random_states(options, *shape)) for _ in range(options.layers)]
    caches = {layout: filled_cache(layout, states) for layout in LAYOUTS}
    for one, other in zip(*(attend(cache, query) for cache in caches.values()), strict=True):
        torch.testing.assert_close(one, other)
    passes = {layout: functools.partial(attend, cache, query) for layout, cache in caches.items()}
    interleave(passes, range(WARMUP), options.device)
    return interleave(passes, range(options.rounds), options.device)


def main() -> None:
    parser = parser_for(__doc__)
    add_shape_options(parser)
    parser.add_argument("--query-heads", type=positive_int, default=9, help="a multiple of --kv-heads (%(default)s)")
    parser.add_argument("--tokens", type=positive_int, default=8000, help="tokens held by the cache (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=40, help="timed passes over each layout (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the times of every pass")
    options = parser.parse_args()
    if options.query_heads % options.kv_heads:
        parser.error(f"--query-heads: expected a multiple of {options.kv_heads}, got {options.query_heads}")

    with torch.inference_mode():
        times = measure(options)
    print_rows(
        [
            {"layout": layout, "ms, median": f"{median(passes):.2f}", "ms, best": f"{min(passes):.2f}"}
            for layout, passes in times.items()
        ]
    )
    speedup = median(times["seq_major"]) / median(times["head_major"])
    print(f"\nhead-major is faster by a factor of {verdict(speedup, SPEEDUP_BAR, at_least=True)}")
    write_json(options.json, {"tokens": options.tokens, "pass_ms": times})


if __name__ == "__main__":
    main()
