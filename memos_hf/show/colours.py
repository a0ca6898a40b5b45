"""Colours that can be read on light and on dark ground."""

from __future__ import annotations

from ..report import MemoryReport

PALETTE = ("#4a90d9", "#e08e3c", "#4fa86a", "#a678c9", "#c9605f", "#7a8794")


def device_colours(memory: MemoryReport) -> dict[str, str]:
    """A colour for each device that a report names, in its order: the one that computes comes first."""
    by_layers = (device for layer in memory.by_layer for device in layer.used_by_device)
    devices = dict.fromkeys([*memory.by_device, *by_layers])
    return {device: PALETTE[index % len(PALETTE)] for index, device in enumerate(devices)}
