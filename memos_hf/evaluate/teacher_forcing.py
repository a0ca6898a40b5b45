"""Teacher-forced quality on a text: perplexity, KL divergence and agreement against DynamicCache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .agreement import Agreement
from .caches import CacheFactory, Reads, bytes_ratio, with_reference
from .model_calls import check_at_least_one, logits_of


@dataclass(kw_only=True)
class Quality(Agreement):
    """One cache on a text, against DynamicCache on the same.

    Attributes
    ----------
    cache : str
    loss : float
        Sum of the negative log-likelihoods of the text's tokens, in nats.
    ratio : float, optional
        `memory().ratio` at the end, bytes used over full precision; `None` for caches that do not report it.
    hit_rate : float, optional
        Of the blocks that were read where tokens are counted, the share that was on the device; `None` for caches that
        are not offloaded.
    """

    cache: str
    loss: float = 0.0
    ratio: float | None = None
    hit_rate: float | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(self.loss / self.tokens)

    def row(self) -> dict[str, Any]:
        """The figures that a table or a JSON file shows."""
        return {
            "cache": self.cache,
            "perplexity": self.perplexity,
            "kl": self.mean_kl,
            "top1": self.top1,
            "bytes": self.ratio,
            "hits": self.hit_rate,
            "tokens": self.tokens,
        }


def evaluate(
    model: PreTrainedModel,
    input_ids: Tensor,
    caches: Mapping[str, CacheFactory],
    *,
    attention_mask: Tensor | None = None,
    chunk: int = 64,
    skip: int = 256,
    skipped_chunk: int | None = None,
    progress: bool = True,
) -> list[Quality]:
    """Teacher-forced quality of caches against DynamicCache.

    The text is fed in chunks to all caches side by side, so that every query but the first chunk's reads what the
    cache stored, and no logits are kept.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor
        int64 `[batch, tokens]`.
    caches : mapping of str to callable
        Makes an empty cache for each name.
    attention_mask : Tensor, optional
        `[batch, tokens]`, 0 for left padding, which is not counted.
    chunk : int
        Tokens in one call of the model.
    skip : int
        Positions at the beginning of each row's real tokens that are not counted.
    skipped_chunk : int, optional
        Tokens in one call while none of them counts; as many as `chunk` by default.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list[Quality]
        DynamicCache first, then one for each entry of `caches`, in their order.

    Raises
    ------
    ValueError
        If there is nothing to count, or a cache is called like the reference.
    """
    skipped_chunk = chunk if skipped_chunk is None else skipped_chunk
    check_at_least_one(chunk=chunk, skipped_chunk=skipped_chunk)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = (mask.cumsum(1) - 1 >= skip) & mask.bool()
    counted[:, -1:] = False  # nothing follows that could be predicted
    if not counted.any():
        raise ValueError(f"input_ids: expected rows of more than {skip + 1} tokens, got {tuple(input_ids.shape)}")
    held = {name: make() for name, make in with_reference(model, caches).items()}
    results = [Quality(cache=name) for name in held]
    reads: dict[str, Reads] = {}
    following = input_ids.roll(-1, dims=1)
    first_counted = int(counted.any(dim=0).int().argmax())
    parts = _parts(input_ids.shape[1], first_counted, skipped_chunk, chunk)
    with torch.inference_mode():
        for part in tqdm(parts, desc="reading", disable=not progress):
            if not reads and part.stop > first_counted:
                reads = {name: Reads(cache) for name, cache in held.items()}
            seen = None if attention_mask is None else mask[:, : part.stop]
            targets = following[:, part][counted[:, part]]
            reference: Tensor | None = None
            for result in results:
                logits = logits_of(model, held[result.cache], input_ids[:, part], seen)
                log_probs = logits[counted[:, part]].float().log_softmax(-1)
                reference = log_probs if reference is None else reference
                result.count(log_probs, reference)
                result.loss -= float(log_probs.gather(1, targets[:, None]).double().sum())
    for result in results:
        result.ratio = bytes_ratio(held[result.cache])
        result.hit_rate = reads[result.cache].hit_rate()
    return results


def _parts(tokens: int, skipped: int, skipped_chunk: int, chunk: int) -> list[slice]:
    """`tokens` in chunks of one size up to `skipped`, and of another from there on."""
    starts = [*range(0, skipped, skipped_chunk), *range(skipped, tokens, chunk)]
    if skipped_chunk == chunk:
        starts = list(range(0, tokens, chunk))
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], tokens], strict=True)]
