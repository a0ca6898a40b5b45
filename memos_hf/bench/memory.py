"""Bytes: what a cache holds, what a piece of work takes at most, and what a device has left."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import Cache

from .. import MemOSCache

SAMPLE_SECONDS = 0.002


def held_bytes(cache: Cache) -> int:
    """Bytes of the storages behind everything that a cache of any class holds, unused room included, each once."""
    if isinstance(cache, MemOSCache):
        return cache.memory().allocated_bytes
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(item: Any) -> Iterator[Tensor]:
    """The plain tensors in containers and in quantized tensors, which are classes around plain ones."""
    flatten = getattr(item, "__tensor_flatten__", None)
    parts: Iterable[Any] = ()
    if flatten is not None:
        parts = (getattr(item, name) for name in flatten()[0])
    elif isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        parts = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    for part in parts:
        yield from _tensors(part)


class PeakMemory:
    """The most memory that one cache's part of some work took, in `with` blocks between which others had their turn.

    What a block leaves allocated counts as held in those that follow, so the figure is what the blocks would have
    taken one after the other. On CUDA it comes from PyTorch's allocator. Elsewhere it is the growth of the resident
    set, looked at every two milliseconds: pages that were allocated and never written do not count, and memory that
    the C library kept of earlier work may hide some.

    Attributes
    ----------
    peak_bytes : int
        At the worst moment, beyond what was there before the first block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = self._held = 0

    @staticmethod
    def method(device: torch.device) -> str:
        """In words, where the figures come from."""
        if device.type == "cuda":
            return "torch.cuda.max_memory_allocated"
        return f"growth of the resident set, sampled every {SAMPLE_SECONDS * 1000:.0f} ms"

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            _return_free_memory()
            self._before = _resident_bytes()
            self._sampler = _Sampler()
            self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            peak, after = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        else:
            peak = self._sampler.stop()
            _return_free_memory()
            after = _resident_bytes()
        self.peak_bytes = max(self.peak_bytes, self._held + peak - self._before)
        self._held += after - self._before


class _Sampler(threading.Thread):
    """Looks at the resident set until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._peak = 0

    def run(self) -> None:
        """Take samples."""
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, _resident_bytes())

    def stop(self) -> int:
        """End; the most that was seen."""
        self._stopped.set()
        self.join()
        return max(self._peak, _resident_bytes())


def anonymous_bytes() -> int:
    """Memory of the process that is no file's, after what was freed has been given back: what the system cannot drop.

    Where the system does not say (it does on Linux), the resident set.
    """
    gc.collect()
    _return_free_memory()
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
    except (OSError, StopIteration):
        return _resident_bytes()


def live_tensors() -> tuple[int, int]:
    """How many tensors Python holds, and the bytes of the storages behind them, each once."""
    gc.collect()
    # By type: `isinstance` asks what some objects stand for, and a few modules answer with a warning.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return len(tensors), sum(storages.values())


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _return_free_memory() -> None:
    """Have the C library give back what was freed, where it is one that keeps it (glibc)."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, after what PyTorch keeps for later was given back."""
    gc.collect()
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
