"""What stored prefixes are found by: chained hashes of token ids, mixed with all that keys and values depend on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..config import CacheOptions
from .fingerprint import Fingerprint
from .tensors import FORMAT_VERSION

TokenIds = npt.NDArray[np.int64]

# Tokens from one hash to the next. Hashes only say which prefixes are worth comparing token by token.
HASH_TOKENS = 16
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}-[0-9a-f]{32}\.safetensors")


def model_key(fingerprint: Fingerprint, computed_in: torch.dtype | None) -> str:
    """16 hexadecimal digits for a model as it is now, the format of files and the dtype of autocast, if it is on."""
    return _digest(json.dumps([FORMAT_VERSION, str(computed_in), fingerprint.to_json()], sort_keys=True).encode(), 8)


def storage_key(options: CacheOptions) -> str:
    """8 hexadecimal digits for the options of a cache that change what it holds."""
    quantization = None if options.quantization is None else asdict(options.quantization)
    active_blocks = None if options.lease is None else options.lease.active_blocks
    described: list[Any] = [quantization, options.block_size, active_blocks]
    return _digest(json.dumps(described, sort_keys=True).encode(), 4)


def boundary_hashes(model: str, storage: str, ids: TokenIds) -> list[bytes]:
    """A hash for each `HASH_TOKENS` tokens, of these and all before them, behind one for no token at all."""
    hashes = [hashlib.blake2b(f"{model}-{storage}".encode(), digest_size=16).digest()]
    for start in range(0, len(ids) - HASH_TOKENS + 1, HASH_TOKENS):
        block = ids[start : start + HASH_TOKENS].tobytes()
        hashes.append(hashlib.blake2b(hashes[-1] + block, digest_size=16).digest())
    return hashes


def file_name(model: str, storage: str, ids: TokenIds) -> str:
    """What the file with the cache of `ids` is called."""
    hashes = boundary_hashes(model, storage, ids)
    rest = ids[(len(hashes) - 1) * HASH_TOKENS :].tobytes()
    return f"{model}-{storage}-{_digest(hashes[-1] + rest + len(ids).to_bytes(8, 'little'), 16)}.safetensors"


def keys_in(name: str) -> tuple[str, str]:
    """The model's and the storage's key in the name of a file."""
    model, storage, _ = name.split("-")
    return model, storage


def common_tokens(one: TokenIds, other: TokenIds) -> int:
    """With how many equal ids both begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length


def _digest(data: bytes, size: int) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()
