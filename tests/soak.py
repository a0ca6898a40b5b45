"""Thousands of mixed requests by several threads, and a look at what is left: nothing, and no request gets slower.

Not collected by pytest. Each request is checked against a twin; see soak_requests.py. Bytes, tensors, files and threads
are counted after the first fifth of the requests and at the end. Exit code 1 if a request failed or something grew:

    python tests/soak.py --requests 2000 --threads 4
    python tests/soak.py --request 1234     # one of them again, alone
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import torch
from soak_requests import REQUESTS, World
from tqdm.auto import tqdm

from memos_hf.arguments import positive_int
from memos_hf.bench.memory import anonymous_bytes, live_tensors
from memos_hf.output import Table

# Memory that the C library keeps for its threads goes up and down by some MiB.
MEMORY_SLACK = 24 << 20
# Of the median request: others use the machine too.
TIME_SLACK = 1.5


@dataclass(frozen=True)
class Left:
    """What is there when no request runs."""

    anonymous_bytes: int
    tensors: int
    tensor_bytes: int
    open_files: int
    files: int
    threads: int

    @classmethod
    def now(cls, world: World) -> Left:
        """Counted after a wait: readers end, and drop what they hold, a moment after their caches."""
        world.clear()
        for _ in range(20):
            gc.collect()
            time.sleep(0.05)
        return cls(
            anonymous_bytes=anonymous_bytes(),
            **dict(zip(("tensors", "tensor_bytes"), live_tensors(), strict=True)),
            open_files=len(os.listdir("/proc/self/fd")),
            files=sum(path.is_file() for path in world.folder.rglob("*")),
            threads=threading.active_count(),
        )

    def grown(self, before: Left) -> list[str]:
        """The figures that are larger than before, by more than they may be."""
        return [
            field.name
            for field in fields(self)
            if getattr(self, field.name)
            > getattr(before, field.name) + (MEMORY_SLACK if field.name == "anonymous_bytes" else 0)
        ]


@dataclass(frozen=True)
class Done:
    """One request: its number, its seconds by the clock and by the processor, and what was raised."""

    number: int
    seconds: float
    cpu_seconds: float
    failure: str | None


def run(world: World, seed: int, number: int) -> Done:
    """Make request `number`, which is the same every time."""
    request, mode = REQUESTS[number % len(REQUESTS)]
    start, cpu_start = time.perf_counter(), time.thread_time()
    failure = None
    try:
        request(world, mode, random.Random(seed + number))
    except BaseException:
        failure = f"request {number}, {request.__name__}, {mode.name}:\n{traceback.format_exc()}"
    return Done(number, time.perf_counter() - start, time.thread_time() - cpu_start, failure)


def run_all(world: World, options: argparse.Namespace, numbers: range, until: float) -> list[Done]:
    """Make requests by several threads, as long as there is time."""
    done = []
    bar = tqdm(total=len(numbers), unit="request", disable=None)

    def one(number: int) -> None:
        if time.monotonic() < until:
            done.append(run(world, options.seed, number))
            bar.update()

    with ThreadPoolExecutor(options.threads) as pool, bar:
        list(pool.map(one, numbers))
    return done


def slower(done: list[Done]) -> tuple[float, float]:
    """How much longer requests took in the last fifth than in the second, by the clock and by the processor."""
    fifth = len(done) // 5
    early, late = done[fifth : 2 * fifth], done[-fifth:]
    return tuple(
        median(getattr(one, name) for one in late) / median(getattr(one, name) for one in early)
        for name in ("seconds", "cpu_seconds")
    )


def report(done: list[Done], before: Left, after: Left, seconds: float) -> bool:
    """Print what was found; whether all is well."""
    kinds = Counter(REQUESTS[one.number % len(REQUESTS)][0].__name__ for one in done)
    print(f"{len(done):,} requests in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    table = Table(("left when no request runs", 26), ("after a fifth", 14), ("at the end", 14))
    for field in fields(Left):
        table.add(field.name.replace("_", " "), *(f"{getattr(left, field.name):,}" for left in (before, after)))
    by_clock, by_processor = slower(done)
    print(f"time of a request, last fifth / second fifth: {by_clock:.2f}, by the processor {by_processor:.2f}")
    failures = [one.failure for one in done if one.failure]
    for failure in failures[:5]:
        print(f"\n{failure}", file=sys.stderr)
    verdicts = {
        f"{len(failures)} failed": not failures,
        f"grown: {', '.join(after.grown(before)) or 'nothing'}": not after.grown(before),
        "requests became slower" if by_processor > TIME_SLACK else "none became slower": by_processor <= TIME_SLACK,
    }
    print("; ".join(verdicts))
    return all(verdicts.values())


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive_int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--threads", type=positive_int, default=4, help="that make them (%(default)s)")
    parser.add_argument("--seconds", type=positive_int, help="begin no request after so many")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--request", type=int, metavar="NUMBER", help="make this one alone, and nothing else")
    options = parser.parse_args()
    if options.requests < 5 * len(REQUESTS) and options.request is None:
        parser.error(f"--requests: expected {5 * len(REQUESTS)}, all kinds in a fifth of them, or more")
    return options


def main() -> None:
    options = parsed_options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name))
        world.disk.install()
        if options.request is not None:
            raise SystemExit(run(world, options.seed, options.request).failure)
        start = time.monotonic()
        until = start + (options.seconds or float("inf"))
        numbers = range(options.requests)
        warm_up = options.requests // 5
        done = run_all(world, options, numbers[:warm_up], until)
        before = Left.now(world)
        done += run_all(world, options, numbers[warm_up:], until)
        after = Left.now(world)
        world.disk.remove()
        if len(done) < 2 * warm_up:
            raise SystemExit(f"--seconds: {len(done)} requests were made in them, too few to say anything")
        if not report(done, before, after, time.monotonic() - start):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
