"""A MemOSCache that is fed one token at a time: how often it grows, and how much memory that takes.

From a capacity of 256 tokens to 10,000, in the shape of SmolLM2-135M's layers, with the peak measured, not computed:

    python examples/growth.py --tokens 10000
"""

from __future__ import annotations

import torch
from command_line import add_shape_options, parser_for, random_states, verdict, write_json
from peak_memory import PeakMemory
from torch import Tensor
from transformers import Cache

from memos_hf import MemOSCache
from memos_hf.arguments import output_file, positive_int

GROWTHS_BAR = 11
PEAK_BAR = 1.1
LIVE_BAR = 1.1


def feed(cache: Cache, layers: int, states: Tensor, tokens: int) -> None:
    """Add `states`, `[batch, heads, 1, head_dim]`, to every layer as key and as value, `tokens` times."""
    for _ in range(tokens):
        for layer_idx in range(layers):
            cache.update(states, states, layer_idx)


def main() -> None:
    parser = parser_for(__doc__)
    add_shape_options(parser)
    parser.add_argument("--tokens", type=positive_int, default=10_000, help="tokens to feed (%(default)s)")
    parser.add_argument("--initial-capacity", type=positive_int, default=256, help="tokens (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures")
    options = parser.parse_args()

    with torch.inference_mode():
        states = random_states(options, options.kv_heads, 1)
        cache = MemOSCache(initial_capacity=options.initial_capacity)
        with PeakMemory(options.device) as memory:
            feed(cache, options.layers, states, options.tokens)

    growths, final = cache.stats.growths, cache.memory().allocated_bytes
    one_layer = final / options.layers
    print(cache, end="\n\n")
    print(f"growths: {verdict(growths, GROWTHS_BAR)}")
    print(f"allocated in the end: {final:,} bytes; at the peak: {memory.peak_bytes:,} bytes")
    print(f"(peak - one layer's buffers) / final: {verdict((memory.peak_bytes - one_layer) / final, PEAK_BAR)}")
    print(f"still alive / final, old buffers being freed: {verdict(memory.live_bytes / final, LIVE_BAR)}")
    write_json(
        options.json,
        {
            "tokens": options.tokens,
            "growths": growths,
            "final_bytes": final,
            "peak_bytes": memory.peak_bytes,
            "live_bytes": memory.live_bytes,
        },
    )


if __name__ == "__main__":
    main()
