"""What a cache holds and what it did: memory by device, and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .layers import BlockLayer, BufferedLayer


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes
    ----------
    used_bytes : int
        What is valid.
    allocated_bytes : int
        Storages held, unused capacity included, each counted once.
    shared_bytes : int
        The part of `allocated_bytes` in tensors that were handed over and that others may hold too.
    """

    used_bytes: int = 0
    allocated_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """Bytes a cache holds; `print` shows a table.

    Attributes
    ----------
    used_bytes, allocated_bytes, shared_bytes : int
        As in :class:`DeviceMemory`, over all devices.
    full_precision_bytes : int
        What the same tokens take without any encoding.
    ratio : float
        `used_bytes / full_precision_bytes`; 1.0 for an empty cache.
    by_device : dict[str, DeviceMemory]
        The same by device: `"cpu"`, `"cuda:0"`, …
    """

    used_bytes: int
    allocated_bytes: int
    shared_bytes: int
    full_precision_bytes: int
    by_device: dict[str, DeviceMemory] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Used bytes over what full precision takes."""
        return self.used_bytes / self.full_precision_bytes if self.full_precision_bytes else 1.0

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("device", "used", "allocated", "shared")]
        rows += [
            (device, *map(format_bytes, (memory.used_bytes, memory.allocated_bytes, memory.shared_bytes)))
            for device, memory in self.by_device.items()
        ]
        lines = ["".join(cell.rjust(12) if i else cell.ljust(10) for i, cell in enumerate(row)) for row in rows]
        return "\n".join([*lines, f"{self.ratio:.3f} of full precision ({format_bytes(self.full_precision_bytes)})"])


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache, as they were when asked for.

    Attributes
    ----------
    growths : int
        Times the buffers, or the arenas of blocks, grew; layers that grow at the same length count as one.
    growths_by_device : dict[str, int]
        The same for the layers of each device.
    seals : int
        Blocks encoded, over all rows and layers.
    damaged_tokens : int
        Tokens with a NaN or infinity among those encoded, counted for K and for V.
    fused_calls, materialised_calls : int
        Attention calls that read encoded blocks in place, and those for which a layer was decoded.
    """

    growths: int = 0
    growths_by_device: dict[str, int] = field(default_factory=dict)
    seals: int = 0
    damaged_tokens: int = 0
    fused_calls: int = 0
    materialised_calls: int = 0


def memory_report(layers: Sequence[Any]) -> MemoryReport:
    """Add up what `layers`, of ours or of transformers, hold; a storage that several hold counts once."""
    used: dict[str, int] = {}
    allocated: dict[str, int] = {}
    shared: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for layer in layers:
        for device, count in _used_bytes(layer):
            used[device] = used.get(device, 0) + count
        for tensor in _held_tensors(layer):
            storage = tensor.untyped_storage()
            device = str(tensor.device)
            if (device, storage.data_ptr()) in seen:
                continue
            seen.add((device, storage.data_ptr()))
            allocated[device] = allocated.get(device, 0) + storage.nbytes()
            if isinstance(layer, BufferedLayer) and layer.buffer.shared:
                shared[device] = shared.get(device, 0) + storage.nbytes()
    by_device = {
        device: DeviceMemory(used.get(device, 0), allocated[device], shared.get(device, 0)) for device in allocated
    }
    full = sum(
        layer.full_precision_bytes
        if isinstance(layer, BufferedLayer)
        else sum(count for _, count in _used_bytes(layer))
        for layer in layers
    )
    return MemoryReport(sum(used.values()), sum(allocated.values()), sum(shared.values()), full, by_device)


def cache_stats(layers: Iterable[Any]) -> CacheStats:
    """The counters of `layers`."""
    by_device: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, BufferedLayer) and layer.device is not None:
            device = str(layer.device)
            by_device[device] = max(by_device.get(device, 0), layer.growths)
    blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
    return CacheStats(
        growths=max(by_device.values(), default=0),
        growths_by_device=by_device,
        seals=sum(layer.seals for layer in blocks),
        damaged_tokens=sum(layer.damaged_tokens for layer in blocks),
        fused_calls=sum(getattr(layer, "fused_calls", 0) for layer in layers),
        materialised_calls=sum(layer.materialised_calls for layer in blocks),
    )


def format_bytes(count: float) -> str:
    """`count` with a binary unit, as in `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _used_bytes(layer: Any) -> Iterator[tuple[str, int]]:
    if isinstance(layer, BufferedLayer):
        if layer.is_initialized:
            yield str(layer.buffer.tensors[0].device), layer.used_bytes
        return
    tensors: Iterable[Tensor] = _held_tensors(layer)
    length = getattr(layer, "cumulative_length", None)
    if isinstance(length, Tensor) and layer.is_initialized:  # a static layer, valid up to its length
        held = min(int(layer.get_seq_length()), layer.max_cache_len)
        tensors = (layer.keys[:, :, :held], layer.values[:, :, :held])
    for tensor in tensors:
        yield str(tensor.device), tensor.numel() * tensor.element_size()


def _held_tensors(layer: Any) -> Iterator[Tensor]:
    """Every tensor of a layer that holds cached data; scalars that count or configure are left out."""
    if isinstance(layer, BufferedLayer):
        yield from layer.held_tensors()
        return
    pending: list[Any] = list(vars(layer).values())
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            if item.ndim > 0:
                yield item
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
