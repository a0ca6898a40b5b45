"""`PrefixStore`: caches of prefixes that many prompts begin with, kept in memory and in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..cache import MemOSCache
from ..report import format_bytes
from . import keys, reuse
from .asked import Asked
from .cropping import can_be_cropped
from .folder import Folder
from .index import Entry, PrefixIndex
from .inputs import cached_row, checked_bytes, checked_model, checked_options, one_row
from .keys import TokenIds
from .places import AnyPath
from .prefix_files import PrefixFiles
from .prefix_memory import PrefixMemory


@dataclass(frozen=True)
class PrefixStoreStats:
    """Counters of a prefix store, as they were when asked for.

    Attributes
    ----------
    hits, misses : int
        Look-ups that found some tokens, and those that found none.
    tokens_matched : int
        Tokens that hits did not have to compute.
    loads : int
        Hits for which a file was read.
    evictions : int
        Caches that left memory for others; where there is a directory, their files stay.
    disk_evictions : int
        Files that this store removed for others.
    entries : int
        Prefixes that are in memory or in the directory, of other models too.
    memory_bytes : int
        What is valid in the caches in memory. Blocks that several share count for each.
    disk_bytes : int
        Of all files in the directory.
    """

    hits: int = 0
    misses: int = 0
    tokens_matched: int = 0
    loads: int = 0
    evictions: int = 0
    disk_evictions: int = 0
    entries: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


class PrefixStore:
    """Keeps caches of prefixes, and hands them out again to prompts that begin with the same tokens.

    ::

        store = PrefixStore(model, "prefixes")
        output = store.generate(model, ids, max_new_tokens=40)    # the next prompt computes only what is new

        cache, matched = store.get(ids)                           # or by hand
        output = model.generate(ids, past_key_values=cache, max_new_tokens=40)
        store.put(ids, cache)

    What is stored never changes: caches come in and go out as forks, which share blocks. It belongs to the model as it
    is when `put` is called: weights (a sample of them), dtype, active adapters, and quantization and block size of the
    cache. `get` finds what belongs to the model as it is then.

    Threads may share a store, and processes a directory, also while others write to it. A file appears whole or not at
    all. One that is damaged is removed and counts as if it had never been there.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, with adapters (PEFT) or without; not with those that are virtual tokens.
    directory : path or URL, optional
        Where caches are kept too, one safetensors file each; a local folder is made if there is none, and a URL is one
        that fsspec knows. Files that the store did not write are left alone.
    max_bytes : int or str
        Bytes, or a size such as `"4GiB"`, that caches in memory may take; beyond it the least recently used go.
    max_disk_bytes : int or str, optional
        The same for the files in the directory, whoever wrote them; by default `max_bytes`.
    cache_options : mapping, optional
        Of :class:`~memos_hf.MemOSCache`, for the caches that are new and those that are loaded. Then only prefixes of
        the same quantization and block size are found; without, those of any.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was expected and what came.
    OSError
        If the directory cannot be made or read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        directory: AnyPath | None = None,
        max_bytes: int | str = "4GiB",
        *,
        max_disk_bytes: int | str | None = None,
        cache_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = checked_model(model)
        self.max_bytes = checked_bytes("max_bytes", max_bytes)
        self.max_disk_bytes = (
            self.max_bytes if max_disk_bytes is None else checked_bytes("max_disk_bytes", max_disk_bytes)
        )
        self.cache_options = None if cache_options is None else checked_options(model, cache_options)
        self._index = PrefixIndex()
        self._memory = PrefixMemory(self._index, self.max_bytes)
        self._files = None if directory is None else PrefixFiles(self._index, Folder.at(directory), self.max_disk_bytes)

    def get(
        self, input_ids: Tensor | Sequence[int], *, cache_options: Mapping[str, Any] | None = None
    ) -> tuple[MemOSCache, int]:
        """A cache with the longest prefix of `input_ids` that is known, and how many tokens that are.

        At least the last token is left to compute. Layers of full attention can go on from any number of tokens that
        a stored prefix has in common with `input_ids`. Sliding windows that are full, and recurrent states, can only go
        on from what was stored: if `input_ids` begin with all of it.

        Parameters
        ----------
        input_ids : Tensor or sequence of int
            One row, `[1, tokens]` or `[tokens]`.
        cache_options : mapping, optional
            In place of those of the store.

        Returns
        -------
        MemOSCache, int
            The cache is the caller's own; an empty one and 0 if nothing is known.

        Raises
        ------
        TypeError, ValueError
            If `input_ids` are not the ids of one row.
        """
        ids = one_row(input_ids)
        options = self.cache_options if cache_options is None else checked_options(self.model, cache_options)
        asked = Asked.of(self.model, options)
        return self._look_up(asked, ids) or (asked.new_cache(), 0)

    def put(self, input_ids: Tensor | Sequence[int], cache: MemOSCache) -> None:
        """Keep what is in `cache`, which goes on as before, for prompts that begin with the same tokens.

        Parameters
        ----------
        input_ids : Tensor or sequence of int
            Ids of the cached tokens, one row, `[1, tokens]` or `[tokens]`; those behind them, as the last one that
            `generate` returns, are left out. They must say all there is to know of the prompt: of a cache that has seen
            images or embeddings they do not.
        cache : MemOSCache
            Of one row, without padding, from the model as it is now.

        Raises
        ------
        TypeError, ValueError
            If `input_ids` are not those of what is cached, or the cache is empty, static, of several rows or of
            another model.
        OSError
            If the file cannot be written; the cache is kept in memory nevertheless.
        """
        row = cached_row(input_ids, cache)
        asked = Asked.of(self.model, cache=cache)
        difference = cache.fingerprint.difference(asked.fingerprint)
        if difference:
            raise ValueError(f"cache: expected one of the model as it is now; {difference}")
        self._keep(asked, row, cache)

    def generate(self, model: PreTrainedModel, input_ids: Tensor, **generate_kwargs: Any) -> Any:
        """Look up, generate, and keep the cache of the prompt; returns what `model.generate` returns.

        A prompt is not kept if all but a sixteenth of it was found: questions behind a long prefix would only repeat
        it. Where a model has sliding windows or recurrent states, the prompt without its last token is read first, as
        what it has seen cannot be taken back; a prefix that many prompts share is best `put` by itself then.

        Parameters
        ----------
        model : PreTrainedModel
            The store's, or another one with caches of its own.
        input_ids : Tensor
            One row, `[1, tokens]`.
        **generate_kwargs
            Of `generate`, but for those that bring a cache or inputs that token ids do not describe. Beams and several
            answers to a prompt go on from the same prefix.

        Raises
        ------
        TypeError, ValueError
            If an argument is not one that a store can go along with, before anything is computed.
        """
        return reuse.generate(self, checked_model(model), input_ids, generate_kwargs)

    def clear(self) -> None:
        """Forget all prefixes, and remove their files, those of other models and processes too; counters stay.

        Raises
        ------
        OSError
            If a file cannot be removed.
        """
        with self._index.lock:
            for entry in self._memory.held():
                self._memory.drop(entry)
            self._index.forget_lost()
        if self._files is not None:
            self._files.clear()

    @property
    def stats(self) -> PrefixStoreStats:
        """Counters since the store was made, and what is in it now."""
        files = [] if self._files is None else self._files.listed()
        with self._index.lock:
            names = {entry.name for entry in self._memory.held()} | {file.name for file in files}
            return PrefixStoreStats(
                **self._index.counts,
                entries=len(names),
                memory_bytes=self._memory.bytes,
                disk_bytes=sum(file.size for file in files),
            )

    def __len__(self) -> int:
        return self.stats.entries

    def __bool__(self) -> bool:
        return True  # an empty store is a store

    def __repr__(self) -> str:
        stats = self.stats
        disk = "" if self._files is None else f", {format_bytes(stats.disk_bytes)} in {self._files.folder}"
        return (
            f"{type(self).__name__}({type(self.model).__name__}; {stats.entries} prefixes, "
            f"{format_bytes(stats.memory_bytes)} of {format_bytes(self.max_bytes)} in memory{disk}; "
            f"{stats.hits} hits, {stats.misses} misses)"
        )

    def _look_up(self, asked: Asked, ids: TokenIds) -> tuple[MemOSCache, int] | None:
        """A cache of the caller's own and how many tokens it has; counted as a hit or a miss."""
        if self._files is not None:
            self._files.take_note(asked.key)
        cache, entry, tokens = None, *self._longest(asked, ids[:-1])
        while entry is not None and (cache := self._forked(entry, asked)) is None:
            entry, tokens = self._longest(asked, ids[:-1])  # its file was lost or damaged, and the entry with it
        with self._index.lock:
            self._index.counts.update(hits=1, tokens_matched=tokens) if entry else self._index.counts.update(misses=1)
        if entry is None or cache is None:
            return None
        if tokens < len(entry.ids):
            cache.crop(tokens - len(entry.ids))
        return cache, tokens

    def _longest(self, asked: Asked, ids: TokenIds) -> tuple[Entry | None, int]:
        """The best entry for `ids` over all storages that will do, and how many tokens it has."""

        def usable(entry: Entry) -> bool:
            fits = asked.most_tokens is None or len(entry.ids) <= asked.most_tokens
            here = entry.cache is not None and entry.place == asked.place
            return fits and (here or entry.name in self._index.files)

        with self._index.lock:
            storages = {storage for model, storage in self._index.models_and_storages() if model == asked.key}
            if asked.storage is not None:
                storages &= {asked.storage}
            found = [
                self._index.longest(keys.boundary_hashes(asked.key, storage, ids), ids, usable) for storage in storages
            ]
        return max(found, key=lambda pair: (pair[1], pair[0].last_used if pair[0] else 0), default=(None, 0))

    def _forked(self, entry: Entry, asked: Asked) -> MemOSCache | None:
        """A fork of an entry's cache, which is read from its file if it is not in memory; `None` if it is lost."""
        with entry.loading:
            with self._index.lock:
                self._touch(entry)
                if entry.cache is not None and entry.place == asked.place:
                    return entry.cache.fork()
            cache = self._files.read(entry, asked) if self._files is not None else None
            if cache is not None:
                with self._index.lock:
                    self._memory.hold(entry, cache.fork(), asked.place)
        return cache

    def _keep(self, asked: Asked, ids: TokenIds, cache: MemOSCache) -> None:
        """Store a fork of `cache`, in memory and as a file, unless it is there."""
        name = keys.file_name(asked.key, keys.storage_key(cache.options), ids)
        fork = cache.fork()
        fork.fingerprint = asked.fingerprint
        with self._index.lock:
            entry = self._index.find(name) or Entry(name, ids, can_be_cropped(fork))
            if entry.cache is None or entry.place != asked.place:
                self._memory.hold(entry, fork.fork(), asked.place)
            self._touch(entry)
            self._index.add(entry)
            self._index.forget_lost()
        if self._files is not None:
            self._files.write(entry, fork)

    def _touch(self, entry: Entry) -> None:
        entry.touch()
        if self._files is not None:
            self._files.touch(entry)
