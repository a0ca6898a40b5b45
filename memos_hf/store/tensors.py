"""Named tensors and a JSON document in one safetensors file, every byte of it under a checksum.

The document is in the file's metadata, as `memos_hf`. It has a checksum of each tensor, in the order of their names;
beside it, as `checksum`, is one of the document itself and of the names, dtypes and shapes of all tensors.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT_VERSION = 1
# They find damage, not forgery: whoever can write a file can write its checksums too.
CHECKSUM_BYTES = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# How files begin that `pickle` and `torch.save` write.
PICKLES = (b"\x80", b"PK\x03\x04")


class CacheFileError(ValueError):
    """A file is no saved cache, is damaged, or is that of another model; the message says what differs.

    Raised by :meth:`~memos_hf.MemOSCache.load` and :func:`~memos_hf.store.load_input_ids` before anything is built.
    """


Group = Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]


def write_tensors(file: BinaryIO, document: dict[str, Any], groups: Sequence[Group]) -> None:
    """Write `document` and groups of tensors.

    Each group is asked twice, for the checksums in front and for the data behind them, so that no more than one group
    is in memory beside the cache; safetensors' own `save_file` takes all tensors at once.

    Parameters
    ----------
    groups : sequence of callables
        Each returns a description that JSON can hold and tensors by name, on any device, the same each time.
    """
    header: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    descriptions: list[dict[str, Any]] = []
    offset = 0
    for index, group in enumerate(groups):
        description, tensors = group()
        descriptions.append(description)
        for name, tensor in _in_order(tensors):
            if tensor.dtype not in NAMES:
                raise TypeError(f"{name}: expected a dtype of {sorted(NAMES.values())}, got {tensor.dtype}")
            size = tensor.numel() * tensor.element_size()
            place = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
            header[f"{index}.{name}"] = {**place, "data_offsets": [offset, offset + size]}
            checksums[f"{index}.{name}"] = _checksum(_bytes_of(tensor))
            offset += size
    in_order = [checksums[name] for name in sorted(checksums)]
    document = {"format": FORMAT_VERSION, **document, "groups": descriptions, "checksums": in_order}
    text = json.dumps(document, separators=(",", ":"))
    entries = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    metadata = {"memos_hf": text, "checksum": _document_checksum(text, entries)}
    encoded = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for group in groups:
        for _, tensor in _in_order(group()[1]):
            file.write(_bytes_of(tensor))


class TensorFile:
    """An open file that `write_tensors` wrote: checked as far as can be without reading a tensor.

    Parameters
    ----------
    path : path-like
        A local file.
    name : str
        What errors call it.

    Attributes
    ----------
    document : dict
        What was written, and `groups`, the description of each group.
    shapes : list of dict[str, Tensor]
        For each group, tensors of the shapes and dtypes of its own on the meta device.

    Raises
    ------
    OSError
        If it cannot be read.
    CacheFileError
        If it is not such a file, or is damaged.
    """

    def __init__(self, path: str | PathLike[str], name: str) -> None:
        self.name = name
        with open(path, "rb") as file:  # says clearly what cannot be opened
            beginning = file.read(8)
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, ValueError) as error:
            raise CacheFileError(f"{name}: {_why_unreadable(beginning)} ({error})") from None
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        metadata = self._file.metadata() or {}
        text = metadata.get("memos_hf")
        if text is None:
            raise CacheFileError(f"{self.name}: expected a saved cache, got a safetensors file of something else")
        try:
            self.document: dict[str, Any] = json.loads(text)
            version = self.document["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CacheFileError(f"{self.name}: damaged: its document cannot be read") from None
        if version != FORMAT_VERSION:
            raise CacheFileError(f"{self.name}: format version: expected {FORMAT_VERSION}, got {version!r}")
        entries = {}
        for name in self._file.keys():  # noqa: SIM118, as it is no mapping
            entry = self._file.get_slice(name)
            entries[name] = entry.get_dtype(), entry.get_shape()
        if metadata.get("checksum") != _document_checksum(text, entries):
            raise CacheFileError(f"{self.name}: damaged: its document does not have the checksum it was saved with")
        try:
            self._take_shapes(entries)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CacheFileError(f"{self.name}: its document does not describe its tensors: {error!r}") from None

    def _take_shapes(self, entries: dict[str, tuple[str, list[int]]]) -> None:
        self._checksums = dict(zip(sorted(entries), self.document["checksums"], strict=True))
        self.shapes: list[dict[str, Tensor]] = [{} for _ in self.document["groups"]]
        for name, (dtype, shape) in entries.items():
            index, _, rest = name.partition(".")
            self.shapes[int(index)][rest] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")

    def read(self, group: int, *, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of a group, on the CPU, mapped from the file.

        Raises
        ------
        CacheFileError
            If `verify` and a tensor does not have its checksum.
        """
        return {name: self._read(f"{group}.{name}", verify) for name in self.shapes[group]}

    def _read(self, name: str, verify: bool) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        if verify and _checksum(_bytes_of(tensor)) != self._checksums[name]:
            raise CacheFileError(f"{self.name}: damaged: tensor {name} does not have the checksum it was saved with")
        return tensor

    def close(self) -> None:
        """Let go of the file; tensors that were read stay."""
        self._file.__exit__(None, None, None)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _in_order(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The largest elements first, which keeps most tensors on addresses that suit their dtype."""
    return sorted(tensors.items(), key=lambda item: -item[1].element_size())


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _checksum(data: memoryview | bytes) -> str:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).hexdigest()


def _document_checksum(text: str, entries: dict[str, tuple[str, list[int]]]) -> str:
    described = sorted((name, dtype, list(shape)) for name, (dtype, shape) in entries.items())
    return _checksum(json.dumps([text, described]).encode())


def _why_unreadable(beginning: bytes) -> str:
    if beginning.startswith(PICKLES):
        return (
            "expected a saved cache, got what looks like a pickle or a file of torch.save; those are not read, as that "
            "runs the code in them"
        )
    return "expected a saved cache, got a file that is damaged, cut off or of another kind"


def total_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
