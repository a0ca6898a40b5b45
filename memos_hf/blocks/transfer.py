"""Work beside the computation: on a side stream of a CUDA device, ordered by events; on other devices at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Encoded = dict[str, Tensor]


class Aside:
    """Tensors that are computed aside, from what the current stream has written so far.

    Parameters
    ----------
    device : torch.device
    work : callable
        Returns the tensors by name. What it reads must stay as it is until :meth:`result`.
    """

    def __init__(self, device: torch.device, work: Callable[[], list[Encoded]]) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._tensors = work()
            return
        side = side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._tensors = work()
            self._done = side.record_event()

    def result(self) -> list[Encoded]:
        """The tensors, for the current stream: it waits until they are written, the caller does not."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._done)
            for tensors in self._tensors:
                for tensor in tensors.values():
                    tensor.record_stream(stream)  # their memory belongs to the side stream and goes back to it
        return self._tensors


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a CUDA device on which copies and encodings run beside the computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
