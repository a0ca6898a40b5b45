"""Where each layer's cache belongs: on the device where its attention runs, as accelerate placed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def attention_modules(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """The modules that update a cache, as (layer index, qualified name, module).

    transformers gives each of them its index in the cache as `layer_idx`.
    """
    for name, module in model.named_modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and any(True for _ in module.parameters()):
            yield layer_idx, name, module


def layer_devices(model: nn.Module) -> dict[int, torch.device]:
    """Device on which the attention of each layer runs, by layer index.

    Accelerate's `hf_device_map` decides where there is one: weights it offloaded ("cpu" beside accelerators, or
    "disk") are computed on the main device, the first accelerator of the map, or the CPU if there is none.
    """
    device_map = getattr(model, "hf_device_map", None)
    devices: dict[int, torch.device] = {}
    for layer_idx, name, module in attention_modules(model):
        if layer_idx in devices:
            continue
        if device_map:
            devices[layer_idx] = mapped_device(name, device_map)
        else:
            devices[layer_idx] = next(module.parameters()).device
    return devices


def mapped_device(name: str, device_map: dict[str, Any]) -> torch.device:
    """Device that computes the module called `name` under an accelerate device map.

    Raises
    ------
    ValueError
        If no entry of the map covers the module.
    """
    accelerators = [place for place in device_map.values() if str(place) not in ("cpu", "disk")]
    main = accelerators[0] if accelerators else "cpu"
    prefixes = [prefix for prefix in device_map if not prefix or name == prefix or name.startswith(prefix + ".")]
    if not prefixes:
        raise ValueError(f"hf_device_map: expected an entry that covers {name}, got {sorted(device_map)}")
    place = device_map[max(prefixes, key=len)]
    place = main if str(place) in ("cpu", "disk") else place
    if isinstance(place, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cuda", place)
    return torch.device(place)


def expected_shape(config: Any) -> tuple[int, int]:
    """Key-value heads and head dim that a text config suggests. A guess: the first update decides."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, head_dim
