"""Caches × context lengths × batch sizes on one model: prompt, time per token, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import MemOSCache
from ..contenders import Contender, Room
from .decode import WARMUP, Decoder, decode_in_turn
from .memory import PeakMemory, held_bytes
from .results import BASE_CONTEXT, Measurement, Place
from .timing import time_call


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Parameters
    ----------
    contexts : tuple of int
        Tokens of each row before decoding begins. `BASE_CONTEXT` is measured in any case.
    batch_sizes : tuple of int
    repeats : int
        Steps of each cache that are timed, one in every round.
    chunk : int
        Tokens of a row that the model is given at a time while it reads the prompt.
    """

    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 20
    chunk: int = 2048

    def places(self) -> list[Place]:
        """All combinations, the smaller ones first."""
        contexts = {BASE_CONTEXT, *self.contexts}
        return sorted(Place(context, batch_size) for context in contexts for batch_size in set(self.batch_sizes))

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(BASE_CONTEXT, *self.contexts)

    def room(self, context: int) -> int:
        """Tokens of a row at the end of what is measured at a context."""
        return context + WARMUP + self.repeats

    def turns(self) -> int:
        """Chunks and rounds of all places: the steps of a progress bar."""
        return sum(-(-place.context // self.chunk) + self.repeats for place in self.places())


def measure(
    model: PreTrainedModel,
    input_ids: Tensor,
    contenders: Mapping[str, Contender],
    grid: Grid,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[list[Measurement]]:
    """Every contender at every place of a grid.

    All caches of a place are alive at once. They take every chunk of the prompt and then every step in turn, so that
    whatever disturbs the machine disturbs all of them; each goes on from the tokens it has decoded itself.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor
        int64 `[largest batch size, longest context or more]`, the prompts; shorter and fewer ones are their beginnings.
    contenders : mapping of str to Contender
    grid : Grid
    tick : callable
        Called after every chunk and round.

    Yields
    ------
    list[Measurement]
        One of each contender, a place at a time.
    """
    with torch.inference_mode():
        # The first calls of all start thread pools and load kernels; they are made where nothing is timed.
        _measure_place(model, input_ids[:1, :BASE_CONTEXT], contenders, Grid((BASE_CONTEXT,), repeats=1), lambda: None)
        for place in grid.places():
            prompts = input_ids[: place.batch_size, : place.context]
            yield _measure_place(model, prompts, contenders, grid, tick)


def _measure_place(
    model: PreTrainedModel,
    input_ids: Tensor,
    contenders: Mapping[str, Contender],
    grid: Grid,
    tick: Callable[[], object],
) -> list[Measurement]:
    batch_size, context = input_ids.shape
    room = Room(grid.room(context), batch_size, model.device, model.dtype)
    decoders = {name: Decoder(model, item.make(model.config, room)) for name, item in contenders.items()}
    prefill_ms, peaks = _prefill(decoders, input_ids.to(model.device), grid.chunk, tick)
    times = decode_in_turn(decoders, _ticking(grid.repeats, tick), model.device)
    return [
        Measurement(
            cache=name,
            batch_size=batch_size,
            context=context,
            step_ms=times[name],
            bytes_held=held_bytes(decoder.cache),
            tokens=decoder.tokens(),
            prefill_ms=prefill_ms[name],
            prompt_peak_bytes=peaks[name].peak_bytes,
            materialised_calls=materialised_calls(decoder),
        )
        for name, decoder in decoders.items()
    ]


def _prefill(
    decoders: Mapping[str, Decoder], input_ids: Tensor, chunk: int, tick: Callable[[], object]
) -> tuple[dict[str, float], dict[str, PeakMemory]]:
    """Milliseconds, and memory, that each cache's prompt took; a chunk each in turn, beginning with another."""
    device, names = input_ids.device, list(decoders)
    milliseconds = dict.fromkeys(names, 0.0)
    peaks = {name: PeakMemory(device) for name in names}
    for index, part in enumerate(torch.split(input_ids, chunk, dim=1)):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            with peaks[name]:
                milliseconds[name] += time_call(partial(decoders[name].feed, part), device)
        tick()
    return milliseconds, peaks


def _ticking(rounds: int, tick: Callable[[], object]) -> Iterator[int]:
    for index in range(rounds):
        yield index
        tick()


def materialised_calls(decoder: Decoder) -> int | None:
    """Attention calls that decoded a layer, of a cache that can read in place; `None` of others."""
    cache = decoder.cache
    if not isinstance(cache, MemOSCache) or (cache.options.quantization is None and cache.options.offload is None):
        return None
    return cache.stats.materialised_calls
