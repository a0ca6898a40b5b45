"""Decoding with a whole model from long contexts, in caches filled with random keys and values instead of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel

from ..contenders import CONTENDERS, REFERENCE, Room
from .budget import Budget
from .decode import WARMUP, Decoder, decode_in_turn
from .grid import materialised_calls
from .memory import free_bytes, held_bytes
from .results import Measurement, Place

# Bytes that a cache takes at most while it is filled and read, in units of keys and values in full precision.
# DynamicCache copies a layer at a time; ours may just have grown by half, and hold the newest tokens exact.
SHARE_OF_FULL_PRECISION = {REFERENCE: 1.1, "memos": 1.6, "memos-int8": 0.85, "memos-int4": 0.5}
# Of the memory that is free. The rest is for activations and fragments.
USABLE = 0.92


@dataclass
class Outcome:
    """What one place gave: measurements, and by name why a cache is left out, and what it raised."""

    measurements: list[Measurement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def fill(
    cache: Cache, config: PretrainedConfig, place: Place, device: torch.device, dtype: torch.dtype, piece: int
) -> None:
    """Give every layer random keys and values, `piece` tokens at a time; the same ones to every cache."""
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for layer_idx in range(config.num_hidden_layers):
        generator = torch.Generator(device).manual_seed(layer_idx)
        for start in range(0, place.context, piece):
            tokens = min(piece, place.context - start)
            shape = (2, place.batch_size, heads, tokens, head_dim)
            keys, values = torch.randn(shape, generator=generator, device=device, dtype=dtype).unbind(0)
            cache.update(keys, values, layer_idx)


def needed_bytes(name: str, config: PretrainedConfig, place: Place, dtype: torch.dtype) -> int:
    """Bytes that a contender takes at most at a place."""
    full = Room(place.context, place.batch_size, dtype=dtype).full_bytes(config)
    return int(SHARE_OF_FULL_PRECISION[name] * full)


def groups_that_fit(needed: Mapping[str, int], room: int) -> tuple[list[list[str]], list[str]]:
    """Names in as few groups as their order allows, each within `room` bytes; and those that do not fit alone."""
    groups: list[list[str]] = []
    used = 0
    for name, count in needed.items():
        if count > room:
            continue
        if not groups or used + count > room:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += count
    return groups, [name for name, count in needed.items() if count > room]


def decode_at(model: PreTrainedModel, place: Place, rounds: int, piece: int, budget: Budget) -> Outcome:
    """Milliseconds per token of each contender at one place, as many of them side by side as the memory holds.

    Parameters
    ----------
    model : PreTrainedModel
        Whose layers all have full attention.
    place : Place
    rounds : int
        Steps that are timed, fewer where the budget ends.
    piece : int
        Tokens of a row that the caches are filled with at a time.
    budget : Budget
    """
    outcome = Outcome()
    needed = {name: needed_bytes(name, model.config, place, model.dtype) for name in SHARE_OF_FULL_PRECISION}
    free = free_bytes(model.device)
    groups, too_large = groups_that_fit(needed, int(USABLE * free))
    for name in too_large:
        outcome.left_out[name] = f"needs {needed[name] / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
    for names in groups:
        if budget.is_spent():
            outcome.left_out |= dict.fromkeys(names, "the time was spent")
            continue
        free_bytes(model.device)  # what the last group held is given back, so that nothing is left in fragments
        with torch.inference_mode():
            decoders = _filled(model, names, place, rounds, piece, outcome)
            times = decode_in_turn(decoders, budget.rounds(rounds), model.device) if decoders else {}
        outcome.measurements += [
            Measurement(
                cache=name,
                batch_size=place.batch_size,
                context=place.context,
                step_ms=times[name],
                bytes_held=held_bytes(decoder.cache),
                tokens=decoder.tokens(),
                materialised_calls=materialised_calls(decoder),
            )
            for name, decoder in decoders.items()
        ]
        decoders.clear()
    return outcome


def _filled(
    model: PreTrainedModel, names: list[str], place: Place, rounds: int, piece: int, outcome: Outcome
) -> dict[str, Decoder]:
    """A decoder for each name, its cache filled, that has decoded a token; `outcome` learns of those that could not."""
    config, device = model.config, model.device
    first = torch.randint(config.vocab_size, (place.batch_size, 1), generator=torch.Generator().manual_seed(0))
    decoders: dict[str, Decoder] = {}
    for name in names:
        try:
            room = Room(place.context + 1 + WARMUP + rounds, place.batch_size, device, model.dtype)
            cache = CONTENDERS[name].make(config, room)
            fill(cache, config, place, device, model.dtype, piece)
            decoder = Decoder(model, cache, first.to(device))
            decoder.step()
        except torch.OutOfMemoryError as error:
            outcome.left_out[name] = str(error).splitlines()[0]
        except Exception as error:  # whatever a kernel may raise: the other caches can still be measured
            outcome.failed[name] = f"{type(error).__name__}: {error}"
        else:
            decoders[name] = decoder
    return decoders


def decode(
    model: PreTrainedModel, places: tuple[Place, ...], rounds: int, piece: int, budget: Budget
) -> Iterator[tuple[Place, Outcome]]:
    """Each place in turn, while time is left; those that follow come with all caches left out."""
    for place in places:
        if budget.is_spent():
            yield place, Outcome(left_out=dict.fromkeys(SHARE_OF_FULL_PRECISION, "the time was spent"))
        else:
            yield place, decode_at(model, place, rounds, piece, budget)
