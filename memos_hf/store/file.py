"""Caches to files and back, layer by layer; what is inside a layer, the layer itself hands over and takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ..config import CacheOptions, KVQuantizationConfig
from ..layers import ContiguousLayer, convert
from ..layers.state import LayerState
from ..layers.upstream import adapted
from ..placement import layer_devices
from .cropping import HOLDING, saved_can_be_cropped
from .fingerprint import Fingerprint
from .places import AnyPath, reading, writing
from .tensors import CacheFileError, Group, TensorFile, write_tensors

if TYPE_CHECKING:
    from ..cache import MemOSCache

    CacheType = TypeVar("CacheType", bound=MemOSCache)

# The arguments of a cache that a file keeps; where a cache lies is said anew when it is loaded.
SAVED_OPTIONS = (
    "initial_capacity",
    "max_cache_len",
    "growth_factor",
    "layout",
    "quantization",
    "block_size",
    "fused_attention",
    "static",
)
# Those that say in what form the tokens are in the file.
FIXED_OPTIONS = ("quantization", "block_size", "static")
# The group of tensors behind those of the layers.
IDS = "input_ids"


@torch.no_grad()
def save(cache: MemOSCache, path: AnyPath, *, input_ids: Tensor | None = None, model: Any = None) -> None:
    """Save a cache; see :meth:`~memos_hf.MemOSCache.save`."""
    with cache._exclusive():  # an offloaded cache does not move out; one that was released, or is torn, is refused
        _save(cache, path, input_ids, model)


def _save(cache: MemOSCache, path: AnyPath, input_ids: Tensor | None, model: Any) -> None:
    groups: list[Group] = [partial(_layer_group, adapted(layer).state) for layer in _without_sharing(cache.layers)]
    if input_ids is not None:
        ids = checked_ids(input_ids, cache)
        groups.append(lambda: ({"kind": IDS}, {IDS: ids}))
    fingerprint = cache.fingerprint if model is None else Fingerprint.of_model(_checked_model(model))
    document = {
        "transformers": transformers.__version__,
        "options": _options_of(cache.options),
        "fingerprint": fingerprint.to_json(),
        "open_ended": cache.layer_class_to_replicate is not None,
    }
    with writing(path) as file:
        write_tensors(file, document, groups)


@torch.inference_mode(False)  # what is written later, in whatever mode, must not be made under inference mode
@torch.no_grad()
def load(
    cache_class: type[CacheType], path: AnyPath, model: Any, *, verify: bool, options: dict[str, Any]
) -> CacheType:
    """Load a cache; see :meth:`~memos_hf.MemOSCache.load`."""
    fingerprint = Fingerprint.of_model(_checked_model(model))
    with reading(path) as local, TensorFile(local, str(path)) as file:
        saved = SavedCache(file)
        saved.check_model(fingerprint)
        cache = saved.empty_cache(cache_class, model.config, options)
        saved.check_layers(cache)
        devices = layer_devices(model)
        with (
            cache._exclusive(),
            ThreadPoolExecutor() as threads,
        ):  # checksums take longer than copies, and let other threads run
            states = threads.map(partial(saved.state, verify=verify), range(len(saved.layers)))
            for index, (layer, state) in enumerate(zip(cache.layers, states, strict=False)):
                adapted(layer).take_state(state, devices.get(index, model.device))
    cache.fingerprint = fingerprint
    return cache


def load_input_ids(path: AnyPath) -> Tensor | None:
    """The token ids that were saved with a cache, int64 `[batch, tokens]`; `None` if there are none.

    Parameters
    ----------
    path : str or path-like
        A file that `save` wrote, or a URL that fsspec knows.

    Raises
    ------
    OSError, CacheFileError
        As :meth:`~memos_hf.MemOSCache.load` does.
    """
    with reading(path) as local, TensorFile(local, str(path)) as file:
        saved = SavedCache(file)
        return file.read(len(saved.layers))[IDS].clone() if saved.ids_shape is not None else None


def load_prefix(local: Path, name: str) -> tuple[Tensor, bool]:
    """Of a file with its header and its last tensor, the ids, int64 `[1, tokens]`, and whether it can be cropped.

    Raises
    ------
    OSError, CacheFileError
        As :meth:`~memos_hf.MemOSCache.load` does; also if it is no cache of one row with its ids.
    """
    with TensorFile(local, name) as file:
        saved = SavedCache(file)
        if saved.ids_shape is None or len(saved.ids_shape) != 2 or saved.ids_shape[0] != 1 or not saved.ids_shape[1]:
            raise CacheFileError(f"{name}: expected the token ids of one row, got {saved.ids_shape}")
        try:
            croppable = saved_can_be_cropped(saved.layers)
        except ValueError as error:
            raise CacheFileError(f"{name}: {error}") from None
        return file.read(len(saved.layers))[IDS].clone(), croppable


class SavedCache:
    """What a file says of a cache; checked against a model and options before any tensor is read.

    Parameters
    ----------
    file : TensorFile

    Attributes
    ----------
    layers : list of LayerState
        Of each layer, its tensors on the meta device.
    ids_shape : tuple of int, optional
        `(batch, tokens)` of the token ids saved with it.

    Raises
    ------
    CacheFileError
        If it is not a cache that is described there.
    """

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        document = file.document
        try:
            self.options = _options_from(document["options"])
            self.fingerprint = Fingerprint.parse(document["fingerprint"])
            self.open_ended = bool(document["open_ended"])
            kinds = [str(group["kind"]) for group in document["groups"]]
            has_ids = kinds[-1:] == [IDS]
            self.ids_shape = tuple(file.shapes[-1][IDS].shape) if has_ids else None
            self.layers = [
                LayerState(str(group["kind"]), shapes, dict(group["numbers"]), group["tokens"])
                for group, shapes in zip(document["groups"][: len(kinds) - has_ids], file.shapes, strict=False)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CacheFileError(f"{file.name}: its document is not that of a cache: {error!r}") from None

    def state(self, layer_idx: int, verify: bool) -> LayerState:
        """The state of a layer with its tensors mapped from the file, and held against their checksums."""
        return replace(self.layers[layer_idx], tensors=self.file.read(layer_idx, verify=verify))

    def check_model(self, fingerprint: Fingerprint) -> None:
        """Raise if the cache is known to be of another model; where its dtype is not, that of its keys is."""
        saved = self.fingerprint
        keys = next((layer.tensors["keys"] for layer in self.layers if "keys" in layer.tensors), None)
        if saved.dtype is None and keys is not None:
            saved = replace(saved, dtype=str(keys.dtype).removeprefix("torch."))
        difference = saved.difference(fingerprint)
        if difference:
            raise CacheFileError(f"{self.file.name}: {difference}")

    def empty_cache(self, cache_class: type[CacheType], config: PretrainedConfig, given: dict[str, Any]) -> CacheType:
        """A cache by the options of the file and those given, with an empty layer for each in the file."""
        for name in FIXED_OPTIONS:
            self._check_option(name, given)
        options = {name: getattr(self.options, name) for name in SAVED_OPTIONS}
        cache = cache_class(config, **{**options, **given})
        own = cache.layers
        self._check_layer_count(own)
        if self.open_ended:
            cache.layer_class_to_replicate = ContiguousLayer
        cache.layers = [
            self._empty_layer(layer_idx, own[layer_idx] if layer_idx < len(own) else None, cache.options)
            for layer_idx in range(len(self.layers))
        ]
        if not self.open_ended:
            cache.layers += own[len(self.layers) :]
        return cache

    def check_layers(self, cache: MemOSCache) -> None:
        """Raise if a layer of `cache` cannot take what the file has for it."""
        batches = {layer.tensors["keys"].shape[0] for layer in self.layers if "keys" in layer.tensors}
        if len(batches) > 1:
            raise CacheFileError(f"{self.file.name}: expected one batch size, got {sorted(batches)}")
        for layer_idx, (layer, state) in enumerate(zip(cache.layers, self.layers, strict=False)):
            try:
                adapted(layer).check_state(state)
            except (ValueError, TypeError, RuntimeError) as error:
                raise CacheFileError(f"{self.file.name}: layer {layer_idx}: {error}") from error

    def _check_option(self, name: str, given: dict[str, Any]) -> None:
        saved = getattr(self.options, name)
        value = given.get(name, saved)
        if name == "quantization" and value is not None:
            value = KVQuantizationConfig.of(value)
        if value != saved:
            advice = "; load it as it is and call quantize" if name == "quantization" and saved is None else ""
            raise ValueError(f"{name}: expected {saved!r}, as the cache was saved with, got {given[name]!r}{advice}")

    def _check_layer_count(self, own: list[Any]) -> None:
        """Raise if the model has more layers; fewer are right where the model itself adds some to its caches."""
        count, expected = len(self.layers), len(_without_sharing(own))
        if self.fingerprint.config is not None and not self.open_ended:
            fits = count >= expected
        else:  # without a config there are only layers that were updated
            fits = count in (0, expected)
        if not fits:
            raise CacheFileError(f"{self.file.name}: number of layers: the cache has {count}, the model {expected}")

    def _empty_layer(self, layer_idx: int, own: Any, options: CacheOptions) -> Any:
        """The layer that the model's config asks for, or of the kind that was saved: some models choose their own."""
        state = self.layers[layer_idx]
        if state.kind == getattr(own, "saved_as", type(own).__name__):
            return own
        window = state.numbers.get("sliding_window")
        layer = None
        if window is None or (type(window) is int and window > 0):
            layer = convert.layer_of_kind(state.kind, options, layer_idx, window)
        if layer is None:
            raise CacheFileError(
                f"{self.file.name}: layer {layer_idx}: expected a {type(own).__name__}, as the model and the options "
                f"ask for, got a {state.kind}"
            )
        return layer


def _without_sharing(layers: list[Any]) -> list[Any]:
    """Without the last layers that share what others hold: some versions of transformers list them, others do not."""
    count = len(layers)
    while count and not isinstance(layers[count - 1], HOLDING):
        count -= 1
    return layers[:count]


def _layer_group(state_of: Callable[[], LayerState]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    state = state_of()
    return {"kind": state.kind, "tokens": state.tokens, "numbers": state.numbers}, state.tensors


def _options_of(options: CacheOptions) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in SAVED_OPTIONS}
    return {**fields, "quantization": None if options.quantization is None else asdict(options.quantization)}


def _options_from(fields: dict[str, Any]) -> CacheOptions:
    options = {name: fields[name] for name in SAVED_OPTIONS}
    if options["quantization"] is not None:
        options["quantization"] = KVQuantizationConfig(**options["quantization"])
    return CacheOptions(**options)


def _checked_model(model: Any) -> Any:
    if not isinstance(getattr(model, "config", None), PretrainedConfig):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    return model


def checked_ids(input_ids: Any, cache: MemOSCache) -> Tensor:
    """int64 ids `[batch, tokens]` of the tokens that are cached; those behind them are left out."""
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: expected a tensor of ints, got {kind}")
    if input_ids.ndim not in (1, 2):
        raise ValueError(f"input_ids: expected [batch, tokens] or [tokens], got {tuple(input_ids.shape)}")
    ids = input_ids.detach().long().reshape(-1, input_ids.shape[-1])
    # Recurrent layers do not count tokens.
    counted = (int(layer.get_seq_length()) for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    tokens, batch = next(counted, 0), _batch_size(cache)
    if ids.shape[1] < tokens:
        raise ValueError(f"input_ids: expected at least the {tokens} tokens that are cached, got {ids.shape[1]}")
    if batch is not None and ids.shape[0] != batch:
        raise ValueError(f"input_ids: expected {batch} rows, as the cache has, got {ids.shape[0]}")
    return ids[:, :tokens] if tokens else ids


def _batch_size(cache: MemOSCache) -> int | None:
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return next((half.shape[0] for half in keys if isinstance(half, Tensor)), None)
