"""Decode attention on the CPU: describes a call as a job for the compiled kernel and runs it on torch's own threads.

numba's thread pool is not used. Beside torch's it would fight for the cores (OpenMP threads spin for a while after each
region), and its fallback layer aborts the process when two Python threads enter it at once. Instead the kernel is a
plain function that several threads may run on one job, and where torch comes with GNU OpenMP, its threads do so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..blocks.codecs import BlockCodec
from .reference import Exact, Sealed, Sinks

logger = logging.getLogger(__name__)

EXACT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODED_KINDS = {"int8": 3, "int4": 4, "int2": 5, "fp8": 6}
NO_MASK, BOOLEAN_MASK, ADDITIVE_MASK = range(3)
LARGEST_HEAD_DIM = 1024

# Parts are smaller than threads need, so that a core that is busy elsewhere does not hold up the others.
PARTS_PER_THREAD = 4
# Tiles below which a part is not worth waking a thread for: some ten microseconds.
STEPS_PER_PART = 8
# A tile of float32 keys should leave room for everything else in a first-level cache of 32 KiB or more.
TILE_TOKENS = 128
TILE_ELEMENTS = 8192


def available() -> bool:
    """Whether the kernel can be had; if not, one log line says what to install."""
    return _load_kernel() is not None


def supports(query: Tensor, *states: Tensor) -> bool:
    """Whether the kernel takes queries and exact keys and values like these."""
    return query.dtype in EXACT_KINDS and all(
        state.dtype in EXACT_KINDS and state.shape[-1] <= LARGEST_HEAD_DIM and state.device.type == "cpu"
        for state in states
    )


def decode_attention(
    query: Tensor,
    tail: Exact,
    sealed: Sealed | None,
    sinks: Sinks | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    head_sinks: Tensor | None,
    log_sum_exp: Tensor | None = None,
) -> Tensor:
    """As :func:`memos_hf.attention.reference.decode_attention`, by the compiled kernel.

    Raises
    ------
    RuntimeError
        If numba is not installed.
    """
    kernel = _load_kernel()
    if kernel is None:
        raise RuntimeError("decode attention on the CPU needs numba: pip install 'memos_hf[cpu]'")
    batch, heads, queries, key_dim = query.shape
    kv_heads, value_dim = tail.keys.shape[1], tail.values.shape[-1]
    rows = heads // kv_heads * queries
    block_size = sealed.key_codec.block_size if sealed is not None else TILE_TOKENS
    tile = _tile_tokens(max(key_dim, value_dim), block_size)
    steps = (sealed.table.shape[1] * (block_size // tile) if sealed is not None else 0) + tail.keys.shape[2] // tile + 1
    threads = torch.get_num_threads()
    parts = min(max(batch * kv_heads * steps // STEPS_PER_PART, 1), PARTS_PER_THREAD * threads if threads > 1 else 1)
    threads = min(threads, parts)
    state_size = rows * (value_dim + 2)
    work_size = max(tile * max(key_dim, value_dim), rows * max(key_dim, tile) + _scales(sealed, tile))
    scratch_size = state_size + rows * (2 * key_dim + tile) + work_size
    scratch_size = -(-scratch_size // 32) * 32  # a thread's scratch starts a cache line of its own
    memory = _scratch(threads * scratch_size + 2 * parts * state_size)
    floats = query.to(torch.float32).contiguous()
    output = torch.empty((batch, heads, queries, value_dim), dtype=torch.float32)
    if log_sum_exp is not None and mask is None:
        queries = 1  # without a mask the kernel is causal at the end, which is no limit to one query of more heads
    kept: list[Tensor] = []  # copies that must live until the kernel returns
    fields = [
        *(0, 0, 0, parts, memory, 4 * scratch_size, memory + 4 * threads * scratch_size),
        *(batch, kv_heads, rows // queries, queries, key_dim, value_dim, tile),
        *(floats.data_ptr(), output.data_ptr(), 0 if log_sum_exp is None else log_sum_exp.data_ptr()),
        *_sealed_fields(sealed),
        *_tail_fields(tail, kept),
        *_sink_fields(sinks if sealed is not None else None),
        *_mask_fields(mask, head_sinks, kept),
        *(scale, softcap, *_units(sealed)),
    ]
    kernel.run(fields, threads)
    return output if query.dtype == torch.float32 or log_sum_exp is not None else output.to(query.dtype)


def _tile_tokens(head_dim: int, block_size: int) -> int:
    tokens = TILE_TOKENS
    while tokens > 8 and tokens * head_dim > TILE_ELEMENTS:
        tokens //= 2
    return min(tokens, block_size)


def _scales(sealed: Sealed | None, tile: int) -> int:
    """Floats for scales, and what codes of 0 stand for, of a tile: of keys, and then of values in the same place.

    Those of keys are by token or by channel, whichever share none.
    """
    if sealed is None:
        return 0
    keys, values = sealed.key_codec, sealed.value_codec
    of_keys = tile if keys.group_tokens == 1 else keys.head_dim
    return 2 * max(of_keys, tile * (values.channels // values.group_channels))


def _sealed_fields(sealed: Sealed | None) -> tuple[int, ...]:
    if sealed is None:
        return (0, TILE_TOKENS, 0, 0, _no_blocks().data_ptr(), 0, *(0,) * 22)
    if "cpu" not in sealed.prepared:
        kept: list[Tensor] = []
        table, starts = _rows_of(sealed.table, kept), _rows_of(sealed.starts, kept)
        fields = (
            *(table.shape[1], sealed.key_codec.block_size),
            *(table.data_ptr(), table.stride(0), starts.data_ptr(), starts.stride(0)),
            *_coded_fields(sealed.key_codec, sealed.keys),
            *_coded_fields(sealed.value_codec, sealed.values),
        )
        sealed.prepared["cpu"] = fields, kept
    prepared: tuple[tuple[int, ...], list[Tensor]] = sealed.prepared["cpu"]
    return prepared[0]


@cache
def _no_blocks() -> Tensor:
    """The starts of a row without sealed blocks."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32)


def _rows_of(table: Tensor, kept: list[Tensor]) -> Tensor:
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        table = table.to(torch.int32).contiguous()
        kept.append(table)
    return table


def _coded_fields(codec: BlockCodec, arenas: dict[str, Tensor]) -> tuple[int, ...]:
    kind, codes = CODED_KINDS.get(codec.spec.kind), arenas["codes"]
    addresses = [arenas[name].data_ptr() if name in arenas else 0 for name in ("codes", "scales", "zeros")]
    return (
        EXACT_KINDS[codes.dtype] if kind is None else kind,
        *addresses,
        *(codec.channels, codec.group_channels, codec.group_tokens),
        *(codes.shape[2] * codes.shape[3] * codes.element_size(), codes.stride(0), codes.stride(1)),
        int(codec.spec.rotation is not None),
    )


def _units(sealed: Sealed | None) -> tuple[float, ...]:
    """What a stored scale and a zero point of 1 stand for, and a code of 0 without zero points; of keys, of values."""
    if sealed is None:
        return (0.0,) * 6
    keys, values = sealed.key_codec, sealed.value_codec
    return (
        *(keys.scale_unit, keys.zero_unit, keys.lowest),
        *(values.scale_unit, values.zero_unit, values.lowest),
    )


def _exact_fields(states: Tensor, kept: list[Tensor]) -> tuple[int, ...]:
    if states.stride(-1) != 1:
        states = states.contiguous()
        kept.append(states)
    return (EXACT_KINDS[states.dtype], states.data_ptr(), states.stride(0), states.stride(1), states.stride(2))


def _tail_fields(tail: Exact, kept: list[Tensor]) -> tuple[int, ...]:
    return (tail.keys.shape[2], *_exact_fields(tail.keys, kept), *_exact_fields(tail.values, kept))


def _sink_fields(sinks: Sinks | None) -> tuple[int, ...]:
    if sinks is None or sinks.positions.shape[1] == 0:
        return (0,) * 12
    if "cpu" not in sinks.prepared:
        positions = sinks.positions.to(torch.int32).contiguous()
        kept = [positions]
        fields = (
            *(positions.shape[1], positions.data_ptr()),
            *_exact_fields(sinks.keys, kept),
            *_exact_fields(sinks.values, kept),
        )
        sinks.prepared["cpu"] = fields, kept
    prepared: tuple[tuple[int, ...], list[Tensor]] = sinks.prepared["cpu"]
    return prepared[0]


def _mask_fields(mask: Tensor | None, head_sinks: Tensor | None, kept: list[Tensor]) -> tuple[int, ...]:
    logits = 0
    if head_sinks is not None:
        head_sinks = head_sinks.to(torch.float32).contiguous()
        kept.append(head_sinks)
        logits = head_sinks.data_ptr()
    if mask is None:
        return (NO_MASK, 0, 0, 0, 0, logits)
    kind = BOOLEAN_MASK if mask.dtype == torch.bool else ADDITIVE_MASK
    if kind == ADDITIVE_MASK:
        mask = mask.to(torch.float32)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    kept.append(mask)
    strides = [0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3)]
    return (kind, mask.data_ptr(), *strides, logits)


class _Scratch(threading.local):
    """Working memory of the calls of one Python thread, kept from call to call."""

    memory: Tensor | None = None


_held = _Scratch()


def _scratch(floats: int) -> int:
    """Address of at least so many floats, aligned to a cache line."""
    if _held.memory is None or _held.memory.numel() < floats:
        with torch.inference_mode(False):
            _held.memory = torch.empty(floats, dtype=torch.float32)
    return _held.memory.data_ptr()


class Kernel:
    """The compiled `attend` and the threads it runs on.

    Parameters
    ----------
    address : int
        Of the C function, which takes the address of a job.
    integers, floats : int
        How many 8-byte fields of each kind a job has; the integers come first.
    """

    def __init__(self, address: int, integers: int, floats: int) -> None:
        self._address = address
        self._attend = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self._layout = struct.Struct(f"{integers}q{floats}d")
        self._parallel = _torch_openmp()

    def run(self, fields: list[float], threads: int) -> None:
        """Do a job on so many threads, this one among them; returns when it is done."""
        job = ctypes.create_string_buffer(self._layout.size)  # written to by the threads, so one for each call
        self._layout.pack_into(job, 0, *fields)
        address = ctypes.addressof(job)
        if threads == 1:
            self._attend(address)
        elif self._parallel is not None:
            self._parallel(self._address, address, threads, 0)
        else:
            helpers = [_pool().submit(self._attend, address) for _ in range(threads - 1)]
            self._attend(address)
            for helper in helpers:
                helper.result()


@cache
def _load_kernel() -> Kernel | None:
    logger.info("loading the kernel of CPU attention; the first time on a machine it is compiled, for some 20 seconds")
    try:
        from . import cpu_kernels
    except ImportError:
        logger.warning(
            "numba is not installed: attention over encoded blocks runs in plain torch, several times slower. "
            "Install it with: pip install 'memos_hf[cpu]'"
        )
        return None
    address: int = cpu_kernels.attend.address
    return Kernel(address, len(cpu_kernels.INTEGERS), len(cpu_kernels.FLOATS))


def _torch_openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch brings along, which is the one whose threads it uses."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            try:
                parallel = ctypes.CDLL(str(library)).GOMP_parallel
            except (OSError, AttributeError):
                continue
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            return parallel
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max((os.cpu_count() or 1) - 1, 1), thread_name_prefix="memos-attention")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
