"""Where each row of a batch ends: its own limit, its own stop strings, the end-of-sequence token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from .requests import FinishReason, Request

# Beyond every vocabulary: a token that is part of no stop string.
NO_TOKEN = 2**31 - 1


class RowEnds(StoppingCriteria):  # type: ignore[misc]
    """Ends every row of a batch by itself and remembers after how many tokens.

    Stop strings are matched as `generate` matches them, a beginning in the prompt included, but never across padding.

    Parameters
    ----------
    batch : sequence of Request
    width : int
        Tokens of a row before the first generated one, padding included.
    copies : int
        Rows of each request, side by side.
    tokenizer : PreTrainedTokenizerBase
    others : list of StoppingCriteria
        That end rows too.
    device : torch.device
        Of the ids.
    """

    def __init__(
        self,
        batch: Sequence[Request],
        width: int,
        copies: int,
        tokenizer: Any,
        others: Sequence[StoppingCriteria],
        device: torch.device,
    ) -> None:
        rows = [request for request in batch for _ in range(copies)]
        self.width = width
        self.limits = torch.tensor([request.max_new_tokens for request in rows], device=device)
        self.lengths = self.limits.clone()
        self.stopped = torch.zeros_like(self.limits, dtype=torch.bool)
        self.others = StoppingCriteriaList(others)
        self._matchers = _matchers(rows, tokenizer, device)
        self._tails = _tails(rows, max((matcher.maximum_token_len for matcher, _ in self._matchers), default=0), device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows of `input_ids`, int64 `[rows, tokens]`, are at their end; bool `[rows]`."""
        new_tokens = input_ids.shape[1] - self.width
        stop = torch.zeros_like(self.stopped)
        if len(self.others):
            stop = stop | self.others(input_ids, scores, **kwargs)
        if self._matchers:
            tokens = torch.cat([self._tails, input_ids[:, self.width :]], dim=1)
            for matcher, rows in self._matchers:
                stop[rows] |= matcher(tokens[rows, -matcher.maximum_token_len :], scores)
        self.stopped |= stop & (new_tokens <= self.lengths)
        ended: Tensor = stop | (self.limits <= new_tokens)
        self.lengths = torch.where(ended, self.lengths.clamp(max=new_tokens), self.lengths)
        return ended


def _matchers(rows: Sequence[Request], tokenizer: Any, device: torch.device) -> list[tuple[Any, Tensor]]:
    """For each set of stop strings what finds them, and the rows that have it."""
    return [
        (
            StopStringCriteria(tokenizer, list(strings)),
            torch.tensor([row for row, request in enumerate(rows) if request.stop_strings == strings], device=device),
        )
        for strings in sorted({request.stop_strings for request in rows})
        if strings
    ]


def _tails(rows: Sequence[Request], tokens: int, device: torch.device) -> Tensor:
    """The last `tokens` ids of each prompt, int64 `[rows, tokens]`; shorter ones are filled up in front."""
    tails = [list(request.token_ids[-tokens:]) if tokens else [] for request in rows]
    filled = [[NO_TOKEN] * (tokens - len(tail)) + tail for tail in tails]
    return torch.tensor(filled, dtype=torch.long, device=device)


def cut(
    row: Sequence[int], length: int, stopped: bool, eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason]:
    """The ids of a row up to its end, at most `length`, and why it ends there."""
    kept = list(row[:length])
    eos = next((place for place, token in enumerate(kept) if token in eos_token_ids), None)
    if eos is not None:
        return kept[: eos + 1], "stop"
    return kept, "stop" if stopped else "length"
