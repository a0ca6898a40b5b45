"""`generate` behind a prefix store: what is known is not computed again, and what is new is kept."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import MemOSCache
from ..cache_argument import cache_argument
from .asked import Asked
from .cropping import attends_to_all, has_recurrent_states
from .inputs import generate_arguments, one_row

if TYPE_CHECKING:
    from .prefix import PrefixStore

logger = logging.getLogger(__name__)

# A prompt is kept if at least one token in so many was not found: a file repeats all of them.
WORTH_KEEPING = 16


def generate(store: PrefixStore, model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any]) -> Any:
    """See :meth:`~memos_hf.PrefixStore.generate`."""
    row = one_row(input_ids)
    ids = torch.from_numpy(row)[None].to(model.device)
    given = generate_arguments(ids, arguments, model.generation_config)
    asked = Asked.of(model, store.cache_options)
    cache, matched = store._look_up(asked, row) or (asked.new_cache(), 0)
    worth = (len(row) - matched) * WORTH_KEEPING >= len(row)
    # A quantized cache could be cut back too, but not to the exact tail that it had after the prompt.
    whole = attends_to_all(cache) and cache.options.quantization is None
    if not whole and len(row) > 1:
        # Some recurrent models go on from a state with one token at a time alone (Jamba's, in transformers 5.24).
        step = 1 if matched and has_recurrent_states(cache) else len(row)
        for part in torch.split(ids[:, matched:-1], step, dim=1):
            read(model, part, cache)
        if worth:
            _keep(store, asked, ids[:, :-1], cache)
    rows = _rows(model, arguments)
    if rows > 1 and cache.get_seq_length() > 0:
        cache = cache.fork(repeats=rows)
    output = model.generate(ids, **given, **{cache_argument(model): cache})
    if whole and worth:
        _keep(store, asked, ids, _prompt_of(cache, ids.shape[1], rows))
    return output


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, cache: MemOSCache) -> None:
    """Put the keys and values of `ids`, `[1, tokens]`, behind what is in `cache`; nothing if there are none."""
    if ids.shape[1] == 0:
        return
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    model(**inputs)


def _keep(store: PrefixStore, asked: Asked, ids: Tensor, cache: MemOSCache) -> None:
    """Store; what was computed is not lost because a disk is full."""
    try:
        store._keep(asked, one_row(ids), cache)
    except OSError as error:
        logger.warning("a prefix could not be written: %s", str(error))


def _prompt_of(cache: MemOSCache, tokens: int, rows: int) -> MemOSCache:
    """The first `tokens` of the first row of what `generate` has filled."""
    prompt = cache.fork()
    prompt.crop(tokens - prompt.get_seq_length())
    if rows > 1:
        prompt.batch_select_indices(torch.tensor([0]))
    return prompt


def _rows(model: PreTrainedModel, arguments: dict[str, Any]) -> int:
    """Rows that `generate` makes of a prompt: beams, or answers."""
    config = arguments.get("generation_config")

    def option(name: str) -> int:
        values = (arguments.get(name), getattr(config, name, None), getattr(model.generation_config, name, None))
        return next((int(value) for value in values if value is not None), 1)

    return max(option("num_beams"), option("num_return_sequences"))
