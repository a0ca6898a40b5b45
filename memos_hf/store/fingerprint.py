"""Which model computed keys and values: its config, dtype, weights and active adapters, in a few kilobytes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

# Fields of a config that keys and values do not depend on.
IRRELEVANT = {
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
ENDINGS = ("dropout", "_implementation", "_token_id")
# What errors call some fields, as people do.
SPOKEN = {
    "num_hidden_layers": "number of layers",
    "num_attention_heads": "number of attention heads",
    "num_key_value_heads": "number of key-value heads",
    "head_dim": "head dim",
}
SAMPLES = 256
# Of what cannot be sampled, such as weights that accelerate keeps elsewhere.
UNKNOWN = "--------"
# Spreads samples over all rows and columns of a weight.
STRIDE = 2654435761


@dataclass(frozen=True)
class Fingerprint:
    """What is known of the model that computed a cache.

    Attributes
    ----------
    config : dict, optional
        Fields of the text config that keys and values depend on; `None` where there was no config.
    dtype : str, optional
        The model's, such as `"bfloat16"`; `None` where there was no model.
    weights : str, optional
        For each parameter, in the model's order, 8 hexadecimal digits of a hash over up to 256 of its elements, or
        dashes where it has no data (it is on the meta device, as accelerate offloaded it); `None` where there was no
        model.
    adapters : tuple of str
        Active adapters (PEFT) with their scalings.
    """

    config: dict[str, Any] | None = None
    dtype: str | None = None
    weights: str | None = None
    adapters: tuple[str, ...] = ()

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> Fingerprint:
        """What a config says; of a multimodal one the text part counts."""
        text_config = config.get_text_config(decoder=True)
        return cls(config=json.loads(json.dumps(_relevant(text_config.to_dict()), sort_keys=True, default=str)))

    @classmethod
    def of_model(cls, model: Any) -> Fingerprint:
        """All there is to know of a model, with a sample of its weights as they are now.

        Not seen are: changes to weights outside the sample (a few rows of an embedding, say), and weights that
        accelerate offloaded. Parameters of adapters that are not active do not count.
        """
        config = cls.of_config(model.config).config
        weights = "".join(_digest(parameter) for parameter in _parameters_in_use(model))
        return cls(config, str(model.dtype).removeprefix("torch."), weights, _active_adapters(model))

    @classmethod
    def parse(cls, fields: Any) -> Fingerprint:
        """What `to_json` gave; a `ValueError` for anything else."""
        if not isinstance(fields, dict) or fields.keys() != {"config", "dtype", "weights", "adapters"}:
            raise ValueError(f"fingerprint: expected config, dtype, weights and adapters, got {fields!r}")
        return cls(**{**fields, "adapters": tuple(fields["adapters"])})

    def to_json(self) -> dict[str, Any]:
        """The fields, of types that JSON has."""
        return {**asdict(self), "adapters": list(self.adapters)}

    def difference(self, model: Fingerprint) -> str | None:
        """In what `model` differs from the one this is of, in words; `None` if they agree in all that both know.

        Config fields that only one of them has do not count: other versions of transformers write other defaults.
        """
        return (
            _config_difference(self.config or {}, model.config or {})
            or _difference("dtype", self.dtype, model.dtype)
            or _weights_difference(self, model)
        )


def _relevant(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in IRRELEVANT and not name.startswith("_") and not name.endswith(ENDINGS)
    }


def _config_difference(saved: dict[str, Any], model: dict[str, Any]) -> str | None:
    # The fields that people know first: a model of other size differs in many.
    names = [name for name in ("model_type", *SPOKEN, *sorted(saved)) if name in saved and name in model]
    for name in names:
        found = _difference(SPOKEN.get(name, f"config, {name}"), saved[name], model[name])
        if found:
            return found
    return None


def _difference(what: str, saved: Any, model: Any) -> str | None:
    if saved is None or model is None or saved == model:
        return None
    return f"{what}: the cache was computed with {saved}, the model has {model}"


def _weights_difference(saved: Fingerprint, model: Fingerprint) -> str | None:
    if saved.weights is None or model.weights is None:
        return None
    if saved.adapters != model.adapters:
        return _difference("adapters", list(saved.adapters), list(model.adapters))
    digests = [_split(weights) for weights in (saved.weights, model.weights)]
    counts = [len(each) for each in digests]
    if counts[0] != counts[1]:
        return f"weights: the cache was computed with {counts[0]} parameters, the model has {counts[1]}"
    known = [pair for pair in zip(*digests, strict=True) if UNKNOWN not in pair]
    differing = sum(a != b for a, b in known)
    if differing:
        return f"weights: {differing} of {len(known)} parameters are not those that the cache was computed with"
    return None


def _split(weights: str) -> list[str]:
    return [weights[at : at + len(UNKNOWN)] for at in range(0, len(weights), len(UNKNOWN))]


def _parameters_in_use(model: nn.Module) -> Iterator[Tensor]:
    """All parameters, tied ones as often as they have names, without those of adapters that are not active."""
    idle = {
        id(parameter)
        for module, active in _adapted_modules(model)
        for container in getattr(module, "adapter_layer_names", ())
        for name, adapter in _entries(getattr(module, container, None))
        if name not in active
        for parameter in _parameters_of(adapter)
    }
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in idle:
            yield parameter


def _adapted_modules(model: nn.Module) -> Iterator[tuple[nn.Module, set[str]]]:
    """PEFT's layers, and of each the adapters that take part."""
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            active: Any = module.active_adapters
            yield module, set() if getattr(module, "disable_adapters", False) else set(active)


def _entries(container: Any) -> list[tuple[str, Any]]:
    return list(container.items()) if hasattr(container, "items") else []


def _parameters_of(adapter: Any) -> list[Tensor]:
    return list(adapter.parameters()) if isinstance(adapter, nn.Module) else [adapter]


def _active_adapters(model: nn.Module) -> tuple[str, ...]:
    found = set()
    for module, active in _adapted_modules(model):
        scaling: dict[str, Any] = getattr(module, "scaling", None) or dict.fromkeys(active, 1)
        found |= {f"{name} ({scaling[name]})" for name in active if name in scaling}
    return tuple(sorted(found))


def _digest(parameter: Tensor) -> str:
    """8 hexadecimal digits for the shape, the dtype and a sample of a parameter."""
    # Of a tensor-parallel model the part that is here.
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if local.device.type == "meta":
        return UNKNOWN
    try:
        sample = _sample(local.detach()).cpu().numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):  # a packed format that has no plain elements
        return UNKNOWN
    described = f"{tuple(local.shape)} {local.dtype} ".encode()
    return hashlib.blake2b(described + sample, digest_size=len(UNKNOWN) // 2).hexdigest()


def _sample(parameter: Tensor) -> Tensor:
    """The bytes of up to `SAMPLES` elements, `[samples, bytes of one]`."""
    flat = parameter.contiguous().view(-1) if parameter.ndim else parameter.reshape(1)
    count = flat.shape[0]
    if count > SAMPLES:
        flat_bytes = flat.view(torch.uint8).view(count, -1)
        return flat_bytes[_positions(count, flat.device)]
    return flat.view(torch.uint8) if count else torch.empty(0, dtype=torch.uint8)


@functools.lru_cache(maxsize=256)
def _positions(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return (torch.arange(SAMPLES) * STRIDE % count).to(device)
