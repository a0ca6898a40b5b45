"""Which blocks are kept on the device when there is not room for all of them.

Exact attention reads every block at every step. Of a scan in order that is longer than the room for it, a cache that
takes in the newest and lets the least recently used go has nothing left when the scan begins anew: not one hit. The
sum over all blocks can be taken in any order, though, so what is on the device is read first. Then `lru` finds as many
blocks there as `pin`, and exchanges them for others, for nothing: `pin` keeps what is there and lets the rest pass by.
Where attention reads a few blocks of its choice, and nearly the same ones at the next step, `lru` keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Literal

PolicyName = Literal["pin", "lru"]


class Policy(ABC):
    """Remembers the blocks that are on the device, and says which of them give way to others."""

    takes_newest: bool  # of more blocks than there is room for, whether the last or the first are taken

    @abstractmethod
    def add(self, block: int) -> None:
        """`block` has come to the device."""

    @abstractmethod
    def discard(self, block: int) -> None:
        """`block` has left the device."""

    @abstractmethod
    def use(self, blocks: Iterable[int]) -> None:
        """`blocks`, which are on the device, are read."""

    @abstractmethod
    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """Up to `count` blocks that are to give way, none of them in `keep`."""


class Pin(Policy):
    """What came first stays; nothing gives way."""

    takes_newest = False

    def add(self, block: int) -> None:
        """Nothing to remember."""

    def discard(self, block: int) -> None:
        """Nothing to forget."""

    def use(self, blocks: Iterable[int]) -> None:
        """Nothing to note."""

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """None."""
        return []


class LRU(Policy):
    """The least recently used give way first."""

    takes_newest = True

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def add(self, block: int) -> None:
        """Note `block` as used last."""
        self._order[block] = None

    def discard(self, block: int) -> None:
        """Forget `block`."""
        self._order.pop(block, None)

    def use(self, blocks: Iterable[int]) -> None:
        """Note `blocks` as used last, in their order."""
        for block in blocks:
            self._order.move_to_end(block)

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """The `count` least recently used ones that are not in `keep`, or as many as there are."""
        chosen: list[int] = []
        for block in self._order:
            if len(chosen) >= count:
                break
            if block not in keep:
                chosen.append(block)
        return chosen


POLICIES: dict[str, type[Policy]] = {"pin": Pin, "lru": LRU}
