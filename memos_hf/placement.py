"""Where each layer's cache belongs: on the device where its attention runs, as accelerate placed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Device on which the attention of each decoder layer runs, by layer index.

    transformers gives the modules that update a cache their index in it as `layer_idx`. Accelerate's `hf_device_map`
    says where they are: weights it offloaded ("cpu" beside accelerators, or "disk") are computed on the main device,
    the first accelerator of the map, or the CPU if there is none. A module that the map does not name is where its
    weights are.
    """
    device_map = getattr(model, "hf_device_map", None) or {}
    decoder = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else model
    inside = set(decoder.modules())
    devices: dict[int, torch.device] = {}
    for name, module in model.named_modules():
        layer_idx = getattr(module, "layer_idx", None)
        if module not in inside or not isinstance(layer_idx, int) or layer_idx in devices:
            continue
        parameter = next(module.parameters(), None)
        if parameter is not None:
            devices[layer_idx] = mapped_device(name, device_map) or parameter.device
    return devices


def mapped_device(name: str, device_map: dict[str, Any]) -> torch.device | None:
    """Device that computes the module called `name` under an accelerate device map; `None` if no entry covers it."""
    prefixes = [prefix for prefix in device_map if not prefix or name == prefix or name.startswith(prefix + ".")]
    if not prefixes:
        return None
    accelerators = [place for place in device_map.values() if str(place) not in ("cpu", "disk")]
    main = accelerators[0] if accelerators else "cpu"
    place = device_map[max(prefixes, key=len)]
    place = main if str(place) in ("cpu", "disk") else place
    if isinstance(place, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cuda", place)
    return torch.device(place)


def expected_states(model: Any, batch_size: int) -> Iterator[tuple[int, Tensor]]:
    """For each layer whose shape its config suggests: its index, and K or V without tokens, `[batch, heads, 0, dim]`.

    A guess: the first update decides.
    """
    config = model.config.get_text_config(decoder=True)
    devices = layer_devices(model)
    # Configs whose layers differ refuse to be asked for what differs, and have one config for each layer.
    layer_configs = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    for layer_idx, layer_config in enumerate(layer_configs):
        heads = getattr(layer_config, "num_attention_heads", None)
        kv_heads = getattr(layer_config, "num_key_value_heads", None) or heads
        head_dim = getattr(layer_config, "head_dim", None)
        if head_dim is None and isinstance(heads, int):
            head_dim = getattr(layer_config, "hidden_size", 0) // heads
        if isinstance(kv_heads, int) and isinstance(head_dim, int):
            device = devices.get(layer_idx, model.device)
            yield layer_idx, torch.empty((batch_size, kv_heads, 0, head_dim), dtype=model.dtype, device=device)
