"""The files of a prefix store: in a local folder that processes share, or behind a URL that machines share."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from .keys import NAME
from .places import AnyPath, is_url, locked, remote, remove_abandoned, temporary
from .tensors import CacheFileError

LOCK = ".memos-prefixes.lock"
# No header of a cache is longer; a damaged file may say so.
MOST_HEADER_BYTES = 1 << 28


@dataclass(frozen=True)
class StoredFile:
    """A file: its size, and when it was used last, larger for later."""

    name: str
    size: int
    used: float


class Folder(ABC):
    """Files of a prefix store; what is called otherwise is left alone."""

    @staticmethod
    def at(place: AnyPath) -> Folder:
        """A local folder, which is made if there is none, or what is behind a URL that fsspec knows.

        Raises
        ------
        OSError
            If there is none and none can be made.
        ImportError
            If `place` is a URL and fsspec, or what it needs for this kind of URL, is not installed.
        """
        if not isinstance(place, (str, os.PathLike)):
            raise TypeError(f"directory: expected a path or a URL, got {type(place).__name__}")
        return RemoteFolder(str(place)) if is_url(place) else LocalFolder(Path(str(place).removeprefix("file://")))

    @abstractmethod
    def names(self) -> set[str]:
        """What is there now."""

    @abstractmethod
    def files(self) -> list[StoredFile]:
        """The same with sizes and times."""

    @abstractmethod
    def path(self, name: str) -> AnyPath:
        """For `MemOSCache.save` and `load`."""

    @abstractmethod
    def touch(self, name: str) -> None:
        """Note that a file is used now, if it is there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def locked(self) -> Any:
        """A context in which nobody else writes or evicts, as far as the place allows."""

    @abstractmethod
    def outline(self, name: str) -> Any:
        """A context with a local file that has at least the header and the last tensor of the file, in their places."""


class LocalFolder(Folder):
    """A folder; what was used when is the time of its files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        remove_abandoned(folder)

    def names(self) -> set[str]:
        """What is there now."""
        try:
            with os.scandir(self.folder) as entries:
                return {entry.name for entry in entries if NAME.fullmatch(entry.name)}
        except FileNotFoundError:  # somebody has removed the folder
            return set()

    def files(self) -> list[StoredFile]:
        """The same with sizes and times."""
        found = []
        for name in self.names():
            with suppress(FileNotFoundError):  # evicted by another process
                status = (self.folder / name).stat()
                found.append(StoredFile(name, status.st_size, status.st_mtime_ns))
        return found

    def path(self, name: str) -> AnyPath:
        """The full path."""
        return self.folder / name

    def touch(self, name: str) -> None:
        """Note that a file is used now, if it is there."""
        now = time.time_ns()  # finer than the clock that file systems stamp files with
        with suppress(OSError):
            os.utime(self.folder / name, ns=(now, now))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            (self.folder / name).unlink()

    def locked(self) -> Any:
        """A context in which no other thread or process writes or evicts."""
        return locked(self.folder / LOCK)

    @contextmanager
    def outline(self, name: str) -> Iterator[Path]:
        """The file itself."""
        yield self.folder / name

    def __str__(self) -> str:
        return str(self.folder)


class RemoteFolder(Folder):
    """What is behind a URL. Other machines take no part in locking, and know no more than when a file was written."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = remote(self.url)
        self._files.makedirs(self._root, exist_ok=True)
        self._used: dict[str, float] = {}  # by this store
        self._lock = threading.RLock()

    def names(self) -> set[str]:
        """What is there now."""
        return {name for name, _ in self._listed()}

    def _listed(self) -> list[tuple[str, dict[str, Any]]]:
        self._files.invalidate_cache()  # others may have written
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:  # object stores have no empty folders
            return []
        named = [(str(entry["name"]).rpartition("/")[2], entry) for entry in found]
        return [(name, entry) for name, entry in named if NAME.fullmatch(name)]

    def files(self) -> list[StoredFile]:
        """The same with sizes and times."""
        return [
            StoredFile(name, int(entry["size"] or 0), max(self._used.get(name, 0.0), _written(entry)))
            for name, entry in self._listed()
        ]

    def path(self, name: str) -> AnyPath:
        """The full URL."""
        return f"{self.url}/{name}"

    def touch(self, name: str) -> None:
        """Note that a file is used now, if it is there."""
        self._used[name] = time.time()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._used.pop(name, None)
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def locked(self) -> Any:
        """A context in which no other thread writes or evicts."""
        return self._lock

    @contextmanager
    def outline(self, name: str) -> Iterator[Path]:
        """Downloads the header and the last tensor only; between them is a hole."""
        with temporary() as (local, copy), self._files.open(f"{self._root}/{name}", "rb") as file:
            _copy_outline(file, copy, name)
            copy.flush()
            yield local

    def __str__(self) -> str:
        return self.url


def _copy_outline(file: Any, copy: BinaryIO, name: str) -> None:
    beginning = file.read(8)
    length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else MOST_HEADER_BYTES
    if length >= MOST_HEADER_BYTES:
        raise CacheFileError(f"{name}: expected a saved cache, got a file that is damaged, cut off or of another kind")
    text = file.read(length)
    try:
        header = json.loads(text)
        start, end = max(entry["data_offsets"] for key, entry in header.items() if key != "__metadata__")
        file.seek(8 + length + start)
        last = file.read(end - start)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CacheFileError(f"{name}: damaged: its header cannot be read") from None
    copy.write(beginning + text)
    copy.seek(8 + length + start)
    copy.write(last)


def _written(entry: dict[str, Any]) -> float:
    """When a file was written, where the place says so; each kind of place calls it by its own name."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = entry.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return 0.0
