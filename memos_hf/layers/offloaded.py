"""Sealed blocks on several tiers: read in place where they are on the device, through staging buffers where not."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention.dispatch import can_attend
from ..attention.lazy import Role
from ..attention.op import MOST_QUERIES
from ..attention.parts import Part, attend_in_parts, attend_to_part
from ..attention.reference import Exact, Sealed, Sinks
from ..blocks.budget import Lease
from ..blocks.staging import Buffer
from ..blocks.tiers import HOST, TieredPool, in_chunks
from ..config import CacheOptions, KVQuantizationConfig
from .blocks import BlockLayer
from .parked import ParkedTail
from .selection import KeyBounds
from .sliding_blocks import SlidingBlockLayer
from .state import LayerState
from .tail import TailBuffer


@dataclass
class _Piece:
    """Entries that are read in one go: all that are on the device, or as many as a staging buffer takes.

    Attributes
    ----------
    blocks : tuple of int
        To be staged, in this order; empty for what is on the device.
    columns : list of list of int
        Of each row, which entries.
    table, starts : Tensor
        See :class:`Sealed`; slots are those of the arenas or of the staging buffer.
    """

    blocks: tuple[int, ...]
    columns: list[list[int]]
    table: Tensor
    starts: Tensor
    read_with: dict[int, Sealed] = field(default_factory=dict)
    positions: Tensor | None = None  # made when a mask or sinks ask for it
    sinks: Sinks | None = None

    @property
    def is_resident(self) -> bool:
        """Whether it is read where the blocks are."""
        return not self.blocks

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same entries."""
        return all(row == self.columns[0] for row in self.columns)


class OffloadedLayer(BlockLayer):
    """A :class:`BlockLayer` whose blocks share a budget of the device with other layers and caches.

    ::

        tokens ->     0 ..... 127 | 128 ... 255 | 256 ... 383 | 384 ... 511 | 512 .... 600
        each row     [ device     |  device     |  below      |  below      |  tail ..... ]

    Attention is exact: it reads what is on the device in place and everything else, a few blocks at a time, through
    staging buffers, and joins the parts. With `active_blocks`, it reads the blocks that matter most to a query.

    Parameters
    ----------
    options : CacheOptions
        With a lease.
    quantization : KVQuantizationConfig
        How blocks are encoded; by `"full"`, not at all.
    """

    def __init__(self, options: CacheOptions, quantization: KVQuantizationConfig) -> None:
        assert options.lease is not None
        self.lease: Lease = options.lease
        # What takes back a step of the cache that cannot be finished.
        self.undo_step: weakref.WeakMethod[Callable[[BaseException], None]] | None = None
        self._parked: ParkedTail | None = None
        self._is_sealing = False
        self._past_counts = [0, 0, 0, 0]  # of pools that were made for other shapes
        super().__init__(options, quantization)
        self.lease.register(self)

    @property  # type: ignore[override]
    def buffer(self) -> TailBuffer:
        """The tail; it is brought back to the device if it was moved out."""
        if self._parked is not None:
            self._bring_tail_back()
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: TailBuffer) -> None:
        self._buffer = buffer

    @property
    def tiers(self) -> TieredPool | None:
        """The blocks; `None` before the first update."""
        return self._pool if isinstance(self._pool, TieredPool) else None

    @property
    def held_tokens(self) -> int:
        """Tokens of each row that are held, wherever they are."""
        return self.sealed_tokens + (self._buffer.length if self._parked is None else self._parked.tokens)

    def check_update(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise if K and V cannot be appended to what is held, or if the budget is below one block."""
        super().check_update(key_states, value_states)
        if self.is_empty and key_states.device.type != "meta":  # of a file that is to be loaded, only shapes are shown
            self._new_pool(key_states, value_states).check_budget()

    def _new_pool(self, keys: Tensor, values: Tensor) -> TieredPool:
        codecs = self._codecs(keys, values)
        return TieredPool(*codecs, keys.shape[1], keys.device, self.options.growth_factor, self.lease)

    def _slots(self) -> TieredPool:
        if self._pool is None:
            self._pool = self._new_pool(*self.buffer.tensors)
        assert isinstance(self._pool, TieredPool)
        tail = _bytes(self._buffer.tensors) * self._tail_after_sealing // max(self._buffer.capacity, 1)
        self._pool.reserved_bytes = tail + self._buffer.common_bytes + _bytes(self._notes())
        return self._pool

    def _take_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        before = self.tiers
        super()._take_geometry(key_states, value_states)
        if before is not None and self._pool is None:
            self._past_counts = self.tier_counts(before)

    @property
    def growths(self) -> int:
        """Times that the tail, wherever it is, or the arenas grew."""
        return self._buffer.growths + self._arena_growths

    def tier_counts(self, pool: TieredPool | None = None) -> list[int]:
        """Hits, misses, evictions and bytes moved, since the layer was made."""
        pool = pool if pool is not None else self.tiers
        if pool is None:
            return list(self._past_counts)
        counts = pool.hits, pool.misses, pool.evictions, pool.bytes_moved
        return [past + count for past, count in zip(self._past_counts, counts, strict=True)]

    def _forget_blocks(self) -> None:
        super()._forget_blocks()
        self._bounds: KeyBounds | None = None
        # Of each row, which of its blocks the newest attention call chose to read; `None`: it had to read all.
        self.last_selected: list[list[int]] | None = None

    def _table_changed(self) -> None:
        super()._table_changed()
        self._plan: tuple[Any, list[_Piece]] | None = None

    def _seal_first(self, count: int) -> None:
        """Encode the first `count` blocks of the tail; what does not find room on the device is written below.

        Raises
        ------
        OSError
            If it cannot be written; nothing has changed then.
        """
        bounds = None
        if self._chooses_blocks:
            keys = self.buffer.first(count * self.block_size)[0].expand(self._signatures[0][0], -1, -1, -1)
            bounds = KeyBounds.of(keys, self.block_size)
        self._is_sealing = True
        try:
            super()._seal_first(count)
        finally:
            self._is_sealing = False
        if bounds is not None:
            self._bounds = bounds if self._bounds is None else self._bounds.followed_by(bounds)

    @property
    def _chooses_blocks(self) -> bool:
        """Whether attention may read some of the blocks only."""
        return self.lease.active_blocks is not None and not self.is_sliding

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`; the bounds of encoded keys are those of what they decode to."""
        super().take_state(state, device)
        if self._chooses_blocks and self._entry_tokens and self._bounds is None:
            keys = self.decode("key")[:, :, : self.sealed_tokens]
            self._bounds = KeyBounds.of_entries(keys, self._entry_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens: of the tail, then by shortening and dropping entries."""
        super().crop(tokens_to_remove)
        if self._bounds is not None:
            self._bounds = self._bounds.first(len(self._entry_tokens))

    def _take_rows(self, index: Tensor) -> None:
        super()._take_rows(index)
        if self._bounds is not None:
            self._bounds = self._bounds.rows(index)

    def decode(self, role: Role, last: int | None = None) -> Tensor:
        """All that is held of K or V, or the `last` tokens, in a plain tensor, `[batch, heads, tokens, head_dim]`.

        Raises
        ------
        OSError
            If blocks cannot be read back.
        """
        with self.lease.lock:
            return super().decode(role, last)

    def reading_failed(self, error: BaseException) -> None:
        """Take back the step in which attention could not read what it needs."""
        undo = self.undo_step() if self.undo_step is not None else None
        if undo is not None:
            undo(error)

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        softcap: float,
        head_sinks: Tensor | None,
        last: int,
    ) -> Tensor | None:
        """Attention over the `last` tokens, the tail and more, or `None` where they have to be decoded.

        Raises
        ------
        OSError
            If blocks cannot be read back.
        """
        with self.lease.lock:
            self.last_selected = None
            self._note_padding(mask)
            *common, tail = (Exact(*states) for states in self.buffer.parts())
            if not self._entry_tokens or not can_attend(query, tail, mask, causal, head_sinks):
                return None
            hidden = self.sealed_tokens + self.buffer.length - last
            self.last_selected = self._selected(query, mask)
            pieces = self._pieces(hidden, self.last_selected)
            self._count(pieces)
            arguments = last, mask, causal, scale, softcap, head_sinks
            output = None
            if len(pieces) == 1 and pieces[0].is_resident and pieces[0].is_uniform and not common:
                output = attend_to_part(query, self._part(pieces[0], tail, hidden, mask), *arguments)
            if output is None:
                shared = (Part(states, None, None, self._tail_positions(states, hidden)) for states in common)
                parts = itertools.chain(shared, self._parts(pieces, tail, hidden, mask))
                output = attend_in_parts(query, parts, *arguments)
            self.fused_calls += 1
            return output

    def _selected(self, query: Tensor, mask: Tensor | None) -> list[list[int]] | None:
        """Of each row, the entries to read; `None`: all."""
        active = self.lease.active_blocks
        if self._bounds is None or active is None or active >= len(self._entry_tokens):
            return None
        if query.shape[2] > MOST_QUERIES:  # a prompt, whose queries would have to agree on a few blocks
            return None
        return self._bounds.select(query, mask, self._entry_tokens, active)

    def _pieces(self, hidden: int, columns: list[list[int]] | None) -> list[_Piece]:
        """How the entries are read: first what is on the device, then what has to be staged."""
        pool = self._slots()
        if columns is not None:
            return self._planned(hidden, columns)
        key = pool.version, hidden
        if self._plan is None or self._plan[0] != key:
            ends = itertools.accumulate(self._entry_tokens)
            visible = [column for column, end in enumerate(ends) if end > hidden]
            self._plan = key, self._planned(hidden, [visible] * len(self._table))
        return self._plan[1]

    def _planned(self, hidden: int, columns: list[list[int]]) -> list[_Piece]:
        pool = self._slots()
        here: list[list[tuple[int, int]]] = []
        missing: dict[int, None] = {}  # in the order in which they are read
        for row, wanted in zip(self._table, columns, strict=True):
            here.append([(column, slot) for column in wanted if (slot := pool.slot(row[column])) is not None])
        for column in sorted(set(itertools.chain.from_iterable(columns))):
            for row, wanted in zip(self._table, columns, strict=True):
                if pool.slot(row[column]) is None and column in wanted:
                    missing[row[column]] = None
        pieces = [self._piece((), here, hidden)] if any(here) or not missing else []
        for blocks in in_chunks(list(missing), pool.staging.slots if missing else 1):
            slots = {block: slot for slot, block in enumerate(blocks)}
            staged = [
                [(column, slots[row[column]]) for column in wanted if row[column] in slots]
                for row, wanted in zip(self._table, columns, strict=True)
            ]
            pieces.append(self._piece(blocks, staged, hidden))
        return pieces

    def _piece(self, blocks: tuple[int, ...], entries: list[list[tuple[int, int]]], hidden: int) -> _Piece:
        """A piece of `entries`, of each row the columns and slots."""
        ends = list(itertools.accumulate(self._entry_tokens))
        longest = max(map(len, entries))
        table, starts = [], []
        for row in entries:
            # Of the first entry a part may have left the window; the entries of a piece follow each other directly.
            first = min(ends[row[0][0]] - self._entry_tokens[row[0][0]] - hidden, 0) if row else 0
            own = [first, *itertools.accumulate((self._entry_tokens[column] for column, _ in row), initial=first)][1:]
            table.append([slot for _, slot in row] + [0] * (longest - len(row)))
            starts.append(own + [own[-1]] * (longest - len(row)))
        device = self._slots().device
        with torch.inference_mode(False):
            slots = torch.tensor(table, dtype=torch.int32).to(device)
            ends_of = torch.tensor(starts, dtype=torch.int32).to(device)
        return _Piece(blocks, [[column for column, _ in row] for row in entries], slots, ends_of)

    def _count(self, pieces: Sequence[_Piece]) -> None:
        resident = [block for piece in pieces if piece.is_resident for block in self._blocks_of(piece)]
        self._slots().count(resident, sum(len(piece.blocks) for piece in pieces))

    def _blocks_of(self, piece: _Piece) -> dict[int, None]:
        """The blocks of a piece that is on the device, in the order of its entries."""
        return dict.fromkeys(
            row[column] for row, columns in zip(self._table, piece.columns, strict=True) for column in columns
        )

    def _parts(self, pieces: list[_Piece], tail: Exact, hidden: int, mask: Tensor | None) -> Iterator[Part]:
        """The parts of an attention call, one after the other; what comes later is read while one is computed."""
        staged = [piece for piece in pieces if not piece.is_resident]
        tail_is_left = True
        for piece in pieces:
            if piece.is_resident:
                yield self._part(piece, tail if piece.is_uniform else None, hidden, mask)
                tail_is_left = tail_is_left and not piece.is_uniform
        if tail_is_left:
            yield Part(tail, None, None, self._tail_positions(tail, hidden, self.buffer.common_tokens))
        if staged:
            yield from self._staged_parts(staged, hidden, mask)

    def _staged_parts(self, pieces: list[_Piece], hidden: int, mask: Tensor | None) -> Iterator[Part]:
        pool = self._slots()
        staging, left = pool.staging, [piece.blocks for piece in pieces]
        with staging.lock:
            for piece in pieces:
                buffer = pool.staged(piece.blocks)
                left.remove(piece.blocks)
                try:
                    staging.begin(pool, left)
                    yield self._part(piece, None, hidden, mask, buffer)
                    pool.admit(piece.blocks, buffer)
                finally:
                    staging.give_back(buffer)
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Begin to read what the layer after this one will stage, while this one's step goes on."""
        following = self.lease.following(self)
        if isinstance(following, OffloadedLayer) and (upcoming := following.upcoming()):
            pool = following._slots()
            with pool.staging.lock:
                pool.staging.begin(pool, upcoming)

    def upcoming(self) -> list[tuple[int, ...]]:
        """What the next attention call will stage, as far as is known."""
        if self._plan is None or self._plan[0][0] != self._slots().version:
            return []
        return [piece.blocks for piece in self._plan[1] if piece.blocks]

    def _part(
        self, piece: _Piece, tail: Exact | None, hidden: int, mask: Tensor | None, buffer: Buffer | None = None
    ) -> Part:
        pool = self._slots()
        held_by = pool if buffer is None else buffer
        if id(held_by) not in piece.read_with:
            arenas = held_by.keys, held_by.values
            codecs = pool.key_codec, pool.value_codec
            piece.read_with[id(held_by)] = Sealed(*codecs, *arenas, piece.table, piece.starts)
        positions = None
        if mask is not None or self.first_tokens.kept is not None:
            positions = self._positions(piece, hidden)
        sinks = self._sinks_of(piece, positions) if positions is not None else None
        if positions is not None and tail is not None:
            positions = torch.cat([positions, self._tail_positions(tail, hidden, self.buffer.common_tokens)])
        return Part(tail, piece.read_with[id(held_by)], sinks, positions)

    def _tail_positions(self, tail: Exact, hidden: int, before: int = 0) -> Tensor:
        begin = self.sealed_tokens - hidden + before
        return torch.arange(begin, begin + tail.keys.shape[2], device=tail.keys.device)

    def _positions(self, piece: _Piece, hidden: int) -> Tensor:
        """Which visible tokens a piece has, `[tokens]` or `[batch, tokens]`; rows that have fewer end anyhow."""
        if piece.positions is None:
            ends = list(itertools.accumulate(self._entry_tokens))
            rows = [
                [
                    position
                    for column in columns
                    for position in range(max(ends[column] - self._entry_tokens[column], hidden), ends[column])
                ]
                for columns in (piece.columns[:1] if piece.is_uniform else piece.columns)
            ]
            longest = max(map(len, rows))
            padded = torch.tensor([row + [hidden] * (longest - len(row)) for row in rows], dtype=torch.int64) - hidden
            piece.positions = (padded[0] if piece.is_uniform else padded).to(piece.table.device)
        return piece.positions

    def _sinks_of(self, piece: _Piece, positions: Tensor) -> Sinks | None:
        """The sinks at the positions that they have in the piece."""
        kept = self.first_tokens.kept
        if kept is None:
            return None
        if piece.sinks is None or piece.sinks.keys is not kept.keys:
            before = kept.positions.long()
            batch = before.shape[0]
            places = torch.arange(positions.shape[-1], device=positions.device).expand(batch, -1)
            where = torch.full((batch, self.sealed_tokens), -1, device=positions.device)
            where.scatter_(1, positions.expand(batch, -1), places)
            where = where if piece.is_uniform else self._without_padding(where, piece)
            inside = (before >= 0) & (before < self.sealed_tokens)
            moved = where.gather(1, before.clamp(0, self.sealed_tokens - 1))
            with torch.inference_mode(False):
                piece.sinks = Sinks(kept.keys, kept.values, torch.where(inside, moved, -1).int())
        return piece.sinks

    def _without_padding(self, where: Tensor, piece: _Piece) -> Tensor:
        """`where` without what the rows' padding of positions wrote at 0."""
        has_first = torch.tensor([[0 in columns] for columns in piece.columns], device=where.device)
        where[:, :1] = torch.where(has_first, 0, -1)
        return where

    def bytes_beside_blocks(self, device: torch.device) -> int:
        """Bytes on `device` of what is not in blocks; while a prompt is sealed, of what will be left of its tail."""
        if self.device != device:
            return 0
        tail = 0
        if self._buffer.allocated:
            per_token = int(sum(_bytes([half[:, :, :1]]) for half in self._buffer.tensors))
            tail = per_token * (self._tail_after_sealing if self._is_sealing else self._buffer.capacity)
        return tail + self._buffer.common_bytes + _bytes(self._notes())

    @property
    def _tail_after_sealing(self) -> int:
        return min(self._buffer.capacity, self.residual + 2 * self.block_size)

    def tensors_beside_blocks(self) -> list[Tensor]:
        """What is always on the device while the layer is: the tail, sinks and bounds."""
        return [*self._buffer.held_tensors, *self._notes()]

    def _notes(self) -> list[Tensor]:
        notes = self.first_tokens.tensors
        return notes if self._bounds is None else notes + self._bounds.tensors

    def held_tensors(self) -> list[Tensor]:
        """Every tensor that the layer holds, on the device and beside it."""
        pool = self.tiers
        return self.tensors_beside_blocks() + ([*pool.tensors, *pool.host_tensors] if pool is not None else [])

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that others may hold too, on all tiers."""
        pool = self.tiers
        blocks = pool.shared(self._held_blocks()) * pool.bytes_per_slot if pool is not None else 0
        return self._buffer.shared_bytes + blocks

    def used_by_tier(self) -> dict[str, int]:
        """Bytes of what is valid, by where it is: a device, `"cpu"` or `"disk"`; what is on two counts as the first."""
        if not self.is_initialized:
            return {}
        pool, device = self.tiers, str(self.device)
        found = pool.used_by_tier(self._held_blocks()) if pool is not None else {}
        found[device] = found.get(device, 0) + _bytes(self._notes())
        tail, tier = (self._buffer.valid_bytes, device) if self._parked is None else self._parked.used
        found[tier] = found.get(tier, 0) + tail
        return found

    @property
    def used_bytes(self) -> int:
        """Bytes of what is valid, on all tiers."""
        return sum(self.used_by_tier().values())

    def move_out(self) -> None:
        """Move blocks and tail below, and free what they took on the device. An `OSError` leaves both valid."""
        with self.lease.lock:
            pool = self.tiers
            if pool is not None:
                pool.move_out()
                self._table_changed()
            if self._parked is None and self._buffer.allocated and not self._buffer.shared:
                self._parked = ParkedTail(self._buffer, self.lease.file)

    def come_back(self) -> None:
        """Bring the tail back to the device, and as many blocks as there is room for."""
        with self.lease.lock:
            if self.is_initialized and self.buffer.allocated:
                self._slots().come_back()

    def _bring_tail_back(self) -> None:
        with self.lease.lock:
            if self._parked is not None:
                self._parked.bring_back(self._buffer)
                self._parked = None

    def blocks_due(self, new_tokens: int) -> tuple[int, int]:
        """How many blocks may have to be written to disk in a step of `new_tokens`, and the bytes of each."""
        pool = self.tiers
        if pool is None or pool.device != HOST or not self.is_initialized:
            return 0, 0
        tail = self.held_tokens - self.sealed_tokens + new_tokens
        due = self._signatures[0][0] * max((tail - self.residual) // self.block_size, 0)
        return (pool.outside(due) if due else 0), pool.bytes_per_slot

    def fork(self) -> OffloadedLayer:
        """A layer with the same tokens in the same part of the budget."""
        with self.lease.lock:
            self._bring_tail_back()
            twin = super().fork()
            assert isinstance(twin, OffloadedLayer)
            twin.undo_step, twin._past_counts = None, [0, 0, 0, 0]
            twin.lease.register(twin)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedLayer:
        with self.lease.lock:
            self._bring_tail_back()  # a copy has its tail on the device
            twin = super().__deepcopy__(memo)
            assert isinstance(twin, OffloadedLayer)
            twin.options = copy.deepcopy(self.options, memo)
            assert twin.options.lease is not None
            twin.lease, twin.undo_step = twin.options.lease, None
            twin._bounds = copy.deepcopy(self._bounds, memo)
            twin.lease.register(twin)
        return twin


class OffloadedSlidingLayer(SlidingBlockLayer, OffloadedLayer):
    """A :class:`SlidingBlockLayer` whose blocks share a budget of the device with other layers and caches."""


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
