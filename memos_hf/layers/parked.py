"""An open tail that was moved off the device, with the layer it belongs to."""

from __future__ import annotations

import weakref

import torch

from ..blocks.disk import BlockFile, bytes_of
from ..blocks.tiers import HOST
from .buffer import KVBuffer


class ParkedTail:
    """Takes the valid tokens out of a buffer: to host memory, or from there to a file.

    Parameters
    ----------
    buffer : KVBuffer
        Without tensors afterwards, or, beside an accelerator, with tensors in host memory.
    file : BlockFile

    Raises
    ------
    OSError
        If the file cannot take them; the buffer is then as it was.
    """

    def __init__(self, buffer: KVBuffer, file: BlockFile) -> None:
        self.tokens = buffer.length
        self._device = buffer.tensors[0].device
        self.used = buffer.valid_bytes, "disk" if self._device == HOST else "cpu"
        self._file: BlockFile | None = None
        if self._device != HOST:
            buffer.move_to(HOST)
            return
        with torch.no_grad():
            states = [half.contiguous() for half in buffer.view()]
        # As large as the buffer, so that the records of all tails of a geometry can stand for each other.
        size = sum(half[:, :, :1].numel() * half.element_size() for half in buffer.tensors) * max(
            buffer.capacity, buffer.length
        )
        (offset,) = file.reserve(size, 1)
        try:
            file.write(offset, states)
        except BaseException:
            file.release(offset, size)
            raise
        self._file, self._offset = file, offset
        self._shapes = [(tuple(half.shape), half.dtype) for half in states]
        self._free = weakref.finalize(self, file.release, offset, size)
        self._free.atexit = False  # the file goes then
        buffer.free()

    def bring_back(self, buffer: KVBuffer) -> None:
        """Put the tokens back into the buffer they came from. Raises an `OSError` if they cannot be read."""
        if self._file is None:
            buffer.move_to(self._device)
            return
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes)
            self._file.read(self._offset, [bytes_of(keys), bytes_of(values)])
            buffer.allocate(keys, values)
            buffer.append(keys, values)
        self._free()
