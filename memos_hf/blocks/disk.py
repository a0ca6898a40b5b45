"""Blocks on disk: a file for each cache, of records that are written once and read back as a whole."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

PREFIX, SUFFIX = "memos_hf-", ".blocks"
# What one call of the system takes: pieces of memory.
PIECES_PER_CALL = 512


class BlockFile:
    """Records in one file, made when the first is reserved, removed with this object.

    The file is locked as long as its process lives. One whose owner was killed is removed by whoever makes the next
    file in the folder.

    Parameters
    ----------
    folder : path, optional
        Where; by default the folder of the system for temporary files.

    Raises
    ------
    NotADirectoryError, PermissionError
        If there is no such folder and none can be made, or nothing may be written there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        check_folder(self.folder)
        self.path: Path | None = None
        self._file = -1
        self._size = 0
        self._free: dict[int, list[int]] = {}  # of each size of record, offsets that nobody holds
        self._held = 0
        self._owner = os.getpid()
        self._lock = threading.RLock()  # destructors release what is left, in any thread

    @property
    def allocated_bytes(self) -> int:
        """Size of the file."""
        return self._size

    def reserve(self, size: int, count: int) -> list[int]:
        """Offsets of `count` records of `size` bytes each, side by side where the file grows for them.

        Raises
        ------
        OSError
            If the disk is full or the file cannot be made; nothing is reserved then.
        """
        with self._lock:
            self._held += count  # first, as a destructor may release others at any point
            try:
                self.make_room(size, count)
            except BaseException:
                self._held -= count
                raise
            free = self._free[size]
            taken = free[:count]
            del free[:count]
        return taken

    def make_room(self, size: int, count: int) -> None:
        """See to it that `count` records of `size` bytes can be reserved. Raises as :meth:`reserve` does."""
        self._check_owner()
        with self._lock:
            free = self._free.setdefault(size, [])
            missing = count - len(free)
            if missing <= 0:
                return
            if self._file < 0:
                self._open()
            _enlarge(self._file, self._size, missing * size)
            free.extend(range(self._size, self._size + missing * size, size))
            self._size += missing * size

    def release(self, offset: int, size: int) -> None:
        """Give a record back. When the last one is, the file shrinks to nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._free.setdefault(size, []).append(offset)
            self._held -= 1
            if self._held == 0:
                os.ftruncate(self._file, 0)
                self._size = 0
                self._free.clear()

    def write(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Write contiguous tensors of the CPU one after the other. Raises an `OSError` if that fails."""
        self._check_owner()
        _transfer(os.pwritev, self._file, offset, [bytes_of(piece) for piece in pieces], "write to")

    def read(self, offset: int, pieces: list[memoryview]) -> None:
        """Fill `pieces` of memory one after the other. Raises an `OSError` if that fails or the file is too short."""
        _transfer(os.preadv, self._file, offset, pieces, "read from")

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise OSError(
                errno.EPERM, "offload: a process that was forked off can read what the cache has on disk, but not write"
            )

    def _open(self) -> None:
        check_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder)
        self._file, name = tempfile.mkstemp(SUFFIX, PREFIX, self.folder)
        self.path = Path(name)
        weakref.finalize(self, _remove, self._file, name, os.getpid())
        fcntl.flock(self._file, fcntl.LOCK_SH)


def check_folder(folder: Path) -> None:
    """Raise unless files can be made in `folder`, or it in the nearest folder that exists."""
    if fcntl is None or not hasattr(os, "preadv"):
        raise OSError(errno.ENOTSUP, "offload: expected a system with flock and preadv, such as Linux")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "offload_folder: expected a folder, got a file", str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "offload_folder: expected a folder that can be written to", str(nearest))


def remove_abandoned(folder: Path) -> None:
    """Remove the files that killed processes left in `folder`: those that nobody has locked."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # somebody else's, or gone by now
        try:
            # A file that was made just now and is not locked yet loses its name here, and serves its owner without.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed %s, which a process had left behind", path)
        except OSError:
            pass  # in use
        finally:
            os.close(file)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _enlarge(file: int, size: int, more: int) -> None:
    """Reserve space behind `size`, so that a full disk is found now and not in the middle of a step."""
    try:
        os.posix_fallocate(file, size, more)
    except (AttributeError, OSError) as error:
        unsupported = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
        if isinstance(error, OSError) and error.errno not in unsupported:
            os.ftruncate(file, size)
            raise OSError(error.errno, f"offload: {more} bytes more do not fit the disk ({error.strerror})") from error
        os.ftruncate(file, size + more)


def _transfer(call: object, file: int, offset: int, pieces: list[memoryview], what: str) -> None:
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        count = call(file, pieces[:PIECES_PER_CALL], offset)  # type: ignore[operator]
        if count == 0:
            raise OSError(errno.EIO, f"offload: could not {what} the file of a cache: it ends at {offset}")
        offset += count
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if count:
            pieces[0] = pieces[0][count:]


def _remove(file: int, name: str, process: int) -> None:
    os.close(file)
    if os.getpid() == process:  # not in a child that was forked off, where the object is a copy
        Path(name).unlink(missing_ok=True)
