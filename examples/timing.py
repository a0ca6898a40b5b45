"""Timing things against each other in one process, so that a machine's moods strike all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def interleave(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, warmup: int = 0
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; a round makes each call once, and begins with another every time.

    Parameters
    ----------
    calls : mapping of str to callable
        What to time, by name.
    rounds : int
        Rounds that count.
    device : torch.device
        Waited for before and after each call.
    warmup : int
        Rounds before them that do not count.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            milliseconds = time_call(calls[name], device)
            if index >= warmup:
                times[name].append(milliseconds)
    return times


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that one call takes, the work it left to the device included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1000


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
