"""The decode-attention operator alone: against float64 on random shapes, and how fast it reads a long cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from .. import KVQuantizationConfig
from .budget import Budget
from .calls import Call, Geometry, RandomCalls
from .timing import device_times

Preset = Literal["int8", "fp8", "int4", "int2"]
PRESETS: tuple[Preset, ...] = ("int8", "fp8", "int4", "int2")


def _specs_of(preset: Preset) -> tuple[str, str]:
    keys, values = KVQuantizationConfig.of(preset).specs(128, 128, 128)
    return str(keys), str(values)


# Codecs of keys and of values: those of the presets, and others that store or group differently.
CODECS: dict[str, tuple[str, str]] = {
    "full": ("full", "full"),
    **{preset: _specs_of(preset) for preset in PRESETS},
    "int8 by channel": ("int8 channel 32", "int8 token 32"),
    "int8 by one scale": ("int8 tensor", "int8 tensor"),
    "int4 by token": ("int4 token 32 hadamard symmetric", "int4 token 16"),
    "int2 rotated values": ("int2 channel 16", "int2 token 16 hadamard"),
    "full keys, int4 values": ("full", "int4 token 32"),
}

STOCK = "torch's attention"
# How keys and values lie that bandwidth is measured on, and their codecs; None: in one buffer, as without blocks.
STORAGES: dict[str, tuple[str, str] | None] = {
    STOCK: None,
    "one buffer": None,
    "bfloat16 blocks": CODECS["full"],
    **{preset: CODECS[preset] for preset in PRESETS},
}

# Of the largest error beside the largest output. Half precision rounds the output, and may round the weights.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check(device: torch.device, rounds: int, budget: Budget) -> Iterator[list[dict[str, Any]]]:
    """The operator beside its reference in float64, for every codec.

    The first call of each codec has the heads of an 8-billion-parameter Llama, the others are drawn.

    Parameters
    ----------
    device : torch.device
    rounds : int
        Calls of each codec, where time allows.
    budget : Budget
        Every codec has its first call before any has its second.

    Yields
    ------
    list of dict
        What was found so far, after every round. For each codec and dtype the number of `calls`, the `largest_error`
        (`None` if it is not finite) and the `call` that had it, with what was raised if something was, the `tolerance`,
        and whether all `passed`.
    """
    calls = RandomCalls(device)
    llama = Geometry(batch=2, kv_heads=8, group=4)
    found: dict[tuple[str, torch.dtype], list[tuple[float, str]]] = {}
    for index in range(rounds):
        for name, specs in CODECS.items():
            if found and budget.is_spent():
                break
            with torch.inference_mode():
                call = calls.plain(llama, specs) if index == 0 else calls.drawn(specs)
                found.setdefault((name, call.query.dtype), []).append(_error(call))
        order = sorted(found, key=lambda place: (list(CODECS).index(place[0]), str(place[1])))
        yield [_verdict(name, dtype, found[name, dtype]) for name, dtype in order]


def _verdict(codec: str, dtype: torch.dtype, errors: list[tuple[float, str]]) -> dict[str, Any]:
    largest, call = max(errors)
    return {
        "codec": codec,
        "dtype": str(dtype).removeprefix("torch."),
        "calls": len(errors),
        "largest_error": largest if math.isfinite(largest) else None,
        "call": call,
        "tolerance": TOLERANCES[dtype],
        "passed": largest <= TOLERANCES[dtype],
    }


def _error(call: Call) -> tuple[float, str]:
    """The error of a call, infinite if it raises, and what call it was."""
    try:
        return call.error(), str(call)
    except Exception as error:  # whatever a kernel may raise: the other calls are still to be made
        return math.inf, f"{call}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class LongCache:
    """What bandwidth is measured on: one layer of an 8-billion-parameter Llama."""

    batch: int = 8
    tokens: int = 32768
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    copied_bytes: int = 2**31
    samples: int = 11
    calls: int = 10

    def geometry(self, sealed: bool) -> Geometry:
        """All tokens in blocks but a residual window; or none, in one buffer."""
        block = 128
        entries = (self.tokens - block) // block if sealed else 0
        return Geometry(
            self.batch,
            self.kv_heads,
            self.group,
            head_dim=self.head_dim,
            block=block,
            entries=entries,
            tail=self.tokens - entries * block,
        )


def copy_bandwidth(device: torch.device, sizes: LongCache) -> tuple[float, Tensor]:
    """GB/s, read and written, of copying on the device; and a buffer to keep the device busy with."""
    source = torch.empty(sizes.copied_bytes // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = device_times(lambda: target.copy_(source), device, sizes.samples, 1, lambda: target.copy_(source))
    return sizes.copied_bytes / median(times) / 1e6, target


def bandwidth(device: torch.device, sizes: LongCache, budget: Budget) -> Iterator[dict[str, Any]]:
    """How fast the operator reads keys and values in bfloat16 and encoded, beside a copy and torch's own attention.

    Yields
    ------
    dict
        `storage`, `bytes` read by a call, `ms` of a call, `gb_per_s`, `of_copy` (a share of the copy's bandwidth, read
        and written), `copy_gb_per_s`, and `speedup` over `scaled_dot_product_attention` on the same tokens. Where the
        call raised, what `raised` says is all there is.
    """
    copied, buffer = copy_bandwidth(device, sizes)
    half = buffer.numel() // 2

    def lead() -> None:
        for _ in range(16):  # longer than Python takes to launch the calls that follow
            buffer[:half].copy_(buffer[half : 2 * half])

    stock_ms: float | None = None
    for storage in STORAGES:
        if budget.is_spent():
            return
        row = dict.fromkeys(("bytes", "ms", "gb_per_s", "of_copy", "speedup", "raised"))
        row |= {"storage": storage, "copy_gb_per_s": copied}
        try:
            count, ms = _timed(storage, device, sizes, lead)
        except Exception as error:  # whatever a kernel may raise: the others can still be measured
            yield row | {"raised": f"{type(error).__name__}: {error}"}
            continue
        stock_ms = ms if storage == STOCK else stock_ms
        rate = count / ms / 1e6
        row |= {"bytes": count, "ms": ms, "gb_per_s": rate, "of_copy": rate / copied}
        yield row | {"speedup": stock_ms / ms if stock_ms is not None else None}


def _timed(storage: str, device: torch.device, sizes: LongCache, lead: Callable[[], object]) -> tuple[int, float]:
    """Bytes that a call reads, and the median of its milliseconds."""
    specs = STORAGES[storage]
    with torch.inference_mode():
        call = RandomCalls(device).plain(sizes.geometry(sealed=specs is not None), specs or CODECS["full"])
        run = _stock(call) if storage == STOCK else call.run
        return call.bytes_read(), median(device_times(run, device, sizes.samples, sizes.calls, lead))


def _stock(call: Call) -> Callable[[], Tensor]:
    attention = torch.nn.functional.scaled_dot_product_attention
    query, tail = call.query, call.tail
    return lambda: attention(query, tail.keys, tail.values, enable_gqa=True)
