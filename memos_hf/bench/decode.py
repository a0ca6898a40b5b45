"""Feeding prompts to a model through a cache, and decoding with several caches in turn."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..cache_argument import cache_argument
from .timing import interleave

# Steps of each cache that are not counted: buffers are touched for the first time, kernels compiled.
WARMUP = 3


class Decoder:
    """Greedy decoding with one cache.

    Parameters
    ----------
    model : PreTrainedModel
    cache : Cache
        Empty, or filled with what the model has seen.
    next_ids : Tensor, optional
        int64 `[batch, 1]`, what `step` begins with where no prompt is fed.

    Attributes
    ----------
    decoded : list[Tensor]
        Ids that the steps gave, `[batch, 1]` each.
    next_ids : Tensor
        The likeliest ids after everything that was fed, `[batch, 1]`.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, next_ids: Tensor | None = None) -> None:
        self.model, self.cache = model, cache
        self.decoded: list[Tensor] = []
        self.next_ids = next_ids
        self._argument = cache_argument(model)
        accepted = inspect.signature(model.forward).parameters
        # A prompt's logits over a large vocabulary would outweigh the cache.
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def feed(self, input_ids: Tensor) -> None:
        """Run the model on int64 `[batch, tokens]`, which follow what the cache holds."""
        cache = {self._argument: self.cache}
        logits = self.model(input_ids, **cache, use_cache=True, **self._options).logits
        self.next_ids = logits[:, -1:].argmax(dim=-1)

    def step(self) -> None:
        """Decode one token of each row."""
        assert self.next_ids is not None, "nothing was fed"
        self.feed(self.next_ids)
        assert self.next_ids is not None
        self.decoded.append(self.next_ids)

    def tokens(self) -> list[list[int]]:
        """Ids decoded so far, of each row."""
        ids: list[list[int]] = torch.cat(self.decoded, dim=1).tolist()
        return ids


def decode_in_turn(
    decoders: Mapping[str, Decoder], rounds: Iterable[object], device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of each step of each cache, a step each in every round, after some that are not counted."""
    steps = {name: decoder.step for name, decoder in decoders.items()}
    interleave(steps, range(WARMUP), device)
    return interleave(steps, rounds, device)
