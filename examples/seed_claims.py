"""The figures of the design that memos_hf began with, each measured here and printed beside what it claims.

The design is an article that names neither its model nor, mostly, its GPU. A claim holds if what is measured here is as
good, or within a tenth of it; where it does not, the line below says why. All of it, or some subjects:

    python examples/seed_claims.py --json claims.json
    python examples/seed_claims.py --only growth leaks
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import batch_speed
import layouts
import torch
from cache_argument import cache_argument
from command_line import add_model_options, model_from, parser_for, write_json
from compare_dynamic_cache import example_text, prefilled
from long_context import memory_bytes
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from memos_hf import MemOSCache, OffloadConfig, generate_batch
from memos_hf.arguments import output_file, positive_int
from memos_hf.bench.decode import WARMUP, Decoder, decode_in_turn
from memos_hf.bench.memory import anonymous_bytes, held_bytes, live_tensors
from memos_hf.bench.shapes import random_model
from memos_hf.bench.timing import interleave, time_call
from memos_hf.contenders import ONE_SCALE, Room, offloaded
from memos_hf.evaluate import evaluate
from memos_hf.output import Table, say

# How far from the claim a figure may be and still hold.
SLACK = 0.1
GROWTHS = 5  # of each length, the median counts
GROWTH_MS = {1024: 2.1, 2048: 3.8, 4096: 7.2}  # claimed, from so many tokens to half as many more
# Tokens of a prompt and of its answer, with and without a cache.
WITH_AND_WITHOUT = ((64, 24), (256, 12))
REQUESTS_IN_A_BATCH = 8
# Of the tokens of a request on the tiny model, and of the requests that are made before any is counted.
SHORT_PROMPT, SHORT_ANSWER, FIRST_REQUESTS = 12, 4, 200
TINY_LLAMA = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)


@dataclass(frozen=True)
class Finding:
    """A claim and what was measured; `holds` is `None` where it cannot be told here."""

    claim: str
    claimed: str
    measured: str
    holds: bool | None
    why: str

    @property
    def verdict(self) -> str:
        """In words."""
        if self.holds is None:
            return "cannot be had here (GPU)"
        return "holds" if self.holds else "does not hold"


@dataclass
class Subject:
    """What the claims are measured on.

    Attributes
    ----------
    model, tokenizer
    options : Namespace
        Of the command line.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: argparse.Namespace

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.options.device

    def shape(self, **more: Any) -> argparse.Namespace:
        """The shape of the model's cache, as layouts.py takes it."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        return argparse.Namespace(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads or heads,
            query_heads=heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            device=self.device,
            dtype=self.options.dtype,
            **more,
        )

    def text(self, tokens: int) -> Tensor:
        """Ids of English text, `[1, tokens]`."""
        return example_text(self.tokenizer, tokens).to(self.device)


def cache_or_none(subject: Subject) -> Iterator[Finding]:
    """Generation with a cache against generation that computes the whole text for every token."""
    for prompt, answer in WITH_AND_WITHOUT:
        ids = subject.text(prompt)
        options = {"max_new_tokens": answer, "min_new_tokens": answer, "do_sample": False}
        run = partial(subject.model.generate, ids, attention_mask=torch.ones_like(ids), **options)
        cached = time_call(lambda run=run: run(**cache_argument(MemOSCache(subject.model.config))), subject.device)
        uncached = time_call(partial(run, use_cache=False), subject.device)
        yield Finding(
            f"with a cache over without, {prompt} + {answer} tokens",
            "3 to 5 times",
            f"{uncached / cached:.1f} times",
            uncached / cached >= 3 * (1 - SLACK),
            "no single figure can be right: without a cache a token costs as much as the text so far is long",
        )


def append(subject: Subject) -> Iterator[Finding]:
    """A token put into every layer, in place and by concatenation."""
    shape = subject.shape()
    token = _states(shape, 1)
    for length in subject.options.lengths:
        prompt = _states(shape, length)
        room = length + WARMUP + subject.options.rounds
        caches: dict[str, Cache] = {"concat": DynamicCache(), "in place": MemOSCache(initial_capacity=room)}
        updates = {name: partial(_update, cache, shape.layers, token) for name, cache in caches.items()}
        for cache in caches.values():
            _update(cache, shape.layers, prompt)
        interleave(updates, range(WARMUP), subject.device)
        times = interleave(updates, range(subject.options.rounds), subject.device)
        concat, in_place = (median(times[name]) for name in caches)
        yield Finding(
            f"append behind {length:,} tokens, {shape.layers} layers",
            "no concatenation",
            f"{in_place:.2f} ms, concatenating {concat:.2f}",
            in_place < concat,
            "in place a token costs the same at any length; concatenating copies all that is cached",
        )


def _states(shape: argparse.Namespace, tokens: int) -> Tensor:
    size = (1, shape.kv_heads, tokens, shape.head_dim)
    return torch.randn(size, dtype=getattr(torch, shape.dtype), device=shape.device)


def _update(cache: Cache, layers: int, states: Tensor) -> None:
    for layer_idx in range(layers):
        cache.update(states, states, layer_idx)


def layout(subject: Subject) -> Iterator[Finding]:
    """Attention over keys and values that lie head by head, and token by token; see layouts.py."""
    shape = subject.shape(tokens=max(subject.options.lengths) // 2, rounds=subject.options.rounds)
    times = {name: median(passes) for name, passes in layouts.measure(shape).items()}
    gain = times["seq_major"] / times["head_major"] - 1
    dtype = getattr(torch, shape.dtype)
    read = 2 * shape.layers * shape.kv_heads * shape.tokens * shape.head_dim * dtype.itemsize
    seq, head = (read / times[name] / 1e6 for name in ("seq_major", "head_major"))
    yield Finding(
        f"head-major over sequence-major, {shape.tokens:,} tokens",
        "+50%",
        f"{gain:+.0%}",
        gain >= 0.5 * (1 - SLACK),
        "of attention alone: what else a step computes, the layout leaves as it is",
    )
    yield Finding(
        "memory traffic of the faster layout",
        "320 -> 240 GB/s",
        f"{seq:.1f} -> {head:.1f} GB/s",
        head < seq,
        "both layouts read the same bytes, so what takes less time reads more a second, not less",
    )


def growth(subject: Subject) -> Iterator[Finding]:
    """The update that finds the buffers full, without what it takes to append."""
    shape = subject.shape()
    token = _states(shape, 1)
    for length, claimed in GROWTH_MS.items():
        growing, prompt = [], _states(shape, length)
        for _ in range(min(subject.options.rounds, GROWTHS)):
            cache = MemOSCache(initial_capacity=length)
            _update(cache, shape.layers, prompt)
            first = time_call(partial(_update, cache, shape.layers, token), subject.device)
            growing.append(first - time_call(partial(_update, cache, shape.layers, token), subject.device))
            if cache.stats.growths != 1:
                raise RuntimeError(f"expected one growth beyond {length} tokens, got {cache.stats.growths}")
        whole = median(growing)
        size = held_bytes(cache) / 2**20
        yield Finding(
            f"growth {length:,} -> {length * 3 // 2:,} tokens",
            f"{claimed} ms",
            f"{whole:.1f} ms, {whole / shape.layers:.2f} a layer",
            whole <= claimed * (1 + SLACK),
            f"time is that of a copy, here into {size:.0f} MiB; the article does not say of what size its cache is",
        )


def batches(subject: Subject) -> Iterator[Finding]:
    """Requests one after the other, and all at once; see batch_speed.py."""
    new_tokens = subject.options.new_tokens
    rows = subject.text(1000 * REQUESTS_IN_A_BATCH)[0].view(REQUESTS_IN_A_BATCH, -1).tolist()
    prompts = [row[:length] for row, length in zip(rows, batch_speed.LENGTHS, strict=True)]
    limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}

    def together() -> None:
        generate_batch(subject.model, subject.tokenizer, prompts, progress=False, **limits)

    def alone() -> None:
        for prompt in prompts:
            batch_speed.generate(subject.model, torch.tensor([prompt], device=subject.device), new_tokens)

    gain = batch_speed.seconds(alone) / batch_speed.seconds(together)
    yield Finding(
        f"throughput of {REQUESTS_IN_A_BATCH} requests in a batch",
        "6 times",
        f"{gain:.1f} times",
        gain >= 6 * (1 - SLACK),
        "a batch reads the weights once for all rows; cores that compute most of the time have less of that to save",
    )


def quantized_bytes(subject: Subject) -> Iterator[Finding]:
    """A float16 cache and the same in 8 bit."""
    shape = subject.shape()
    cache = MemOSCache(quantization="int8")
    tokens = max(subject.options.lengths)
    for part in _states(shape, tokens).half().split(512, dim=2):
        _update(cache, shape.layers, part)
    ratio = cache.memory().ratio
    yield Finding(
        f"int8 bytes over float16, {tokens:,} tokens",
        "0.5 (4 -> 2 GB)",
        f"{ratio:.3f}",
        ratio <= 0.5 * (1 + SLACK),
        "above a half: a float16 scale for each token and head, and the newest 128 tokens are exact",
    )


def quality(subject: Subject) -> Iterator[Finding]:
    """Next tokens on a text, with scales that fit and with the article's one scale of 0.1."""
    config = subject.model.config
    kinds = {
        "scales by token and head": "int8",
        "one scale of 0.1 as claimed": ONE_SCALE,
    }
    caches = {name: partial(MemOSCache, config, quantization=kind) for name, kind in kinds.items()}
    text = subject.text(subject.options.text)
    reference, *found = evaluate(subject.model, text, caches, progress=False)
    for quality in found:
        change = quality.perplexity / reference.perplexity - 1
        yield Finding(
            f"int8 accuracy, {quality.cache}",
            "-0.5%",
            f"{quality.top1 - 1:+.2%} top-1, {change:+.2%} perplexity",
            1 - quality.top1 <= 0.005 * (1 + SLACK),
            f"next tokens that DynamicCache finds likeliest, of {quality.tokens:,}; KL {quality.mean_kl:.1e} nats",
        )


def decoding(subject: Subject) -> Iterator[Finding]:
    """Decoding steps of a cache in full precision, in 8 bit, and in blocks of which 0.4 may be on the device."""
    model, options = subject.model, subject.options
    _, filled, token = next(prefilled(model, subject.text(options.tokens), [options.tokens]))
    room = Room(options.tokens + WARMUP + options.rounds, 1, subject.device, model.dtype)
    offload = offloaded(model.config, room).options.offload
    convert = partial(MemOSCache.from_cache, filled, config=model.config)
    caches: dict[str, Cache] = {
        "dynamic": copy.deepcopy(filled),
        "memos": convert(initial_capacity=room.tokens),
        "int8": convert(quantization="int8"),
        "blocks": convert(offload=offload),
    }
    decoders = {name: Decoder(model, cache, token) for name, cache in caches.items()}
    times = decode_in_turn(decoders, range(options.rounds), subject.device)
    full, int8, blocks = (median(times[name]) for name in ("memos", "int8", "blocks"))
    yield Finding(
        f"int8 latency of a token, {options.tokens:,} tokens",
        "42 -> 47 ms (+12%)",
        f"{full:.0f} -> {int8:.0f} ms ({int8 / full - 1:+.0%})",
        int8 / full <= 47 / 42 * (1 + SLACK),
        "attention reads the codes in place: fewer bytes, and no decoding that would take more",
    )
    left = memory_bytes(caches["blocks"]) / held_bytes(caches["dynamic"])
    same = "the same tokens" if decoders["blocks"].tokens() == decoders["dynamic"].tokens() else "other tokens"
    yield Finding(
        f"blocks: device memory, {options.tokens:,} tokens",
        "-60%",
        f"{left - 1:+.0%}",
        left <= 0.4 * (1 + SLACK),
        f"as much as one asks for; the price is time: {blocks / full:.2f} of the plain cache's a token; {same}",
    )


def leaks(subject: Subject) -> Iterator[Finding]:
    """Thousands of requests with caches of three kinds on a tiny model: what is there after the first and the last."""
    model = random_model(TINY_LLAMA, subject.device, torch.float32)
    ids = torch.arange(1, SHORT_PROMPT + 1, device=subject.device)[None]
    block_bytes = 4 * 16 * 2 * 16 * 4  # K and V of two layers, of 16 tokens, 2 heads and 16 dims
    offload = OffloadConfig({_place(subject.device): block_bytes})
    kinds = ({}, {"quantization": "int8", "block_size": 8}, {"offload": offload, "block_size": 8})
    torch.set_num_threads(1)  # a model this small is faster so
    taken = 0

    def request(number: int) -> None:
        nonlocal taken
        cache = MemOSCache(model.config, **kinds[number % len(kinds)])
        model.generate(ids, max_new_tokens=SHORT_ANSWER, do_sample=False, **cache_argument(cache))
        taken += cache.memory().allocated_bytes

    for number in range(FIRST_REQUESTS):
        request(number)
    bytes_before, tensors_before, taken = anonymous_bytes(), live_tensors()[0], 0
    for number in range(subject.options.requests):
        request(number)
    grown, tensors = anonymous_bytes() - bytes_before, live_tensors()[0] - tensors_before
    yield Finding(
        f"no leak over {subject.options.requests:,} requests",
        "flat",
        f"{grown / 2**20:+.1f} MiB, {tensors:+d} tensors",
        tensors <= 0 and grown < max(taken / 100, 2**20),
        f"a cache is free when nobody refers to it: these took {taken / 2**20:.0f} MiB, one after the other",
    )


def _place(device: torch.device) -> int | str:
    return device.index or 0 if device.type == "cuda" else device.type


def overlap(subject: Subject) -> Iterator[Finding]:
    """What streams are worth, which a CPU does not have; a GPU's figures come from the suite that is made for it."""
    yield Finding(
        "a second stream updates the cache",
        "hides it (no figure)",
        "",
        None,
        "a CPU has no streams; on a GPU, python -m memos_hf bench --suite gpu times blocks read ahead and not",
    )


SUBJECTS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "cache": cache_or_none,
    "append": append,
    "layout": layout,
    "overlap": overlap,
    "growth": growth,
    "batches": batches,
    "bytes": quantized_bytes,
    "quality": quality,
    "decoding": decoding,
    "leaks": leaks,
}


def parsed_options() -> argparse.Namespace:
    parser = parser_for(__doc__)
    add_model_options(parser)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="subjects (all)")
    parser.add_argument(
        "--lengths", type=positive_int, nargs="+", default=[1024, 4096, 8192], help="tokens to append to (%(default)s)"
    )
    parser.add_argument("--tokens", type=positive_int, default=1536, help="in front of decoding steps (%(default)s)")
    parser.add_argument("--text", type=positive_int, default=1024, help="tokens to read for quality (%(default)s)")
    parser.add_argument("--new-tokens", type=positive_int, default=16, help="of a batch's answers (%(default)s)")
    parser.add_argument("--requests", type=positive_int, default=2000, help="to look for leaks (%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=20, help="timed rounds (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the table")
    return parser.parse_args()


def main() -> None:
    options = parsed_options()
    subject = Subject(*model_from(options), options)
    table = Table(("claim", 48), ("claimed", 20), ("measured", 34), ("verdict", 24))
    findings = []
    with torch.inference_mode():
        for name in options.only:
            for finding in SUBJECTS[name](subject):
                table.add(finding.claim, finding.claimed, finding.measured, finding.verdict)
                say(f"    {finding.why}")
                findings.append({"subject": name, **asdict(finding), "verdict": finding.verdict})
    write_json(options.json, {"claims": findings})


if __name__ == "__main__":
    main()
