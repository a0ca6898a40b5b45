"""The options of a cache, and every check of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .blocks.budget import Lease, MemoryBudget
from .blocks.codecs import Axis, CodecSpec, Kind, is_power_of_two
from .blocks.disk import check_folder
from .blocks.policies import POLICIES, PolicyName

Bits = Literal[8, 4, 2, "fp8", "full"]
Preset = Literal["int8", "int4", "int2", "fp8"]
Layout = Literal["head_major", "seq_major"]

DEFAULT_INITIAL_CAPACITY = 256

# What cannot be combined, as (option, option, reason). The README prints this table.
REFUSED_COMBINATIONS = (
    ("static", "initial_capacity", "a static cache allocates max_cache_len tokens at once"),
    ("static", "layout", "a static cache uses transformers' static layers, which are head-major"),
    ("static", "fused_attention", "a compiled step computes attention itself"),
    ("static", "quantization", "blocks are sealed at shapes that change"),
    ("static", "offload", "blocks are sealed at shapes that change"),
    ("quantization", "layout", "blocks have a layout of their own"),
    ("offload", "layout", "blocks have a layout of their own"),
    ("offload", "fused_attention", "blocks are read by that kernel anyway"),
    ("offload", "offloading", "one of them moves layers as a whole, the other block by block"),
    ("quantization", "offloading", "a layer of blocks cannot be moved as a whole"),
    ("static", "offloading", "a compiled step cannot move layers between devices"),
    ("static", "per-layer data", "a static cache is filled by the model, not from tensors"),
    ("static", "flash attention", "it cannot be compiled with a cache of fixed shape"),
)


KINDS: dict[Any, Kind] = {8: "int8", 4: "int4", 2: "int2", "fp8": "fp8", "full": "full"}


@dataclass(frozen=True)
class KVQuantizationConfig:
    """How sealed blocks are encoded.

    Parameters
    ----------
    key_bits, value_bits : {8, 4, 2, "fp8", "full"}
        Bits of one element; "fp8" is e4m3, "full" keeps the model's dtype.
    key_axis : {"token", "channel", "tensor"}
        What shares a scale: the channels of one token (and head), the tokens of one channel (as in KIVI,
        arXiv:2402.02750), or everything, by one fixed scale.
    value_axis : {"token", "tensor"}
        The same for values; by channel it is worse than by token (KIVI), and not offered.
    group_size : int, optional
        Elements that share a scale; `None`: all channels of a token, or all tokens of a block.
    value_group_size : int or "as keys", optional
        The same for values alone. A rotated token that shares one scale needs no lowest value beside it at 4 or 2
        bits: the rotation centres it.
    sink_tokens : int
        First real tokens of each row that are kept exact too; not in sliding windows, which lose them. Where padding
        is, the mask says that attention is given, which eager and flex attention do not show: a left-padded row's
        first tokens, padding among them, are kept there.
    residual_tokens : int
        Newest tokens that are exact, at least; rounded up to whole blocks.
    rotation : {"hadamard"}, optional
        Spread outliers over channels before encoding (QuaRot, arXiv:2404.00456); for head dims that are powers of two.
    skip_layers : tuple of int
        Layers that stay in full precision.

    Raises
    ------
    TypeError, ValueError
        Naming the option, what was expected and what came.
    """

    key_bits: Bits = 8
    value_bits: Bits = 8
    key_axis: Axis = "token"
    value_axis: Axis = "token"
    group_size: int | None = None
    sink_tokens: int = 4
    residual_tokens: int = 128
    rotation: Literal["hadamard"] | None = None
    skip_layers: tuple[int, ...] = ()
    value_group_size: int | Literal["as keys"] | None = "as keys"

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) not in get_args(Bits) or isinstance(getattr(self, name), float):
                raise ValueError(f"{name}: expected one of {get_args(Bits)}, got {getattr(self, name)!r}")
        if self.key_axis not in get_args(Axis):
            raise ValueError(f"key_axis: expected one of {get_args(Axis)}, got {self.key_axis!r}")
        if self.value_axis not in ("token", "tensor"):
            raise ValueError(f"value_axis: expected 'token' or 'tensor', got {self.value_axis!r}")
        if self.rotation not in (None, "hadamard"):
            raise ValueError(f"rotation: expected 'hadamard' or None, got {self.rotation!r}")
        _check_positive_int("group_size", self.group_size)
        if isinstance(self.value_group_size, str):
            if self.value_group_size != "as keys":
                raise ValueError(f"value_group_size: expected 'as keys', an int or None, got {self.value_group_size!r}")
        else:
            _check_positive_int("value_group_size", self.value_group_size)
        for name in ("sink_tokens", "residual_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
        if not isinstance(self.skip_layers, (tuple, list)) or any(type(layer) is not int for layer in self.skip_layers):
            raise TypeError(f"skip_layers: expected a tuple of layer indices, got {self.skip_layers!r}")
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))  # a list would make presets uncomparable
        if any(layer < 0 for layer in self.skip_layers):
            raise ValueError(f"skip_layers: expected indices of at least 0, got {self.skip_layers!r}")

    @classmethod
    def of(cls, quantization: KVQuantizationConfig | Preset) -> KVQuantizationConfig:
        """A preset by its name, or a config as it is.

        Raises
        ------
        ValueError
            If it is neither.
        """
        if isinstance(quantization, KVQuantizationConfig):
            return quantization
        if not isinstance(quantization, str) or quantization not in PRESETS:
            raise ValueError(
                f"quantization: expected a KVQuantizationConfig or one of {tuple(PRESETS)}, got {quantization!r}"
            )
        return PRESETS[quantization]

    @property
    def name(self) -> str:
        """The preset that it is, or in a few words what it is."""
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        keys, values = KINDS[self.key_bits], KINDS[self.value_bits]
        rotated = f", {self.rotation}" if self.rotation else ""
        return f"keys {keys} by {self.key_axis}, values {values} by {self.value_axis}{rotated}"

    def residual_window(self, block_size: int) -> int:
        """`residual_tokens` rounded up to whole blocks of `block_size` tokens."""
        return -(-self.residual_tokens // block_size) * block_size

    def specs(self, key_dim: int, value_dim: int, block_size: int) -> tuple[CodecSpec, CodecSpec]:
        """Codecs for keys and values of these head dims. A preset adapts to any, what was asked for is kept.

        Parameters
        ----------
        key_dim, value_dim : int
            Elements of a head.
        block_size : int
            Tokens in a block.
        """
        value_group = self.group_size if self.value_group_size == "as keys" else self.value_group_size
        keys = self._spec(self.key_bits, self.key_axis, self.group_size)
        values = self._spec(self.value_bits, self.value_axis, value_group)
        if self in PRESETS.values():
            return keys.fitted_to(key_dim, block_size), values.fitted_to(value_dim, block_size)
        return keys, values

    def _spec(self, bits: Bits, axis: Axis, group_size: int | None) -> CodecSpec:
        if bits == "full":
            return CodecSpec()
        centred = self.rotation is not None and axis == "token" and group_size is None and bits in (4, 2)
        return CodecSpec(KINDS[bits], axis, None if axis == "tensor" else group_size, self.rotation, symmetric=centred)


@dataclass(frozen=True)
class OffloadConfig:
    """Where blocks go that do not find room on the device.

    Parameters
    ----------
    max_memory : mapping or MemoryBudget, optional
        Bytes by device in accelerate's words, such as `{0: "2GiB", "cpu": "8GiB"}`; see :class:`MemoryBudget`. A budget
        that several caches are given is one that they share.
    offload_folder : path, optional
        For a file of each cache that needs one; by default the system's folder for temporary files. It is removed with
        the cache.
    policy : {"pin", "lru"}, optional
        Which blocks stay on the device. By default `"pin"`, with which exact attention finds as large a part of its
        blocks there as fits; with `active_blocks`, `"lru"`.
    active_blocks : int, optional
        Let a call of few queries attend to so many blocks of each row and layer: those with the highest bound of
        query · key (Quest, arXiv:2406.10774), the first one of a row always among them, and the tail. An approximation,
        a better one with a `block_size` of 16 or 32, whose bounds say more. `None`: all of them, which is exact.

    Raises
    ------
    TypeError, ValueError, OSError
        Naming the option, what was expected and what came.
    """

    max_memory: Mapping[int | str, int | str] | MemoryBudget | None = None
    offload_folder: str | os.PathLike[str] | None = None
    policy: PolicyName | None = None
    active_blocks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_memory, MemoryBudget):
            MemoryBudget(self.max_memory)
        if self.offload_folder is not None:
            if not isinstance(self.offload_folder, (str, os.PathLike)):
                raise TypeError(f"offload_folder: expected a path, got {self.offload_folder!r}")
            check_folder(Path(self.offload_folder))
        if self.policy is not None and self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {tuple(POLICIES)} or None, got {self.policy!r}")
        _check_positive_int("active_blocks", self.active_blocks)

    @property
    def chosen_policy(self) -> PolicyName:
        """The policy that was asked for, or the one that suits the attention."""
        return self.policy or ("pin" if self.active_blocks is None else "lru")

    def lease(self) -> Lease:
        """A part in the budget, for one cache."""
        budget = self.max_memory if isinstance(self.max_memory, MemoryBudget) else MemoryBudget(self.max_memory)
        return Lease(budget, self.offload_folder, self.chosen_policy, self.active_blocks)


@dataclass(frozen=True)
class CacheOptions:
    """How a :class:`~memos_hf.MemOSCache` stores keys and values.

    Parameters
    ----------
    initial_capacity : int, optional
        Tokens allocated at a layer's first update. By default 256, or `max_cache_len` where that is lower.
    max_cache_len : int, optional
        Hard ceiling in tokens; `None` lets the cache grow for ever.
    growth_factor : float
        Capacity is multiplied by this when it runs out; greater than 1.
    layout : {"head_major", "seq_major"}
        Order in memory: `[batch, head, token, dim]` or `[batch, token, head, dim]`. Attention reads the first
        faster; the second is kept to be measured against.
    block_size : int
        Tokens in a sealed block, a power of two of at least 8.
    quantization : KVQuantizationConfig or {"int8", "int4", "int2", "fp8"}, optional
        How sealed blocks are encoded; `None`: no blocks, one contiguous buffer.
    fused_attention : bool
        On the CPU, compute a single token's `sdpa` attention over contiguous buffers by the compiled kernel too.
    static : bool
        Fixed shapes of `max_cache_len` tokens, for `torch.compile` and CUDA graphs.
    offload : OffloadConfig, optional
        Keep blocks, encoded or not, within a budget of the device, and the others in host memory and on disk.
    attention : str, optional
        The model's `attn_implementation`, as its config says; not an argument of the cache.
    lease : Lease, optional
        The part of a budget that belongs to the cache; not an argument of the cache.

    Raises
    ------
    TypeError, ValueError
        Naming the option, what was expected and what came.
    """

    initial_capacity: int | None = None
    max_cache_len: int | None = None
    growth_factor: float = 1.5
    layout: Layout = "head_major"
    static: bool = False
    quantization: KVQuantizationConfig | None = None
    block_size: int = 128
    fused_attention: bool = False
    offload: OffloadConfig | None = None
    attention: str | None = None
    lease: Lease | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_positive_int("initial_capacity", self.initial_capacity)
        _check_positive_int("max_cache_len", self.max_cache_len)
        if isinstance(self.growth_factor, bool) or not isinstance(self.growth_factor, (int, float)):
            raise TypeError(f"growth_factor: expected a number, got {self.growth_factor!r}")
        if not math.isfinite(self.growth_factor) or self.growth_factor <= 1:
            raise ValueError(f"growth_factor: expected a finite number above 1, got {self.growth_factor!r}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout: expected one of {get_args(Layout)}, got {self.layout!r}")
        for name in ("static", "fused_attention"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.offload is not None and not isinstance(self.offload, OffloadConfig):
            raise TypeError(f"offload: expected an OffloadConfig or None, got {self.offload!r}")
        if self.static and self.max_cache_len is None:
            raise ValueError("static=True: expected max_cache_len, the number of tokens to allocate, got None")
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int):
            raise TypeError(f"block_size: expected an int, got {self.block_size!r}")
        if self.block_size < 8 or not is_power_of_two(self.block_size):
            raise ValueError(f"block_size: expected a power of two of at least 8, got {self.block_size}")
        refuse_combinations(
            static=self.static,
            initial_capacity=self.initial_capacity is not None,
            layout=self.layout != "head_major",
            quantization=self.quantization is not None,
            offload=self.offload is not None,
            fused_attention=self.fused_attention,
        )
        if (
            self.initial_capacity is not None
            and self.max_cache_len is not None
            and self.max_cache_len < self.initial_capacity
        ):
            raise ValueError(
                f"max_cache_len: expected at least initial_capacity ({self.initial_capacity}), got {self.max_cache_len}"
            )

    def encoding(self, layer_idx: int) -> KVQuantizationConfig | None:
        """How a layer's blocks are encoded; `None` if it has none, but one contiguous buffer."""
        if self.quantization is None or layer_idx in self.quantization.skip_layers:
            return UNENCODED if self.offload is not None else None
        return self.quantization

    @property
    def mode(self) -> str:
        """How tokens are kept, in a few words, such as `"int8, offloaded (pin)"`."""
        words = ["static"] if self.static else []
        words += ["seq_major"] if self.layout == "seq_major" else []
        words.append(self.quantization.name if self.quantization is not None else "full precision")
        if self.offload is not None:
            active = self.offload.active_blocks
            reads = f", {active} active blocks of {self.block_size} tokens" if active is not None else ""
            words.append(f"offloaded ({self.offload.chosen_policy}{reads})")
        return ", ".join(words)

    @property
    def first_capacity(self) -> int:
        """Tokens to allocate when a layer sees its first K and V."""
        if self.initial_capacity is not None:
            return self.initial_capacity
        if self.max_cache_len is not None:
            return min(DEFAULT_INITIAL_CAPACITY, self.max_cache_len)
        return DEFAULT_INITIAL_CAPACITY


def refuse_combinations(**used: bool) -> None:
    """Raise a `ValueError` if two options that cannot be combined are both in use.

    Parameters
    ----------
    **used : bool
        Whether each option, named as in `REFUSED_COMBINATIONS` with spaces and hyphens as underscores, is in use.
    """
    known = {_identifier(option) for pair in REFUSED_COMBINATIONS for option in pair[:2]}
    assert used.keys() <= known, used.keys() - known
    for first, second, reason in REFUSED_COMBINATIONS:
        if used.get(_identifier(first)) and used.get(_identifier(second)):
            raise ValueError(f"{first} cannot be combined with {second}: {reason}")


def _identifier(option: str) -> str:
    return option.replace(" ", "_").replace("-", "_")


def _check_positive_int(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int or None, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name}: expected at least 1, got {value}")


PRESETS: dict[str, KVQuantizationConfig] = {
    "int8": KVQuantizationConfig(),
    "fp8": KVQuantizationConfig(key_bits="fp8", value_bits="fp8"),
    "int4": KVQuantizationConfig(4, 4, key_axis="channel", group_size=32, value_group_size=None, rotation="hadamard"),
    "int2": KVQuantizationConfig(2, 2, key_axis="channel", group_size=32, rotation="hadamard"),
}

# Blocks that keep the model's dtype: every token of them is exact, so that no window beside them needs to be.
UNENCODED = KVQuantizationConfig("full", "full", sink_tokens=0, residual_tokens=0)
