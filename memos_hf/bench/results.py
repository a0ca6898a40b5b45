"""What was measured of a cache, and what it says beside DynamicCache: the rows of tables, JSON files and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..contenders import REFERENCE
from ..output import Table

# The context at which a step is taken to cost nothing for its cache.
BASE_CONTEXT = 16


@dataclass(frozen=True, order=True)
class Place:
    """Tokens of each row when decoding begins, and rows."""

    context: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.context:,} tokens x {self.batch_size}"


@dataclass
class Measurement:
    """One cache at one context length and batch size.

    Attributes
    ----------
    cache : str
        Name of the contender.
    batch_size, context : int
        Rows, and tokens of each when decoding began.
    step_ms : list[float]
        Milliseconds of each step that decoded one token of every row.
    bytes_held : int
        Storages of the cache at the end, each once.
    tokens : list[list[int]]
        Ids decoded, of each row.
    prefill_ms : float, optional
        Milliseconds for the whole prompt.
    prompt_peak_bytes : int, optional
        Most memory taken during the prompt, the cache's own included.
    materialised_calls : int, optional
        Attention calls that decoded a layer instead of reading it in place, of caches that count them.
    """

    cache: str
    batch_size: int
    context: int
    step_ms: list[float]
    bytes_held: int
    tokens: list[list[int]] = field(repr=False)
    prefill_ms: float | None = None
    prompt_peak_bytes: int | None = None
    materialised_calls: int | None = None

    @property
    def ms_per_token(self) -> float:
        """Median milliseconds of a step."""
        return median(self.step_ms)


class Comparison:
    """Measurements beside DynamicCache's, as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._by_place: dict[tuple[str, int, int], Measurement] = {}

    def add(self, measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
        """Take in what was measured at one place, DynamicCache first; return a row for each cache.

        The KV tax is the milliseconds per token less those of the same cache and batch size at `BASE_CONTEXT` tokens.
        Figures beside DynamicCache's are `None` where there is none to compare with.
        """
        measurements = list(measurements)
        for measured in measurements:
            self._by_place[measured.cache, measured.batch_size, measured.context] = measured
        rows = [self._row(measured) for measured in measurements]
        self.rows += rows
        return rows

    def _row(self, measured: Measurement) -> dict[str, Any]:
        reference = self._by_place.get((REFERENCE, measured.batch_size, measured.context))
        tax, reference_tax = self._kv_tax(measured), self._kv_tax(reference)
        row = {name: value for name, value in asdict(measured).items() if name != "tokens"}
        return row | {
            "ms_per_token": measured.ms_per_token,
            "step_ratio": measured.ms_per_token / reference.ms_per_token if reference else None,
            "kv_tax_ms": tax,
            # Noise can make nothing, or less, of a small tax, and that is not compared with.
            "kv_tax_ratio": tax / reference_tax if tax is not None and reference_tax and reference_tax > 0 else None,
            "same_tokens": _begin_alike(measured.tokens, reference.tokens) if reference else None,
        }

    def _kv_tax(self, measured: Measurement | None) -> float | None:
        if measured is None or measured.context == BASE_CONTEXT:
            return None
        base = self._by_place.get((measured.cache, measured.batch_size, BASE_CONTEXT))
        return measured.ms_per_token - base.ms_per_token if base is not None else None


def _begin_alike(tokens: list[list[int]], others: list[list[int]]) -> bool:
    """Whether rows agree as far as both go: what runs out of time decodes fewer tokens."""
    return all(one[: len(other)] == other[: len(one)] for one, other in zip(tokens, others, strict=True))


# Title and width of each column, and how a row's figure is shown there; those of prompts, then of the others.
_PROMPT_COLUMNS: tuple[tuple[str, int, Callable[[dict[str, Any]], str]], ...] = (
    ("prefill, s", 10, lambda row: _shown(row["prefill_ms"], 2, unit=1000)),
    ("peak of prompt, MiB", 19, lambda row: _shown(row["prompt_peak_bytes"], 1, unit=2**20)),
)
_COLUMNS: tuple[tuple[str, int, Callable[[dict[str, Any]], str]], ...] = (
    ("cache", 18, lambda row: row["cache"]),
    ("batch", 5, lambda row: str(row["batch_size"])),
    ("context", 8, lambda row: f"{row['context']:,}"),
    ("ms/token", 9, lambda row: _shown(row["ms_per_token"], 2)),
    ("of dynamic's", 12, lambda row: _shown(row["step_ratio"], 3)),
    ("KV tax, ms", 10, lambda row: _shown(row["kv_tax_ms"], 2)),
    ("of dynamic's", 12, lambda row: _shown(row["kv_tax_ratio"], 3)),
    ("MiB held", 10, lambda row: _shown(row["bytes_held"], 1, unit=2**20)),
    ("tokens", 6, lambda row: {True: "same", False: "differ", None: ""}[row["same_tokens"]]),
)


class ComparisonTable:
    """A table of the rows of :class:`Comparison`.

    Parameters
    ----------
    prompts : bool
        Whether prompts were measured too.
    """

    def __init__(self, prompts: bool = True) -> None:
        self._columns = _COLUMNS + (_PROMPT_COLUMNS if prompts else ())
        self._table = Table(*((title, width) for title, width, _ in self._columns))

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Print more rows."""
        for row in rows:
            self._table.add(*(show(row) for _, _, show in self._columns))


def _shown(figure: float | None, digits: int, unit: float = 1) -> str:
    return "" if figure is None else f"{figure / unit:,.{digits}f}"
