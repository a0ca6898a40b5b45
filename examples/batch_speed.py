"""What batching and a shared prefix are worth: `generate_batch` beside `generate`, on the CPU or a GPU.

First eight prompts, against one call of `generate` with the same prompts padded by hand. Then many prompts that begin
with the same thousand tokens, against `generate` one by one on a few of them, scaled up:

    python examples/batch_speed.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable
from typing import Any

import torch
from command_line import add_model_options, model_from, parser_for, verdict
from transformers import PreTrainedModel

from memos_hf import generate_batch
from memos_hf.arguments import positive_int

LENGTHS = (20, 30, 45, 60, 80, 100, 120, 150)


def seconds(work: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def padded_by_hand(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> None:
    """One call of `generate` with left padding, as one writes it without `generate_batch`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    generate(model, ids, new_tokens, attention_mask=mask)


def generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **inputs: Any) -> None:
    model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **inputs)


def main() -> None:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--requests", type=positive_int, default=64, help="with a prefix in common (%(default)s)")
    parser.add_argument("--sample", type=positive_int, default=8, help="of them to run one by one (%(default)s)")
    parser.add_argument("--prefix", type=positive_int, default=1000, help="tokens in common (%(default)s)")
    parser.add_argument("--new-tokens", type=positive_int, default=32, help="of each answer (%(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="with the prefix (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="of the first comparison (%(default)s)")
    options = parser.parse_args()
    model, tokenizer = model_from(options)
    topics = pydoc_data.topics.topics
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics))[:200_000], verbose=False).input_ids

    def batch(prompts: list[list[int]], batch_size: int) -> None:
        limits = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": False}
        generate_batch(model, tokenizer, prompts, batch_size=batch_size, progress=False, **limits)

    compare_padding(options, model, [ids[1000 * n : 1000 * n + length] for n, length in enumerate(LENGTHS)], batch)
    own = [ids[5000 + 50 * n :][: 5 + n % 20] for n in range(options.requests)]
    compare_prefix(options, model, [ids[: options.prefix] + own_ids for own_ids in own], batch)


def compare_padding(
    options: argparse.Namespace, model: PreTrainedModel, prompts: list[list[int]], batch: Callable[..., None]
) -> None:
    """Print the throughput of a batch over that of a call padded by hand; the best of rounds that alternate."""
    batch(prompts[:2], 2)
    hand, ours = [], []
    for _ in range(options.rounds):
        hand.append(seconds(lambda: padded_by_hand(model, prompts, options.new_tokens)))
        ours.append(seconds(lambda: batch(prompts, len(prompts))))
    print(f"{len(prompts)} prompts, {options.new_tokens} new tokens each; the best of {options.rounds} rounds")
    print(f"  generate, padded by hand  {min(hand):7.2f} s")
    print(f"  generate_batch            {min(ours):7.2f} s")
    print(f"  throughput over generate's: {verdict(min(hand) / min(ours), 0.95, at_least=True)}")


def compare_prefix(
    options: argparse.Namespace, model: PreTrainedModel, prompts: list[list[int]], batch: Callable[..., None]
) -> None:
    """Print the throughput of batches behind a shared prefix over that of `generate` one by one."""
    sample = prompts[:: max(len(prompts) // options.sample, 1)][: options.sample]
    half = len(sample) // 2

    def one_by_one(some: list[list[int]]) -> float:
        return seconds(
            lambda: [generate(model, torch.tensor([ids], device=model.device), options.new_tokens) for ids in some]
        )

    alone = one_by_one(sample[:half])
    together = seconds(lambda: batch(prompts, options.batch_size))
    alone += one_by_one(sample[half:])
    scaled = alone * len(prompts) / len(sample)
    print(f"\n{len(prompts)} prompts with {options.prefix} tokens in common, {options.new_tokens} new tokens each")
    print(f"  generate, one by one      {scaled:7.1f} s, scaled up from {alone:.1f} s for {len(sample)} of them")
    print(f"  generate_batch            {together:7.1f} s, {options.batch_size} rows at a time")
    print(f"  throughput over one by one: {verdict(scaled / together, 6, at_least=True)}")


if __name__ == "__main__":
    main()
