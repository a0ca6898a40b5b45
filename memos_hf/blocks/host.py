"""Blocks in host memory, beside an accelerator: page-locked, so that copies run while the device computes."""

from __future__ import annotations

import torch
from torch import Tensor

# Page-locking takes a call of the driver for each allocation, so blocks are allocated ahead by so many.
BLOCKS_PER_SLAB = 64


class HostBlocks:
    """Blocks of one layout in slabs of host memory.

    Parameters
    ----------
    like : list[Tensor]
        The tensors that a block consists of on the device, with slots in front.
    pinned : bool
        Whether the memory is page-locked.
    """

    def __init__(self, like: list[Tensor], pinned: bool) -> None:
        self._like = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in like]
        self._pinned = pinned
        self.slabs: list[list[Tensor]] = []
        self._free: list[int] = []

    @property
    def slab_bytes(self) -> int:
        """Bytes that one more slab takes."""
        return BLOCKS_PER_SLAB * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self._like)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slabs."""
        return len(self.slabs) * self.slab_bytes

    @property
    def free(self) -> int:
        """Blocks that can be reserved without another slab."""
        return len(self._free)

    def enlarge(self) -> None:
        """Allocate one more slab."""
        with torch.inference_mode(False):
            slab = [
                torch.empty((BLOCKS_PER_SLAB, *shape), dtype=dtype, pin_memory=self._pinned)
                for shape, dtype in self._like
            ]
        first = len(self.slabs) * BLOCKS_PER_SLAB
        self.slabs.append(slab)
        self._free.extend(range(first, first + BLOCKS_PER_SLAB))

    def reserve(self, count: int) -> list[int]:
        """Places of `count` blocks; there must be as many free."""
        assert count <= len(self._free), (count, len(self._free))
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def release(self, place: int) -> None:
        """Give a place back; the memory of all slabs goes when nobody holds any."""
        self._free.append(place)
        if len(self._free) == len(self.slabs) * BLOCKS_PER_SLAB:
            self.slabs.clear()
            self._free.clear()

    def write(self, place: int, pieces: list[Tensor]) -> None:
        """Copy the tensors of one block here; of an accelerator in the order of its stream, without waiting."""
        slab, row = self.slabs[place // BLOCKS_PER_SLAB], place % BLOCKS_PER_SLAB
        for own, piece in zip(slab, pieces, strict=True):
            own[row].copy_(piece, non_blocking=True)

    def read(self, places: list[int], targets: list[Tensor], first: int) -> None:
        """Copy blocks to the slots of `targets` from `first` on; neighbours in one go."""
        begin = 0
        while begin < len(places):
            end = begin + 1
            while end < len(places) and self._are_neighbours(places[end - 1], places[end]):
                end += 1
            slab, row = self.slabs[places[begin] // BLOCKS_PER_SLAB], places[begin] % BLOCKS_PER_SLAB
            for own, target in zip(slab, targets, strict=True):
                target[first + begin : first + end].copy_(own[row : row + end - begin], non_blocking=True)
            begin = end

    @staticmethod
    def _are_neighbours(place: int, following: int) -> bool:
        return following == place + 1 and following % BLOCKS_PER_SLAB != 0
