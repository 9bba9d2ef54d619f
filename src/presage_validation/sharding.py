"""The claim on placements of tables: of those that were measured, the pick is among the best.

For each task every measured placement is ranked by its predicted largest forward plus backward over ranks, with the
embedding model as shipped: it was fitted on groups of tables, never on placements. Beside it, on the same tasks: the
same with the law alone, uniform rows and no reuse; sums of what simple costs say a table takes, the largest over ranks
(`cost ...`); TorchRec's estimator; and always taking the placement that one heuristic made (`always ...`).

TorchRec's estimate of a table-wise shard (torchrec/distributed/planner/shard_estimators.py and constants.py, read
2026-11): bytes of indices, rows looked up and outputs, over the bandwidth of memory, times 1.15 for 64 to 127 columns
and 1.75 for fewer, forward once and backward twice. Its times of communication are left out, as they are from the
measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.row_reuse import zipf
from presage.embeddings import EmbeddingModel, Lookups, embedding_model
from presage_validation.embeddings import MeasuredPlacement, Task, read_tasks
from presage_validation.score import Skipped, in_turn

Array = npt.NDArray[Any]
Tell = Callable[[str], None]
Predictor = Callable[[Task], list[float]]  # a number for each placement, the least is picked
REPEATED = 0.3  # what a lookup of a row that came before costs, of one of a new row (as in lpt_cache)


@dataclass(frozen=True)
class Choice:
    """What one predictor did on one task."""

    predictor: str
    task: str
    picked: str
    regret: float  # of the pick's measured time over the best
    tau: float | None


@dataclass(frozen=True)
class Picks:
    """What a predictor did on all tasks; shares and regrets as fractions."""

    tasks: int
    top1: float
    within_5pct: float
    within_10pct: float
    mean_regret: float
    kendall_tau: float | None


@dataclass(frozen=True)
class ShardingScores:
    path: str
    choices: tuple[Choice, ...]
    ranks: tuple[tuple[str, str, int, str, float, float], ...]  # task, placement, rank, phase, predicted, measured
    skipped: tuple[Skipped, ...]
    kind: str = "sharding"

    def picks(self) -> dict[str, Picks]:
        names = dict.fromkeys(c.predictor for c in self.choices)
        return {n: _picks([c for c in self.choices if c.predictor == n]) for n in names}

    def lines(self) -> list[tuple[str, ...]]:
        """Every rank's predicted beside its measured time, for a CSV file."""
        head = ("task", "placement", "rank", "phase", "predicted", "measured", "error")
        rows = [(t, p, str(r), n, f"{a:.9g}", f"{b:.9g}", f"{a / b - 1:.6g}") for t, p, r, n, a, b in self.ranks]
        return [head, *rows]

    def to_json(self) -> dict[str, Any]:
        found = {n: asdict(p) for n, p in self.picks().items()}
        metrics = found.pop("presage", None) or asdict(_picks([]))
        return {
            "kind": self.kind,
            "path": self.path,
            "n": metrics["tasks"],
            "skipped": [asdict(s) for s in self.skipped],
            "metrics": metrics,
            "baselines": found,
            "tasks": [asdict(c) for c in self.choices if c.predictor == "presage"],
        }


def _picks(choices: Sequence[Choice]) -> Picks:
    regret = np.array([c.regret for c in choices] or [np.nan])
    taus = [c.tau for c in choices if c.tau is not None]
    best, five, ten = (float((regret <= limit).mean()) for limit in (1e-9, 0.05, 0.10))
    return Picks(len(choices), best, five, ten, float(regret.mean()), float(np.mean(taus)) if taus else None)


def score_sharding(path: str | Path, tell: Tell = lambda _: None) -> ShardingScores:
    """Score one file."""
    chip, tasks, skipped = read_tasks(path)
    model = embedding_model(chip)
    choices: list[Choice] = []
    for name, predictor in in_turn(_predictors(model).items(), tell, lambda p: p[0]):
        choices += [_choice(name, t, predictor(t)) for t in tasks]
    choices += [c for t in tasks for c in _always(t)]
    return ShardingScores(str(path), tuple(choices), tuple(r for t in tasks for r in _ranks(model, t)), skipped)


def _choice(name: str, task: Task, predicted: Sequence[float]) -> Choice:
    measured = np.array([p.total for p in task.placements])
    pick = int(np.argmin(predicted))
    return Choice(
        name,
        task.name,
        task.placements[pick].name,
        float(measured[pick] / measured.min() - 1),
        _tau(predicted, measured),
    )


def _tau(predicted: Sequence[float], measured: Array) -> float:
    """Kendall's tau-a: pairs in the same order less pairs in the other, over all pairs."""
    i, j = np.triu_indices(len(measured), 1)
    guess = np.asarray(predicted)
    return float((np.sign(guess[i] - guess[j]) * np.sign(measured[i] - measured[j])).mean())


def _always(task: Task) -> Iterable[Choice]:
    """The placements of heuristics, each as if it were always taken."""
    best = min(p.total for p in task.placements)
    for p in task.placements:
        yield Choice(f"always {p.name}", task.name, p.name, p.total / best - 1, None)


# ---- what predicts


def _predictors(model: EmbeddingModel) -> dict[str, Predictor]:
    def by_model(asked: Callable[[Task], Sequence[Lookups]], corrected: bool = True) -> Predictor:
        return lambda task: [_times(model, task, p, asked(task), corrected)[2] for p in task.placements]

    def by_cost(cost: Callable[[Task], Array]) -> Predictor:
        return lambda task: [float(_summed(cost(task), task, p).max()) for p in task.placements]

    return {
        "presage": by_model(lambda t: t.lookups),
        "law": by_model(lambda t: t.lookups, corrected=False),
        "uniform": by_model(_uniform),
        "no_reuse": by_model(lambda t: [Lookups.all_new(k.count) for k in t.lookups]),
        "torchrec": by_cost(torchrec),
    } | {f"cost {name}": by_cost(cost) for name, cost in COSTS.items()}


def _uniform(task: Task) -> list[Lookups]:
    return [zipf(0.0, t.rows, k.count) for t, k in zip(task.tables, task.lookups, strict=True)]


def _summed(values: Array, task: Task, placement: MeasuredPlacement) -> Array:
    """Tables' values added up by rank."""
    out = np.zeros((task.ranks, *values.shape[1:]))
    np.add.at(out, np.array(placement.assign), values)
    return out


def _times(
    model: EmbeddingModel, task: Task, placement: MeasuredPlacement, asked: Sequence[Lookups], corrected: bool
) -> tuple[Array, Array, float]:
    """Forward and backward by rank, and the largest sum."""
    terms = model.terms(task.tables, task.batch, optimizer=task.optimizer, lengths=task.lengths, lookups=asked)
    total = _summed(terms, task, placement)
    there, back = (of(total, corrected=corrected) for of in (model.forward_of, model.backward_of))
    return there, back, float((there + back).max())


def _columns(task: Task) -> tuple[Array, Array, Array]:
    rows, dim, pooling = np.array([(t.rows, t.dim, t.pooling) for t in task.tables], float).T
    return rows, dim, pooling


def _size(task: Task) -> Array:
    rows, dim, _ = _columns(task)
    return np.asarray(rows * dim)


def _lookup(task: Task) -> Array:
    _, dim, pooling = _columns(task)
    return np.asarray(dim * pooling)


def _lookup_size(task: Task) -> Array:
    return np.asarray(_lookup(task) * np.log10(np.maximum(2.0, _columns(task)[0])))


def _cache(task: Task) -> Array:
    counts = np.array([(k.distinct, k.count) for k in task.lookups])
    repeats = np.maximum(0.0, counts[:, 1] - counts[:, 0])
    return np.asarray(_columns(task)[1] * (counts[:, 0] + REPEATED * repeats) / task.batch)


COSTS: dict[str, Callable[[Task], Array]] = {
    "greedy_size": _size,
    "greedy_lookup": _lookup,
    "greedy_lookup_size": _lookup_size,
    "greedy_dim": lambda task: _columns(task)[1],
    "lpt_cache": _cache,
}


def torchrec(task: Task) -> Array:
    """TorchRec's times of tables, but for a factor that all share."""
    _, dim, pooling = _columns(task)
    width = np.array([t.width for t in task.tables], float)
    penalty = np.where(dim >= 128, 1.0, np.where(dim >= 64, 1.15, 1.75))
    moved = task.batch * (8 * pooling + pooling * dim * width + dim * width)
    return np.asarray(3 * moved * penalty)


def _ranks(model: EmbeddingModel, task: Task) -> Iterable[tuple[str, str, int, str, float, float]]:
    """Every rank's predicted beside its measured time."""
    for p in task.placements:
        there, back, _ = _times(model, task, p, task.lookups, True)
        for rank in range(task.ranks):
            if p.forward[rank] > 0:
                yield task.name, p.name, rank, "forward", float(there[rank]), p.forward[rank]
                yield task.name, p.name, rank, "backward", float(back[rank]), p.backward[rank]
