"""The sealed blocks of one layer on three tiers: slots on the device, host memory beside an accelerator, and disk.

::

    device   [ 0 | 4 | 7 | 1 | ... ]        arenas that grow to the layer's part of a budget; kernels read them in place
    host            [ 2 | 3 | ... ]         page-locked, beside an accelerator only
    disk                    [ 5 | 6 | ... ] the cache's file

A block is written below at most once, as it never changes. So one that was there before leaves the device for free.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .budget import STEPS_AT_WORK, Lease
from .codecs import BlockCodec, Role
from .disk import BlockFile
from .host import HostBlocks
from .policies import POLICIES
from .pool import Block, BlockPool, as_bytes, next_number
from .staging import Buffer, Place, Staging

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")
# So many blocks are copied at a time, where a pool is.
COPIED_BLOCKS = 16


@dataclass(slots=True)
class TieredBlock(Block):
    """A block whose slot is on the device, and its place below, if it has been written there."""

    place: Place | None = None


class TieredPool(BlockPool):
    """Blocks each on the device, below it, or both.

    All of it is called with the lease's lock held.

    Parameters
    ----------
    key_codec, value_codec : BlockCodec
    heads : int
        Key-value heads; a block holds all of them.
    device : torch.device
    growth_factor : float
        By which the arenas grow, up to the layer's part of the budget.
    lease : Lease

    Attributes
    ----------
    reserved_bytes : int
        What of the layer's part of the budget other things take.
    version : int
        Changes whenever a block comes to the device or leaves it.
    hits, misses, evictions, bytes_moved : int
        Blocks read on the device, and from below; blocks that gave way; bytes written below and read back.
    """

    def __init__(
        self,
        key_codec: BlockCodec,
        value_codec: BlockCodec,
        heads: int,
        device: torch.device,
        growth_factor: float,
        lease: Lease,
    ) -> None:
        self.lease = lease
        self.policy = POLICIES[lease.policy]()
        self.hits = self.misses = self.evictions = self.bytes_moved = 0
        self.reserved_bytes = 0
        self._blocks: dict[int, TieredBlock]  # type: ignore[assignment]
        self._host: HostBlocks | None = None
        self._ask_again_at = 0
        super().__init__(key_codec, value_codec, heads, device, 0, growth_factor)
        self.lock = lease.lock
        if device.type != "cpu":
            self._host = HostBlocks(self.tensors, pinned=device.type == "cuda")

    def used_by_tier(self, blocks: Iterable[int]) -> dict[str, int]:
        """Bytes of distinct `blocks` by where they are: the device, `"cpu"` or `"disk"`."""
        found: Counter[str] = Counter()
        for number in blocks:
            block = self._blocks[number]
            below = "disk" if block.place is not None and isinstance(block.place[0], BlockFile) else "cpu"
            found[below if block.slot is None else str(self.device)] += self.bytes_per_slot
        return dict(found)

    def held_on(self, device: torch.device) -> int:
        """Bytes allocated on `device`."""
        if device == self.device:
            return self.capacity * self.bytes_per_slot
        return sum(tensor.numel() * tensor.element_size() for tensor in self.host_tensors) if device == HOST else 0

    @property
    def host_tensors(self) -> list[Tensor]:
        """What is allocated in host memory, beside an accelerator."""
        return [] if self._host is None else [tensor for slab in self._host.slabs for tensor in slab]

    def places(self, blocks: Sequence[int]) -> list[Place]:
        """Of blocks that are not on the device, the tier that has each and its place there."""
        found = [self._blocks[block].place for block in blocks]
        assert None not in found, blocks
        return found  # type: ignore[return-value]

    def _forget(self, number: int, block: Block) -> None:
        assert isinstance(block, TieredBlock)
        if block.slot is not None:
            self._leave(number, block)
        if block.place is not None:
            self._release_place(block.place)
        del self._blocks[number]

    def store(self, keys: dict[str, Tensor], values: dict[str, Tensor], limit: int | None = None) -> list[int]:
        """Take encoded blocks, `[n, …]` each; those that find no room on the device are written below.

        Returns
        -------
        list[int]
            Their numbers, each held once.

        Raises
        ------
        OSError
            If they cannot be written; nothing has changed then.
        """
        self._release_dropped()
        blocks = {next_number(): TieredBlock() for _ in range(keys["codes"].shape[0])}
        self._put(blocks, keys, values)
        return list(blocks)

    def _put(self, blocks: dict[int, TieredBlock], keys: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        numbers = list(blocks)
        room = self._make_room(len(numbers))
        victims = self.policy.victims(len(numbers) - room, ())
        staying = min(room + len(victims), len(numbers))
        first = len(numbers) - staying if self.policy.takes_newest else 0
        stays = range(first, first + staying)
        encoded = [*keys.values(), *values.values()]
        outside = [index for index in range(len(numbers)) if index not in stays]
        self._write_out({victim: self._in_slot(victim) for victim in victims})
        written = self._written([[tensor[index] for tensor in encoded] for index in outside])
        self._evict(victims)
        self._blocks.update(blocks)
        for index, place in zip(outside, written, strict=True):
            blocks[numbers[index]].place = place
        staying_blocks = {number: blocks[number] for number in numbers[first : first + staying]}
        self._arrive(staying_blocks, [tensor[first : first + staying] for tensor in encoded])

    def admit(self, blocks: Sequence[int], buffer: Buffer) -> None:
        """Keep on the device what was staged in `buffer`, as far as there is room or others give way."""
        if self.lease.policy == "pin" and not self._may_grow() and not self._free:
            return
        rows = [row for row, block in enumerate(blocks) if self._blocks[block].slot is None]
        room = self._make_room(len(rows))
        victims = self.policy.victims(len(rows) - room, blocks)
        try:
            self._write_out({victim: self._in_slot(victim) for victim in victims})
        except OSError as error:
            logger.warning("blocks could not be written below and keep their slots: %s", str(error))
            victims = []
        self._evict(victims)
        rows = rows[: room + len(victims)]
        if rows:
            index = torch.tensor(rows, device=self.device)
            arriving = {blocks[row]: self._blocks[blocks[row]] for row in rows}
            self._arrive(arriving, [as_bytes(tensor)[index].view(tensor.dtype) for tensor in buffer.tensors])

    def gather(self, role: Role, blocks: Sequence[int]) -> dict[str, Tensor]:
        """A copy of the encoded keys or values of `blocks`, `[len(blocks), …]` each, in that order.

        Raises
        ------
        OSError
            If blocks that are not on the device cannot be read.
        """
        arenas = self.keys if role == "key" else self.values
        found = {
            name: torch.empty((len(blocks), *arena.shape[1:]), dtype=arena.dtype, device=self.device)
            for name, arena in arenas.items()
        }
        here: dict[int, list[int]] = {}  # of each block, where it goes
        missing: dict[int, list[int]] = {}
        for row, block in enumerate(blocks):
            (missing if self._blocks[block].slot is None else here).setdefault(block, []).append(row)
        self.count(list(here), len(missing))
        places = [(row, self._blocks[block].slot) for block, rows in here.items() for row in rows]
        if places:
            rows, slots = torch.tensor(places, device=self.device).unbind(dim=1)
            for name, arena in arenas.items():
                as_bytes(found[name])[rows] = as_bytes(arena)[slots]
        for chunk, buffer in self._passing(list(missing)):
            for slot, block in enumerate(chunk):
                for name, staged in (buffer.keys if role == "key" else buffer.values).items():
                    as_bytes(found[name])[missing[block]] = as_bytes(staged)[slot]
        return found

    def _passing(self, blocks: list[int]) -> Iterator[tuple[tuple[int, ...], Buffer]]:
        """Blocks that are not on the device, a few at a time in a buffer."""
        if not blocks:
            return
        staging = self.staging
        with staging.lock:
            for chunk in in_chunks(blocks, staging.slots):
                buffer = self.staged(chunk)
                try:
                    yield chunk, buffer
                finally:
                    staging.give_back(buffer)

    @property
    def staging(self) -> Staging:
        """Buffers for blocks like these; use them with their lock held."""
        codecs, budget = (self.key_codec, self.value_codec), self.lease.budget
        key = (*map(str, (self.key_codec.spec, self.value_codec.spec, self.device)), self.heads, self.bytes_per_slot)
        limit = budget.limit(self.device)
        return budget.staging(key, lambda: Staging(codecs, self.heads, self.device, budget.reader, limit))

    def staged(self, blocks: tuple[int, ...]) -> Buffer:
        """A buffer with blocks that are not on the device; see :meth:`Staging.take`."""
        buffer = self.staging.take(self, blocks)
        self.bytes_moved += len(blocks) * self.bytes_per_slot
        return buffer

    def count(self, used: Sequence[int], misses: int) -> None:
        """Note that blocks are read on the device, and how many from below."""
        self.hits += len(used)
        self.misses += misses
        self.policy.use(used)

    def outside(self, more: int) -> int:
        """How many blocks may still have to be written below, with so many more."""
        total = self.used + more
        if total <= self._quota():
            return 0
        staying = self._quota() if self.lease.policy == "pin" else 0  # others give way sooner or later
        return max(total - staying - sum(block.place is not None for block in self._blocks.values()), 0)

    def move_out(self) -> None:
        """Leave the device with all blocks, and free the arenas. An `OSError` leaves everything as it was."""
        here = [number for number, block in self._blocks.items() if block.slot is not None]
        self._write_out({number: self._in_slot(number) for number in here})
        self._evict(here)
        self._forget_arenas()
        self._ask_again_at = 0

    def come_back(self) -> None:
        """Bring blocks back to the device, as far as there is room."""
        missing = [number for number, block in self._blocks.items() if block.slot is None]
        for chunk, buffer in self._passing(missing[: self._make_room(len(missing))]):
            self.admit(chunk, buffer)

    def check_budget(self) -> None:
        """Raise a `ValueError` if the budget of the device is below one block."""
        limit = self.lease.budget.limit(self.device)
        if limit < self.bytes_per_slot:
            raise ValueError(
                f"max_memory: expected at least {self.bytes_per_slot} bytes for {self.device}, one block of "
                f"{self.key_codec.block_size} tokens, got {limit}"
            )

    def _quota(self) -> int:
        """Slots that the layer may have."""
        return max(self.lease.share(self.device) - self.reserved_bytes, 0) // self.bytes_per_slot

    def _may_grow(self) -> bool:
        return self.lease.budget.clock >= self._ask_again_at and self.capacity < self._quota()

    def _make_room(self, count: int) -> int:
        """How many of `count` blocks there are slots for, after the arenas have grown as far as they may."""
        missing = count - len(self._free)
        if missing > 0 and self._may_grow():
            wanted = max(math.ceil(self.capacity * self.growth_factor), self.capacity + missing)
            capacity = min(wanted, self._quota())
            more = (capacity - self.capacity) * self.bytes_per_slot
            if self.lease.budget.has_room(self.lease, self.device, more):
                self._grow_to(capacity)
            else:
                self._ask_again_at = self.lease.budget.clock + STEPS_AT_WORK
        return min(len(self._free), count)

    def _in_slot(self, number: int) -> list[Tensor]:
        slot = self._blocks[number].slot
        assert slot is not None
        return [arena[slot] for arena in self.tensors]

    def _write_out(self, blocks: dict[int, list[Tensor]]) -> None:
        """See to it that blocks have a place below. An `OSError` leaves everything as it was."""
        homeless = [number for number in blocks if self._blocks[number].place is None]
        for number, place in zip(homeless, self._written([blocks[number] for number in homeless]), strict=True):
            self._blocks[number].place = place

    def _written(self, blocks: list[list[Tensor]]) -> list[Place]:
        """Write blocks below; returns where they are. An `OSError` leaves everything as it was."""
        places = self._reserve(len(blocks))
        try:
            for (tier, place), pieces in zip(places, blocks, strict=True):
                if isinstance(tier, BlockFile):
                    pieces = [piece.detach().to(HOST).contiguous() for piece in pieces]
                tier.write(place, pieces)
        except BaseException:
            for reserved in places:
                self._release_place(reserved)
            raise
        self.bytes_moved += len(blocks) * self.bytes_per_slot
        return places

    def _reserve(self, count: int) -> list[Place]:
        places: list[Place] = []
        host = self._host
        if host is not None and count > 0:
            while host.free < count and self.lease.budget.has_room(self.lease, HOST, host.slab_bytes):
                host.enlarge()
            places = [(host, place) for place in host.reserve(min(count, host.free))]
        if len(places) < count:
            try:
                on_disk = self.lease.file.reserve(self.bytes_per_slot, count - len(places))
            except BaseException:
                for reserved in places:
                    self._release_place(reserved)
                raise
            places += [(self.lease.file, offset) for offset in on_disk]
        return places

    def _release_place(self, place: Place) -> None:
        tier, at = place
        if isinstance(tier, BlockFile):
            tier.release(at, self.bytes_per_slot)
        else:
            tier.release(at)

    def _arrive(self, blocks: dict[int, TieredBlock], encoded: list[Tensor]) -> None:
        if blocks:
            self._enter(dict(blocks), encoded)
            for number in blocks:
                self.policy.add(number)

    def _evict(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._leave(number, self._blocks[number])
        self.evictions += len(numbers)

    def _leave(self, number: int, block: Block) -> None:
        assert block.slot is not None
        self._free.append(block.slot)
        block.slot = None
        self.policy.discard(number)
        self.version += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredPool:
        lease = copy.deepcopy(self.lease, memo)
        codecs = self.key_codec, self.value_codec
        twin = TieredPool(*codecs, self.heads, self.device, self.growth_factor, lease)
        memo[id(self)] = twin
        with lease.lock:
            for chunk in in_chunks(list(self._blocks), COPIED_BLOCKS):
                blocks = {number: TieredBlock(references=self._blocks[number].references) for number in chunk}
                twin._put(blocks, self.gather("key", chunk), self.gather("value", chunk))
        return twin


def in_chunks(blocks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """`blocks` in order, up to `size` at a time."""
    return [tuple(blocks[first : first + size]) for first in range(0, len(blocks), size)]
