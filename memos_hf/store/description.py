"""What is in a file, told without reading a tensor."""

from __future__ import annotations

from typing import Any

from ..layers.state import LayerState
from .file import SavedCache
from .places import AnyPath, reading
from .tensors import TensorFile, total_bytes


def describe(path: AnyPath) -> dict[str, Any]:
    """Versions, options, fingerprint and layers of a saved cache.

    Returns
    -------
    dict
        Of types that JSON has. Of `layers`, each stands for all layers that are alike: their `kind`, how many
        (`layers`), `rows` of the batch, `tokens` seen, `blocks` sealed, the `codec` of these, the `dtype` of the other
        tokens, and `bytes` of them all.

    Raises
    ------
    OSError, CacheFileError
        As :meth:`~memos_hf.MemOSCache.load` does. Tensors are not read, and so not checked.
    """
    with reading(path) as local, TensorFile(local, str(path)) as file:
        saved = SavedCache(file)
        return {
            "file": str(path),
            "format": file.document["format"],
            "transformers": file.document["transformers"],
            "file_bytes": local.stat().st_size,
            "tensor_bytes": sum(map(total_bytes, file.shapes)),
            "layers": _alike(saved),
            "options": file.document["options"],
            "fingerprint": file.document["fingerprint"],
            "input_ids": list(saved.ids_shape) if saved.ids_shape else None,
        }


def _alike(saved: SavedCache) -> list[dict[str, Any]]:
    """Layers that differ in nothing that is shown, together."""
    rows: dict[str, dict[str, Any]] = {}
    for state in saved.layers:
        shown = {
            "kind": state.kind,
            "rows": _rows(state),
            "tokens": state.tokens,
            "blocks": _blocks(state),
            "codec": _codec(saved, state),
            "dtype": str(state.tensors["keys"].dtype).removeprefix("torch.") if "keys" in state.tensors else None,
        }
        row = rows.setdefault(str(shown), {"kind": state.kind, "layers": 0, **shown, "bytes": 0})
        row["layers"] += 1
        row["bytes"] += total_bytes(state.tensors)
    return list(rows.values())


def _rows(state: LayerState) -> int | None:
    tensors = (state.tensors.get("keys"), *state.tensors.values())
    return next((tensor.shape[0] for tensor in tensors if tensor is not None and tensor.ndim > 1), None)


def _blocks(state: LayerState) -> int | None:
    codes = state.tensors.get("key.codes")
    return None if codes is None else codes.shape[0]


def _codec(saved: SavedCache, state: LayerState) -> str | None:
    quantization = saved.options.quantization
    if quantization is None or "key.codes" not in state.tensors:
        return None
    dims = state.tensors["keys"].shape[3], state.tensors["values"].shape[3]
    return ", ".join(map(str, quantization.specs(*dims, saved.options.block_size)))
