"""Decoding with most of the cache below the device: is it right, how busy is the link, and what is reading ahead worth.

The caches are filled with random keys and values. What reading ahead is worth is seen by doing without it, which is
nothing that a user could ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from .. import MemOSCache
from ..blocks.staging import Staging
from ..contenders import Room, offloaded
from .budget import Budget
from .decode import WARMUP, Decoder
from .end_to_end import USABLE, fill
from .kernel import TOLERANCES
from .memory import free_bytes
from .results import Place
from .timing import device_times, interleave

RESIDENT, AHEAD, NOT_AHEAD = "all on the device", "offloaded", "offloaded, nothing read ahead"
# Bytes of the caches on the device, in units of what is offloaded: one that has all, with room to grow, and two more.
RESIDENT_SHARE = 1.6


@dataclass(frozen=True)
class OffloadSizes:
    """How much of everything.

    Attributes
    ----------
    context : int
        Tokens of the one row.
    share : float
        Of the cache's bytes, what may be on the device.
    layers : int, optional
        The first so many of the model.
    rounds : int
        Steps of each cache that are timed.
    piece : int
        Tokens that caches are filled with at a time.
    copied_bytes, samples : int
        Of the copies that the link is measured with.
    """

    context: int = 65536
    share: float = 0.25
    layers: int | None = None
    rounds: int = 12
    piece: int = 16384
    copied_bytes: int = 2**28
    samples: int = 11


def link_bandwidth(device: torch.device, sizes: OffloadSizes) -> float:
    """GB/s of copying page-locked memory of the host to the device; on a CPU, of a copy in memory."""
    source = torch.ones(sizes.copied_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)

    def copy() -> object:
        return target.copy_(source, non_blocking=True)

    return sizes.copied_bytes / median(device_times(copy, device, sizes.samples, 1, copy)) / 1e6


def lacking(config: PretrainedConfig, room: Room, share: float) -> str | None:
    """Why the caches do not fit on the device, if they do not."""
    needed = (RESIDENT_SHARE + 2 * share) * room.full_bytes(config)
    free = free_bytes(room.device)
    return None if needed <= USABLE * free else f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"


def filled_caches(model: PreTrainedModel, sizes: OffloadSizes) -> dict[str, MemOSCache]:
    """The caches by name, all with the same random keys and values."""
    config = model.config
    room = _room(model, sizes)
    makers: dict[str, Callable[[], MemOSCache]] = {
        RESIDENT: partial(MemOSCache, config, initial_capacity=room.tokens),
        AHEAD: partial(offloaded, config, room, sizes.share),
        NOT_AHEAD: partial(offloaded, config, room, sizes.share),
    }
    caches = {name: make() for name, make in makers.items()}
    for cache in caches.values():
        fill(cache, config, Place(sizes.context, 1), model.device, model.dtype, sizes.piece)
    return caches


def largest_error(model: PreTrainedModel, one: MemOSCache, other: MemOSCache) -> float:
    """The largest difference of attention in any layer, over the largest output there; both caches take in a token."""
    config, random = model.config, torch.Generator(model.device).manual_seed(0)
    attention = torch.nn.functional.scaled_dot_product_attention
    kwargs = {"generator": random, "device": model.device, "dtype": model.dtype}
    worst = 0.0
    for layer_idx in range(config.num_hidden_layers):
        keys, values = torch.randn((2, 1, config.num_key_value_heads, 1, config.head_dim), **kwargs).unbind(0)
        query = torch.randn((1, config.num_attention_heads, 1, config.head_dim), **kwargs)
        outputs = []
        for cache in (one, other):
            held = cache.update(keys, values, layer_idx)
            outputs.append(attention(query, *held, enable_gqa=True).float())
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()))
    return worst


@contextmanager
def nothing_read_ahead() -> Iterator[None]:
    """Inside, blocks are read when they are asked for, while the device waits."""
    with mock.patch.object(Staging, "begin", lambda self, source, upcoming: None):
        yield


def decode(
    model: PreTrainedModel, caches: Mapping[str, MemOSCache], sizes: OffloadSizes, budget: Budget
) -> list[dict[str, Any]]:
    """Time per token of each cache, all fed the same random tokens in turn, and what went over the link.

    Returns
    -------
    list of dict
        For each cache `ms_per_token`, `of_resident` (the ratio to the one that has all), `same_tokens` (the share of
        steps whose likeliest next token is that one's), and for offloaded ones `bytes_moved_per_token`, `gb_per_s` and
        `hit_rate`.
    """
    steps = WARMUP + sizes.rounds
    fed = torch.randint(model.config.vocab_size, (steps, 1, 1), generator=torch.Generator().manual_seed(1))
    forced = {name: _Forced(Decoder(model, cache), fed.to(model.device)) for name, cache in caches.items()}
    calls = {name: one.step if name != NOT_AHEAD else one.step_alone for name, one in forced.items()}
    interleave(calls, range(WARMUP), model.device)
    before = {name: cache.stats for name, cache in caches.items()}
    times = interleave(calls, budget.rounds(sizes.rounds), model.device)
    rows = []
    for name, cache in caches.items():
        stats, ms = cache.stats, median(times[name])
        moved, hits, misses = (
            getattr(stats, counter) - getattr(before[name], counter) for counter in ("bytes_moved", "hits", "misses")
        )
        pairs = list(zip(forced[name].likeliest, forced[RESIDENT].likeliest, strict=True))
        rows.append(
            {
                "cache": name,
                "ms_per_token": ms,
                "of_resident": ms / median(times[RESIDENT]),
                "bytes_moved_per_token": moved / len(times[name]),
                "gb_per_s": moved / sum(times[name]) / 1e6 if moved else None,
                "hit_rate": hits / (hits + misses) if hits + misses else None,
                "same_tokens": sum(one == other for one, other in pairs) / len(pairs),
                "step_ms": times[name],
            }
        )
    return rows


class _Forced:
    """A cache that is fed tokens that do not depend on what it leads to."""

    def __init__(self, decoder: Decoder, fed: Tensor) -> None:
        self._decoder, self._fed = decoder, iter(fed)
        self.likeliest: list[int] = []

    def step(self) -> None:
        self._decoder.feed(next(self._fed))
        assert self._decoder.next_ids is not None
        self.likeliest.append(int(self._decoder.next_ids))

    def step_alone(self) -> None:
        with nothing_read_ahead():
            self.step()


def measure(model: PreTrainedModel, sizes: OffloadSizes, budget: Budget) -> dict[str, Any]:
    """All of it.

    Returns
    -------
    dict
        `context`, `layers`, `share`; `left_out`, a reason if nothing was measured; `copy_gb_per_s`; `largest_error` of
        attention beside the resident cache's, and its `tolerance`; and `rows` as :func:`decode` gives them, each with
        `of_copy`, a share of the copy's bandwidth.
    """
    found: dict[str, Any] = {
        "context": sizes.context,
        "layers": model.config.num_hidden_layers,
        "share": sizes.share,
        "tolerance": TOLERANCES[model.dtype],
        "left_out": lacking(model.config, _room(model, sizes), sizes.share),
        "rows": [],
    }
    if found["left_out"] is not None:
        return found
    found["copy_gb_per_s"] = link_bandwidth(model.device, sizes)
    with torch.inference_mode():
        caches = filled_caches(model, sizes)
        rows = decode(model, caches, sizes, budget)
        found["largest_error"] = largest_error(model, caches[AHEAD], caches[RESIDENT])
    for row in rows:
        row["of_copy"] = row["gb_per_s"] / found["copy_gb_per_s"] if row["gb_per_s"] else None
    return found | {"rows": rows}


def _room(model: PreTrainedModel, sizes: OffloadSizes) -> Room:
    return Room(sizes.context + WARMUP + sizes.rounds + 1, 1, model.device, model.dtype)
