"""The caches that are compared, each by a short name: ours, and those that transformers has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, QuantizedCache, StaticCache, cache_utils
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from .cache import MemOSCache
from .config import PRESETS, KVQuantizationConfig

# What all others are measured against.
REFERENCE = "dynamic"
ONE_SCALE = KVQuantizationConfig(key_axis="tensor", value_axis="tensor")


@dataclass(frozen=True)
class Contender:
    """One kind of cache.

    Attributes
    ----------
    name : str
    make : callable
        Makes an empty one from a model's config and the tokens it will have to hold, of which only a static cache
        makes use.
    missing : callable
        Says in one line what it lacks on a device, or `None` if it runs there.
    lossless : bool
        Whether it is to give the tokens that DynamicCache gives.
    """

    name: str
    make: Callable[[PretrainedConfig, int], Cache]
    missing: Callable[[torch.device], str | None]
    lossless: bool = False


def _nothing(device: torch.device) -> None:
    """What caches lack that need nothing."""


def _numba(device: torch.device) -> str | None:
    # On other devices the option has no need of the package.
    if device.type != "cpu" or find_spec("numba") is not None:
        return None
    return "numba is not installed: pip install 'memos_hf[cpu]'"


def _quanto(device: torch.device) -> str | None:
    return None if is_optimum_quanto_available() else "optimum-quanto is not installed: pip install optimum-quanto"


def _hqq(device: torch.device) -> str | None:
    return None if is_hqq_available() else "hqq is not installed: pip install hqq"


def _fp8(device: torch.device) -> str | None:
    return None if hasattr(cache_utils, "Fp8QuantizedLayer") else "this version of transformers has no fp8 backend"


def _dynamic(config: PretrainedConfig, room: int) -> Cache:
    return DynamicCache(config=config)


def _static(config: PretrainedConfig, room: int) -> Cache:
    return StaticCache(config=config, max_cache_len=room)


def _memos(config: PretrainedConfig, room: int, **options: Any) -> Cache:
    return MemOSCache(config, **options)


def _transformers_quantized(config: PretrainedConfig, room: int, **options: Any) -> Cache:
    return QuantizedCache(config=config, **options)


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(REFERENCE, _dynamic, _nothing, lossless=True),
        Contender("static", _static, _nothing, lossless=True),
        Contender("memos", _memos, _nothing, lossless=True),
        # Another kernel computes its attention, so that it may choose another of two tokens that are nearly equal.
        Contender("memos-fused", partial(_memos, fused_attention=True), _numba),
        *(Contender(f"memos-{preset}", partial(_memos, quantization=preset), _nothing) for preset in PRESETS),
        # One fixed scale of 0.1 for everything: what scales that fit are worth.
        Contender("memos-int8-tensor", partial(_memos, quantization=ONE_SCALE), _nothing),
        *(
            Contender(f"quanto-{bits}", partial(_transformers_quantized, backend="quanto", nbits=bits), _quanto)
            for bits in (4, 2)
        ),
        *(
            # Its scales run along tokens by default, which transformers' documentation advises against.
            Contender(
                f"hqq-{bits}",
                partial(_transformers_quantized, backend="hqq", nbits=bits, axis_key=1, axis_value=1),
                _hqq,
            )
            for bits in (8, 4, 2)
        ),
        Contender("transformers-fp8", partial(_transformers_quantized, backend="fp8"), _fp8),
    )
}


def available(
    names: Iterable[str] | None, config: PretrainedConfig, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those contenders that run here on a model, and why the others do not.

    Parameters
    ----------
    names : iterable of str, optional
        Of `CONTENDERS`; all by default. DynamicCache takes part in any case.
    config : PretrainedConfig
        The model's.
    device : torch.device
        The model's.

    Returns
    -------
    contenders : dict[str, Contender]
        By name, DynamicCache first.
    left_out : dict[str, str]
        The reason for each that is left out, by name.

    Raises
    ------
    ValueError
        If there is no cache of such a name.
    """
    names = list(CONTENDERS if names is None else names)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"caches: expected some of {tuple(CONTENDERS)}, got {unknown[0]!r}")
    contenders, left_out = {}, {}
    for name in dict.fromkeys((REFERENCE, *names)):
        reason = CONTENDERS[name].missing(device) or _refusal(CONTENDERS[name], config)
        if reason is None:
            contenders[name] = CONTENDERS[name]
        else:
            left_out[name] = reason
    return contenders, left_out


def _refusal(contender: Contender, config: PretrainedConfig) -> str | None:
    """Why a cache cannot be made for a model: QuantizedCache, for one, takes full attention only."""
    try:
        contender.make(config, 16)
    except (ImportError, KeyError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
