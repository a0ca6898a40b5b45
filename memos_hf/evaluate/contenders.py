"""The caches that are compared: DynamicCache, modes of MemOSCache by name, transformers' QuantizedCache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, QuantizedCache

from ..cache import MemOSCache
from ..config import PRESETS, KVQuantizationConfig

CacheFactory = Callable[[], Cache]
REFERENCE = "DynamicCache"

# What a name stands for where it is no preset of MemOSCache.
OTHER_MODES: dict[str, KVQuantizationConfig | None] = {
    "none": None,
    # One fixed scale of 0.1 for everything.
    "int8-tensor": KVQuantizationConfig(key_axis="tensor", value_axis="tensor"),
}
# Bits that the backends of QuantizedCache take, and the axis that transformers' documentation recommends for each.
BACKENDS = {"quanto": ((4, 2), 0), "hqq": ((8, 4, 3, 2, 1), 1)}

MODES = (
    *OTHER_MODES,
    *PRESETS,
    *(f"{backend}-{bits}" for backend, (all_bits, _) in BACKENDS.items() for bits in all_bits),
)


def caches_for(model: PreTrainedModel, modes: Iterable[str]) -> dict[str, CacheFactory]:
    """What makes an empty cache for `model`, for each mode.

    Parameters
    ----------
    model : PreTrainedModel
    modes : iterable of str
        "none" (full precision), a preset of `MemOSCache`, "int8-tensor" (one fixed scale of 0.1), or a backend of
        transformers' `QuantizedCache` with its bits, such as "quanto-4" or "hqq-8".

    Raises
    ------
    ValueError
        If there is no such mode, or a backend does not support the model.
    ImportError
        If a backend is not installed.
    """
    caches: dict[str, CacheFactory] = {}
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes: expected some of {MODES}, got {mode!r}")
        backend, _, bits = mode.partition("-")
        if backend in BACKENDS:
            make = partial(_quantized_cache, model.config, backend, int(bits))
            make()  # what is missing is said now, not after the first measurement
            caches[f"QuantizedCache {mode}"] = make
        else:
            quantization = OTHER_MODES[mode] if mode in OTHER_MODES else PRESETS[mode]
            caches[f"MemOSCache {mode}"] = partial(MemOSCache, model.config, quantization=quantization)
    return caches


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


def _quantized_cache(config: PretrainedConfig, backend: str, bits: int) -> Cache:
    axis = BACKENDS[backend][1]
    return QuantizedCache(backend, config, nbits=bits, axis_key=axis, axis_value=axis)
