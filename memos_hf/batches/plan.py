"""Which requests go into one batch, and whether they share what they have in common."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..cache import MemOSCache
from ..layers import BlockLayer, BufferedLayer, ContiguousLayer
from ..layers.sliding import WindowedLayer
from .requests import Request

# One more decoding step, or call of the model, takes as long as reading so many more tokens of a prompt: with
# SmolLM2-135M on a CPU 18 for one row and 30 for eight; on GPUs more. It weighs batches against a shared prefix.
STEP_TOKENS = 20


@dataclass(frozen=True)
class Abilities:
    """What a model and its cache allow without changing what a row computes.

    Attributes
    ----------
    padding : bool
        Rows of different lengths in one batch, padded on the left.
    padding_between : bool
        Padding behind what rows share: each layer sees every token, and positions are given, not counted.
    sharing : bool
        A filled cache, copied and repeated for each batch.
    """

    padding: bool
    padding_between: bool
    sharing: bool

    @classmethod
    def of(cls, model: PreTrainedModel, cache: MemOSCache) -> Abilities:
        """Those of `model` with caches like `cache`."""
        full = all(
            isinstance(layer, (ContiguousLayer, BlockLayer)) and not isinstance(layer, WindowedLayer)
            for layer in cache.layers
        )
        ours = all(isinstance(layer, BufferedLayer) for layer in cache.layers)
        recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        padding = not recurrent and _only_full_or_sliding(model)
        return cls(
            padding=padding,
            padding_between=padding and full and _takes_positions(model),
            sharing=ours and not cache.offloading,
        )


@dataclass(frozen=True)
class Plan:
    """The batches, in the order in which they run, and the ids with which all their prompts begin."""

    prefix: tuple[int, ...]
    batches: list[list[Request]]


def plan(
    requests: Sequence[Request],
    abilities: Abilities,
    *,
    batch_size: int,
    share_prefix: bool,
    same_limit: bool = False,
    max_cache_len: int | None = None,
) -> Plan:
    """Put requests of about the same limit and length together, the longest first.

    A prefix is shared if that is less work: a common first token is not worth a call of the model, nor are batches of
    one where a model can only share among rows of the same length.

    Parameters
    ----------
    same_limit : bool
        Only rows of the same `max_new_tokens` may be in a batch.
    max_cache_len : int, optional
        Tokens that a row may have, padding included.
    """

    def batches_behind(prefix: int, padding: bool) -> list[list[Request]]:
        return _batches(requests, prefix, padding, batch_size, same_limit, max_cache_len)

    apart = Plan((), batches_behind(0, abilities.padding))
    prefix = _common_prefix(requests) if share_prefix and abilities.sharing else ()
    if not prefix:
        return apart
    shared = Plan(prefix, batches_behind(len(prefix), abilities.padding_between))
    return shared if _work(shared) < _work(apart) else apart


def _batches(
    requests: Sequence[Request],
    prefix: int,
    padding: bool,
    batch_size: int,
    same_limit: bool,
    max_cache_len: int | None,
) -> list[list[Request]]:
    def group(request: Request) -> tuple[int, ...]:
        """What has to agree within a batch."""
        limit = request.max_new_tokens if same_limit else 0
        return (limit, 0 if padding else len(request.token_ids))

    def order(request: Request) -> tuple[object, ...]:
        # Steps count for more than padding: first by the limit, to a factor of two, then by the length.
        return group(request), (request.max_new_tokens - 1).bit_length(), len(request.token_ids), -request.index

    batches: list[list[Request]] = []
    for request in sorted(requests, key=order, reverse=True):
        batch = batches[-1] if batches else []
        fits = max_cache_len is None or _row_tokens([*batch, request]) <= max_cache_len
        if batch and len(batch) < batch_size and group(batch[0]) == group(request) and fits:
            batch.append(request)
        else:
            batches.append([request])
    return batches


def _row_tokens(batch: Sequence[Request]) -> int:
    """Tokens in each row of a cache in the end, padding included."""
    return max(len(request.token_ids) for request in batch) + max(request.max_new_tokens for request in batch) - 1


def _work(planned: Plan) -> int:
    """What a plan takes at most, in tokens of a prompt."""
    shared = len(planned.prefix)
    read = sum(len(batch) * (max(len(request.token_ids) for request in batch) - shared) for batch in planned.batches)
    steps = sum(max(request.max_new_tokens for request in batch) for batch in planned.batches)
    return read + STEP_TOKENS * steps + (shared + STEP_TOKENS if shared else 0)


def _common_prefix(requests: Sequence[Request]) -> tuple[int, ...]:
    """The ids with which all prompts begin; each keeps at least one of its own, for the model to continue from."""
    if len(requests) < 2:
        return ()
    first, last = min(request.token_ids for request in requests), max(request.token_ids for request in requests)
    longest = min(len(request.token_ids) for request in requests) - 1
    # What the first and the last in lexicographic order have in common, all between them have too.
    same = next((place for place in range(longest) if first[place] != last[place]), longest)
    return first[:same]


def _only_full_or_sliding(model: PreTrainedModel) -> bool:
    """Whether the config names no other kind of layer; chunks are cut at places in the row, padding included."""
    config = model.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ())
    return types <= {"full_attention", "sliding_attention"} and not getattr(config, "attention_chunk_size", None)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether a token's place among the keys does not matter, as its position is given."""
    # GPT-Neo's local layers, which its config calls by another name, count keys.
    counts_keys = getattr(model.config.get_text_config(decoder=True), "attention_layers", None) is not None
    return not counts_keys and "position_ids" in inspect.signature(model.forward).parameters
