"""The caches that are measured, and DynamicCache, which all are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import Cache, DynamicCache, PreTrainedModel

from ..cache import MemOSCache

CacheFactory = Callable[[], Cache]
REFERENCE = "DynamicCache"


def with_reference(model: PreTrainedModel, caches: Mapping[str, CacheFactory]) -> dict[str, CacheFactory]:
    """DynamicCache, which all are compared with, and then `caches`."""
    if REFERENCE in caches:
        raise ValueError(f"caches: expected names other than {REFERENCE!r}, which is measured first in any case")
    return {REFERENCE: lambda: DynamicCache(config=model.config), **caches}


def bytes_ratio(cache: Cache) -> float | None:
    """Bytes that the cache uses over what full precision takes; `None` where it cannot be told."""
    if isinstance(cache, MemOSCache):
        return cache.memory().ratio
    return 1.0 if type(cache) is DynamicCache else None


class Reads:
    """Where an offloaded cache finds the blocks that it reads from now on."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        return (self._cache.stats.hits, self._cache.stats.misses) if isinstance(self._cache, MemOSCache) else (0, 0)

    def hit_rate(self) -> float | None:
        """Of the blocks read, the share that was on the device; `None` if none were, as in other caches."""
        hits, misses = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        return hits / (hits + misses) if hits + misses else None
