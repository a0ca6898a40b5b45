"""Full attention over sealed blocks, encoded once and read in place, and an exact tail."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention import interface
from ..attention.dispatch import attend_in_place, can_attend
from ..attention.lazy import ReplacedError, Role, stand_in
from ..attention.op import MOST_QUERIES
from ..attention.parts import Part, attend_in_parts
from ..attention.reference import Exact, Sealed
from ..blocks.codecs import BlockCodec
from ..blocks.pool import BlockPool
from ..blocks.transfer import Aside, Encoded
from ..config import UNENCODED, CacheOptions, KVQuantizationConfig
from .base import BufferedLayer, removed_tokens
from .buffer import KVBuffer, row_signature
from .first_tokens import FirstTokens
from .state import LayerState
from .tail import TailBuffer

logger = logging.getLogger(__name__)

# So many blocks are left to be sealed only by a prompt; they are sealed as soon as another layer is updated.
PROMPT_BLOCKS = 4
ROLES: tuple[Role, ...] = ("key", "value")


class BlockLayer(BufferedLayer):
    """Every token of the sequence: sealed blocks of each row, then a tail in full precision.

    ::

        tokens ->     0 ..... 127 | 128 ... 255 | 256 ... 383 | 384 ....... 600
        each row     [ sealed     |  sealed     |  sealed     |  tail ......... ]
                       encoded, immutable, reference-counted     exact: residual window and one open block

    A block is sealed at the start of an update that finds the residual window and a whole block in the tail. So the
    step that brought tokens reads them exact, and drafts that were rejected have been cropped off by then. A block is
    never decoded and encoded again. All rows have equally many entries of equal lengths, as rows advance together; a
    crop into a sealed block shortens its entry.

    Parameters
    ----------
    options : CacheOptions
    quantization : KVQuantizationConfig
        How blocks are encoded.
    """

    buffer: TailBuffer
    buffer_class = TailBuffer

    def __init__(self, options: CacheOptions, quantization: KVQuantizationConfig) -> None:
        self.block_size = options.block_size
        self.residual = quantization.residual_window(self.block_size)
        super().__init__(options, self.residual + self.block_size)
        self.quantization = quantization
        self.version = 0  # of what stand-ins read; they have no data of their own
        self.seals = self.fused_calls = self.materialised_calls = 0
        self._damaged: int | Tensor = 0
        self._past_growths = 0  # of arenas that were made for other shapes
        self._ahead: tuple[tuple[int, ...], Aside] | None = None
        self._pool: BlockPool | None = None
        self._table: list[list[int]] = []
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._table = []  # of each row, what the pool calls the blocks of its entries
        self._entry_tokens: list[int] = []  # of each entry, its valid tokens
        self.sealed_tokens = 0  # their sum: tokens of each row that are in sealed blocks
        self.first_tokens = FirstTokens(self.sink_tokens)
        self._table_changed()

    def _table_changed(self) -> None:
        self._read_with: Sealed | None = None  # table and starts on the device, made when needed

    @property
    def growth_limit(self) -> int | None:
        """None: the tail is short, and the blocks have arenas of their own."""
        return None

    @property
    def sink_tokens(self) -> int:
        """First real tokens of each row that are kept exact too."""
        return self.quantization.sink_tokens

    @property
    def most_entries(self) -> int | None:
        """Blocks of a row at which the arenas stop growing, unless more are needed; `None`: they never do."""
        return None

    @property
    def held_tokens(self) -> int:
        """Tokens of each row that are held: as many as `keys` has."""
        return self.sealed_tokens + self.buffer.length

    @property
    def is_empty(self) -> bool:
        """Whether neither blocks nor tail hold a token."""
        return not self._entry_tokens and super().is_empty

    def check_update(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise if K and V cannot be appended to what is held, pass the ceiling, or cannot be encoded."""
        super().check_update(key_states, value_states)
        if self.is_empty:
            self._codecs(key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tail, and arenas for `initial_capacity` tokens of each row beside it."""
        super().lazy_initialization(key_states, value_states)
        self._slots()

    def _take_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        if (row_signature(key_states), row_signature(value_states)) != self._signatures and self._pool is not None:
            self._past_growths += self._pool.growths
            self._pool = None
        super()._take_geometry(key_states, value_states)
        self._forget_blocks()

    def _slots(self) -> BlockPool:
        """The pool, made for the shapes of the tail where there is none."""
        if self._pool is None:
            keys, values = self.buffer.tensors
            tokens = max(self.options.first_capacity - self.residual, self.block_size)
            count = keys.shape[0] * -(-tokens // self.block_size)
            count = min(count, self._slot_limit(keys.shape[0]) or count)
            codecs = self._codecs(keys, values)
            self._pool = BlockPool(*codecs, keys.shape[1], keys.device, count, self.options.growth_factor)
            self._pool.readers.add(self)
        return self._pool

    def _slot_limit(self, batch: int) -> int | None:
        return None if self.most_entries is None else batch * self.most_entries

    def _lent(self, half: int) -> Tensor | None:
        return self.decode("key" if half == 0 else "value") if self.is_initialized else None

    def lent(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        """All K and V that are held, or of the `last` tokens, decoded, `[batch, heads, tokens, head_dim]`."""
        tokens = self.held_tokens if last is None else min(last, self.held_tokens)
        return self.decode("key", tokens), self.decode("value", tokens)

    def copied(self) -> tuple[Tensor | None, Tensor | None]:
        """All K and V, decoded, in tensors of their own; `None` if there are none."""
        return (None, None) if self.is_empty else (self.decode("key").clone(), self.decode("value").clone())

    def _half(self, half: int) -> Tensor | None:
        return self.decode("key" if half == 0 else "value") if self._entry_tokens else super()._half(half)

    def _assign(self, keys: Tensor | None, values: Tensor | None) -> None:
        self.version += 1
        self._release_rows(self._table)
        self._forget_blocks()
        super()._assign(keys, values)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Seal what is due, append to the tail; return stand-ins for all K and V, or the tail if that is all.

        Of a prompt stand-ins are returned in any case: they see the mask, which says where padded rows begin.
        """
        self.seal()
        self.version += 1
        self.buffer.append(key_states, value_states)
        if not self._entry_tokens and self.first_tokens.is_known and key_states.shape[2] == 1:
            return self.buffer.view()
        return self._stand_ins(self.held_tokens, key_states.shape[2])

    def _stand_ins(self, tokens: int, new_tokens: int) -> tuple[Tensor, Tensor]:
        """What stands for K and V of the last `tokens`, after `new_tokens` came."""
        reading, (keys, values) = _Reading(self, tokens, new_tokens), self.buffer.tensors
        if self.options.attention == interface.FLEX:
            return reading.decode("key"), reading.decode("value")
        return (
            stand_in(reading, "key", keys.dtype, keys.device),
            stand_in(reading, "value", values.dtype, values.device),
        )

    @property
    def due_blocks(self) -> int:
        """Whole blocks that the tail holds beside the residual window."""
        return max((self.buffer.length - self.residual) // self.block_size, 0)

    @property
    def _due_at_once(self) -> int:
        """How many of them are encoded in one go: those that all rows have in common are before the others."""
        return min(self.due_blocks, self.buffer.common_tokens // self.block_size) or self.due_blocks

    def seal(self) -> None:
        """Encode the blocks that are due."""
        while (count := self._due_at_once) > 0:
            self._seal_first(count)

    def _seal_first(self, count: int) -> None:
        """Encode the first `count` blocks of the tail; one that all rows have in common once."""
        pool, tokens = self._slots(), count * self.block_size
        if torch.is_grad_enabled() and self.buffer.tensors[0].grad_fn is not None:
            _say_that_sealing_ends_gradients()
        batch = self._signatures[0][0]
        keys, values = (states.detach().expand(batch, -1, -1, -1) for states in self.buffer.first(tokens))
        self.first_tokens.keep(keys, values, self.sealed_tokens)
        encoded_keys, encoded_values, damaged = self._encoded(count)
        slots = pool.store(encoded_keys, encoded_values, self._slot_limit(batch))
        self.seals += len(slots)
        if len(slots) < batch * count:  # all rows hold them
            pool.share(slots * (batch - 1))
            slots *= batch
        self._table = [
            [*row, *slots[index * count : (index + 1) * count]] for index, row in enumerate(self._rows(batch))
        ]
        self._entry_tokens += [self.block_size] * count
        self.sealed_tokens += tokens
        self._table_changed()
        self._damaged = self._damaged + damaged["tokens"]
        self.buffer.keep_last(self.buffer.length - tokens)
        self.buffer.shrink_to(self.residual + self.block_size)

    @property
    def damaged_tokens(self) -> int:
        """Tokens sealed with a NaN or an infinity, of keys and of values; counted on the device until somebody asks."""
        return int(self._damaged)

    def encode_ahead(self) -> None:
        """Encode what the next update will seal, beside what the device computes now, if anything is due.

        Nothing changes: should tokens be cropped, or rows reordered, before that update, it encodes anew.
        """
        count = self._due_at_once
        if count > 0 and self.buffer.allocated:
            self._slots()
            device = self.buffer.tensors[0].device
            self._ahead = self._state(), Aside(device, lambda: self._encode(count))

    def _state(self) -> tuple[int, ...]:
        """Equal as long as the tail has the same tokens in the same place."""
        return self.version, self.buffer.common_tokens, self.buffer.start, self.buffer.end

    def _encoded(self, count: int) -> list[Encoded]:
        """The first `count` blocks of the tail: keys, values, and how many tokens are damaged."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._state() and count == self._due_at_once:
            return ahead[1].result()
        return self._encode(count)

    def _encode(self, count: int) -> list[Encoded]:
        pool = self._slots()
        keys, values = (
            _as_blocks(states.detach(), self.block_size) for states in self.buffer.first(count * self.block_size)
        )
        encoded_keys, damaged_keys = pool.key_codec.encode(keys)
        encoded_values, damaged_values = pool.value_codec.encode(values)
        return [encoded_keys, encoded_values, {"tokens": damaged_keys + damaged_values}]

    def get_seq_length(self) -> int:
        """Tokens cached."""
        return self.held_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens: of the tail, then by shortening and dropping entries."""
        removed = removed_tokens(tokens_to_remove)
        from_tail = min(removed, self.buffer.length)
        self.version += 1
        self.buffer.remove_last(from_tail)
        left = max(self.sealed_tokens - (removed - from_tail), 0)
        if left < self.sealed_tokens:
            self._shorten_to(left)

    def reset(self) -> None:
        """Forget all tokens; the memory of tail and arenas is kept for the next prompt."""
        self.version += 1
        self._release_rows(self._table)
        self._forget_blocks()
        super().reset()

    def decode(self, role: Role, last: int | None = None) -> Tensor:
        """All that is held of K or V, or the `last` tokens, in a plain tensor, `[batch, heads, tokens, head_dim]`.

        A view of the tail if that is all.
        """
        index = 0 if role == "key" else 1
        tail = self.buffer.halves()[index]
        assert tail is not None
        last = self.held_tokens if last is None else last
        if not self._entry_tokens or last <= tail.shape[2]:
            return tail[:, :, max(tail.shape[2] - last, 0) :]
        assert self._pool is not None
        codec = self._pool.key_codec if role == "key" else self._pool.value_codec
        batch, heads, _, head_dim = tail.shape
        states = codec.decode(self._pool.gather(role, [slot for row in self._table for slot in row]))
        entries = len(self._entry_tokens)
        states = states.view(batch, entries, heads, self.block_size, head_dim).transpose(1, 2).flatten(2, 3)
        if self.sealed_tokens < states.shape[2]:
            states = states[:, :, self._valid_positions(tail.device)]
        self.first_tokens.put(states, role)
        before = self.sealed_tokens + tail.shape[2] - last
        return torch.cat([states[:, :, before:], tail], dim=2)

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
        """Attention over the `last` tokens, the tail and more, in place, or `None` where they have to be decoded."""
        self._note_padding(mask)
        if not self._entry_tokens:
            return None  # nothing is encoded yet: the tail is a plain tensor
        hidden = self.sealed_tokens + self.buffer.length - last
        sealed, arguments = self._sealed(hidden), (last, mask, causal, scale, softcap, head_sinks)
        *common, tail = (Exact(*states) for states in self.buffer.parts())
        if not common:
            output = attend_in_place(query, tail, sealed, self.first_tokens.kept, *arguments)
        elif query.shape[2] <= MOST_QUERIES and can_attend(query, tail, mask, causal, head_sinks):
            begin = self.sealed_tokens - hidden
            positions = torch.arange(last, device=query.device).tensor_split([begin, begin + common[0].keys.shape[2]])
            parts = (
                Part(common[0], None, None, positions[1]),
                Part(tail, sealed, self.first_tokens.kept, torch.cat([positions[0], positions[2]])),
            )
            output = attend_in_parts(query, parts, *arguments)
        else:
            output = None
        if output is not None:
            self.fused_calls += 1
        return output

    def _note_padding(self, mask: Tensor | None) -> None:
        if not self.first_tokens.is_known:
            batch, device = self._signatures[0][0], self.buffer.tensors[0].device
            self.first_tokens.note(mask, batch, device, self.sealed_tokens)

    def reading_failed(self, error: BaseException) -> None:
        """Attention could not read what it needs; called before the error goes on."""

    def held_tensors(self) -> list[Tensor]:
        """Every tensor that the layer holds."""
        return self.tensors_beside_blocks() + (self._pool.tensors if self._pool is not None else [])

    def tensors_beside_blocks(self) -> list[Tensor]:
        """What is held and not in blocks: the tail and the sinks."""
        return [*super().held_tensors(), *self.first_tokens.tensors]

    @property
    def growths(self) -> int:
        """Times that the tail or the arenas grew."""
        return super().growths + self._arena_growths

    @property
    def _arena_growths(self) -> int:
        return self._past_growths + (self._pool.growths if self._pool is not None else 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of what is valid: tail, sinks, and a block once however many rows hold it."""
        used = super().used_bytes
        if self._pool is not None:
            used += len(self._held_blocks()) * self._pool.bytes_per_slot
        return used + self.first_tokens.used_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one sealed block of one row; 0 before the first is sealed."""
        return self._pool.bytes_per_slot if self._pool is not None else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that others may hold too: of the tail until it is written to, and of blocks."""
        return self.buffer.shared_bytes + (
            self._pool.shared(self._held_blocks()) * self._pool.bytes_per_slot if self._pool else 0
        )

    def _held_blocks(self) -> Counter[int]:
        """How often each block is held by a row."""
        return Counter(itertools.chain.from_iterable(self._table))

    @property
    def full_precision_bytes(self) -> int:
        """Bytes that the same tokens take without encoding."""
        if not self.is_initialized:
            return 0
        per_token = (batch * heads * head_dim * dtype.itemsize for batch, heads, head_dim, dtype, _ in self._signatures)
        return self.held_tokens * int(sum(per_token))

    @property
    def saved_as(self) -> str:
        """The kind of layer that files say this one is."""
        return "ContiguousLayer" if self.quantization is UNENCODED else "BlockLayer"

    def state(self) -> LayerState:
        """All that is held, to be saved: blocks as they are encoded, each once however many rows hold it.

        Blocks that are not encoded go out as the tokens that they are.
        """
        if self.quantization is UNENCODED:
            keys, values = self.copied()
            tensors = {} if keys is None or values is None else {"keys": keys, "values": values}
            return LayerState(self.saved_as, tensors, {}, self.get_seq_length())
        state = super().state()
        if not state.tensors:
            return state
        slots = list(dict.fromkeys(slot for row in self._table for slot in row))
        saved = {slot: index for index, slot in enumerate(slots)}
        state.numbers.update(
            table=[[saved[slot] for slot in row] for row in self._table],
            entry_tokens=list(self._entry_tokens),
        )
        if slots and self._pool is not None:
            for role in ROLES:
                encoded = self._pool.gather(role, slots)
                state.tensors.update({f"{role}.{name}": tensor for name, tensor in encoded.items()})
        self.first_tokens.add_to(state)
        return state

    def check_state(self, state: LayerState) -> None:
        """Raise if this layer, which is empty, cannot take `state`."""
        super().check_state(state)
        if not state.tensors:
            return
        keys, values = state.pair()
        if self.quantization is UNENCODED:
            self.check_room(keys.shape[2])
            return
        batch, heads = keys.shape[:2]
        entry_tokens, count = _checked_table(state, batch, self.block_size)
        self.check_room(sum(entry_tokens) + keys.shape[2])
        self.first_tokens.check_state(state)
        if count:
            for role, codec in zip(ROLES, self._codecs(keys, values), strict=True):
                for name, (shape, dtype) in codec.layout(heads).items():
                    state.check_tensor(f"{role}.{name}", (count, *shape), dtype)

    def take_state(self, state: LayerState, device: torch.device) -> None:
        """Hold what `state` has, copied to `device`; blocks are neither decoded nor encoded."""
        super().take_state(state, device)
        if not state.tensors:
            return
        self.version += 1
        if self.quantization is UNENCODED:
            self.seal()
            return
        self.first_tokens.take_state(state, device)
        mentions = Counter(index for row in state.numbers["table"] for index in row)
        if mentions:
            pool = self._slots()
            heads = state.tensor("keys").shape[1]
            key_codes, value_codes = (
                {name: state.tensor(f"{role}.{name}").to(device) for name in codec.layout(heads)}
                for role, codec in zip(ROLES, (pool.key_codec, pool.value_codec), strict=True)
            )
            slots = pool.store(key_codes, value_codes, self._slot_limit(len(state.numbers["table"])))
            pool.share(slots[index] for index, times in mentions.items() for _ in range(times - 1))
            self._table = [[slots[index] for index in row] for row in state.numbers["table"]]
            self._entry_tokens = list(state.numbers["entry_tokens"])
            self.sealed_tokens = sum(self._entry_tokens)

    def _codecs(self, key_states: Tensor, value_states: Tensor) -> tuple[BlockCodec, BlockCodec]:
        """The codecs for K and V like these; raises if they cannot be encoded as asked."""
        key_dim, value_dim = key_states.shape[3], value_states.shape[3]
        key_spec, value_spec = self.quantization.specs(key_dim, value_dim, self.block_size)
        return (
            BlockCodec(key_spec, "key", key_dim, self.block_size, key_states.dtype),
            BlockCodec(value_spec, "value", value_dim, self.block_size, value_states.dtype),
        )

    def _sealed(self, hidden: int) -> Sealed:
        """What kernels read, with the table on the device; the first `hidden` tokens are not visible."""
        assert self._pool is not None
        sealed = self._read_with
        if sealed is None:
            device = self.buffer.tensors[0].device
            with torch.inference_mode(False):
                starts = torch.tensor([[0, *itertools.accumulate(self._entry_tokens)]], dtype=torch.int32)
                starts = starts.expand(len(self._table), -1).contiguous().to(device)
                with self._pool.lock:  # another fork's thread may be moving blocks
                    pool = self._pool
                    slots = [[pool.slot(block) for block in row] for row in self._table]
                    arenas = pool.keys, pool.values
                table = torch.tensor(slots, dtype=torch.int32).to(device)
                sealed = Sealed(pool.key_codec, pool.value_codec, *arenas, table, starts)
            self._read_with = sealed
        return sealed if hidden == 0 else replace(sealed, starts=sealed.starts - hidden)

    def _valid_positions(self, device: torch.device) -> Tensor:
        """Boolean over the tokens of all entries: those that a crop left."""
        tokens = torch.tensor(self._entry_tokens, device=device)
        return (torch.arange(self.block_size, device=device) < tokens[:, None]).flatten()

    def _rows(self, batch: int) -> list[list[int]]:
        return self._table or [[] for _ in range(batch)]

    def _shorten_to(self, tokens: int) -> None:
        """Keep the first `tokens` sealed tokens."""
        kept: list[int] = []
        for valid in self._entry_tokens:
            if tokens > 0:
                kept.append(min(valid, tokens))
            tokens -= valid
        self._keep_entries(0, kept)

    def _keep_entries(self, first: int, tokens: list[int]) -> None:
        """Keep the entries from `first` on, with so many tokens each, as many as `tokens` has; release the others."""
        end = first + len(tokens)
        self._release_rows([[*row[:first], *row[end:]] for row in self._table])
        self._table = [row[first:end] for row in self._table] if tokens else []
        self._entry_tokens = tokens
        self.sealed_tokens = sum(tokens)
        if not tokens:
            self.first_tokens.forget()
        self._table_changed()

    def _release_rows(self, rows: list[list[int]]) -> None:
        if self._pool is not None:
            self._pool.release([slot for row in rows for slot in row])

    def take_over(self, buffer: KVBuffer) -> None:
        """Hold the tokens of a contiguous buffer, which nobody uses any more, without copying them.

        What makes whole blocks is read where it lies, by strides, where the kernels can; the rest is the tail. On other
        devices they are copied.
        """
        tensors, tokens = buffer.tensors, buffer.length - buffer.length % self.block_size
        self._take_geometry(*tensors)
        count = tokens // self.block_size
        by_strides = all(half.is_contiguous() and half.device.type == "cpu" for half in tensors)
        if count > 0 and by_strides:
            codecs = self._codecs(*tensors)
            self._pool, self._table = BlockPool.over(codecs, tensors, buffer.start, count, self.options.growth_factor)
            self._pool.readers.add(self)
            self._entry_tokens, self.sealed_tokens = [self.block_size] * count, tokens
            keys, values = (half[:, :, buffer.start + tokens : buffer.end] for half in tensors)
            self.buffer.adopt(keys, values)
        else:
            keys, values = buffer.view()
            self.buffer.allocate(keys, values)
            self.buffer.append(keys, values)
            self.seal()

    def fork(self) -> BlockLayer:
        """A layer with the same tokens, and counters of its own: blocks are held once more, the tail until a write."""
        twin = copy.copy(self)
        twin._table, twin._ahead = [], None
        twin.buffer, twin.first_tokens = self.buffer.fork(), copy.copy(self.first_tokens)
        if self._pool is not None:
            self._pool.share(itertools.chain.from_iterable(self._table))
            self._pool.readers.add(twin)
        twin._table, twin._entry_tokens = [list(row) for row in self._table], list(self._entry_tokens)
        twin.seals = twin.fused_calls = twin.materialised_calls = twin._damaged = 0
        twin._table_changed()
        return twin

    def free(self) -> None:
        """Forget all tokens, and give back their memory."""
        super().free()
        self._pool = None

    def forget_places(self) -> None:
        """Blocks have moved: let go of the arenas that they were in."""
        self._table_changed()

    def __del__(self) -> None:
        pool, table = getattr(self, "_pool", None), getattr(self, "_table", None)
        if pool is not None and table:
            pool.drop([block for row in table for block in row])

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockLayer:
        twin = copy.copy(self)
        twin._table = []
        memo[id(self)] = twin
        for name in ("buffer", "_pool", "_table", "_entry_tokens", "first_tokens"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        if twin._pool is not None:
            twin._pool.readers.add(twin)
        twin._ahead = None
        twin._table_changed()
        return twin

    def _take_rows(self, index: Tensor) -> None:
        """Reorder, repeat or select rows: tables and references, and the tail."""
        self.version += 1
        rows = index.tolist()
        super()._take_rows(index)
        if self._table:
            assert self._pool is not None
            taken = [list(self._table[row]) for row in rows]
            self._pool.share([slot for row in taken for slot in row])
            self._release_rows(self._table)
            self._table = taken
            self._table_changed()
        self.first_tokens.take_rows(index)


class _Reading:
    """What the stand-ins of one update read: the last `tokens` of a layer, its tail among them.

    Compilers leave it, and updates, to Python: traced, tables and lengths would be compiled anew at every sealing.
    """

    def __init__(self, layer: BlockLayer, tokens: int, new_tokens: int) -> None:
        self.layer, self.version = layer, layer.version
        self.tokens, self.new_tokens = tokens, new_tokens
        self.follows_scores = layer.options.attention == interface.NAME

    def shape(self, role: Role) -> tuple[int, int, int, int]:
        tail = self.layer.buffer.tensors[0 if role == "key" else 1]
        return tail.shape[0], tail.shape[1], self.tokens, tail.shape[3]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def decode(self, role: Role) -> Tensor:
        self._check()
        try:
            states = self.layer.decode(role, self.tokens)
        except Exception as error:
            self.layer.reading_failed(error)
            raise
        if role == "key" and self.layer.sealed_tokens:
            self.layer.materialised_calls += 1
            if self.new_tokens == 1 and not torch.compiler.is_compiling():
                _say_that_decoding_decodes()
        return states

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        softcap: float = 0.0,
        head_sinks: Tensor | None = None,
    ) -> Tensor | None:
        self._check()
        try:
            return self.layer.attend(query, mask, causal, scale, softcap, head_sinks, self.tokens)
        except Exception as error:
            self.layer.reading_failed(error)
            raise

    def _check(self) -> None:
        if self.version != self.layer.version:
            raise ReplacedError("these keys and values were replaced: what update returns holds until the next call")


@functools.cache
def _say_that_decoding_decodes() -> None:
    logger.warning(
        "this model's attention does not read encoded keys and values in place, so that each step decodes them, layer "
        "by layer: it is not scaled_dot_product_attention, computes gradients, or transforms what it cached. Models "
        "without sdpa attention can be loaded with attn_implementation='memos'"
    )


@functools.cache
def _say_that_sealing_ends_gradients() -> None:
    logger.warning(
        "gradients are recorded, and do not go through tokens that are sealed in blocks (quantization, offload); if "
        "none are wanted, call the model under torch.no_grad()"
    )


def _as_blocks(states: Tensor, block_size: int) -> Tensor:
    """`[batch, heads, n * block, head_dim]` as `[batch * n, heads, block, head_dim]`, the blocks of a row together."""
    batch, heads, tokens, head_dim = states.shape
    blocks = states.reshape(batch, heads, tokens // block_size, block_size, head_dim)
    return blocks.transpose(1, 2).reshape(-1, heads, block_size, head_dim)


def _checked_table(state: LayerState, batch: int, block_size: int) -> tuple[list[int], int]:
    """The valid tokens of each entry of a saved table, and how many blocks it names; raises if it is not sound."""
    table, entry_tokens = state.numbers.get("table"), state.numbers.get("entry_tokens")
    if not isinstance(entry_tokens, list) or not all(type(n) is int and 0 < n <= block_size for n in entry_tokens):
        raise ValueError(f"entry_tokens: expected ints from 1 to {block_size}, got {entry_tokens!r}")
    rows = batch if entry_tokens else 0
    if not isinstance(table, list) or len(table) != rows:
        raise ValueError(f"table: expected {rows} rows, got {table!r}")
    if any(not isinstance(row, list) or len(row) != len(entry_tokens) for row in table):
        raise ValueError(f"table: expected rows of {len(entry_tokens)} entries, got {table!r}")
    named = {index for row in table for index in row}
    if named != set(range(len(named))):
        raise ValueError(f"table: expected the blocks from 0 on, each at least once, got {sorted(map(str, named))}")
    return entry_tokens, len(named)
