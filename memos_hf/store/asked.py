"""For which model, as it is when it is asked for, a prefix is looked up or kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import MemOSCache
from ..layers import BufferedLayer
from ..placement import layer_devices
from .fingerprint import Fingerprint
from .keys import model_key, storage_key


@dataclass(frozen=True)
class Asked:
    """A model as it is now, and which caches will do.

    Attributes
    ----------
    key : str
        Of the model, in the names of files.
    place : str
        Devices that its layers are on: a cache in memory is of use there only.
    options : mapping, optional
        Of the caches that are made and loaded.
    storage : str, optional
        The key of these options; `None` where there are none, and any prefix of the model will do.
    """

    model: PreTrainedModel
    fingerprint: Fingerprint
    key: str
    place: str
    options: Mapping[str, Any] | None
    storage: str | None

    @classmethod
    def of(
        cls, model: PreTrainedModel, options: Mapping[str, Any] | None = None, cache: MemOSCache | None = None
    ) -> Asked:
        """For `model`; if a `cache` is to be kept, for the autocast that it was filled under."""
        fingerprint = Fingerprint.of_model(model)
        places = {str(place) for place in (*layer_devices(model).values(), model.device)}
        return cls(
            model,
            fingerprint,
            model_key(fingerprint, _autocast_dtype(model, cache)),
            ", ".join(sorted(places)),
            options,
            None if options is None else storage_key(MemOSCache(model.config, **options).options),
        )

    def new_cache(self) -> MemOSCache:
        """An empty cache."""
        cache = MemOSCache(self.model.config, **(self.options or {}))
        cache.fingerprint = self.fingerprint
        return cache

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a cache may hold, if that is limited."""
        return (self.options or {}).get("max_cache_len")


def _autocast_dtype(model: PreTrainedModel, cache: MemOSCache | None) -> torch.dtype | None:
    """The dtype of autocast while it is on, or that the cache of a float32 model was evidently filled under."""
    if cache is not None and model.dtype == torch.float32:
        layers = [layer for layer in cache.layers if isinstance(layer, BufferedLayer) and layer.is_initialized]
        # Keys may be in float32 nevertheless, as positions are.
        held = {half.dtype for layer in layers[:1] for half in layer.buffer.tensors}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in held), None)
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
