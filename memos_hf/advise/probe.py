"""What a model caches, found by running it without data: on torch's meta device, where tensors have shapes only."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    EncoderDecoderCache,
    PretrainedConfig,
    PreTrainedModel,
)

from ..cache import MemOSCache
from ..cache_argument import cache_argument
from ..layers import BufferedLayer
from ..placement import expected_states
from ..report import held_tensors

META = torch.device("meta")
# Tokens of the two runs. What layers of transformers' own kinds hold is taken to lie on a line through both; these are
# multiples of what such layers compress, and longer than the kernels of convolutions.
LENGTHS = (128, 256)


@dataclass(frozen=True)
class Line:
    """A number that grows evenly with the tokens of a prompt: `at_least + slope * tokens`."""

    at_least: float
    slope: float

    @classmethod
    def through(cls, numbers: tuple[int, int]) -> Line:
        """The line through what was found at `LENGTHS`."""
        slope = (numbers[1] - numbers[0]) / (LENGTHS[1] - LENGTHS[0])
        return cls(numbers[0] - slope * LENGTHS[0], slope)

    def at(self, tokens: int) -> int:
        """The number at a prompt of so many tokens."""
        return round(self.at_least + self.slope * tokens)


@dataclass(frozen=True)
class CachedStates:
    """What one layer caches of one row.

    Attributes
    ----------
    keys, values : Tensor, optional
        `[1, heads, 0, head_dim]` on the meta device: shape and dtype of what an update of a layer of ours brings.
        `None` where it never gets any, or is of another kind.
    tokens : Line
        Tokens that a prompt brings: its own, or, of cross attention, what the encoder makes of them.
    other_bytes, other_storage_bytes : Line
        Of a layer of transformers' own kinds, its recurrent states, or keys and values of a special form: of the
        tensors, and of the storages behind them.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    tokens: Line = Line(0, 1)
    other_bytes: Line = Line(0, 0)
    other_storage_bytes: Line = Line(0, 0)

    def of(self, batch_size: int, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of an update, `[batch_size, heads, tokens, head_dim]`, without data."""
        assert self.keys is not None and self.values is not None
        keys, values = (
            half.new_empty((batch_size, half.shape[1], tokens, half.shape[3])) for half in (self.keys, self.values)
        )
        return keys, values


@dataclass(frozen=True)
class Probe:
    """What a model caches, and how large it is.

    Attributes
    ----------
    config : PretrainedConfig
        The model's, as it was given.
    dtype : torch.dtype
        Of the weights.
    layers : tuple of CachedStates
        Of the decoder's own attention.
    cross_layers : tuple of CachedStates
        Of attention to an encoder; empty without one.
    weight_bytes : int
        Parameters and buffers, tied ones once.
    notes : tuple of str
        What could not be found in this way.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    layers: tuple[CachedStates, ...]
    cross_layers: tuple[CachedStates, ...]
    weight_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the prompt is read by an encoder."""
        return bool(self.cross_layers)


def probe(config: PretrainedConfig, dtype: torch.dtype | None = None) -> Probe:
    """Run the model of a config on the meta device, and see what its layers are given to cache.

    No weights are loaded and nothing is computed. Where a model cannot run so (it looks at values), heads and head dims
    are taken from the config, as `MemOSCache.for_model` does, and a note says so.

    Parameters
    ----------
    config : PretrainedConfig
    dtype : torch.dtype, optional
        Of the weights; by default what the config says, or float32.

    Raises
    ------
    ValueError
        If there is no model of this config that generates text.
    """
    dtype = dtype or getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
    model = _meta_model(config, dtype)
    weights = {id(tensor): tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())}
    try:
        runs = [_run(model, tokens) for tokens in LENGTHS]
    except Exception as error:  # whatever a model's own code makes of tensors without data
        layers, note = _guessed(model, error)
        return Probe(config, dtype, layers, (), sum(weights.values()), (note,))
    own, cross = (tuple(map(_found, *parts)) for parts in zip(*runs, strict=True))
    return Probe(config, dtype, own, cross, sum(weights.values()), _estimates(own))


def _estimates(layers: tuple[CachedStates, ...]) -> tuple[str, ...]:
    growing = sum(states.other_bytes.slope > 0 for states in layers)
    if not growing:
        return ()
    return (f"{growing} of {len(layers)} layers are of transformers' own kinds: taken to grow evenly with the tokens",)


def _meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(config)
    # Neither looks at values: the plain form of attention, and experts without sorting tokens.
    kinds = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    automatic = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with META:
        for model_class in named:
            if model_class is not None and model_class.can_generate():
                return model_class._from_config(config, dtype=dtype, **kinds).eval()
        return automatic.from_config(config, dtype=dtype, **kinds).eval()


def _run(model: PreTrainedModel, tokens: int) -> tuple[list[Any], list[Any]]:
    """The layers of a cache after a prompt, and those of its cross attention."""
    own, ids = MemOSCache(model.config), torch.ones((1, tokens), dtype=torch.int64, device=META)
    for part in (model.config, model.config.get_text_config(decoder=True)):
        vars(part)["pad_token_id"] = None  # models with one look for it among the ids; some refuse to be told of none
    # Experts may ask which tokens are theirs.
    with torch.no_grad(), fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        if not model.config.is_encoder_decoder:
            cache = {cache_argument(model): own}
            model(ids[:, 1:], **cache, use_cache=True)
            model(ids[:, :1], **cache, use_cache=True)  # some layers hold less after the first token
            return list(own.layers), []
        if model.main_input_name != "input_ids":
            raise ValueError(f"the encoder reads {model.main_input_name}, not token ids")
        cross = MemOSCache(model.config)
        both = {cache_argument(model): EncoderDecoderCache(own, cross)}
        model(ids, decoder_input_ids=ids[:, :1], **both, use_cache=True)
        return list(own.layers), list(cross.layers)


def _found(first: Any, second: Any) -> CachedStates:
    """What the same layer held after prompts of the two lengths."""
    if not isinstance(first, BufferedLayer):
        used, allocated = (Line.through(numbers) for numbers in zip(_bytes(first), _bytes(second), strict=True))
        return CachedStates(other_bytes=used, other_storage_bytes=allocated)
    if first.keys is None or first.values is None:
        return CachedStates()
    lengths = first.get_seq_length(), second.get_seq_length()
    return CachedStates(first.keys[:, :, :0], first.values[:, :, :0], Line.through(lengths))


def _bytes(layer: Any) -> tuple[int, int]:
    """Bytes of all that a layer of transformers' holds, and of the storages behind it."""
    tensors = list(held_tensors(layer))
    # By their handles, as nothing on the meta device has an address.
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), sum(storages.values())


def _guessed(model: PreTrainedModel, error: Exception) -> tuple[tuple[CachedStates, ...], str]:
    """What the config says of each layer, and a note that it is a guess."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: what it caches cannot be told from its config: {reason}")
    layers = MemOSCache(model.config).layers
    states = dict(expected_states(model, 1))
    found = tuple(
        CachedStates(states.get(index), states.get(index)) if isinstance(layer, BufferedLayer) else CachedStates()
        for index, layer in enumerate(layers)
    )
    note = (
        "heads and head dims are those that the config names, and may be others in truth, as the model does not run "
        f"without data ({reason})"
    )
    unknown = sum(states.keys is None for states in found)
    if unknown:
        note += f"; of {unknown} of its {len(layers)} layers it does not tell what they hold, which is not counted"
    return found, note
