"""How many bytes of tensors a piece of work holds at once, measured on a CPU as well as on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory:
    """Bytes that tensors allocated inside the `with` block take: at most, and when it ends.

    On CUDA this is what PyTorch's allocator says. PyTorch keeps no such account of a CPU, so there the storage of every
    tensor that an operator returns is counted from then until it is freed.

    Attributes
    ----------
    peak_bytes, live_bytes : int
        At the worst moment, and at the end.
    reserved_bytes : int or None
        The most that the allocator has taken from the GPU, fragments that nothing fitted into included.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = self.live_bytes = 0
        self.reserved_bytes: int | None = None
        self._storages = _StorageCount()

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._allocated_before = torch.cuda.memory_allocated(self.device)
            self._reserved_before = torch.cuda.memory_reserved(self.device)
        else:
            self._storages.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._allocated_before
            self.live_bytes = torch.cuda.memory_allocated(self.device) - self._allocated_before
            self.reserved_bytes = torch.cuda.max_memory_reserved(self.device) - self._reserved_before
        else:
            self._storages.__exit__(*error)
            self.peak_bytes, self.live_bytes = self._storages.peak_bytes, self._storages.live_bytes


class _StorageCount(TorchDispatchMode):
    """Sees every operator, and counts the storages of what it returns unless that is a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._allocates: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in self._allocates:
            self._allocates[func] = all(returned.alias_info is None for returned in func._schema.returns)
        if self._allocates[func]:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._discount, storage.nbytes()).atexit = False

    def _discount(self, count: int) -> None:
        self.live_bytes -= count
