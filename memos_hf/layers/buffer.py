"""The memory of one layer: K and V preallocated, appended in place, grown by a factor."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import torch
from torch import Tensor

# What a GPU reads in one transaction, and a multiple of every CPU's cache line.
ALIGNMENT_BYTES = 128
Buffer = TypeVar("Buffer", bound="KVBuffer")


class KVBuffer:
    """K and V of one layer, `[batch, heads, tokens, head_dim]` each, valid from `start` to `end`.

    ::

        token     0        start                  end           capacity
        head 0    | dropped  | valid ............ | room ........ |
        head 1    | dropped  | valid ............ | room ........ |

    Only `view` reads, so nothing outside the valid part is ever seen. Only `append` writes, behind the valid part,
    and never into memory that somebody else may hold: tensors that were handed over (`adopt`) are replaced by a fresh
    allocation first. What an autograd graph may have saved is not written again after it was cropped or forgotten.

    Parameters
    ----------
    first_capacity : int
        Tokens to allocate at first.
    growth_factor : float
        How capacity grows; greater than 1.
    seq_major : bool
        Put tokens before heads in memory. Shapes stay as above; strides differ.
    """

    def __init__(self, first_capacity: int, growth_factor: float, seq_major: bool = False):
        self.first_capacity = first_capacity
        self.growth_factor = growth_factor
        self.seq_major = seq_major
        self.growths = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._writable = False  # whether nobody else may hold the tensors
        self._seen_by_graph = False  # whether views were given out while gradients are recorded
        self.capacity = 0  # tokens that fit before the next growth
        self.start = 0
        self.end = 0

    @property
    def allocated(self) -> bool:
        """Whether there are tensors at all."""
        return self._keys is not None and self._values is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The whole K and V tensors, `[batch, heads, capacity, head_dim]`, invalid parts included."""
        if self._keys is None or self._values is None:
            raise RuntimeError("this layer holds no keys and values yet")
        return self._keys, self._values

    @property
    def length(self) -> int:
        """Valid tokens."""
        return self.end - self.start

    @property
    def valid_bytes(self) -> int:
        """Bytes of the valid tokens; from shapes, as looking at the tensors would count as reading them."""
        return sum(
            half[:, :, :1].numel() * half.element_size() * (min(self.end, half.shape[2]) - self.start)
            for half in (self._keys, self._values)
            if half is not None
        )

    @property
    def shared(self) -> bool:
        """Whether the tensors were handed over and may be held by somebody else too."""
        return not self._writable and (self._keys is not None or self._values is not None)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the valid tokens that somebody else may hold too."""
        return self.valid_bytes if self.shared else 0

    @property
    def held_tensors(self) -> list[Tensor]:
        """Every tensor."""
        return list(self.tensors) if self.allocated else []

    def allocate(self, keys: Tensor, values: Tensor, limit: int | None = None) -> None:
        """Make room for first tokens like `keys` and `values`, `[batch, heads, tokens, head_dim]`; nothing is written.

        Memory of the right kind that is large enough is kept.

        Parameters
        ----------
        limit : int, optional
            Tokens to allocate at most, unless `keys` has more.
        """
        self.start = self.end = 0
        tokens = keys.shape[2]
        if self._writable and tokens <= self.capacity and self._matches(keys, values):
            return
        capacity = self.first_capacity
        if tokens > capacity:
            capacity += tokens  # a long prompt, and the first tokens after it
        if limit is not None:
            capacity = max(min(capacity, limit), tokens)
        capacity = _aligned_capacity(capacity, keys, values)
        self.free()  # before the new tensors are allocated
        self._install(self._empty(keys, capacity), self._empty(values, capacity), 0)

    def _matches(self, keys: Tensor, values: Tensor) -> bool:
        return row_signature(self.tensors[0]) == row_signature(keys) and (
            row_signature(self.tensors[1]) == row_signature(values)
        )

    def free(self) -> None:
        """Drop the tensors."""
        self._keys = self._values = None
        self._writable = self._seen_by_graph = False
        self.capacity = self.start = self.end = 0

    def adopt(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Take tensors that somebody else may hold, as they are; every token of them is valid."""
        self._keys, self._values = keys, values
        self._writable = self._seen_by_graph = False
        self.start, self.end = 0, max((half.shape[2] for half in (keys, values) if half is not None), default=0)
        self.capacity = self.end

    def fork(self: Buffer) -> Buffer:
        """A buffer that holds the same tensors. Whichever of the two is written to first takes a copy."""
        self._writable = False
        return copy.copy(self)

    def halves(self) -> tuple[Tensor | None, Tensor | None]:
        """What is valid of K and of V, each for itself: one may still be missing or of another length."""
        keys, values = (
            half
            if half is None
            else self._readable(half).narrow(2, self.start, min(self.end, half.shape[2]) - self.start)
            for half in (self._keys, self._values)
        )
        return keys, values

    def check_paired(self) -> None:
        """Raise a `RuntimeError` if K and V were assigned with different lengths."""
        lengths = [0 if half is None else half.shape[2] for half in (self._keys, self._values)]
        if lengths[0] != lengths[1]:
            raise RuntimeError(f"keys has {lengths[0]} tokens and values {lengths[1]}: expected both of one length")

    def append(self, keys: Tensor, values: Tensor, limit: int | None = None) -> None:
        """Add tokens, `[batch, heads, new_tokens, head_dim]`, at the end.

        Parameters
        ----------
        limit : int, optional
            Growth stops at this many tokens, unless more are needed.
        """
        if self.is_recorded(keys, values):
            # A graph goes through the cache: out of place, as concatenation is.
            old = self.view() if self.length else (keys[:, :, :0], values[:, :, :0])
            self.adopt(torch.cat([old[0], keys], dim=2), torch.cat([old[1], values], dim=2))
            return
        count = keys.shape[2]
        if not self._writable or self.end + count > self.capacity:
            self._make_room(count, limit)
        end = self.end
        own_keys, own_values = self.tensors
        own_keys.narrow(2, end, count).copy_(keys)
        own_values.narrow(2, end, count).copy_(values)
        self.end = end + count

    def is_recorded(self, keys: Tensor, values: Tensor) -> bool:
        """Whether gradients have to go through what is held or through `keys` and `values`."""
        if not torch.is_grad_enabled():
            return False
        return any(half is not None and half.requires_grad for half in (keys, values, self._keys, self._values))

    def view(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        """The valid K and V, or the `last` tokens of them, without a copy."""
        return self._own(last)

    def _own(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        start = self.start if last is None else max(self.start, self.end - last)
        length = self.end - start
        keys, values = self._readable(self._keys), self._readable(self._values)
        return keys.narrow(2, start, length), values.narrow(2, start, length)

    def _readable(self, half: Tensor | None) -> Tensor:
        if half is None:
            raise RuntimeError("this layer holds no keys and values yet")
        if not torch.is_grad_enabled() or half.requires_grad:
            return half
        # A graph may save a view of it (of another tensor's queries) and would take the next append, behind that view,
        # for a change. `data` has a version of its own; from now on nothing in front of the pointer is written.
        self._seen_by_graph = True
        return half.data

    def keep_last(self, tokens: int) -> None:
        """Forget all but the last `tokens`."""
        self.start = max(self.start, self.end - tokens)

    def remove_last(self, tokens: int) -> None:
        """Forget the last `tokens`, or all if there are fewer."""
        if tokens > 0:
            self._leave_to_graph()
        self.end = max(self.start, self.end - tokens)

    def replace(self, keys: Tensor, values: Tensor, limit: int | None = None) -> None:
        """Forget all tokens and take these instead; arguments as for `append`."""
        before = dict(vars(self))
        self.clear()
        try:
            self.append(keys, values, limit)
        except BaseException:  # there was no memory for them, and none was written to
            vars(self).update(before)
            raise

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        self._leave_to_graph()
        self.start = self.end = 0

    def _leave_to_graph(self) -> None:
        """What a graph may have saved is about to be forgotten: do not write there."""
        if self._seen_by_graph:
            self._writable = False

    def take_rows(self, index: Tensor) -> None:
        """Make row `i` of the batch what row `index[i]` was. `index` is int64, on the tensors' device."""
        keys, values = self._own()
        if self.is_recorded(keys, values):
            self.adopt(keys.index_select(0, index), values.index_select(0, index))
            return
        capacity = _aligned_capacity(self.capacity, keys, values)
        self._install(self._taken(keys, capacity, index), self._taken(values, capacity, index), keys.shape[2])

    def shrink_to(self, tokens: int) -> None:
        """Give back what a long prompt took, if the capacity is more than twice `tokens`."""
        if self.capacity > 2 * tokens:
            self._reallocate(max(tokens, self.end - self.start), self.tensors[0].device)

    def move_to(self, device: torch.device) -> None:
        """Move the valid part to another device, with the same capacity there."""
        if self.allocated and self.tensors[0].device != device:
            self._reallocate(self.capacity, device)

    def _make_room(self, count: int, limit: int | None) -> None:
        needed = self.end - self.start + count
        if self._writable and needed <= self.capacity and not self._seen_by_graph:
            self._move_to_front()
            return
        capacity = self.capacity if self._writable else max(self.capacity, min(self.first_capacity, limit or needed))
        if needed > capacity:
            capacity = math.ceil(capacity * self.growth_factor)
        if limit is not None:
            capacity = min(capacity, limit)
        is_growth = self._writable and capacity > self.capacity
        self._reallocate(max(capacity, needed), self.tensors[0].device)
        self.growths += is_growth

    def _move_to_front(self) -> None:
        length = self.end - self.start
        # Source and target of one copy must not overlap.
        sources = [valid if self.start >= length else valid.clone() for valid in self._own()]
        for tensor, source in zip(self.tensors, sources, strict=True):
            tensor.narrow(2, 0, length).copy_(source)
        self.start, self.end = 0, length

    def _reallocate(self, capacity: int, device: torch.device) -> None:
        keys, values = self._own()
        capacity = _aligned_capacity(capacity, keys, values)
        self._install(self._copied(keys, capacity, device), self._copied(values, capacity, device), keys.shape[2])

    def _install(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Take new tensors of our own. Both exist by now: had memory run out for one, nothing would have changed."""
        self._keys, self._values = keys, values
        self._writable, self._seen_by_graph = True, False
        self.capacity = keys.shape[2]
        self.start, self.end = 0, end

    def _copied(self, valid: Tensor, capacity: int, device: torch.device) -> Tensor:
        new = self._empty(valid, capacity, device=device)
        new.narrow(2, 0, valid.shape[2]).copy_(valid.detach(), non_blocking=True)
        return new

    def _taken(self, valid: Tensor, capacity: int, index: Tensor) -> Tensor:
        new = self._empty(valid, capacity, batch=index.shape[0])
        torch.index_select(valid.detach(), 0, index, out=new.narrow(2, 0, valid.shape[2]))
        return new

    def _empty(
        self, like: Tensor, capacity: int, batch: int | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Uninitialised `[batch, heads, capacity, head_dim]` whose first byte is aligned."""
        batch = like.shape[0] if batch is None else batch
        heads, head_dim = like.shape[1], like.shape[3]
        size = batch * heads * capacity * head_dim
        slack = ALIGNMENT_BYTES // like.element_size()
        # Outside inference mode, so that a cache filled there can go on anywhere.
        with torch.inference_mode(False):
            flat = torch.empty(size + slack, dtype=like.dtype, device=device or like.device)
            beyond = flat.data_ptr() % ALIGNMENT_BYTES
            offset = (ALIGNMENT_BYTES - beyond) % ALIGNMENT_BYTES // like.element_size()
            flat = flat.narrow(0, offset, size)
            if self.seq_major:
                return flat.view(batch, capacity, heads, head_dim).transpose(1, 2)
            return flat.view(batch, heads, capacity, head_dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVBuffer:
        # Tensors' own deepcopy refuses those that an autograd graph computed, and loses the alignment.
        twin = copy.copy(self)
        memo[id(self)] = twin
        if self.allocated:
            twin._reallocate(self.capacity, self.tensors[0].device)
        return twin


def row_signature(tensor: Tensor) -> tuple[Any, ...]:
    """What all K, or all V, of one layer have in common: batch, heads, head dim, dtype and device."""
    shape = tensor.shape
    return shape[0], shape[1], shape[3], tensor.dtype, tensor.device


def _aligned_capacity(tokens: int, *tensors: Tensor) -> int:
    """The least capacity of at least `tokens` at which every head of every tensor starts on an aligned address."""
    step = 1
    for tensor in tensors:
        row_bytes = tensor.shape[3] * tensor.element_size()
        step = max(step, ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, row_bytes))
    return math.ceil(tokens / step) * step
