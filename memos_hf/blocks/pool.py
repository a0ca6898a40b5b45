"""Slots for sealed blocks: preallocated arenas, which block is in which slot, and how often each is held."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .codecs import BlockCodec, Role
from .transfer import Encoded

_numbers = itertools.count()


def next_number() -> int:
    """A number for a block that no other block of this process has."""
    return next(_numbers)


@dataclass(slots=True)
class Block:
    """Where a block is, and how many table entries hold it."""

    slot: int | None = None
    references: int = 1


class Reader(Protocol):
    """What remembers where blocks are."""

    def forget_places(self) -> None:
        """Blocks have moved, and what they were in is to be freed."""


class BlockPool:
    """The sealed blocks of one layer, and of its forks.

    ::

        block            17   18   19   23                 numbers that tables hold; they never change
        references        2    1    1    1                 a block that two tables name is held twice
        slot              0    3    1    2
        keys["codes"]  [ K0 | K1 | K2 | K3 |    | ... ]    arenas, one for each tensor of the codec

    Metadata is apart from tensors: counting never waits for a device. Threads may share a pool, each with layers of its
    own; what they read does not change, as blocks do not.

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
    arenas : (dict, dict), optional
        Of keys and values, where there are some.
    """

    def __init__(
        self,
        key_codec: BlockCodec,
        value_codec: BlockCodec,
        heads: int,
        device: torch.device,
        first_capacity: int,
        growth_factor: float,
        arenas: tuple[Encoded, Encoded] | None = None,
    ) -> None:
        self.key_codec, self.value_codec, self.heads, self.device = key_codec, value_codec, heads, device
        self.growth_factor = growth_factor
        self.growths = 0
        self.version = 0  # of where blocks are
        self._blocks: dict[int, Block] = {}
        self._dropped: deque[list[int]] = deque()
        self.lock = threading.RLock()
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self.capacity = 0
        self._free: list[int] = []
        if arenas is not None:
            self.keys, self.values = arenas
        else:
            self._forget_arenas()
        if first_capacity > 0:
            self._grow_to(first_capacity)

    @classmethod
    def over(
        cls,
        codecs: tuple[BlockCodec, BlockCodec],
        states: tuple[Tensor, Tensor],
        start: int,
        count: int,
        growth_factor: float,
    ) -> tuple[BlockPool, list[list[int]]]:
        """A pool whose blocks lie in a contiguous buffer, as they are.

        Parameters
        ----------
        codecs : (BlockCodec, BlockCodec)
            Of kind "full", for keys and values.
        states : (Tensor, Tensor)
            K and V of the CPU, `[batch, heads, capacity, head_dim]`, contiguous.
        start, count : int
            Each row has `count` blocks, from token `start` on.
        growth_factor : float
            By which the arenas grow when they are full. They are then arenas like all others.

        Returns
        -------
        pool : BlockPool
        table : list[list[int]]
            Of each row, its blocks, held once.
        """
        batch, heads, capacity, _ = states[0].shape
        block_size = codecs[0].block_size
        # A slot begins at every token: where heads of a block lie apart, no larger step reaches the blocks of all rows.
        slots = (batch - 1) * heads * capacity + capacity - block_size + 1
        with torch.inference_mode(False):
            keys, values = (
                {"codes": half.detach().as_strided((slots, heads, block_size, dim), (dim, capacity * dim, dim, 1))}
                for half in states
                for dim in (half.shape[3],)
            )
        pool = cls(*codecs, heads, states[0].device, 0, growth_factor, (keys, values))
        table = []
        for row in range(batch):
            first = row * heads * capacity + start
            table.append(list(itertools.islice(_numbers, count)))
            slots_of_row = range(first, first + (capacity - start) // block_size * block_size, block_size)
            pool._blocks.update(zip(table[-1], map(Block, slots_of_row), strict=False))
            # Behind them lies an open tail, and behind that what nobody has written to.
            pool._free += slots_of_row[count + 1 :]
        pool.capacity = batch * count + len(pool._free)
        return pool, table

    def _forget_arenas(self) -> None:
        self.keys = _arenas(self.key_codec, self.heads, self.device)
        self.values = _arenas(self.value_codec, self.heads, self.device)
        self.capacity, self._free = 0, []
        self.version += 1

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        self._release_dropped()
        return len(self._blocks)

    @property
    def tensors(self) -> list[Tensor]:
        """All arenas."""
        return [*self.keys.values(), *self.values.values()]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one block in all arenas."""
        return self.key_codec.bytes_per_block(self.heads) + self.value_codec.bytes_per_block(self.heads)

    def references(self, block: int) -> int:
        """How many table entries hold `block`."""
        self._release_dropped()
        return self._blocks[block].references

    def slot(self, block: int) -> int | None:
        """Where in the arenas `block` is."""
        return self._blocks[block].slot

    def shared(self, held: Counter[int]) -> int:
        """How many of the blocks of a table, with how often it holds each, others hold too."""
        with self.lock:
            self._release_dropped()
            return sum(self._blocks[block].references > count for block, count in held.items())

    def store(self, keys: dict[str, Tensor], values: dict[str, Tensor], limit: int | None = None) -> list[int]:
        """Put encoded blocks, `[n, …]` each, into slots of their own, held once; the arenas grow if they have to.

        Parameters
        ----------
        limit : int, optional
            Growth stops at this many slots, unless more are needed.

        Returns
        -------
        list[int]
            The numbers of the blocks.
        """
        count = keys["codes"].shape[0]
        with self.lock:
            self._release_dropped()
            if count > len(self._free):
                capacity = math.ceil(self.capacity * self.growth_factor)
                capacity = capacity if limit is None else min(capacity, limit)
                self._grow_to(max(capacity, len(self._blocks) + count))
            blocks = {next_number(): Block() for _ in range(count)}
            self._enter(blocks, [*keys.values(), *values.values()])
            self._blocks.update(blocks)
        return list(blocks)

    def _enter(self, blocks: dict[int, Block], encoded: list[Tensor]) -> None:
        """Copy encoded blocks to free slots, of which there must be enough."""
        slots = self._free[: len(blocks)]
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for arena, tensor in zip(self.tensors, encoded, strict=True):
            if arena.stride(0) == arena[0].numel():
                as_bytes(arena).index_copy_(0, index, as_bytes(tensor))
            else:  # slots of a buffer overlap, those that are free do not
                for slot, states in zip(slots, tensor, strict=True):
                    arena[slot].copy_(states)
        del self._free[: len(blocks)]
        for block, slot in zip(blocks.values(), slots, strict=True):
            block.slot = slot
        self.version += 1

    def gather(self, role: Role, blocks: Sequence[int]) -> dict[str, Tensor]:
        """A copy of the encoded keys or values of `blocks`, `[len(blocks), …]` each, in that order."""
        arenas = self.keys if role == "key" else self.values
        index = torch.tensor([self.slot(block) for block in blocks], dtype=torch.int64, device=self.device)
        return {name: as_bytes(arena).index_select(0, index).view(arena.dtype) for name, arena in arenas.items()}

    def share(self, blocks: Iterable[int]) -> None:
        """Hold each of `blocks` once more."""
        with self.lock:
            for block in blocks:
                self._blocks[block].references += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Hold each of `blocks` once less; one that nobody holds is gone."""
        with self.lock:
            for number in blocks:
                block = self._blocks[number]
                assert block.references > 0, (number, block)
                block.references -= 1
                if block.references == 0:
                    self._forget(number, block)

    def drop(self, blocks: list[int]) -> None:
        """Release `blocks` at the next opportunity. For destructors, which may run anywhere, under any lock."""
        self._dropped.append(blocks)

    def _release_dropped(self) -> None:
        with self.lock:
            while self._dropped:
                self.release(self._dropped.popleft())

    def _forget(self, number: int, block: Block) -> None:
        """Take back what a block had that nobody holds any more."""
        if block.slot is not None:
            self._free.append(block.slot)
        del self._blocks[number]

    def _grow_to(self, capacity: int) -> None:
        """Allocate all new arenas before any old one is let go; blocks keep their numbers and get new slots."""
        self.growths += self.capacity > 0
        here = [block for block in self._blocks.values() if block.slot is not None]
        slots = torch.tensor([block.slot for block in here], dtype=torch.int64, device=self.device)
        keys, values = _enlarged(self.keys, slots, capacity), _enlarged(self.values, slots, capacity)
        self.keys, self.values = keys, values
        for slot, block in enumerate(here):
            block.slot = slot
        self._free = list(range(len(here), capacity))
        self.capacity = capacity
        self.version += 1
        for reader in list(self.readers):
            reader.forget_places()

    def __getstate__(self) -> dict[str, Any]:
        self._release_dropped()
        return {name: value for name, value in vars(self).items() if name not in ("lock", "readers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock, self.readers = threading.RLock(), weakref.WeakSet()


def _arenas(codec: BlockCodec, heads: int, device: torch.device) -> dict[str, Tensor]:
    with torch.inference_mode(False):
        return {
            name: torch.empty((0, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in codec.layout(heads).items()
        }


def as_bytes(tensor: Tensor) -> Tensor:
    """`tensor`, or, as torch has no index operations for them, the bytes of 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _enlarged(arenas: dict[str, Tensor], slots: Tensor, capacity: int) -> dict[str, Tensor]:
    """New arenas of `capacity` slots, with what is in `slots` in the first ones."""
    enlarged = {}
    with torch.inference_mode(False):
        for name, arena in arenas.items():
            enlarged[name] = torch.empty((capacity, *arena.shape[1:]), dtype=arena.dtype, device=arena.device)
            torch.index_select(as_bytes(arena), 0, slots, out=as_bytes(enlarged[name])[: len(slots)])
    return enlarged
