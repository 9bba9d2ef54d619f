"""Predictions beside measurements, and the numbers that sum them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.pool.pool import Pool

# |error| below this counts as this in the geometric mean, where one lucky zero would otherwise hide everything.
GEOMEAN_FLOOR = 4e-4


@dataclass(frozen=True)
class Row:
    """One prediction beside its measurement."""

    metric: str
    group: str
    name: str
    predicted: float
    measured: float
    also: tuple[str, ...] = ()  # further groups it belongs to

    @property
    def error(self) -> float:
        """Signed, as a fraction of the measurement."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class Skipped:
    """A row that could not be handled, and why."""

    row: str
    reason: str


@dataclass(frozen=True)
class Score:
    """Errors as fractions: mean, geometric mean, median, 90th percentile and largest |error|, and the signed mean."""

    n: int
    mape: float
    geomean: float
    median: float
    p90: float
    max: float
    bias: float


def score(rows: Iterable[Row]) -> Score:
    """Sum up the errors of some rows."""
    signed = np.array([r.error for r in rows])
    if not len(signed):
        return Score(0, *([float("nan")] * 6))
    size = np.abs(signed)
    return Score(
        n=len(signed),
        mape=float(size.mean()),
        geomean=float(np.exp(np.log(np.maximum(size, GEOMEAN_FLOOR)).mean())),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        max=float(size.max()),
        bias=float(signed.mean()),
    )


@dataclass(frozen=True)
class AccuracyResult:
    """What one accuracy command found: every row, and every row it could not handle."""

    kind: str
    path: str
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = field(default=())
    rates: Mapping[str, float] = field(default_factory=dict)  # metrics that are one number and not errors of rows

    def metrics(self, group: str | None = None) -> dict[str, Score]:
        """A score per metric, over all rows or those of one group."""
        rows = [r for r in self.rows if group in (None, r.group, *r.also)]
        return {m: score(r for r in rows if r.metric == m) for m in _distinct(r.metric for r in rows)}

    def groups(self) -> list[str]:
        """The groups of rows, then those that cut across them."""
        return _distinct([*(r.group for r in self.rows), *(g for r in self.rows for g in r.also)])

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": self.path,
            "n": len(self.rows),
            "skipped": [asdict(s) for s in self.skipped],
            "metrics": {m: asdict(s) for m, s in self.metrics().items()} | dict(self.rates),
            "groups": {g: {m: asdict(s) for m, s in self.metrics(g).items()} for g in self.groups()},
        }


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def csv_lines(rows: Sequence[Row]) -> Iterable[tuple[str, ...]]:
    """A header, then a line for every prediction beside its measurement."""
    yield "metric", "group", "name", "predicted", "measured", "error"
    for r in rows:
        yield r.metric, r.group, r.name, f"{r.predicted:.9g}", f"{r.measured:.9g}", f"{r.error:.6g}"


# Cases that share nothing, scored one by one or by a pool, told of and given back in their order.

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Failed:
    """A case that could not be scored, and why."""

    reason: str


def swept(
    function: Callable[[Item], Outcome],
    items: Iterable[Item],
    tell: Callable[[str], None],
    name: Callable[[Item], str],
    pool: Pool,
    piece: int = 1,
) -> Iterator[tuple[Item, Outcome | Failed]]:
    """Each item with what the function makes of it; of quick ones, several in one piece of work."""
    every = list(items)
    pieces = [every[i : i + piece] for i in range(0, len(every), piece)]
    found = chain.from_iterable(pool.map(partial(_tried_all, function), pieces))
    for item in in_turn(every, tell, name):
        yield item, next(found)


def _tried_all(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome | Failed]:
    return [_tried(function, item) for item in items]


def _tried(function: Callable[[Item], Outcome], item: Item) -> Outcome | Failed:
    try:
        return function(item)
    except PresageError as e:
        return Failed(str(e))


@dataclass(frozen=True)
class Captured:
    """Cases of a workloads file. Each process imports the file for itself."""

    workloads: str

    @cached_property
    def functions(self) -> dict[str, Callable[..., Callable[[], Any]]]:
        from presage.capture import load_cases

        return load_cases(self.workloads)

    def __reduce__(self) -> tuple[type[Captured], tuple[str]]:
        return Captured, (self.workloads,)

    def graph(self, name: str) -> Graph:
        from presage.capture import capture

        return capture(self.functions[name], source=f"{self.workloads}:{name}")


# Cases one after the other, told by name and place, so that whoever listens can show how many are left.

T = TypeVar("T")


class Turn(str):
    """The name of a case, with how many are done and how many there are."""

    done: int
    total: int

    def __new__(cls, name: str, done: int, total: int) -> Turn:
        self = super().__new__(cls, name)
        self.done, self.total = done, total
        return self


def in_turn(items: Iterable[T], tell: Callable[[str], None], name: Callable[[T], str]) -> Iterator[T]:
    """Each item, after `tell` was told of it."""
    every = list(items)
    for done, item in enumerate(every):
        tell(Turn(name(item), done, len(every)))
        yield item
