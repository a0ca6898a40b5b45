"""The caches of a prefix store that are in memory: the least recently used go when there is no room for another."""

from __future__ import annotations

import logging

from ..cache import MemOSCache
from ..report import format_bytes
from .index import Entry, PrefixIndex

logger = logging.getLogger(__name__)


class PrefixMemory:
    """Caches of entries, within `max_bytes` of what is valid in them. Called with the lock of `index` held."""

    def __init__(self, index: PrefixIndex, max_bytes: int) -> None:
        self.index, self.max_bytes = index, max_bytes

    def hold(self, entry: Entry, cache: MemOSCache, place: str) -> None:
        """Keep `cache`, which nobody else uses, for an entry, and drop others for it; not if it is too large."""
        size = cache.memory().used_bytes
        if size > self.max_bytes:
            say_too_large(size, self.max_bytes)
            return
        self.drop(entry)
        held = sorted(self.held(), key=lambda other: other.last_used)
        total = size + self.bytes
        for other in held:
            if total <= self.max_bytes:
                break
            total -= other.memory_bytes
            self.drop(other)
            self.index.counts["evictions"] += 1
        entry.cache, entry.place, entry.memory_bytes = cache, place, size

    def drop(self, entry: Entry) -> None:
        """Let go of the cache of an entry, if it has one; forks of it go on."""
        if entry.cache is not None:
            entry.cache.release()
        entry.cache, entry.memory_bytes = None, 0

    def held(self) -> list[Entry]:
        """Entries whose caches are in memory."""
        return [entry for entry in self.index if entry.cache is not None]

    @property
    def bytes(self) -> int:
        """What is valid in all of them; blocks that several share count for each."""
        return sum(entry.memory_bytes for entry in self.held())


def say_too_large(size: int, limit: int) -> None:
    """Log that a prefix is not kept."""
    logger.warning("a prefix of %s is not kept, as all may take %s", format_bytes(size), format_bytes(limit))
