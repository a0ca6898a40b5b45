"""The caches that are compared, each by a short name: ours, and those that transformers has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, QuantizedCache, StaticCache, cache_utils
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from .cache import MemOSCache
from .config import PRESETS, KVQuantizationConfig, OffloadConfig

# What all others are measured against.
REFERENCE = "dynamic"
ONE_SCALE = KVQuantizationConfig(key_axis="tensor", value_axis="tensor")
# Of what an offloaded cache will hold, the bytes that it may have on the device.
OFFLOADED_SHARE = 0.4
BLOCK_SIZE = 128
CPU = torch.device("cpu")
# An offloaded cache whose attention reads so many blocks, of so many tokens.
_ACTIVE = re.compile(r"memos-active-([1-9]\d*)(?:x(8|16|32|64|128|256))?")


@dataclass(frozen=True)
class Room:
    """What a cache will have to hold, and where.

    Attributes
    ----------
    tokens, rows : int
        Tokens of each row at the end.
    device : torch.device
    dtype : torch.dtype
        Of keys and values.
    """

    tokens: int
    rows: int = 1
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def full_bytes(self, config: PretrainedConfig) -> int:
        """Bytes of keys and values in full precision, if all layers of the model have full attention."""
        config = config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * head_dim * self.dtype.itemsize
        return int(per_token * self.tokens * self.rows)


@dataclass(frozen=True)
class Contender:
    """One kind of cache.

    Attributes
    ----------
    name : str
    make : callable
        Makes an empty one from a model's config and what it will have to hold, of which static and offloaded caches
        make use.
    missing : callable
        Says in one line what it lacks on a device, or `None` if it runs there.
    lossless : bool
        Whether it is to give the tokens that DynamicCache gives.
    """

    name: str
    make: Callable[[PretrainedConfig, Room], Cache]
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


def _dynamic(config: PretrainedConfig, room: Room) -> Cache:
    return DynamicCache(config=config)


def _static(config: PretrainedConfig, room: Room) -> Cache:
    return StaticCache(config=config, max_cache_len=room.tokens)


def _memos(config: PretrainedConfig, room: Room, **options: Any) -> Cache:
    return MemOSCache(config, **options)


def offloaded(
    config: PretrainedConfig,
    room: Room,
    share: float = OFFLOADED_SHARE,
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> MemOSCache:
    """A cache that may have a share of what it will hold on the device, one block of each layer at least.

    Parameters
    ----------
    config : PretrainedConfig
    room : Room
    share : float
    block_size : int
        Tokens in a block.
    **options
        Of :class:`~memos_hf.OffloadConfig`.
    """
    place: int | str = room.device.type if room.device.type in ("cpu", "mps") else room.device.index or 0
    budget = max(int(share * room.full_bytes(config)), replace(room, tokens=block_size).full_bytes(config))
    return MemOSCache(config, offload=OffloadConfig({place: budget}, **options), block_size=block_size)


def _transformers_quantized(config: PretrainedConfig, room: Room, **options: Any) -> Cache:
    return QuantizedCache(config=config, **options)


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(REFERENCE, _dynamic, _nothing, lossless=True),
        Contender("static", _static, _nothing, lossless=True),
        Contender("memos", _memos, _nothing, lossless=True),
        # Other kernels compute their attention, so that they may choose another of two tokens that are nearly equal.
        Contender("memos-fused", partial(_memos, fused_attention=True), _numba),
        Contender("memos-offload", offloaded, _nothing),
        Contender("memos-offload-lru", partial(offloaded, policy="lru"), _nothing),
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


# What `--caches` takes; N is any number of blocks, T how many tokens one has.
NAMES = (*CONTENDERS, "memos-active-N", "memos-active-NxT")


def contender(name: str) -> Contender:
    """The one called `name`; `"memos-active-8x32"` is an offloaded cache that reads 8 blocks of 32 tokens, and so on.

    Raises
    ------
    ValueError
        If there is no cache of such a name.
    """
    if name in CONTENDERS:
        return CONTENDERS[name]
    match = _ACTIVE.fullmatch(name)
    if match is None:
        raise ValueError(f"caches: expected some of {NAMES}, got {name!r}")
    active = partial(offloaded, active_blocks=int(match[1]), block_size=int(match[2] or BLOCK_SIZE))
    return Contender(name, active, _nothing)


def available(
    names: Iterable[str] | None, config: PretrainedConfig, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those contenders that run here on a model, and why the others do not.

    Parameters
    ----------
    names : iterable of str, optional
        As :func:`contender` takes them; all of `CONTENDERS` by default. DynamicCache takes part in any case.
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
    wanted = {name: contender(name) for name in (REFERENCE, *(CONTENDERS if names is None else names))}
    contenders, left_out = {}, {}
    for name, found in wanted.items():
        reason = found.missing(device) or _refusal(found, config, device)
        if reason is None:
            contenders[name] = found
        else:
            left_out[name] = reason
    return contenders, left_out


def _refusal(contender: Contender, config: PretrainedConfig, device: torch.device) -> str | None:
    """Why a cache cannot be made for a model: QuantizedCache, for one, takes full attention only."""
    try:
        contender.make(config, Room(16, device=device))
    except (ImportError, KeyError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
