"""Bytes that a cache will hold, counted on layers that are driven without data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import StaticLayer

from ..blocks.staging import staged_blocks
from ..cache import MemOSCache
from ..config import UNENCODED, OffloadConfig
from ..layers import BlockLayer, BufferedLayer
from .probe import CachedStates, Probe, probe


@dataclass(frozen=True)
class Prediction:
    """Bytes of a cache that holds a prompt and what was generated after it.

    Attributes
    ----------
    used_bytes, allocated_bytes, full_precision_bytes : int
        As in :class:`~memos_hf.MemoryReport`. Of an offloaded cache, what is allocated is that of the device alone, at
        most.
    peak_bytes : int
        On the device at the worst moment: beside what is allocated one layer in full precision, as while a prompt is
        encoded, or while a buffer is copied to a larger one.
    below_bytes : int
        Of an offloaded cache: used bytes in host memory or on disk.
    least_bytes : int
        What the device must have: `peak_bytes`, or, of an offloaded cache, what does not go below.
    """

    used_bytes: int
    allocated_bytes: int
    full_precision_bytes: int
    peak_bytes: int
    below_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        """Used bytes over what full precision takes; 1.0 for an empty cache."""
        return self.used_bytes / self.full_precision_bytes if self.full_precision_bytes else 1.0


@dataclass
class _Count:
    """Bytes of some layers.

    Attributes
    ----------
    beside_blocks : int
        Of what is allocated, the part that is not in sealed blocks.
    largest : int
        The most that one layer takes in full precision.
    blocks : set of int
        Bytes of a block in each geometry there is.
    """

    used: int = 0
    allocated: int = 0
    full: int = 0
    beside_blocks: int = 0
    largest: int = 0
    blocks: set[int] = field(default_factory=set)

    def add(self, other: _Count) -> None:
        self.used += other.used
        self.allocated += other.allocated
        self.full += other.full
        self.beside_blocks += other.beside_blocks
        self.largest = max(self.largest, other.largest)
        self.blocks |= other.blocks


def predict(
    source: PretrainedConfig | Probe,
    *,
    context: int,
    new_tokens: int = 1,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Prediction:
    """What `memory()` of a `MemOSCache(config, **options)` will say, from the config alone.

    The layers of such a cache are given keys and values without data, on torch's meta device, as the model would give
    them: a prompt at once, then one token after another. So it is the package's own arithmetic that is counted: growth,
    blocks, sinks, residual windows. Layers that are alike are driven once.

    Parameters
    ----------
    source : PretrainedConfig or Probe
        A model's config, or what :func:`probe` found for it.
    context : int
        Tokens of the prompt; of an encoder-decoder, those that the encoder reads.
    new_tokens : int
        Tokens that are cached after it, one at a time; at least 1, as what follows a prompt seals the last of its
        blocks.
    batch_size : int
        Rows.
    dtype : torch.dtype, optional
        Of the weights, and so of keys and values; not with a `Probe`, which has one.
    **options
        As for `MemOSCache`. The device of `offload` is the accelerator, or the CPU where there is none.

    Returns
    -------
    Prediction
        Of an encoder-decoder, for `EncoderDecoderCache(MemOSCache(config, …), MemOSCache(config, …))`.

    Raises
    ------
    TypeError, ValueError
        As by `MemOSCache`, or if a number is below 1.
    """
    for name, number in (("context", context), ("new_tokens", new_tokens), ("batch_size", batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {number!r}")
    if isinstance(source, Probe) and dtype is not None:
        raise ValueError(f"dtype: expected None with a Probe, which has one, got {dtype}")
    found = source if isinstance(source, Probe) else probe(source, dtype)
    offload: OffloadConfig | None = options.pop("offload", None)
    if offload is not None:
        MemOSCache(found.config, offload=offload, **options)  # refuses what cannot be combined
        options["quantization"] = options.get("quantization") or UNENCODED
    prompt = 1 if found.is_encoder_decoder else context
    with torch.no_grad():
        total = _count(found, found.layers, (prompt, new_tokens), batch_size, options)
        total.add(_count(found, found.cross_layers, (context, 0), batch_size, options))
    return _resident(total) if offload is None else _on_tiers(total, offload)


def _resident(total: _Count) -> Prediction:
    peak = total.allocated + total.largest
    return Prediction(total.used, total.allocated, total.full, peak, 0, peak)


def _on_tiers(total: _Count, offload: OffloadConfig) -> Prediction:
    limit = offload.lease().budget.limit(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    staging = sum(2 * staged_blocks(size, limit) * size for size in total.blocks)
    resident = max(min(total.allocated, limit), total.beside_blocks)
    allocated = resident + staging
    return Prediction(
        used_bytes=total.used,
        allocated_bytes=allocated,
        full_precision_bytes=total.full,
        peak_bytes=allocated + total.largest,
        below_bytes=max(total.used - resident, 0),
        least_bytes=total.beside_blocks + max(total.blocks, default=0) + staging + total.largest,
    )


def _count(
    found: Probe, cached: Sequence[CachedStates], tokens: tuple[int, int], batch_size: int, options: dict[str, Any]
) -> _Count:
    """Add up the layers of one cache after a prompt and what came after it."""
    prompt, new_tokens = tokens
    cache = MemOSCache(found.config, **options) if cached else MemOSCache()
    for layer_idx, states in enumerate(cached):
        if isinstance(cache.layers[layer_idx], BufferedLayer) and states.keys is not None:
            cache.update(*states.of(batch_size, states.tokens.at(prompt)), layer_idx)
    total = _Count()
    alike: dict[Hashable, _Count] = {}
    for layer_idx, (layer, states) in enumerate(zip(cache.layers, cached, strict=True)):
        # After a prompt alone the last layers are not sealed yet, so that each is another case.
        kind = _kind(layer, states) if new_tokens else layer_idx
        if kind not in alike:
            alike[kind] = _layer_count(layer, states, tokens, batch_size)
        total.add(alike[kind])
    return total


def _kind(layer: Any, states: CachedStates) -> Hashable:
    """Equal for layers that hold as much."""
    options = [getattr(layer, name, None) for name in ("sliding_window", "max_cache_len", "quantization")]
    shapes = [(half.shape, half.dtype) for half in (states.keys, states.values) if half is not None]
    return type(layer), *options, *shapes, states.tokens, states.other_bytes, states.other_storage_bytes


def _layer_count(layer: Any, states: CachedStates, tokens: tuple[int, int], batch_size: int) -> _Count:
    """What a layer holds, if it is one of ours after the tokens that come behind the prompt it has."""
    prompt, new_tokens = tokens
    if isinstance(layer, StaticLayer):
        return _static_count(layer, states, prompt + new_tokens, batch_size)
    if not isinstance(layer, BufferedLayer):
        lines = states.other_bytes, states.other_storage_bytes
        used, allocated = (batch_size * line.at(prompt + new_tokens) for line in lines)
        return _Count(used, allocated, used, allocated)
    if states.keys is None:
        return _Count()
    for _ in range(new_tokens):
        layer.update(*states.of(batch_size, 1))
    allocated = _storage_bytes(layer.held_tensors())
    count = _Count(layer.used_bytes, allocated, layer.full_precision_bytes, allocated, layer.full_precision_bytes)
    if isinstance(layer, BlockLayer) and layer.bytes_per_block:
        count.beside_blocks, count.blocks = _storage_bytes(layer.tensors_beside_blocks()), {layer.bytes_per_block}
    return count


def _static_count(layer: StaticLayer, states: CachedStates, tokens: int, batch_size: int) -> _Count:
    if states.keys is None:
        raise ValueError(f"static: what a {type(layer).__name__} allocates cannot be told from the config")
    layer.lazy_initialization(*states.of(batch_size, 0))
    allocated = _storage_bytes([layer.keys, layer.values])
    used = allocated * min(tokens, layer.max_cache_len) // layer.max_cache_len
    return _Count(used, allocated, used, allocated)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors that share none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
