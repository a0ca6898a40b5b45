"""One run on one GPU: is the decode kernel right, how fast does it read, and how fast do whole models decode.

The parts come in the order of their importance and share a time budget; what it does not suffice for is left out, and
said to be. Figures are written as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..contenders import CONTENDERS
from ..output import JsonReport, Table, environment, say
from . import end_to_end, kernel, offload
from .budget import Budget
from .kernel import LongCache
from .offload import OffloadSizes
from .results import BASE_CONTEXT, Comparison, ComparisonTable, Place
from .shapes import random_model, shape_config

# What the parts before the last may take at most, as shares of all the time: a kernel is compiled for each geometry.
CHECK_SHARE = 0.3
BANDWIDTH_SHARE = 0.2
OFFLOAD_SHARE = 0.15


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes
    ----------
    check_rounds : int
        Calls of each codec that are checked.
    long_cache : LongCache
        What bandwidth is measured on.
    offload : OffloadSizes
        What decoding from an offloaded cache is measured on.
    shape, layers : str, int or None
        The model of the last two parts.
    places : tuple of Place
        Where it decodes, the most important first but for the base that the KV tax needs.
    rounds, piece : int
        Steps of each cache that are timed, and tokens that caches are filled with at a time.
    """

    check_rounds: int = 8
    long_cache: LongCache = field(default_factory=LongCache)
    offload: OffloadSizes = field(default_factory=OffloadSizes)
    shape: str = "llama-3-8b"
    layers: int | None = None
    places: tuple[Place, ...] = (
        Place(BASE_CONTEXT, 1),
        Place(32768, 1),
        Place(131072, 1),
        Place(BASE_CONTEXT, 8),
        Place(32768, 8),
        Place(4096, 1),
        Place(4096, 8),
        Place(131072, 8),
    )
    rounds: int = 20
    piece: int = 16384


# The same code in seconds on a CPU.
QUICK = Sizes(
    check_rounds=2,
    long_cache=LongCache(batch=2, tokens=1024, kv_heads=2, head_dim=64, copied_bytes=2**20, samples=3, calls=1),
    offload=OffloadSizes(context=1500, share=0.4, layers=2, rounds=3, piece=256, copied_bytes=2**20, samples=3),
    shape="smollm2-135m",
    layers=2,
    places=(Place(BASE_CONTEXT, 1), Place(600, 1), Place(600, 2)),
    rounds=3,
    piece=256,
)


class GpuSuite:
    """The parts of a run, its tables and its report.

    Parameters
    ----------
    device : torch.device
    sizes : Sizes
    seconds : float
        To spend at most, but for what is under way when they end.
    json : Path, optional
        Where the figures go.
    """

    def __init__(self, device: torch.device, sizes: Sizes, seconds: float, json: Path | None = None) -> None:
        self.device, self.sizes, self.budget = device, sizes, Budget(seconds)
        self.seconds = seconds
        contents: dict[str, Any] = {"environment": environment(device), "seconds": seconds}
        self.report = JsonReport(
            json,
            contents
            | {"correctness": [], "bandwidth": [], "offload": {}, "end_to_end": [], "left_out": [], "problems": []},
        )

    def run(self) -> dict[str, Any]:
        """Do everything there is time for; the report's contents."""
        say(", ".join(f"{name} {value}" for name, value in self.report.contents["environment"].items()))
        parts: dict[str, Callable[[], None]] = {
            "correctness": self._check,
            "bandwidth": self._bandwidth,
            "offload": self._offload,
            "end to end": self._end_to_end,
        }
        for title, part in parts.items():
            say(f"\n{title}; {self.budget.left():.0f} s are left")
            if self.budget.is_spent():
                self._leave_out(f"{title}: the time was spent")
                continue
            try:
                part()
            except Exception as error:  # whatever a kernel or a device may raise: what can still be measured is
                self._problem(f"{title}: {type(error).__name__}: {error}")
            self.report.save()
        say(f"\n{self.seconds - self.budget.left():.0f} s of {self.seconds:.0f} used")
        return self.report.contents

    def _check(self) -> None:
        rows: list[dict[str, Any]] = []
        budget = self.budget.part(CHECK_SHARE * self.seconds)
        for rows in kernel.check(self.device, self.sizes.check_rounds, budget):
            self.report.contents["correctness"] = rows
            self.report.save()
        table = Table(("codec", 24), ("dtype", 8), ("calls", 5), ("largest error", 13), ("tolerance", 9), ("", 6))
        for row in rows:
            error = "infinite" if row["largest_error"] is None else f"{row['largest_error']:.1e}"
            verdict = "passed" if row["passed"] else "FAILED"
            table.add(row["codec"], row["dtype"], row["calls"], error, f"{row['tolerance']:.0e}", verdict)
        for row in rows:
            if not row["passed"]:
                self._problem(f"correctness: {row['codec']} in {row['dtype']} is off the most for {row['call']}")
        made, asked = sum(row["calls"] for row in rows), self.sizes.check_rounds * len(kernel.CODECS)
        if made < asked:
            self._leave_out(f"correctness: {asked - made} of {asked} calls, as their share of the time was spent")

    def _bandwidth(self) -> None:
        table = Table(("keys and values", 18), ("MiB", 8), ("ms", 8), ("GB/s", 8), ("of a copy", 9), ("speedup", 8))
        sizes = self.sizes.long_cache
        missing = list(kernel.STORAGES)
        for row in kernel.bandwidth(self.device, sizes, self.budget.part(BANDWIDTH_SHARE * self.seconds)):
            if missing[0] == kernel.STOCK:
                say(f"{sizes.tokens:,} tokens x {sizes.batch}; a copy: {row['copy_gb_per_s']:,.0f} GB/s")
            missing.remove(row["storage"])
            self._add("bandwidth", [row])
            if row["raised"] is not None:
                self._problem(f"bandwidth: {row['storage']}: {row['raised']}")
                continue
            table.add(
                row["storage"],
                f"{row['bytes'] / 2**20:,.1f}",
                f"{row['ms']:.3f}",
                f"{row['gb_per_s']:,.0f}",
                f"{row['of_copy']:.2f}",
                "" if row["speedup"] is None else f"{row['speedup']:.2f}",
            )
        if missing:
            self._leave_out(f"bandwidth: {', '.join(missing)}, as their share of the time was spent")

    def _offload(self) -> None:
        sizes = self.sizes.offload
        config = shape_config(self.sizes.shape, sizes.layers, sizes.context + 64)
        model = random_model(config, self.device, torch.bfloat16)
        found = offload.measure(model, sizes, self.budget.part(OFFLOAD_SHARE * self.seconds))
        self.report.contents["offload"] = found
        self.report.save()
        if found["left_out"] is not None:
            self._leave_out(f"offload: {found['left_out']}")
            return
        say(f"{sizes.context:,} tokens, {sizes.share:g} of them on the device")
        say(f"a copy: {found['copy_gb_per_s']:.1f} GB/s")
        table = Table(
            *(("cache", 30), ("ms/token", 9), ("of resident", 11), ("MiB moved", 9), ("GB/s", 7), ("of a copy", 9))
        )
        for row in found["rows"]:
            link: tuple[str, ...] = ("", "", "")
            if row["gb_per_s"]:
                moved = row["bytes_moved_per_token"] / 2**20
                link = (f"{moved:,.1f}", f"{row['gb_per_s']:.1f}", f"{row['of_copy']:.2f}")
            table.add(row["cache"], f"{row['ms_per_token']:.2f}", f"{row['of_resident']:.2f}", *link)
        say(f"largest error of attention {found['largest_error']:.1e}, tolerance {found['tolerance']:.0e}")
        if not found["largest_error"] <= found["tolerance"]:
            self._problem(f"offload: attention is off by {found['largest_error']:.1e}")

    def _end_to_end(self) -> None:
        sizes = self.sizes
        config = shape_config(sizes.shape, sizes.layers)
        model = random_model(config, self.device, torch.bfloat16)
        comparison, table = Comparison(), ComparisonTable(prompts=False)
        for place, outcome in end_to_end.decode(model, sizes.places, sizes.rounds, sizes.piece, self.budget):
            rows = comparison.add(outcome.measurements)
            table.add(rows)
            for name, reason in outcome.left_out.items():
                self._leave_out(f"end to end: {name} at {place}: {reason}")
            for name, raised in outcome.failed.items():
                self._problem(f"end to end: {name} at {place}: {raised}")
            for row in rows:
                if CONTENDERS[row["cache"]].lossless and row["same_tokens"] is False:
                    self._problem(f"end to end: {row['cache']} at {place} gave other tokens than DynamicCache")
                if row["materialised_calls"]:
                    self._problem(f"end to end: {row['cache']} at {place} decoded layers instead of reading in place")
            self._add("end_to_end", rows)

    def _add(self, part: str, rows: Iterable[dict[str, Any]]) -> None:
        self.report.contents[part] += rows
        self.report.save()

    def _leave_out(self, what: str) -> None:
        say(f"left out: {what}")
        self.report.contents["left_out"].append(what)
        self.report.save()

    def _problem(self, what: str) -> None:
        say(f"problem: {what}")
        self.report.contents["problems"].append(what)
        self.report.save()
