"""Timing things against each other in one process, so that a machine's moods strike all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch


def interleave(
    calls: Mapping[str, Callable[[], object]], rounds: Iterable[object], device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; a round makes each call once, and begins with another every time.

    Parameters
    ----------
    calls : mapping of str to callable
        What to time, by name.
    rounds : iterable
        One item for each round, such as a range; only how many there are matters.
    device : torch.device
        Waited for before and after each call.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index, _ in enumerate(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(time_call(calls[name], device))
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


def device_times(
    call: Callable[[], object], device: torch.device, samples: int, calls: int, lead: Callable[[], object]
) -> list[float]:
    """Milliseconds of one call as the device counts them, without what Python needs to launch it.

    Parameters
    ----------
    call : callable
        Made once beforehand, uncounted.
    device : torch.device
        On CUDA its events are the clock, elsewhere it is the wall's.
    samples : int
        How many figures to return.
    calls : int
        Calls in a row that a figure is the mean of.
    lead : callable
        Work that keeps a GPU busy while Python launches the calls, so that they follow each other without gaps.
    """
    call()
    if device.type != "cuda":
        return [time_call(lambda: [call() for _ in range(calls)], device) / calls for _ in range(samples)]
    times = []
    for _ in range(samples):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        lead()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return times
