"""The replay claim: measured durations through the engine give the measured step times, on every trace in a folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from presage.errors import InputError, PresageError
from presage.pool.pool import SERIAL, Pool
from presage.traces import kineto
from presage.traces.replay import Replay, measured_steps, replay_of
from presage.traces.trace import Trace
from presage.traces.trace_set import run_of
from presage_validation.pipeline import score_pipeline
from presage_validation.score import AccuracyResult, Row, Skipped, run_cases
from presage_validation.straggler_cost import score_optable, whatif_slowdown

TRACE_ENDINGS = (".json", ".json.gz")
TABLE_ENDINGS = (".csv", ".csv.gz")


@dataclass(frozen=True)
class _Source:
    """One thing to score: a folder of traces, a pipeline schedule's folder, or an operation table."""

    kind: str
    path: Path
    files: tuple[Path, ...]
    name: str


def score_traces(
    paths: Iterable[str | Path], tell: Callable[[str], None] = lambda _: None, pool: Pool = SERIAL
) -> AccuracyResult:
    """Replay all that can be replayed under these paths. `tell` hears what is being read.

    A row is one step of one rank. Files of one folder that are all the ranks of one run are replayed together; any
    other file by itself, its collectives as long as it saw them. `busiest_lane` is the yardstick: the work of the
    busiest thread or stream, with no dependencies at all.
    """
    given = [Path(p) for p in paths]
    sources = [s for p in given for s in _sources(p)]
    done, skipped = run_cases(_scored, sources, tell, lambda s: s.name, pool)
    rows = [r for _, result in done for r in result.rows]
    skipped += [s for _, result in done for s in result.skipped]
    if not rows and not skipped:
        raise InputError(given[0], "no trace, pipeline schedule or operation table here")
    return AccuracyResult("traces", ", ".join(map(str, given)), tuple(rows), tuple(skipped))


def _scored(source: _Source) -> AccuracyResult:
    return _SCORES[source.kind](source)


def _sources(root: Path) -> Iterator[_Source]:
    if not root.exists():
        raise InputError(root, "no such file or folder")
    if root.is_file():
        kind = "table" if root.name.endswith(TABLE_ENDINGS) else "folder"
        yield _Source(kind, root, (root,), root.resolve().parent.name)
        return
    for folder in sorted([root, *(p for p in root.rglob("*") if p.is_dir())]):
        name = str(Path(root.resolve().parent.name) / folder.relative_to(root.parent))
        if (folder / "config.json").exists() and any(folder.glob("pp_rank_*")):
            yield _Source("pipeline", folder, (), name)
            continue
        files = sorted(p for p in folder.iterdir() if p.is_file())
        for table in (f for f in files if f.name.startswith("trace-") and f.name.endswith(TABLE_ENDINGS)):
            yield _Source("table", table, (table,), f"{name}/{table.name}")
        traces = tuple(f for f in files if f.name.endswith(TRACE_ENDINGS))
        if traces:
            yield _Source("folder", folder, traces, name)


def _pipeline(source: _Source) -> AccuracyResult:
    found = score_pipeline(source.path)
    return _kept(found, source.name)


def _table(source: _Source) -> AccuracyResult:
    replayed, slowed = score_optable(source.path), whatif_slowdown(source.path)
    both = AccuracyResult("traces", str(source.path), replayed.rows + slowed.rows, replayed.skipped + slowed.skipped)
    return _kept(both, source.name)


def _kept(found: AccuracyResult, name: str) -> AccuracyResult:
    """The same rows under the source's name as their group."""
    rows = tuple(Row(r.metric, name, r.name, r.predicted, r.measured) for r in found.rows)
    return AccuracyResult(
        "traces", found.path, rows, tuple(Skipped(f"{name}: {s.row}", s.reason) for s in found.skipped)
    )


def _folder(source: _Source) -> AccuracyResult:
    rows: list[Row] = []
    skipped: list[Skipped] = []
    read: list[Trace] = []
    for file in source.files:
        try:
            trace, unknown = _usable(file)
            read.append(trace)
            skipped += [Skipped(f"{source.name}/{file.name}", unknown)] if unknown else []
        except InputError as e:
            skipped.append(Skipped(f"{source.name}/{file.name}", e.problem))
    for traces in _runs(read):
        try:
            rows += _replayed(replay_of(run_of(traces)), source.name)
        except PresageError as e:
            skipped += [Skipped(f"{source.name}/{Path(t.path).name}", str(e)) for t in traces]
    return AccuracyResult("traces", str(source.path), tuple(rows), tuple(skipped))


def _usable(file: Path) -> tuple[Trace, str]:
    """A trace that can be replayed, and what had to be left out of it."""
    try:
        trace, unknown = kineto.read(file), ""
    except InputError as e:
        if e.field != "traceEvents[].cat":
            raise
        trace, unknown = kineto.read(file, ["*"]), "replayed without events of categories not known"
    if not len(trace.gpu):
        raise InputError(file, "no GPU events")
    return trace, unknown


def _runs(traces: list[Trace]) -> list[list[Trace]]:
    """Together what is a whole run: all ranks of one world, once each, at the same time. The rest one by one."""
    by_world: dict[int, list[Trace]] = defaultdict(list)
    for t in traces:
        by_world[t.world or 1].append(t)
    out: list[list[Trace]] = []
    for world, some in by_world.items():
        whole = world > 1 and sorted(t.rank if t.rank is not None else -1 for t in some) == list(range(world))
        out += [some] if whole and _at_one_time(some) else [[t] for t in some]
    return out


def _at_one_time(traces: list[Trace]) -> bool:
    spans = [(t.origin_ns + t.span[0], t.origin_ns + t.span[1]) for t in traces]
    return max(lo for lo, _ in spans) < min(hi for _, hi in spans)


def _replayed(replay: Replay, group: str) -> list[Row]:
    timeline = replay.simulate()
    rows: list[Row] = []
    for i in range(len(replay.run)):
        file = Path(replay.ranks[i].trace.path).name
        measured = measured_steps(replay, i)
        pairs = zip(measured, replay.steps(timeline, i), strict=True)
        rows += [Row("replay", group, f"{file} {m.name}", p.seconds, m.seconds) for m, p in pairs if m.seconds > 0]
        whole = measured[-1].done - measured[0].start
        rows.append(Row("busiest_lane", group, f"{file} all steps", _busiest(replay, i), whole))
    return rows


def _busiest(replay: Replay, place: int) -> float:
    """What a model without dependencies would say: the busiest lane's work, all steps together."""
    r = replay.ranks[place]
    mine = np.concatenate([r.stretch_task, r.gpu_task])
    return float(np.bincount(replay.program.lane[mine], replay.durations[mine]).max())


_SCORES: dict[str, Callable[[_Source], AccuracyResult]] = {"pipeline": _pipeline, "table": _table, "folder": _folder}
