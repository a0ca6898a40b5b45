"""What a cache holds and what it did: memory by device, and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks.budget import Lease
from .layers import BlockLayer, BufferedLayer, OffloadedLayer

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        The part that others may hold too: of what is valid, blocks that forks share, tails that none of them has
        written to since, and tensors that were handed over.
    """

    used_bytes: int = 0
    allocated_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of what is valid in one layer.

    Attributes
    ----------
    kind : str
        Name of the layer's class.
    used_by_device : dict[str, int]
        By where it is, in the words of :class:`MemoryReport`.
    shared_bytes : int
        As in :class:`DeviceMemory`.
    full_precision_bytes : int
        What the same tokens take without any encoding.
    """

    kind: str
    used_by_device: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    full_precision_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of what is valid, wherever it is."""
        return sum(self.used_by_device.values())


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes a cache holds; `print` shows a table, a notebook bars, `plot` draws its layers.

    Attributes
    ----------
    used_bytes, allocated_bytes, shared_bytes : int
        As in :class:`DeviceMemory`, over all devices.
    full_precision_bytes : int
        What the same tokens take without any encoding.
    ratio : float
        `used_bytes / full_precision_bytes`; 1.0 for an empty cache.
    by_device : dict[str, DeviceMemory]
        The same by device: `"cpu"`, `"cuda:0"`, …, and `"disk"`. A block that is on a device and below it too counts as
        used on the device.
    by_layer : tuple of LayerMemory
        What is valid, and shared, by layer.
    """

    used_bytes: int
    allocated_bytes: int
    shared_bytes: int
    full_precision_bytes: int
    by_device: dict[str, DeviceMemory] = field(default_factory=dict)
    by_layer: tuple[LayerMemory, ...] = ()

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

    def __repr__(self) -> str:
        tiers = self.by_device.items() if len(self.by_device) > 1 else ()
        devices = "".join(f", {device} {format_bytes(memory.used_bytes)}" for device, memory in tiers)
        return (
            f"MemoryReport({format_bytes(self.used_bytes)} of {format_bytes(self.allocated_bytes)} used{devices}, "
            f"{format_bytes(self.shared_bytes)} shared, {self.ratio:.3f} of full precision)"
        )

    def _repr_html_(self) -> str:
        from .show.html import memory_html  # what draws a report imports it

        return memory_html(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the bytes of each layer by device, the shared ones hatched, and what full precision would take.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default in a new figure of pyplot.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it says which extra has it.
        """
        from .show.plots import plot_memory

        return plot_memory(self, ax)


@dataclass(frozen=True, repr=False)
class CacheStats:
    """Counters of a cache, as they were when asked for; its line of text leaves out those at 0.

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
    hits, misses : int
        Of an offloaded cache: blocks read on the device, and from below it.
    evictions : int
        Blocks that left the device.
    bytes_moved : int
        Bytes of blocks that were written below the device and read from there.
    """

    growths: int = 0
    growths_by_device: dict[str, int] = field(default_factory=dict)
    seals: int = 0
    damaged_tokens: int = 0
    fused_calls: int = 0
    materialised_calls: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_moved: int = 0

    def __repr__(self) -> str:
        names = [each.name for each in fields(self) if each.name != "growths_by_device"]
        return f"CacheStats({', '.join(f'{name}={getattr(self, name)}' for name in names if getattr(self, name))})"

    def _repr_html_(self) -> str:
        from .show.html import stats_html

        return stats_html(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw which part of the blocks were read on the device, and of the attention calls in place.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default in a new figure of pyplot.

        Raises
        ------
        ImportError
            If matplotlib is not installed; it says which extra has it.
        """
        from .show.plots import plot_stats

        return plot_stats(self, ax)


def memory_report(layers: Sequence[Any], lease: Lease | None = None) -> MemoryReport:
    """Add up what `layers`, of ours or of transformers, hold; a storage that several hold counts once.

    Of an offloaded cache, staging buffers and its file too.
    """
    used: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    by_layer: list[LayerMemory] = []
    with lease.lock if lease is not None else nullcontext():
        for layer in layers:
            memory = _layer_memory(layer)
            by_layer.append(memory)
            used.update(memory.used_by_device)
            for device, count in _storages(held_tensors(layer), seen):
                allocated[device] += count
            if memory.shared_bytes:
                shared[str(layer.device)] += memory.shared_bytes
        if lease is not None:
            for device, count in _storages(lease.budget.staging_tensors(), seen):
                allocated[device] += count
            if lease.file.allocated_bytes:
                allocated["disk"] = lease.file.allocated_bytes
    shared = shared & allocated  # tensors that were handed over to several layers are held once
    by_device = {device: DeviceMemory(used[device], allocated[device], shared[device]) for device in allocated | used}
    full = sum(memory.full_precision_bytes for memory in by_layer)
    return MemoryReport(used.total(), allocated.total(), shared.total(), full, by_device, tuple(by_layer))


def _layer_memory(layer: Any) -> LayerMemory:
    valid: Counter[str] = Counter()
    for device, count in _used_bytes(layer):
        valid[device] += count
    kind = type(layer).__name__
    if not isinstance(layer, BufferedLayer):
        return LayerMemory(kind, dict(valid), 0, valid.total())
    shared = layer.shared_bytes if layer.is_initialized else 0
    return LayerMemory(kind, dict(valid), shared, layer.full_precision_bytes)


def _storages(tensors: Iterable[Tensor], seen: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Device and bytes of each storage behind `tensors` that is not in `seen`, and is from then on."""
    for tensor in tensors:
        storage, device = tensor.untyped_storage(), str(tensor.device)
        if (device, storage.data_ptr()) not in seen:
            seen.add((device, storage.data_ptr()))
            yield device, storage.nbytes()


def cache_stats(layers: Iterable[Any]) -> CacheStats:
    """The counters of `layers`."""
    by_device: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, BufferedLayer) and layer.device is not None:
            device = str(layer.device)
            by_device[device] = max(by_device.get(device, 0), layer.growths)
    blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
    tiers = [layer.tier_counts() for layer in blocks if isinstance(layer, OffloadedLayer)]
    hits, misses, evictions, bytes_moved = (sum(counts) for counts in zip(*tiers, strict=True)) if tiers else (0,) * 4
    return CacheStats(
        growths=max(by_device.values(), default=0),
        growths_by_device=by_device,
        seals=sum(layer.seals for layer in blocks),
        damaged_tokens=sum(layer.damaged_tokens for layer in blocks),
        fused_calls=sum(getattr(layer, "fused_calls", 0) for layer in layers),
        materialised_calls=sum(layer.materialised_calls for layer in blocks),
        hits=hits,
        misses=misses,
        evictions=evictions,
        bytes_moved=bytes_moved,
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
        yield from layer.used_by_tier().items()
        return
    tensors: Iterable[Tensor] = held_tensors(layer)
    length = getattr(layer, "cumulative_length", None)
    if isinstance(length, Tensor) and layer.is_initialized:  # a static layer, valid up to its length
        held = min(int(layer.get_seq_length()), layer.max_cache_len)
        tensors = (layer.keys[:, :, :held], layer.values[:, :, :held])
    for tensor in tensors:
        yield str(tensor.device), tensor.numel() * tensor.element_size()


def held_tensors(layer: Any) -> Iterator[Tensor]:
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
