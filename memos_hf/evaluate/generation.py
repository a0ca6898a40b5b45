"""Long generation: whether what a cache loses adds up while its own tokens come back to it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from .agreement import Agreement
from .caches import CacheFactory, Reads, bytes_ratio, with_reference
from .model_calls import check_at_least_one, next_log_probs

NGRAM = 4


@dataclass(kw_only=True)
class Window(Agreement):
    """Agreement over the generated tokens `first` to `last`, counted from 1."""

    first: int
    last: int


@dataclass
class LongGeneration:
    """One cache generating, against DynamicCache generating from the same prompt.

    Attributes
    ----------
    cache : str
    generated : Tensor
        int64 `[batch, new tokens]`: what the model writes with this cache alone.
    windows : list[Window]
        Agreement on DynamicCache's tokens, when this cache is fed those.
    common_prefix : float
        Tokens before the first that is not DynamicCache's; the mean over rows.
    same : float
        Share of the generated tokens that are DynamicCache's at the same place.
    ratio : float, optional
        Bytes used over full precision at the end; `None` for caches that do not report it.
    hit_rate : float, optional
        Of the blocks that were read while DynamicCache's tokens were fed, the share that was on the device; `None` for
        caches that are not offloaded.
    """

    cache: str
    generated: Tensor
    windows: list[Window]
    common_prefix: float
    same: float
    ratio: float | None = None
    hit_rate: float | None = None

    @property
    def overall(self) -> Agreement:
        """The windows together."""
        return Agreement(
            kl=sum(window.kl for window in self.windows),
            agreed=sum(window.agreed for window in self.windows),
            tokens=sum(window.tokens for window in self.windows),
        )

    @property
    def distinct(self) -> float:
        """Distinct 4-grams over all: near 0, the text goes in circles, and agreement on it says little."""
        rows = self.generated.tolist()
        ngrams = [tuple(row[start : start + NGRAM]) for row in rows for start in range(len(row) - NGRAM + 1)]
        return len(set(ngrams)) / len(ngrams) if ngrams else 1.0

    def row(self) -> dict[str, Any]:
        """The figures that a table or a JSON file shows."""
        return {
            "cache": self.cache,
            "common prefix": self.common_prefix,
            "same": self.same,
            "distinct": self.distinct,
            "top1": self.overall.top1,
            "kl": self.overall.mean_kl,
            "bytes": self.ratio,
            "hits": self.hit_rate,
        }

    def window_rows(self) -> list[dict[str, Any]]:
        """A row for each window, in which a drift shows."""
        return [
            {"cache": self.cache, "first": part.first, "last": part.last, "top1": part.top1, "kl": part.mean_kl}
            for part in self.windows
        ]


def long_generation(
    model: PreTrainedModel,
    input_ids: Tensor,
    caches: Mapping[str, CacheFactory],
    *,
    attention_mask: Tensor | None = None,
    new_tokens: int = 500,
    window: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    chunk: int = 256,
    progress: bool = True,
) -> list[LongGeneration]:
    """Generate with DynamicCache and with other caches, side by side.

    Each cache goes two ways. Free, it is fed the tokens that it leads to itself: after the first that differs it writes
    another text, so what counts there is how long that takes. Forced, it is fed DynamicCache's tokens one at a time,
    and its next-token distribution is compared with DynamicCache's at each. Up to the first difference the two ways
    are one; a copy of the cache then takes the free one. Ends of sequence are tokens like others.

    Small models that generate greedily soon repeat themselves (`LongGeneration.distinct`), and in a loop every cache
    agrees. A temperature of 1 keeps them out of it.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor
        int64 `[batch, tokens]`, the prompt.
    caches : mapping of str to callable
        Makes an empty cache for each name. Caches are deep-copied where their tokens differ.
    attention_mask : Tensor, optional
        `[batch, tokens]`, 0 for left padding.
    new_tokens : int
        To generate, the same number in each row.
    window : int
        Generated tokens in a :class:`Window`.
    temperature : float
        Of sampling; 0 is greedy. All caches are given the same random numbers (the Gumbel-max trick), so that equal
        distributions give equal tokens.
    seed : int
        Of these numbers.
    chunk : int
        Tokens of the prompt in one call of the model.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list[LongGeneration]
        DynamicCache first, then one for each entry of `caches`, in their order.

    Raises
    ------
    ValueError
        If a number is too low, or a cache is called like the reference.
    """
    check_at_least_one(new_tokens=new_tokens, window=window, chunk=chunk)
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    random = torch.Generator().manual_seed(seed)
    mask = attention_mask
    with torch.inference_mode():
        runs = [
            _Run(name, _Stream(cache, next_log_probs(model, cache, input_ids, mask, chunk=chunk)), Reads(cache))
            for name, make in with_reference(model, caches).items()
            for cache in [make()]
        ]
        for step in tqdm(range(new_tokens), desc="generating", disable=not progress):
            reference = runs[0].forced.log_probs
            noise = temperature * _gumbel(reference, random) if temperature else torch.zeros_like(reference)
            following = (reference + noise).argmax(-1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            for run in runs:
                if step % window == 0:
                    run.windows.append(Window(first=step + 1, last=min(step + window, new_tokens)))
                run.windows[-1].count(run.forced.log_probs, reference)
                run.choose(noise, following)
                if step + 1 < new_tokens:
                    run.step(model, following, mask)
    return [run.result(runs[0]) for run in runs]


@dataclass
class _Stream:
    """A cache that is fed one token at a time, and what it says comes next, `[batch, vocabulary]`."""

    cache: Cache
    log_probs: Tensor

    def step(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> None:
        self.log_probs = next_log_probs(model, self.cache, tokens[:, None], mask, chunk=1)


@dataclass
class _Run:
    """One cache on both ways."""

    name: str
    forced: _Stream
    reads: Reads  # after the prompt
    free: _Stream | None = None  # once it is another way than the forced one
    own: list[Tensor] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def choose(self, noise: Tensor, following: Tensor) -> None:
        """Choose this cache's own next tokens, and part from DynamicCache's where they differ."""
        self.own.append(((self.free or self.forced).log_probs + noise).argmax(-1))
        if self.free is None and not torch.equal(self.own[-1], following):
            self.free = copy.deepcopy(self.forced)

    def step(self, model: PreTrainedModel, following: Tensor, mask: Tensor | None) -> None:
        """Feed DynamicCache's tokens on one way, its own on the other."""
        self.forced.step(model, following, mask)
        if self.free is not None:
            self.free.step(model, self.own[-1], mask)

    def result(self, reference: _Run) -> LongGeneration:
        generated = torch.stack(self.own, dim=1)
        equal = (generated == torch.stack(reference.own, dim=1)).double()
        return LongGeneration(
            cache=self.name,
            generated=generated.cpu(),
            windows=self.windows,
            common_prefix=float(equal.cumprod(1).sum(1).mean()),
            same=float(equal.mean()),
            ratio=bytes_ratio((self.free or self.forced).cache),
            hit_rate=self.reads.hit_rate(),
        )


def _gumbel(like: Tensor, random: torch.Generator) -> Tensor:
    """Gumbel noise: the likeliest of `log_probs + noise` is a sample. Drawn on the CPU, the same for every device."""
    return -torch.empty(like.shape).exponential_(generator=random).log().to(like.device)
