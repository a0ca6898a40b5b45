"""What a cache does to the quality of a model: perplexity, KL divergence and agreement against DynamicCache.

`python -m memos_hf eval` is the command line of this module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

CacheFactory = Callable[[], Cache]
REFERENCE = "DynamicCache"


@dataclass
class Quality:
    """One cache on a text, against DynamicCache on the same.

    Attributes
    ----------
    cache : str
    loss, kl : float
        Sums over positions, in nats: negative log-likelihood of the text's tokens, and Kullback-Leibler divergence of
        the next-token distribution from DynamicCache's.
    agreed : int
        Positions whose likeliest next token is DynamicCache's.
    tokens : int
        Positions counted.
    ratio : float
        `memory().ratio` at the end, bytes used over full precision; 1.0 for caches that do not report it.
    """

    cache: str
    loss: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0
    ratio: float = 1.0
    _held: Cache | None = field(default=None, repr=False)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(self.loss / self.tokens)

    @property
    def mean_kl(self) -> float:
        """Nats a token."""
        return self.kl / self.tokens

    @property
    def top1(self) -> float:
        """Share of positions whose likeliest next token is DynamicCache's."""
        return self.agreed / self.tokens

    def row(self) -> dict[str, Any]:
        """The figures that a table or a JSON file shows."""
        return {
            "cache": self.cache,
            "perplexity": self.perplexity,
            "kl": self.mean_kl,
            "top1": self.top1,
            "bytes": self.ratio,
            "tokens": self.tokens,
        }

    def _add(self, log_probs: Tensor, reference: Tensor, targets: Tensor) -> None:
        self.loss -= float(log_probs.gather(1, targets[:, None]).double().sum())
        self.kl += float((reference.exp() * (reference - log_probs)).double().sum())
        self.agreed += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())
        self.tokens += targets.shape[0]


def evaluate(
    model: PreTrainedModel,
    input_ids: Tensor,
    caches: Mapping[str, CacheFactory],
    *,
    attention_mask: Tensor | None = None,
    chunk: int = 64,
    skip: int = 256,
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
    progress : bool
        Show a progress bar.

    Returns
    -------
    list[Quality]
        DynamicCache first, then one for each entry of `caches`, in their order.

    Raises
    ------
    ValueError
        If there is nothing to count.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    counted = (positions >= skip) & mask.bool()
    counted[:, -1:] = False  # nothing follows that could be predicted
    if not counted.any():
        raise ValueError(f"input_ids: expected rows of more than {skip + 1} tokens, got {tuple(input_ids.shape)}")
    results = [
        Quality(name, _held=make())
        for name, make in {REFERENCE: lambda: DynamicCache(config=model.config), **caches}.items()
    ]
    following = input_ids.roll(-1, dims=1)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    starts = range(0, input_ids.shape[1], chunk)
    with torch.inference_mode():
        for start in tqdm(starts, desc="evaluating", disable=not progress):
            part = slice(start, start + chunk)
            padding = {"attention_mask": mask[:, : start + chunk], "position_ids": positions[:, part]}
            inputs = {"input_ids": input_ids[:, part], **({} if attention_mask is None else padding)}
            reference: Tensor | None = None
            for result in results:
                logits = model(**inputs, **{argument: result._held}, use_cache=True).logits
                log_probs = logits[counted[:, part]].float().log_softmax(-1)
                reference = log_probs if reference is None else reference
                result._add(log_probs, reference, following[:, part][counted[:, part]])
    for result in results:
        memory = getattr(result._held, "memory", None)
        result.ratio = memory().ratio if memory is not None else 1.0
    return results
