"""The requests of the soak: short pieces of everyday work with caches of every mode, each checked against a twin.

A request works on a `Pair`: the cache under test and one that is to give the same, to which the same is done. In
lossless modes that is a DynamicCache, in lossy ones a resident MemOSCache of the same quantization.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from character_tokenizer import character_tokenizer
from tiny import LOSSY, dynamic, forward, generate, llama, mistral, qwen3_next, random_states, token_ids
from torch import Tensor
from transformers import Cache, StoppingCriteria

from memos_hf import CacheFileError, MemoryBudget, MemOSCache, OffloadConfig, PrefixStore, generate_batch

# All that a request may make of a sequence; what static caches allocate.
LONGEST = 112
BLOCK = 8
# Of logits, which go up to some units; where other kernels compute, a few codes may be rounded the other way.
TOLERANCE, LOSSY_TOLERANCE = 2e-3, 5e-2
ROUNDING = 0.2  # of keys and values in 8 bit
# Few blocks of the caches that share it at any time: most of them are on disk.
SHARED_BYTES, OWN_BYTES = 40_000, 6_000
STORE_BYTES = 300_000
PREFIXES = [token_ids(1, 40, seed=9000 + number) for number in range(4)]


@dataclass(frozen=True)
class Mode:
    """A kind of cache and what it takes part in.

    Attributes
    ----------
    options : dict
        Of MemOSCache, but for `offload`.
    offloads, crops, forks : bool
    """

    name: str
    make_model: Callable[[], Any] = llama
    options: dict[str, Any] = field(default_factory=dict)
    offloads: bool = False
    crops: bool = True
    forks: bool = True

    @property
    def model(self) -> Any:
        return self.make_model()

    @property
    def is_lossless(self) -> bool:
        return "quantization" not in self.options

    def reference(self) -> Cache:
        """An empty cache that is to give the same."""
        return dynamic(self.model) if self.is_lossless else MemOSCache(self.model.config, **self.options)


MODES = (
    Mode("default"),
    Mode("static", options={"static": True, "max_cache_len": LONGEST}, crops=False, forks=False),
    *(Mode(name, options=LOSSY[name]) for name in ("int8", "int4", "int2", "fp8")),
    Mode("offloaded", options={"block_size": BLOCK}, offloads=True),
    Mode("offloaded int8", options=LOSSY["int8"], offloads=True),
    Mode("sliding", mistral, crops=False),
    Mode("sliding int8", partial(mistral, 40), options=LOSSY["int8"], crops=False),
    Mode("hybrid", qwen3_next, crops=False),
)


class FaultyDisk:
    """Calls of the system that fail for files in some folders, from a certain call on."""

    CALLS = ("preadv", "pwritev", "posix_fallocate")

    def __init__(self) -> None:
        self._real = {name: getattr(os, name) for name in self.CALLS}
        self._left: dict[str, int] = {}
        self._errors: dict[str, int] = {}

    def install(self) -> None:
        for name in self.CALLS:
            setattr(os, name, partial(self._call, name))

    def remove(self) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)

    @contextmanager
    def failing(self, folder: Path, error: int, after: int) -> Iterator[None]:
        """Have files in `folder` fail with `error` after so many calls."""
        self._errors[str(folder)], self._left[str(folder)] = error, after
        try:
            yield
        finally:
            del self._left[str(folder)], self._errors[str(folder)]

    def _call(self, name: str, file: int, *arguments: Any) -> Any:
        if self._left:
            folder = os.path.dirname(os.readlink(f"/proc/self/fd/{file}"))
            if folder in self._left:
                self._left[folder] -= 1
                if self._left[folder] < 0:
                    raise OSError(self._errors[folder], os.strerror(self._errors[folder]))
        return self._real[name](file, *arguments)


class World:
    """What all requests of a run share: a folder, one memory budget, and a prefix store for each mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = FaultyDisk()
        self.blocks, self.saves = folder / "blocks", folder / "saves"
        self.blocks.mkdir()
        self.saves.mkdir()
        self.offload = OffloadConfig(MemoryBudget({"cpu": SHARED_BYTES}), self.blocks)
        self.stores = {
            mode.name: PrefixStore(
                mode.model, folder / f"store {mode.name}", STORE_BYTES, cache_options=self.options(mode)
            )
            for mode in MODES
            if mode.forks
        }

    def options(self, mode: Mode) -> dict[str, Any]:
        """All options of a mode's caches."""
        return {**mode.options, "offload": self.offload} if mode.offloads else mode.options

    def cache(self, mode: Mode, **more: Any) -> MemOSCache:
        """An empty cache of a mode."""
        return MemOSCache.for_model(mode.model, **{**self.options(mode), **more})

    def clear(self) -> None:
        """Forget what stores keep for later requests."""
        for store in self.stores.values():
            store.clear()


class Pair:
    """A cache and its twin, which have seen the same ids, `[batch, tokens]`."""

    def __init__(self, mode: Mode, ours: Cache, theirs: Cache, ids: Tensor, dice: random.Random) -> None:
        self.mode, self.ours, self.theirs, self.ids, self.dice = mode, ours, theirs, ids, dice

    @classmethod
    def begin(cls, world: World, mode: Mode, dice: random.Random, rows: int = 1, **more: Any) -> Pair:
        """Two empty caches that read a prompt."""
        nothing = torch.empty(rows, 0, dtype=torch.long)
        pair = cls(mode, world.cache(mode, **more), mode.reference(), nothing, dice)
        pair.read(dice.randint(20, 44))
        return pair

    def new_ids(self, tokens: int) -> Tensor:
        return token_ids(self.ids.shape[0], tokens, seed=self.dice.getrandbits(32))

    def read(self, tokens: int) -> None:
        """Feed both the same new tokens; their logits are to agree."""
        ids = self.new_ids(tokens)
        with torch.no_grad():
            ours, theirs = (forward(self.mode.model, ids, cache).logits for cache in (self.ours, self.theirs))
        tolerance = TOLERANCE if self.mode.is_lossless else LOSSY_TOLERANCE
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        self.ids = torch.cat([self.ids, ids], dim=1)

    def answer(self, new_tokens: int) -> None:
        """Let both go on with a new turn of a few ids."""
        prompt = torch.cat([self.ids, self.new_ids(3)], dim=1)
        mask = torch.ones_like(prompt)
        answers = [
            generate(self.mode.model, prompt, cache, new_tokens, attention_mask=mask)
            for cache in (self.ours, self.theirs)
        ]
        assert torch.equal(*answers), f"{answers[0].tolist()} instead of {answers[1].tolist()}"
        self.ids = answers[0][:, :-1]  # the last one is nobody's yet

    def crop(self, tokens: int) -> None:
        self.ours.crop(-tokens)
        self.theirs.crop(-tokens)
        self.ids = self.ids[:, : self.ids.shape[1] - tokens]

    def fork(self, repeats: int = 1) -> Pair:
        """The same again, going on by itself, every row so many times."""
        theirs = copy.deepcopy(self.theirs)
        if repeats > 1:
            theirs.batch_repeat_interleave(repeats)
        ids = self.ids.repeat_interleave(repeats, dim=0)
        return Pair(self.mode, self.ours.fork(repeats), theirs, ids, random.Random(self.dice.random()))


def chat(world: World, mode: Mode, dice: random.Random) -> None:
    """Turns of a conversation, with some tokens taken back in between."""
    pair = Pair.begin(world, mode, dice, rows=dice.choice([1, 1, 2]))
    pair.answer(dice.randint(2, 6))
    if mode.crops:
        pair.crop(dice.randint(1, 20))
    pair.answer(dice.randint(2, 6))


def sample(world: World, mode: Mode, dice: random.Random) -> None:
    """Forks go on beside each other, each in its own way."""
    pair = Pair.begin(world, mode, dice)
    # Recurrent layers of DynamicCache cannot be repeated.
    forks = [pair.fork(), pair.fork(1 if mode.model is qwen3_next() else dice.choice([1, 2]))]
    for each in (forks[0], pair, forks[1]):
        each.answer(dice.randint(2, 5))
    with forks[0].ours:
        pass  # released at the end
    pair.read(2)
    forks[1].read(2)


def save_and_load(world: World, mode: Mode, dice: random.Random) -> None:
    """A cache goes on from its file; with a byte changed, the file is refused."""
    pair = Pair.begin(world, mode, dice)
    path = world.saves / f"{dice.getrandbits(64):x}.safetensors"
    try:
        pair.ours.save(path)
        options = {"offload": world.offload} if mode.offloads else {}
        pair.ours = MemOSCache.load(path, mode.model, **options)
        damaged = bytearray(path.read_bytes())
        damaged[-1 - dice.randrange(100)] ^= 1
        path.write_bytes(damaged)
        with refused(CacheFileError):
            MemOSCache.load(path, mode.model)
    finally:
        path.unlink(missing_ok=True)
    with refused(OSError):
        pair.ours.save(world.folder / "no such folder" / "cache.safetensors")
    pair.answer(4)


def reuse(world: World, mode: Mode, dice: random.Random) -> None:
    """What a store hands out goes on as what it was given; its own `generate` gives the tokens of a fresh cache."""
    store = world.stores[mode.name]
    pair = Pair.begin(world, mode, dice)
    store.put(pair.ids, pair.ours)
    found, matched = store.get(torch.cat([pair.ids, pair.new_ids(3)], dim=1))
    if matched == pair.ids.shape[1]:  # else others made it go in the meantime
        Pair(mode, found, pair.ours, pair.ids, dice).read(3)
    ids = torch.cat([dice.choice(PREFIXES), pair.new_ids(5)], dim=1)
    output = store.generate(mode.model, ids, max_new_tokens=4, do_sample=False)
    if mode.is_lossless:
        assert torch.equal(output, generate(mode.model, ids, dynamic(mode.model), 4))


def batch(world: World, mode: Mode, dice: random.Random) -> None:
    """Prompts in a batch, one of them refused; where nothing is lost, each answer is the one it gets alone."""
    prefix = dice.choice(PREFIXES)[0].tolist()[: dice.choice([0, 20])]
    rows = [prefix + token_ids(1, dice.randint(3, 12), dice.getrandbits(32))[0].tolist() for _ in range(3)]
    outputs = generate_batch(
        mode.model,
        character_tokenizer(),
        [*rows, []],
        cache_options=world.options(mode),
        progress=False,
        max_new_tokens=4,
        do_sample=False,
    )
    assert [output.error is None for output in outputs] == [True, True, True, False]
    for row, output in zip(rows, outputs, strict=False):
        alone = generate(mode.model, torch.tensor([row]), mode.reference(), 4)[0, len(row) :].tolist()
        assert not mode.is_lossless or output.token_ids == alone, f"{output.token_ids} instead of {alone}"


def refuse(world: World, mode: Mode, dice: random.Random) -> None:
    """Calls that are refused leave the cache as it was."""
    pair = Pair.begin(world, mode, dice, max_cache_len=LONGEST)
    with refused(ValueError):
        forward(mode.model, pair.new_ids(LONGEST), pair.ours)
    attention = len(pair.ours.layers) - 2  # of the hybrid model the only one of full attention; of others any will do
    heads = mode.model.config.num_key_value_heads
    for states in (random_states(3, heads, 1, 16), random_states(1, heads + 1, 1, 16), random_states(1, heads, 1, 5)):
        with refused(ValueError):
            pair.ours.update(*states, attention)
    with refused(ValueError, RuntimeError):
        pair.ours.crop(5)
    if not mode.crops and mode.forks:
        pair.read(41)  # beyond any window
        with refused(RuntimeError):
            pair.ours.crop(-3)
    pair.answer(3)
    pair.ours.release()
    for call in (pair.ours.release, partial(forward, mode.model, pair.new_ids(1), pair.ours)):
        with refused(RuntimeError):
            call()


def disk_fails(world: World, mode: Mode, dice: random.Random) -> None:
    """A full or broken disk: a step is done or not done at all, or the cache says that it has to be reset."""
    folder = world.blocks / f"faulty {dice.getrandbits(64):x}"
    folder.mkdir()
    offload = OffloadConfig({"cpu": OWN_BYTES}, folder, policy=dice.choice(["pin", "lru"]))
    pair = Pair.begin(world, mode, dice, offload=offload)
    for _ in range(4):
        try:
            with world.disk.failing(folder, dice.choice([errno.EIO, errno.ENOSPC]), after=dice.randint(0, 20)):
                pair.read(dice.choice([1, 9, 17]))
        except OSError:
            recover(pair)
    if pair.ids.shape[1] == 0:
        pair.read(20)
    pair.answer(3)
    pair.ours.release()


def recover(pair: Pair) -> None:
    """Go on after a step that failed and that the twin has not made."""
    with suppress(RuntimeError):
        pair.ours.get_mask_sizes(1, 0)  # refused if the cache is torn
        assert pair.ours.get_seq_length() == pair.ids.shape[1]
        if pair.mode.is_lossless or pair.ids.shape[1] == 0:
            pair.read(1)
            return
        # Blocks that the step has sealed stay sealed, where the twin's tokens are exact still.
        for mine, other in zip(pair.ours.layers, pair.theirs.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, rtol=0, atol=ROUNDING)
            torch.testing.assert_close(mine.values, other.values, rtol=0, atol=ROUNDING)
    pair.ours.reset()
    pair.theirs, pair.ids = pair.mode.reference(), pair.ids[:, :0]


def drop_in_use(world: World, mode: Mode, dice: random.Random) -> None:
    """A thread goes on with a fork while this one drops the cache; another one is interrupted in its answer."""
    pair = Pair.begin(world, mode, dice)
    fork, interrupted, failures = pair.fork(), pair.fork(), []

    def go_on() -> None:
        try:
            for _ in range(3):
                fork.answer(2)
        except BaseException as error:
            failures.append(error)

    def give_up() -> None:
        try:
            with suppress(InterruptedAnswerError):
                generate(mode.model, interrupted.ids, interrupted.ours, 8, stopping_criteria=[_Interrupt()])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for work in (go_on, give_up)]
    for thread in threads:
        thread.start()
    del pair
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class InterruptedAnswerError(Exception):
    """What a thread is interrupted by."""


class _Interrupt(StoppingCriteria):
    """Raises at the third token."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.tokens += 1
        if self.tokens == 3:
            raise InterruptedAnswerError
        return torch.tensor([False])


@contextmanager
def refused(*errors: type[BaseException]) -> Iterator[None]:
    """The call has to raise one of `errors`."""
    try:
        with torch.no_grad():
            yield
    except errors:
        return
    raise AssertionError(f"expected {' or '.join(error.__name__ for error in errors)}, and nothing was raised")


Request = Callable[[World, Mode, random.Random], None]

# Every kind of request in every mode that it is for.
REQUESTS: tuple[tuple[Request, Mode], ...] = (
    *itertools.product((chat, save_and_load, batch), MODES),
    *itertools.product((sample, reuse, drop_in_use), [mode for mode in MODES if mode.forks]),
    *((refuse, mode) for mode in MODES),
    *((disk_fails, mode) for mode in MODES if mode.offloads),
)
