"""Colours that can be read on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable

PALETTE = ("#4a90d9", "#e08e3c", "#4fa86a", "#a678c9", "#c9605f", "#7a8794")


def device_colours(devices: Iterable[str]) -> dict[str, str]:
    """A colour for each device, in their order: the one that computes comes first."""
    return {device: PALETTE[index % len(PALETTE)] for index, device in enumerate(dict.fromkeys(devices))}
