"""Predictions beside measurements, and the numbers that sum them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar, cast

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
    notes: tuple[str, ...] | None = None
    counted: str | None = None  # the metric whose rows `n` is; all rows where none is named

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
            "n": sum(self.counted in (None, r.metric) for r in self.rows),
            "skipped": [asdict(s) for s in self.skipped],
            "metrics": {m: asdict(s) for m, s in self.metrics().items()} | dict(self.rates),
            "groups": {g: {m: asdict(s) for m, s in self.metrics(g).items()} for g in self.groups()},
            **({} if self.notes is None else {"notes": list(self.notes)}),
        }

    def lines(self) -> list[tuple[str, ...]]:
        """A header, then a line for every prediction beside its measurement, for a CSV file."""
        head = ("metric", "group", "name", "predicted", "measured", "error")
        numbers = [(f"{r.predicted:.9g}", f"{r.measured:.9g}", f"{r.error:.6g}") for r in self.rows]
        return [head, *((r.metric, r.group, r.name, *n) for r, n in zip(self.rows, numbers, strict=True))]


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


# ---- cases that share nothing, scored one by one or by a pool, reported and returned in their order

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Tell = Callable[[str], None]


def run_cases(
    function: Callable[[Item], Outcome],
    items: Iterable[Item],
    tell: Tell,
    name: Callable[[Item], str],
    pool: Pool,
    pieces: Iterable[Sequence[Item]] | None = None,
) -> tuple[list[tuple[Item, Outcome]], list[Skipped]]:
    """Each item with what the function makes of it, and the items for which it raised a PresageError.

    `pieces`: the items as lists, each of which is scored in one process.
    """
    every = [[item] for item in items] if pieces is None else list(pieces)
    outcomes = chain.from_iterable(pool.map(partial(_try_all, function), every))
    done: list[tuple[Item, Outcome]] = []
    skipped: list[Skipped] = []
    for item in in_turn(chain.from_iterable(every), tell, name):
        outcome, reason = next(outcomes)
        if reason is None:
            done.append((item, cast(Outcome, outcome)))
        else:
            skipped.append(Skipped(name(item), reason))
    return done, skipped


def cut_evenly(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Consecutive pieces of `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def _try_all(function: Callable[[Item], Outcome], items: Sequence[Item]) -> list[tuple[Outcome | None, str | None]]:
    """For each item its outcome, or why there is none."""
    out: list[tuple[Outcome | None, str | None]] = []
    for item in items:
        try:
            out.append((function(item), None))
        except PresageError as e:
            out.append((None, str(e)))
    return out


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


class Turn(str):
    """The name of a case, with how many are done and how many there are."""

    done: int
    total: int

    def __new__(cls, name: str, done: int, total: int) -> Turn:
        self = super().__new__(cls, name)
        self.done, self.total = done, total
        return self


def in_turn(items: Iterable[Item], tell: Tell, name: Callable[[Item], str]) -> Iterator[Item]:
    """Each item, after `tell` was given its name and place, so that progress can be shown."""
    every = list(items)
    for done, item in enumerate(every):
        tell(Turn(name(item), done, len(every)))
        yield item
