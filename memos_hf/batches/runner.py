"""Runs one batch after another: padded ids in, outputs of each request out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import MemOSCache
from ..cache_argument import cache_argument
from ..store.prefix import PrefixStore
from ..store.reuse import read
from .requests import BatchOutput, Request
from .settings import Settings
from .stopping import RowEnds, cut

logger = logging.getLogger(__name__)


@dataclass
class Runner:
    """Runs batches behind one prefix."""

    model: PreTrainedModel
    tokenizer: Any
    settings: Settings
    cache_options: Mapping[str, Any]
    prefix: tuple[int, ...]
    prefix_store: PrefixStore | None = None

    def __post_init__(self) -> None:
        self.prefix_cache = self._read_prefix() if self.prefix else None
        self.pad_token_id = self._pad_token_id()

    def run(self, batch: Sequence[Request]) -> list[list[BatchOutput]]:
        """What each request of a batch gives, one for each of its answers."""
        settings, copies = self.settings, self.settings.copies
        ids, mask = self._padded(batch)
        width, limit = ids.shape[1], max(request.max_new_tokens for request in batch)
        arguments = dict(settings.arguments)
        ends = RowEnds(batch, width, copies, self.tokenizer, arguments.pop("stopping_criteria", None) or (), ids.device)
        if settings.beams == 1:
            arguments["stopping_criteria"] = [ends]
        sequences = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=settings.for_batch(width, limit, self.pad_token_id),
            **{cache_argument(self.model): self._cache(len(batch) * max(settings.beams, copies))},
            **arguments,
        )
        rows = zip(sequences[:, width:].tolist(), ends.lengths.tolist(), ends.stopped.tolist(), strict=True)
        outputs = [self._output(request, sequence, *next(rows)) for request in batch for sequence in range(copies)]
        return [outputs[start : start + copies] for start in range(0, len(outputs), copies)]

    def _output(self, request: Request, sequence: int, row: list[int], length: int, stopped: bool) -> BatchOutput:
        ids, reason = cut(row, length, stopped, self.settings.eos_token_ids)
        return BatchOutput(
            index=request.index,
            prompt=request.prompt,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            prompt_tokens=len(request.token_ids),
            new_tokens=len(ids),
            finish_reason=reason,
            sequence=sequence,
        )

    def _padded(self, batch: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Ids and mask, int64 `[rows, tokens]`: the prefix, padding, what is each prompt's own."""
        shared = len(self.prefix)
        width = max(len(request.token_ids) for request in batch)
        gaps = [width - len(request.token_ids) for request in batch]
        ids = [
            [*self.prefix, *[self.pad_token_id] * gap, *request.token_ids[shared:]]
            for request, gap in zip(batch, gaps, strict=True)
        ]
        mask = [[1] * shared + [0] * gap + [1] * (width - shared - gap) for gap in gaps]
        return torch.tensor(ids, device=self.model.device), torch.tensor(mask, device=self.model.device)

    def _cache(self, rows: int) -> MemOSCache:
        """An empty cache, or one that holds the prefix in each of `rows` rows."""
        if self.prefix_cache is None:
            return MemOSCache.for_model(self.model, **self.cache_options)
        return self.prefix_cache.fork(repeats=rows)

    def _read_prefix(self) -> MemOSCache:
        """A cache of one row that holds the prefix, or as much of it as is known and the rest of it."""
        if self.prefix_store is None:
            cache, matched = MemOSCache.for_model(self.model, **self.cache_options), 0
        else:
            # Look-ups leave the last token to be computed; here there are always more behind the prefix.
            behind = (*self.prefix, self.prefix[-1])
            cache, matched = self.prefix_store.get(behind, cache_options=self.cache_options)
        read(self.model, torch.tensor([self.prefix[matched:]], device=self.model.device), cache)
        if self.prefix_store is not None and matched < len(self.prefix):
            try:
                self.prefix_store.put(self.prefix, cache)
            except OSError as error:  # the answers do not need it
                logger.warning("the prefix could not be written: %s", error)
        return cache

    def _pad_token_id(self) -> int:
        """An id that the model can read: masks hide it in prompts, and behind an answer it is taken off."""
        vocabulary = vocabulary_of(self.model)
        candidates = (self.settings.get("pad_token_id"), getattr(self.tokenizer, "pad_token_id", None))
        usable = [int(token) for token in candidates if token is not None and 0 <= token < (vocabulary or token + 1)]
        return (usable + sorted(self.settings.eos_token_ids) + [0])[0]


def vocabulary_of(model: PreTrainedModel) -> int | None:
    """Ids that the model can read, from 0."""
    count = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return count if isinstance(count, int) else None
