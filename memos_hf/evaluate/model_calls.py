"""How a causal model is called with a cache of any kind, with or without left padding."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..cache_argument import cache_argument


def logits_of(
    model: PreTrainedModel, cache: Cache, input_ids: Tensor, mask: Tensor | None = None, *, last: bool = False
) -> Tensor:
    """Logits of `input_ids`, which come after what `cache` holds and are added to it.

    Parameters
    ----------
    model : PreTrainedModel
    cache : Cache
    input_ids : Tensor
        int64 `[batch, tokens]`.
    mask : Tensor, optional
        `[batch, tokens held + tokens]`, 0 for left padding; `None` where there is none.
    last : bool
        Only those of the last token.

    Returns
    -------
    Tensor
        `[batch, tokens, vocabulary]`, or `[batch, 1, vocabulary]`.
    """
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": True, cache_argument(model): cache}
    if mask is not None:
        inputs["attention_mask"] = mask
        if "position_ids" in accepted:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    if last and "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    logits: Tensor = model(**inputs).logits
    return logits[:, -1:] if last else logits


def next_log_probs(
    model: PreTrainedModel, cache: Cache, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int
) -> Tensor:
    """Log-probabilities of the token after `input_ids`, float32 `[batch, vocabulary]`, fed `chunk` tokens at a time.

    In one call the queries of a prompt would read its keys as they come, and nothing of what the cache stored.
    """
    held = 0 if mask is None else mask.shape[1] - input_ids.shape[1]
    for start in range(0, input_ids.shape[1], chunk):
        part = input_ids[:, start : start + chunk]
        seen = None if mask is None else mask[:, : held + start + part.shape[1]]
        logits = logits_of(model, cache, part, seen, last=True)
    return logits[:, -1].float().log_softmax(-1)


def check_at_least_one(**counts: int) -> None:
    """Raise if one of the named arguments is not an int of at least 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name}: expected an int, got {count!r}")
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
