"""Time that may be spent, and what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


class Budget:
    """Seconds that may be spent from now on.

    Parameters
    ----------
    seconds : float
    clock : callable
        Seconds, ever growing.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds left; 0 when all are spent."""
        return max(self._end - self._clock(), 0.0)

    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.left() == 0

    def part(self, seconds: float) -> Budget:
        """A budget of at most so many seconds that ends with this one."""
        return Budget(min(seconds, self.left()), self._clock)

    def rounds(self, count: int, at_least: int = 1) -> Iterator[int]:
        """0, 1, … up to `count` of them, while something is left; `at_least` so many in any case."""
        for index in range(count):
            if index >= at_least and self.is_spent():
                return
            yield index
