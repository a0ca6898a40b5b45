"""The caches of a prefix store that are in files: shared with other processes, evicted by when they were last used."""

from __future__ import annotations

import logging

import torch

from ..cache import MemOSCache
from . import keys
from .asked import Asked
from .file import load_prefix
from .folder import Folder, StoredFile
from .index import Entry, PrefixIndex
from .prefix_memory import say_too_large
from .tensors import CacheFileError

logger = logging.getLogger(__name__)


class PrefixFiles:
    """Files in a folder, within `max_bytes`. Never called with the lock of `index` held, as it may wait for a disk."""

    def __init__(self, index: PrefixIndex, folder: Folder, max_bytes: int) -> None:
        self.index, self.folder, self.max_bytes = index, folder, max_bytes
        self.index.files = folder.names()

    def take_note(self, model: str) -> None:
        """Take up what others have written for a model since the last time, and forget what is gone."""
        try:
            names = self.folder.names()
        except OSError as error:
            logger.warning("the directory of prefixes cannot be read: %s", error)
            return
        with self.index.lock:
            self.index.files = names
            self.index.forget_lost()
            unknown = [name for name in names if keys.keys_in(name)[0] == model and self.index.find(name) is None]
        for name in unknown:
            self._take_up(name)

    def _take_up(self, name: str) -> None:
        """Enter a file into the index by the ids that are in it."""
        try:
            with self.folder.outline(name) as local:
                ids, croppable = load_prefix(local, str(self.folder.path(name)))
            entry = Entry(name, ids[0].numpy(), croppable)
            if keys.file_name(*keys.keys_in(name), entry.ids) != name:
                raise CacheFileError(f"{self.folder.path(name)}: its name is not that of its token ids")
        except (OSError, CacheFileError) as error:
            self._lose(name, error)
            return
        with self.index.lock:
            if self.index.find(name) is None:
                self.index.add(entry)

    def read(self, entry: Entry, asked: Asked) -> MemOSCache | None:
        """The cache in the file of an entry; `None` if it is gone, or damaged and gone now."""
        try:
            cache = MemOSCache.load(self.folder.path(entry.name), asked.model, **(asked.options or {}))
        except (OSError, CacheFileError) as error:
            self._lose(entry.name, error)
            return None
        with self.index.lock:
            self.index.counts["loads"] += 1
        return cache

    def _lose(self, name: str, error: Exception) -> None:
        """Forget a file that cannot be used, and remove it if it is damaged."""
        if isinstance(error, CacheFileError):
            logger.warning("a stored prefix is damaged and dropped: %s", error)
            try:
                self.folder.remove(name)
            except OSError as reason:
                logger.warning("it cannot be removed: %s", reason)
        elif not isinstance(error, FileNotFoundError):  # else another process has evicted it
            logger.warning("a stored prefix cannot be read and counts as a miss: %s", error)
        self._gone([name])

    def write(self, entry: Entry, cache: MemOSCache) -> None:
        """Write a cache that nobody else uses to the file of an entry, if there is none, and evict others for it.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        size = cache.memory().used_bytes + entry.ids.nbytes
        if size > self.max_bytes:
            say_too_large(size, self.max_bytes)
            return
        with self.folder.locked():
            if entry.name not in self.folder.names():
                self._evict(self.max_bytes - size)
                cache.save(self.folder.path(entry.name), input_ids=torch.from_numpy(entry.ids)[None])
            self.folder.touch(entry.name)
            with self.index.lock:
                self.index.files = self.index.files | {entry.name}
                if self.index.find(entry.name) is None:
                    self.index.add(entry)
            # With its header it may be larger than was expected.
            self._evict(self.max_bytes)

    def _evict(self, max_bytes: int) -> None:
        """Remove what was used longest ago until the rest has `max_bytes`."""
        files = sorted(self.folder.files(), key=lambda file: file.used)
        total = sum(file.size for file in files)
        removed = []
        for file in files:
            if total <= max_bytes:
                break
            try:
                self.folder.remove(file.name)
            except OSError as error:  # somebody else's, or in use where that matters
                logger.warning("a stored prefix cannot be evicted: %s", error)
                continue
            total -= file.size
            removed.append(file.name)
        with self.index.lock:
            self.index.counts["disk_evictions"] += len(removed)
        self._gone(removed)

    def touch(self, entry: Entry) -> None:
        """Note that the file of an entry, if there is one, is used now."""
        if entry.name in self.index.files:
            self.folder.touch(entry.name)

    def clear(self) -> None:
        """Remove all files."""
        with self.folder.locked():
            names = self.folder.names()
            for name in names:
                self.folder.remove(name)
        self._gone(list(names))

    def listed(self) -> list[StoredFile]:
        """What is there now."""
        return self.folder.files()

    def _gone(self, names: list[str]) -> None:
        with self.index.lock:
            self.index.files = self.index.files.difference(names)
            self.index.forget_lost()
