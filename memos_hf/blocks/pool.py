"""Slots for sealed blocks: preallocated arenas, and who holds which slot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .codecs import BlockCodec, Role


class BlockPool:
    """The sealed blocks of one layer.

    ::

        slot             0    1    2    3    4   ...       capacity
        references       2    1    0    1    0             a block that two tables name is held once
        keys["codes"]  [ K0 | K1 |    | K3 |    | ... ]    arenas, one for each tensor of the codec
        free           [ 2, 4, ... ]                       taken from the front, given back at the end

    Metadata is apart from tensors: counting never waits for a device.

    Parameters
    ----------
    key_codec, value_codec : BlockCodec
    heads : int
        Key-value heads; a block holds all of them.
    device : torch.device
    first_capacity : int
        Slots to allocate at first.
    growth_factor : float
        By which the arenas grow when they are full.
    """

    def __init__(
        self,
        key_codec: BlockCodec,
        value_codec: BlockCodec,
        heads: int,
        device: torch.device,
        first_capacity: int,
        growth_factor: float,
    ) -> None:
        self.key_codec, self.value_codec = key_codec, value_codec
        self.growth_factor = growth_factor
        self.growths = 0
        self.capacity = 0
        self._references: list[int] = []
        self._free: list[int] = []
        self.keys = empty_arenas(key_codec, heads, device)
        self.values = empty_arenas(value_codec, heads, device)
        self._grow_to(first_capacity)

    @property
    def used(self) -> int:
        """Slots that somebody holds."""
        return self.capacity - len(self._free)

    @property
    def tensors(self) -> list[Tensor]:
        """All arenas."""
        return [*self.keys.values(), *self.values.values()]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one block in all arenas."""
        return sum(arena[:1].numel() * arena.element_size() for arena in self.tensors)

    def references(self, slot: int) -> int:
        """How many table entries hold `slot`."""
        return self._references[slot]

    def store(self, keys: dict[str, Tensor], values: dict[str, Tensor], limit: int | None = None) -> list[int]:
        """Put encoded blocks, `[n, …]` each, into slots of their own, held once; the arenas grow if they have to.

        Parameters
        ----------
        limit : int, optional
            Growth stops at this many slots, unless more are needed.
        """
        count = keys["codes"].shape[0]
        if count > len(self._free):
            capacity = math.ceil(self.capacity * self.growth_factor)
            capacity = capacity if limit is None else min(capacity, limit)
            self._grow_to(max(capacity, self.used + count))
        slots = self._free[:count]
        index = torch.tensor(slots, dtype=torch.int64, device=self.keys["codes"].device)
        for arenas, encoded in ((self.keys, keys), (self.values, values)):
            for name, arena in arenas.items():
                as_bytes(arena).index_copy_(0, index, as_bytes(encoded[name]))
        del self._free[:count]
        for slot in slots:
            assert self._references[slot] == 0, (slot, self._references[slot])
            self._references[slot] = 1
        return slots

    def gather(self, role: Role, slots: Sequence[int]) -> dict[str, Tensor]:
        """A copy of the encoded keys or values of `slots`, `[len(slots), …]` each, in that order."""
        arenas = self.keys if role == "key" else self.values
        index = torch.tensor(slots, dtype=torch.int64, device=arenas["codes"].device)
        return {name: as_bytes(arena).index_select(0, index).view(arena.dtype) for name, arena in arenas.items()}

    def share(self, slots: Iterable[int]) -> None:
        """Hold each of `slots` once more."""
        for slot in slots:
            assert self._references[slot] > 0, (slot, self._references[slot])
            self._references[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Hold each of `slots` once less; a slot that nobody holds is free."""
        for slot in slots:
            assert self._references[slot] > 0, (slot, self._references[slot])
            self._references[slot] -= 1
            if self._references[slot] == 0:
                self._free.append(slot)

    def _grow_to(self, capacity: int) -> None:
        """Allocate all new arenas before any old one is let go."""
        if self.capacity:
            self.growths += 1
        keys, values = enlarged(self.keys, capacity), enlarged(self.values, capacity)
        self.keys, self.values = keys, values
        self._free.extend(range(self.capacity, capacity))
        self._references.extend([0] * (capacity - self.capacity))
        self.capacity = capacity


def empty_arenas(codec: BlockCodec, heads: int, device: torch.device) -> dict[str, Tensor]:
    """Arenas without slots for what `codec` stores of one block."""
    with torch.inference_mode(False):
        return {
            name: torch.empty((0, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in codec.layout(heads).items()
        }


def as_bytes(tensor: Tensor) -> Tensor:
    """`tensor`, or, as torch has no index operations for them, the bytes of 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def enlarged(arenas: dict[str, Tensor], capacity: int) -> dict[str, Tensor]:
    """New arenas of `capacity` slots, with what is in `arenas` in the first ones."""
    enlarged = {}
    with torch.inference_mode(False):
        for name, arena in arenas.items():
            enlarged[name] = torch.empty((capacity, *arena.shape[1:]), dtype=arena.dtype, device=arena.device)
            enlarged[name][: arena.shape[0]].copy_(arena)
    return enlarged
