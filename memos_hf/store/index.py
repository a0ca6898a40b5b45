"""Which prefixes are known, and which of them has most tokens in common with a prompt."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .keys import HASH_TOKENS, TokenIds, boundary_hashes, common_tokens, keys_in

if TYPE_CHECKING:
    from ..cache import MemOSCache

_uses = itertools.count(1)


@dataclass(eq=False)
class Entry:
    """A prefix and, while it is in memory, its cache.

    Attributes
    ----------
    name : str
        What its file is called, whether there is one or not.
    ids : int64 array, `[tokens]`
    croppable : bool
        Whether shorter prefixes can be cut from it: it attends to all tokens, or to a window that is not yet full.
    cache : MemOSCache, optional
        Of one row; never changed.
    place : str
        Devices of the model when the cache came into memory.
    memory_bytes : int
        What is valid in `cache`.
    last_used : int
        Larger for what was used later.
    loading : threading.Lock
        Held while the cache is read from its file, so that only one thread does.
    """

    name: str
    ids: TokenIds
    croppable: bool
    cache: MemOSCache | None = None
    place: str = ""
    memory_bytes: int = 0
    last_used: int = 0
    loading: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def touch(self) -> None:
        """Note that it is used now."""
        self.last_used = next(_uses)

    @property
    def hashes(self) -> list[bytes]:
        """Its boundary hashes."""
        return boundary_hashes(*keys_in(self.name), self.ids)

    def usable_tokens(self, ids: TokenIds) -> int:
        """How many tokens of its cache `ids` can go on from."""
        common = common_tokens(self.ids, ids)
        return common if self.croppable or common == len(self.ids) else 0


class PrefixIndex:
    """Entries by the hash of each of their boundaries: those in memory, and those that have files.

    Attributes
    ----------
    lock : threading.RLock
        Held while entries are read or changed, but not while a file is read or written.
    files : set of str
        Names of the files that there were the last time somebody looked, of other models too.
    counts : Counter
        What has happened to entries.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.files: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._entries: dict[str, Entry] = {}
        self._at: defaultdict[bytes, dict[str, Entry]] = defaultdict(dict)

    def add(self, entry: Entry) -> None:
        """Take an entry up."""
        self._entries[entry.name] = entry
        for boundary in entry.hashes:
            self._at[boundary][entry.name] = entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry, if it is known."""
        if self._entries.get(entry.name) is not entry:
            return
        del self._entries[entry.name]
        for boundary in entry.hashes:
            self._at[boundary].pop(entry.name, None)
            if not self._at[boundary]:
                del self._at[boundary]

    def forget_lost(self) -> None:
        """Forget entries that are neither in memory nor in a file."""
        for entry in self:
            if entry.cache is None and entry.name not in self.files:
                self.remove(entry)

    def find(self, name: str) -> Entry | None:
        """The entry called `name`."""
        return self._entries.get(name)

    def longest(self, hashes: list[bytes], ids: TokenIds, usable: Callable[[Entry], bool]) -> tuple[Entry | None, int]:
        """The `usable` entry with most tokens for `ids`, the last used if several have as many, and how many.

        Parameters
        ----------
        hashes : list of bytes
            Boundary hashes of `ids`.
        """
        best: tuple[int, int] = (0, 0)
        found: Entry | None = None
        for boundary in range(len(hashes) - 1, -1, -1):
            # Who has more than this in common was seen at a later boundary.
            if found is not None and best[0] >= (boundary + 1) * HASH_TOKENS:
                break
            for entry in self._at.get(hashes[boundary], {}).values():
                if not usable(entry):
                    continue
                rank = entry.usable_tokens(ids), entry.last_used
                if rank[0] > 0 and rank > best:
                    best, found = rank, entry
        return found, best[0]

    def models_and_storages(self) -> set[tuple[str, str]]:
        """Of which models and storages there are entries."""
        return {keys_in(name) for name in self._entries}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)
