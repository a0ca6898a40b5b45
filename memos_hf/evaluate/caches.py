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


def reads(cache: Cache) -> tuple[int, int]:
    """Blocks that an offloaded cache has read on the device, and from below it; of others none."""
    return (cache.stats.hits, cache.stats.misses) if isinstance(cache, MemOSCache) else (0, 0)
