"""The options of a cache, and every check of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Layout = Literal["head_major", "seq_major"]

DEFAULT_INITIAL_CAPACITY = 256

# What cannot be combined, as (option, option, reason). The README prints this table.
REFUSED_COMBINATIONS = (
    ("static", "initial_capacity", "a static cache allocates max_cache_len tokens at once"),
    ("static", "layout", "a static cache uses transformers' static layers, which are head-major"),
    ("static", "offloading", "a compiled step cannot move layers between devices"),
    ("static", "per-layer data", "a static cache is filled by the model, not from tensors"),
    ("static", "flash attention", "it cannot be compiled with a cache of fixed shape"),
)


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
    static : bool
        Fixed shapes of `max_cache_len` tokens, for `torch.compile` and CUDA graphs.

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

    def __post_init__(self) -> None:
        _check_positive_int("initial_capacity", self.initial_capacity)
        _check_positive_int("max_cache_len", self.max_cache_len)
        if isinstance(self.growth_factor, bool) or not isinstance(self.growth_factor, (int, float)):
            raise TypeError(f"growth_factor: expected a number, got {self.growth_factor!r}")
        if not math.isfinite(self.growth_factor) or self.growth_factor <= 1:
            raise ValueError(f"growth_factor: expected a finite number above 1, got {self.growth_factor!r}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout: expected one of {get_args(Layout)}, got {self.layout!r}")
        if not isinstance(self.static, bool):
            raise TypeError(f"static: expected True or False, got {self.static!r}")
        if self.static and self.max_cache_len is None:
            raise ValueError("static=True: expected max_cache_len, the number of tokens to allocate, got None")
        refuse_combinations(
            static=self.static, initial_capacity=self.initial_capacity is not None, layout=self.layout != "head_major"
        )
        if (
            self.initial_capacity is not None
            and self.max_cache_len is not None
            and self.max_cache_len < self.initial_capacity
        ):
            raise ValueError(
                f"max_cache_len: expected at least initial_capacity ({self.initial_capacity}), got {self.max_cache_len}"
            )

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
