"""The claims on table-batched embeddings, on files of measured groups of tables.

`forward`, `backward`: the groups in the order of the file, shuffled with seed 0 and cut in half; law and correction are
fitted on the first half and scored on the second. Beside them, fitted and scored on the same halves: `_law` without the
learned correction; `_skew` knowing alpha and no histogram; `_uniform` as if rows were drawn uniformly, and `_no_reuse`
as if no row came twice: what knowing the data is worth. `_cold`: with the cache overwritten before each phase.
`_shipped`: presage as it ships, without a fit, on all groups; a note tells how many of them it was fitted on.
`_repeated`: groups timed twice, the floor.

A file of few groups is not fitted: there `forward` and `backward` are of the model as shipped, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from presage.costs.lookups.lookup_model import (
    LENGTHS,
    MEASURED_ON,
    OPTIMIZERS,
    EmbeddingModel,
    embedding_model,
    load_lookup_parameters,
    scale_parameters,
)
from presage.costs.lookups.row_reuse import zipf
from presage.embeddings import Lookups, Reuse, Table
from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import read_json
from presage.hardware import Gpu, gpu
from presage_fit.embeddings import START, MeasuredLookup, fit_lookups, group_hash, sample
from presage_validation.score import AccuracyResult, Row, Skipped

Tell = Callable[[str], None]
SEED, ENOUGH = 0, 200  # of the shuffle; groups that a file needs to be fitted
ABLATIONS: dict[str, Callable[[MeasuredLookup], tuple[Lookups, ...]]] = {
    "skew": lambda g: tuple(
        zipf(t.reuse.skew(t.rows), t.rows, k.count) for t, k in zip(g.tables, g.lookups, strict=True)
    ),
    "uniform": lambda g: tuple(zipf(0.0, t.rows, k.count) for t, k in zip(g.tables, g.lookups, strict=True)),
    "no_reuse": lambda g: tuple(Lookups.all_new(k.count) for k in g.lookups),
}


def score_embeddings(path: str | Path, tell: Tell = lambda _: None) -> AccuracyResult:
    """Score one file."""
    found = read_groups(path)
    fitted = len(found.groups) >= ENOUGH
    tell("halves" if fitted else "as shipped")
    rows = list(_scored_rows(found, fitted, tell))
    rows += _rows(embedding_model(found.chip), found.groups, "_shipped") if fitted else []
    rows += [Row(metric, "repeated", name, first, later) for name, metric, first, later in found.repeats]
    notes = tuple(_notes(found, fitted))
    return AccuracyResult("embeddings", str(path), tuple(rows), found.skipped, notes=notes, counted="forward")


def split(groups: Sequence[MeasuredLookup]) -> tuple[list[MeasuredLookup], list[MeasuredLookup]]:
    """The half to fit and the half to score."""
    order = np.random.default_rng(SEED).permutation(len(groups))
    half = len(groups) // 2
    return [groups[i] for i in order[:half]], [groups[i] for i in order[half:]]


def _notes(found: Groups, fitted: bool) -> Iterator[str]:
    seen = load_lookup_parameters().seen
    known = sum(group_hash(g) in seen for g in found.groups)
    if fitted:
        half = len(found.groups) // 2
        yield f"forward, backward: fitted on {half} of {len(found.groups)} groups, the others scored (seed {SEED})"
    else:
        yield f"forward, backward: the model as shipped, for {len(found.groups)} groups are fewer than {ENOUGH}"
    yield f"as shipped: {known} of the {len(found.groups)} groups are among those it was fitted on"


def _model(chip: Gpu, groups: Sequence[MeasuredLookup]) -> EmbeddingModel:
    found = fit_lookups(groups, start=scale_parameters(START, gpu(MEASURED_ON), chip))
    return EmbeddingModel(chip, found.params, {"forward": found.forward, "backward": found.backward})


def _scored_rows(found: Groups, fitted: bool, tell: Tell) -> Iterator[Row]:
    """The model fitted on half of the groups, scored on the others; or as shipped, on all."""
    kept, scored = split(found.groups) if fitted else ([], list(found.groups))
    model = _model(found.chip, kept) if fitted else embedding_model(found.chip)
    yield from _rows(model, scored)
    yield from _rows(model, scored, "_law", corrected=False)
    for name, ablated in ABLATIONS.items():
        tell(name)
        worse = _model(found.chip, [replace(g, lookups=ablated(g)) for g in kept]) if fitted else model
        yield from _rows(worse, [replace(g, lookups=ablated(g)) for g in scored], f"_{name}")
    yield from _rows(model, scored, "_cold", cold=True)


def _rows(
    model: EmbeddingModel,
    groups: Sequence[MeasuredLookup],
    ending: str = "",
    cold: bool = False,
    corrected: bool = True,
) -> Iterator[Row]:
    total = sample(groups, model.params).totals(model.params) if groups else np.zeros((0, 1))
    for metric, of in (("forward", model.forward_of), ("backward", model.backward_of)):
        predicted: Iterable[float] = of(total, cold=cold, corrected=corrected) if groups else ()
        for g, seconds in zip(groups, predicted, strict=True):
            measured = getattr(g, f"{metric}_cold" if cold else metric)
            if np.isfinite(measured):
                label = f"{g.kind} {g.tables[0].dtype} {g.optimizer}"
                yield Row(f"{metric}{ending}", label, g.name, float(seconds), measured)


# Files of measured table-batched embeddings: groups of tables, and placements of tables on ranks.

Made = TypeVar("Made")


@dataclass(frozen=True)
class Groups:
    chip: Gpu
    groups: tuple[MeasuredLookup, ...]
    repeats: tuple[tuple[str, str, float, float], ...]  # of a group: its kind, metric, first and later seconds
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class MeasuredPlacement:
    name: str
    assign: tuple[int, ...]  # rank of each table
    forward: tuple[float, ...]  # seconds, by rank
    backward: tuple[float, ...]

    @property
    def total(self) -> float:
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class Task:
    name: str
    ranks: int
    batch: int
    optimizer: str
    lengths: str
    tables: tuple[Table, ...]
    lookups: tuple[Lookups, ...]
    placements: tuple[MeasuredPlacement, ...]


def read_groups(path: str | Path) -> Groups:
    """Groups with their times; those that cannot be used are told."""
    value = _load(Path(path), "groups")
    out, skipped = _usable(value["groups"], "group", "id", _group)
    return Groups(_chip(path, value), out, _repeats(value, out), skipped)


def read_tasks(path: str | Path) -> tuple[Gpu, tuple[Task, ...], tuple[Skipped, ...]]:
    value = _load(Path(path), "tasks")
    return _chip(path, value), *_usable(value["tasks"], "task", "task", _task)


def _usable(
    entries: Sequence[Any], what: str, key: str, made: Callable[[str, Any], Made]
) -> tuple[tuple[Made, ...], tuple[Skipped, ...]]:
    """What is made of each entry; those of which nothing can be made are told."""
    out, skipped = [], []
    for i, entry in enumerate(entries):
        name = f"{what} {entry.get(key, i)}" if isinstance(entry, dict) else f"{what} number {i}"
        try:
            out.append(made(name, entry))
        except WRONG_VALUE as e:
            skipped.append(Skipped(name, _reason(e)))
    return tuple(out), tuple(skipped)


def _load(path: Path, key: str) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get(key), list):
        raise InputError(path, "should be a list", key)
    return value


def _reason(e: Exception) -> str:
    return f"no {e.args[0]}" if isinstance(e, KeyError) else str(e)


def _chip(path: str | Path, value: Mapping[str, Any]) -> Gpu:
    """The GPU that the calls name, or the one that was measured first."""
    calls = value.get("calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict) and isinstance(call.get("gpu"), str):
            try:
                return gpu(call["gpu"])
            except PresageError as e:
                raise InputError(path, str(e), "calls") from e
    return gpu(MEASURED_ON)


def _known(g: Mapping[str, Any], key: str, there: tuple[str, ...]) -> str:
    if g[key] not in there:
        raise PresageError(f"{key} {g[key]!r}: choose from {', '.join(there)}")
    return str(g[key])


def _seconds(g: Mapping[str, Any], key: str, needed: bool = True) -> float:
    if not needed and g.get(key) is None:
        return nan
    value = float(g[key]) * 1e-3
    if not (isfinite(value) and value > 0):
        raise PresageError(f"{key} is {g[key]!r}, not a time")
    return value


def _tables(g: Mapping[str, Any]) -> tuple[tuple[Table, ...], tuple[Lookups, ...]]:
    """Tables, and what the batch that was counted asked of them."""
    tables = tuple(_table(str(i), t, str(g["dtype"])) for i, t in enumerate(g["tables"]))
    if not tables:
        raise PresageError("no tables")
    batch = int(g["B"])
    return tables, tuple(t.reuse.at(t.reuse.lookups or t.pooling * batch, t.rows) for t in tables)


def _table(name: str, t: Mapping[str, Any], dtype: str) -> Table:
    alpha = None if t.get("alpha") is None else float(t["alpha"])
    hist = tuple(float(x) for x in t.get("hist") or ())
    if alpha is None and not hist:
        raise PresageError(f"table {name}: neither alpha nor hist")
    lookups, distinct, top = (float(t.get(k) or 0.0) for k in ("lookups", "distinct", "top"))
    return Table(name, int(t["E"]), int(t["D"]), float(t["L"]), Reuse(alpha, hist, lookups, distinct, top), dtype)


def _group(name: str, g: Mapping[str, Any]) -> MeasuredLookup:
    tables, lookups = _tables(g)
    return MeasuredLookup(
        name,
        str(g.get("kind", "groups")),
        tables,
        int(g["B"]),
        _known(g, "opt", OPTIMIZERS),
        _known(g, "lengths", LENGTHS),
        lookups,
        _seconds(g, "fwd_ms"),
        _seconds(g, "bwd_ms"),
        *(_seconds(g, k, needed=False) for k in ("check_ms", "fwd_cold_ms", "bwd_cold_ms")),
    )


def _repeats(value: Mapping[str, Any], groups: Sequence[MeasuredLookup]) -> tuple[tuple[str, str, float, float], ...]:
    first, out = {g.name: g for g in groups}, []
    repeats = value.get("repeats")
    for r in repeats if isinstance(repeats, list) else []:
        try:
            g, seconds = first[f"group {r['id']}"], [_seconds(r, k) for k in ("fwd_ms", "bwd_ms")]
        except WRONG_VALUE:
            continue  # of a group that is not there, or was not timed again
        out += [
            (g.name, "forward_repeated", g.forward, seconds[0]),
            (g.name, "backward_repeated", g.backward, seconds[1]),
        ]
    return tuple(out)


def _task(name: str, t: Mapping[str, Any]) -> Task:
    tables, lookups = _tables(t)
    ranks = int(t["N"])
    placements = tuple(_placement(p, ranks, len(tables)) for p in t["placements"])
    if len(placements) < 2:
        raise PresageError("fewer than two placements to choose from")
    settings = (_known(t, "opt", OPTIMIZERS), _known(t, "lengths", LENGTHS))
    return Task(name, ranks, int(t["B"]), *settings, tables, lookups, placements)


def _placement(p: Mapping[str, Any], ranks: int, tables: int) -> MeasuredPlacement:
    assign = tuple(int(r) for r in p["assign"])
    times = tuple(tuple(float(x) * 1e-3 for x in p[k]) for k in ("fwd_ms", "bwd_ms"))
    if len(assign) != tables or not all(0 <= r < ranks for r in assign):
        raise PresageError(f"placement {p['name']}: assign is not one of {ranks} ranks for each of {tables} tables")
    if any(len(t) != ranks for t in times):
        raise PresageError(f"placement {p['name']}: not one time a rank")
    return MeasuredPlacement(str(p["name"]), assign, *times)
