"""Two buffers on the device through which blocks pass that are not there, filled beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from .codecs import BlockCodec
from .disk import BlockFile, bytes_of
from .host import HostBlocks
from .transfer import side_stream

# Bytes of a buffer, or the bytes of two blocks where those are more: enough for a link to be busy.
STAGED_BYTES = 4 << 20
# A buffer takes no more than this share of a device's budget.
STAGED_SHARE = 1 / 32

Place = tuple["HostBlocks | BlockFile", int]


def staged_blocks(block_bytes: int, budget: int) -> int:
    """How many blocks of so many bytes a buffer takes, beside so many bytes for all blocks of a device."""
    return max(int(min(STAGED_BYTES, budget * STAGED_SHARE)) // block_bytes, 2)


class Buffer:
    """Slots for a few blocks, with the arenas' layout: `keys` and `values` by name, `[slots, …]` each."""

    def __init__(
        self,
        codecs: tuple[BlockCodec, BlockCodec],
        heads: int,
        slots: int,
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        with torch.inference_mode(False):
            self.keys, self.values = (
                {
                    name: torch.empty((slots, *shape), dtype=dtype, device=device, pin_memory=pinned)
                    for name, (shape, dtype) in codec.layout(heads).items()
                }
                for codec in codecs
            )
        self.tensors = [*self.keys.values(), *self.values.values()]
        self.slots = slots
        self.free_since: torch.cuda.Event | None = None  # when the device had read what was in it before
        self.memory: list[list[memoryview]] = []  # of each slot, where a file is to be read to
        if device.type == "cpu":
            self.memory = [[bytes_of(tensor[slot]) for tensor in self.tensors] for slot in range(slots)]


class Source(Protocol):
    """Where blocks are that are not on the device."""

    def places(self, blocks: Sequence[int]) -> list[Place]:
        """Of each block, the tier that has it and the place there."""


class Staging:
    """Two buffers for the layers of one geometry, and what is on its way into them.

    Parameters
    ----------
    codecs : (BlockCodec, BlockCodec)
        Of keys and values.
    heads : int
    device : torch.device
    reader : ThreadPoolExecutor
        What fills the buffers.
    budget : int
        Bytes of the device for all blocks there.

    Attributes
    ----------
    lock : threading.RLock
        To be held from `begin` or `take` to the `give_back` that belongs to it.
    """

    def __init__(
        self,
        codecs: tuple[BlockCodec, BlockCodec],
        heads: int,
        device: torch.device,
        reader: ThreadPoolExecutor,
        budget: int,
    ) -> None:
        self.device, self._reader = device, reader
        self.lock = threading.RLock()
        block = sum(codec.bytes_per_block(heads) for codec in codecs)
        self.slots = staged_blocks(block, budget)
        self.buffers = [Buffer(codecs, heads, self.slots, device) for _ in range(2)]
        self._free = list(self.buffers)
        self._bounce: Buffer | None = None
        if device.type != "cpu":
            self._bounce = Buffer(codecs, heads, self.slots, torch.device("cpu"), pinned=device.type == "cuda")
        self._coming: dict[tuple[int, ...], tuple[Buffer, Future[torch.cuda.Event | None]]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated on the device."""
        return [tensor for buffer in self.buffers for tensor in buffer.tensors]

    def begin(self, source: Source, upcoming: Iterable[tuple[int, ...]]) -> None:
        """Begin to read what will be needed next, as far as there are free buffers."""
        for blocks in upcoming:
            if not self._free:
                return
            if blocks not in self._coming:
                self._start(source, blocks)

    def take(self, source: Source, blocks: tuple[int, ...]) -> Buffer:
        """A buffer with `blocks` in its first slots, in their order; give it back when they have been read.

        Raises
        ------
        OSError
            If they could not be read.
        """
        was_ahead = blocks in self._coming
        if not was_ahead:
            if not self._free:  # what was read ahead is not what is needed: the oldest makes room
                self._drop(next(iter(self._coming)))
            self._start(source, blocks)
        buffer, coming = self._coming.pop(blocks)
        try:
            done = coming.result()
        except BaseException:
            self._free.append(buffer)
            if was_ahead:  # whatever stood against it then may be over
                return self.take(source, blocks)
            raise
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """What is in `buffer` is not needed any more."""
        if self.device.type == "cuda":
            buffer.free_since = torch.cuda.current_stream(self.device).record_event()
        self._free.append(buffer)

    def _drop(self, blocks: tuple[int, ...]) -> None:
        buffer, coming = self._coming.pop(blocks)
        coming.exception()  # whatever it is: nobody asked for these blocks
        self._free.append(buffer)

    def _start(self, source: Source, blocks: tuple[int, ...]) -> None:
        buffer = self._free.pop(0)
        written = None
        if self.device.type == "cuda":  # after the writes to host memory that are on the stream by now
            written = torch.cuda.current_stream(self.device).record_event()
        places = source.places(blocks)
        self._coming[blocks] = buffer, self._reader.submit(_fill, buffer, self._bounce, places, self.device, written)


def _fill(
    buffer: Buffer,
    bounce: Buffer | None,
    places: list[Place],
    device: torch.device,
    written: torch.cuda.Event | None,
) -> torch.cuda.Event | None:
    """Bring blocks to the first slots of a buffer; of a CUDA device, the event after which they are there."""
    if device.type != "cuda":
        _read(buffer.tensors, buffer.memory if bounce is None else bounce.memory, bounce, places)
        return None
    stream = side_stream(device)
    with torch.cuda.stream(stream):
        for event in (written, buffer.free_since):
            if event is not None:
                stream.wait_event(event)
        if any(isinstance(tier, BlockFile) for tier, _ in places):
            stream.synchronize()  # the buffer of the host, too, has been read by the last copy
        _read(buffer.tensors, bounce.memory if bounce is not None else [], bounce, places)
        done: torch.cuda.Event = stream.record_event()
        return done


def _read(targets: list[Tensor], memory: list[list[memoryview]], bounce: Buffer | None, places: list[Place]) -> None:
    """Read runs of blocks that lie in one tier, in order."""
    begin = 0
    while begin < len(places):
        tier = places[begin][0]
        end = begin + 1
        while end < len(places) and places[end][0] is tier and _follows(tier, places, end, memory):
            end += 1
        if isinstance(tier, HostBlocks):
            tier.read([place for _, place in places[begin:end]], targets, begin)
        else:
            tier.read(places[begin][1], [piece for slot in memory[begin:end] for piece in slot])
            if bounce is not None:
                for source, target in zip(bounce.tensors, targets, strict=True):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
        begin = end


def _follows(tier: HostBlocks | BlockFile, places: list[Place], at: int, memory: list[list[memoryview]]) -> bool:
    if isinstance(tier, HostBlocks):
        return True
    size = sum(len(piece) for piece in memory[0])
    return places[at][1] == places[at - 1][1] + size
