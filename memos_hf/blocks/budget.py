"""How much memory caches may take on each device, and which of them gives way to another."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import torch
from accelerate.utils import convert_file_size_to_int, get_max_memory

from .disk import BlockFile
from .policies import PolicyName
from .staging import Staging

logger = logging.getLogger(__name__)

# Of what is free on a device, the share that a budget leaves to everything else where it is not told how much to take.
RESERVE = 0.2
# A cache that took one of the last steps of all caches on a budget is at work, and keeps what it has.
STEPS_AT_WORK = 4


def memory_key(device: torch.device | None = None) -> int | str:
    """What accelerate calls a device in `max_memory`; by default the accelerator, or the CPU where there is none."""
    device = device or torch.accelerator.current_accelerator() or torch.device("cpu")
    return device.type if device.type in ("cpu", "mps") else device.index or 0


# Those that there are, for processes that are forked off.
_budgets: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()


class MemoryBudget:
    """Bytes of each device for the caches that are given it; they share it, and idle ones give way.

    ::

        budget = MemoryBudget({0: "2GiB", "cpu": "8GiB"})
        chats = [MemOSCache(model.config, offload=OffloadConfig(budget)) for _ in range(100)]

    What counts is sealed blocks and the open tails behind them. When a cache at work needs more than is left, others
    move out, the least recently used first, and each comes back when it is used again.

    Parameters
    ----------
    max_memory : mapping, optional
        Bytes, or sizes such as `"2GiB"`, by device in accelerate's words: the index of an accelerator, `"mps"` or
        `"cpu"`. Where there is no accelerator, `"cpu"` is the device, and the disk comes next. What is not named is
        taken from `accelerate.utils.get_max_memory()`, less a fifth.

    Raises
    ------
    TypeError, ValueError
        Naming the entry, what was expected and what came.
    """

    def __init__(self, max_memory: Mapping[int | str, int | str] | None = None) -> None:
        self.max_memory = _in_bytes(max_memory if max_memory is not None else {})
        self.clock = 0  # steps that caches have taken
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._staging: dict[Hashable, Staging] = {}
        self._lock = threading.RLock()
        _budgets.add(self)

    def start_anew_in_child(self) -> None:
        """In a process that was forked off: the reader's thread is not there, and what it was reading never comes."""
        self.__dict__.pop("reader", None)
        self._staging.clear()

    def limit(self, device: torch.device) -> int:
        """Bytes of `device` that may be taken."""
        key = memory_key(device)
        if key in self.max_memory:
            return self.max_memory[key]
        return self._defaults.get(key, 0)

    @cached_property
    def _defaults(self) -> dict[int | str, int]:
        return {key: int(free * (1 - RESERVE)) for key, free in get_max_memory().items()}

    @cached_property
    def reader(self) -> ThreadPoolExecutor:
        """The thread that reads blocks ahead for all caches; it ends when they are gone."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="memos-reader")

    def staging(self, key: Hashable, make: Callable[[], Staging]) -> Staging:
        """The buffers through which blocks of one geometry pass; all caches on the budget use the same."""
        with self._lock:
            if key not in self._staging:
                self._staging[key] = make()
            return self._staging[key]

    def staging_tensors(self) -> list[torch.Tensor]:
        """What is allocated on devices for blocks on their way."""
        return [tensor for staging in self._staging.values() for tensor in staging.tensors]

    def enter(self, lease: Lease) -> None:
        """Count a cache in."""
        with self._lock:
            self._leases.add(lease)

    def step(self, lease: Lease) -> None:
        """Note that a cache begins a step."""
        with self._lock:
            self.clock += 1
            lease.last_used = self.clock
            lease.changed()

    def held(self, device: torch.device) -> int:
        """Bytes that all caches hold there."""
        return sum(lease.held(device) for lease in list(self._leases))

    def has_room(self, lease: Lease, device: torch.device, more: int) -> bool:
        """Whether `lease` may take `more` bytes; if it is needed, idle caches move out first."""
        with self._lock:
            missing = self.held(device) + more - self.limit(device)
            if missing <= 0:
                return True
            idle = [
                other
                for other in self._leases
                if other is not lease and self.clock - other.last_used >= STEPS_AT_WORK and other.held(device)
            ]
        for other in sorted(idle, key=lambda other: other.last_used):
            missing -= other.give_way(device, missing)
            if missing <= 0:
                return True
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryBudget:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_memory})"


class Pool(Protocol):
    """Blocks that hold bytes of a budget."""

    def held_on(self, device: torch.device) -> int:
        """Bytes allocated on `device`."""


class Tenant(Protocol):
    """A layer that holds bytes of a budget."""

    device: torch.device | None

    @property
    def tiers(self) -> Pool | None:
        """The blocks, which forks share; `None` before the first update."""

    def bytes_beside_blocks(self, device: torch.device) -> int:
        """Bytes that the layer has there beside its blocks."""

    def move_out(self) -> None:
        """Move all that it has on the device to the tiers below. An `OSError` leaves it as it was."""


class Lease:
    """What one cache has of a budget: its layers, where their blocks go, and when it was used last.

    Parameters
    ----------
    budget : MemoryBudget
    folder : path, optional
        For the cache's file.
    policy : {"pin", "lru"}
    active_blocks : int, optional
        Blocks of a row that attention reads at most.

    Attributes
    ----------
    lock : threading.RLock
        Held while a layer of the cache is read or changed: only then is it certain that it does not move out.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        folder: str | os.PathLike[str] | None,
        policy: PolicyName,
        active_blocks: int | None = None,
    ) -> None:
        self.budget, self.policy, self.active_blocks = budget, policy, active_blocks
        self.file = BlockFile(folder)
        self.lock = threading.RLock()
        self.last_used = -STEPS_AT_WORK
        self._held: dict[torch.device, int] = {}
        self._tenants: list[weakref.ref[Tenant]] = []
        self._order: dict[int, weakref.ref[Tenant]] = {}  # of each layer, by identity, the one that came after it
        self._last: weakref.ref[Tenant] | None = None
        budget.enter(self)

    @property
    def tenants(self) -> list[Tenant]:
        """The layers, in their order."""
        found = [reference() for reference in self._tenants]
        return [tenant for tenant in found if tenant is not None]

    def register(self, tenant: Tenant) -> None:
        """Count a layer in."""
        self._tenants = [reference for reference in self._tenants if reference() is not None]
        self._tenants.append(weakref.ref(tenant))

    def changed(self) -> None:
        """What the cache holds may be other than it was."""
        self._held.clear()

    def held(self, device: torch.device) -> int:
        """Bytes of the cache on `device`; of an idle one, as last counted."""
        if device in self._held:
            return self._held[device]
        held = self._count(device)
        if self.budget.clock - self.last_used >= STEPS_AT_WORK:
            self._held[device] = held
        return held

    def _count(self, device: torch.device) -> int:
        tenants = self.tenants
        pools = {id(tenant.tiers): tenant.tiers for tenant in tenants}
        held = sum(pool.held_on(device) for pool in pools.values() if pool is not None)
        return held + sum(tenant.bytes_beside_blocks(device) for tenant in tenants)

    def share(self, device: torch.device) -> int:
        """Bytes that one layer may have on `device` if all that are there, or not yet anywhere, have as many."""
        here = [tenant for tenant in self.tenants if tenant.device in (device, None)]
        count = len({id(tenant if tenant.tiers is None else tenant.tiers) for tenant in here})
        return self.budget.limit(device) // max(count, 1)

    def following(self, tenant: Tenant) -> Tenant | None:
        """The layer that was used after `tenant` the last time, while `tenant` is used now."""
        previous = self._last() if self._last is not None else None
        self._last = weakref.ref(tenant)
        if previous is not None:
            self._order[id(previous)] = self._last
        after = self._order.get(id(tenant))
        return after() if after is not None else None

    def begin_step(self, tokens: int, due: Iterable[tuple[int, int]]) -> None:
        """Note that the cache begins a step, and see to it that what it may have to write to disk fits there.

        Parameters
        ----------
        tokens : int
            New tokens of each row.
        due : iterable of (int, int)
            Of each layer, how many blocks that are, and the bytes of each.

        Raises
        ------
        OSError
            If the disk is full, or there is no file and none can be made.
        """
        records: dict[int, int] = {}
        for count, size in due:
            if count:
                records[size] = records.get(size, 0) + count
        for size, count in records.items():
            self.file.make_room(size, count)
        was_idle = self.budget.clock - self.last_used >= STEPS_AT_WORK
        self.budget.step(self)
        if tokens > 1 or was_idle:  # tails ask for no room, and are about to grow or to come back
            for device in {tenant.device for tenant in self.tenants}:
                if device is not None:
                    self.budget.has_room(self, device, 0)

    def give_way(self, device: torch.device, wanted: int) -> int:
        """Move layers out until `wanted` bytes are free, unless the cache is in use; returns how many are.

        From the last layer back, as the first ones are the first to be needed again.
        """
        if not self.lock.acquire(blocking=False):
            return 0
        try:
            before = self._count(device)
            freed = 0
            for tenant in reversed(self.tenants):
                if freed >= wanted:
                    break
                tenant.move_out()
                freed = before - self._count(device)
            return freed
        except OSError as error:
            logger.warning(
                "an idle cache could not move out and stays where it is: %s", str(error)
            )  # no traceback kept
            return before - self._count(device)
        finally:
            self.changed()
            self.lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        twin = Lease(self.budget, self.file.folder, self.policy, self.active_blocks)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("an offloaded cache cannot be pickled: its blocks are in a file; `save` it instead")


def _in_bytes(max_memory: Mapping[int | str, int | str]) -> dict[int | str, int]:
    if not isinstance(max_memory, Mapping):
        raise TypeError(
            f"max_memory: expected a mapping such as {{0: '2GiB', 'cpu': '8GiB'}}, got {type(max_memory).__name__}"
        )
    found: dict[int | str, int] = {}
    for key, size in max_memory.items():
        if isinstance(key, bool) or (key not in ("cpu", "mps") and not (isinstance(key, int) and key >= 0)):
            raise ValueError(f"max_memory: expected the index of an accelerator, 'mps' or 'cpu', got {key!r}")
        if isinstance(size, bool) or not isinstance(size, (int, str)):
            raise TypeError(f"max_memory[{key!r}]: expected bytes or a size such as '2GiB', got {size!r}")
        try:
            found[key] = convert_file_size_to_int(size)
        except ValueError:
            raise ValueError(f"max_memory[{key!r}]: expected bytes or a size such as '2GiB', got {size!r}") from None
        if found[key] < 1:
            raise ValueError(f"max_memory[{key!r}]: expected at least 1 byte, got {size!r}")
    return found


def _after_fork() -> None:
    for budget in list(_budgets):
        budget.start_anew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
