"""TraceFindings: where the time of traced steps went, each part computed on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from presage.engine import Timeline
from presage.errors import PresageError
from presage.traces import explain
from presage.traces.explain import LaneActivity, Lateness, OpSummary, PathPart
from presage.traces.overheads import Overheads, extract, overheads, pool
from presage.traces.replay import Replay, StepTime, measured_steps
from presage.traces.trace_set import Meeting, TraceSet


def rank_labels(runs: Sequence[TraceSet]) -> list[list[str]]:
    """The label of each rank of each run: its number, or its file's name if there are several runs."""
    if len(runs) == 1:
        return [[str(runs[0].rank(i)) for i in range(len(runs[0]))]]
    return [[Path(t.path).name.removesuffix(".gz").removesuffix(".json") for t in run.traces] for run in runs]


def rank_place(replay: Replay, rank: int | None) -> int:
    """Where a rank is in the run; the first where none is given."""
    places = {replay.run.rank(i): i for i in range(len(replay.run))}
    if rank is not None and rank not in places:
        raise PresageError(f"--rank {rank}: the run has ranks {', '.join(map(str, sorted(places)))}")
    return places[rank] if rank is not None else 0


@dataclass(frozen=True, eq=False)
class TraceFindings:
    """Steps and activity of every rank of the replayed runs; of a single run also its path, late ranks and ops."""

    replays: Sequence[Replay]
    place: int = 0  # the rank whose ops are listed
    top: int = 10  # rows of each table

    @property
    def single(self) -> bool:
        """Whether all traces are of one run."""
        return len(self.replays) == 1

    @property
    def _ranks(self) -> list[tuple[Replay, int]]:
        return [(r, i) for r in self.replays for i in range(len(r.run))]

    @cached_property
    def notes(self) -> list[str]:
        """What in the traces contradicts itself."""
        return [note for r in self.replays for note in r.run.notes]

    @cached_property
    def names(self) -> list[str]:
        """Labels of all ranks."""
        return [name for names in rank_labels([r.run for r in self.replays]) for name in names]

    @cached_property
    def steps(self) -> list[list[StepTime]]:
        """Measured steps of each rank."""
        return [measured_steps(r, i) for r, i in self._ranks]

    @cached_property
    def activity(self) -> list[LaneActivity]:
        return [explain.activity(r, i) for r, i in self._ranks]

    @cached_property
    def overheads(self) -> Overheads:
        """T1 to T5 over all ranks as profiled, without the first step, which contains the profiler's start-up."""
        traces = [r.trace for replay in self.replays for r in replay.ranks]
        return overheads(pool([extract(t, skip_steps=int(len(t.steps) > 1)) for t in traces]))

    @cached_property
    def timelines(self) -> list[Timeline]:
        """The runs, replayed."""
        return [r.simulate() for r in self.replays]

    @cached_property
    def path(self) -> list[PathPart]:
        """The critical path of the first run."""
        return explain.critical_parts(self.replays[0], self.timelines[0])

    @cached_property
    def late(self) -> list[Lateness]:
        """Stragglers of the first run."""
        return explain.lateness(self.replays[0]) if len(self.replays[0].run) > 1 else []

    @cached_property
    def meetings(self) -> list[tuple[Meeting, int, float, float]]:
        """Collectives with the most waiting."""
        return explain.late_meetings(self.replays[0], self.top) if self.late else []

    @cached_property
    def ops(self) -> list[OpSummary]:
        return explain.ops(self.replays[0], self.place)

    @cached_property
    def kernels(self) -> list[OpSummary]:
        return explain.kernels(self.replays[0], self.place)

    @cached_property
    def cpu_only(self) -> bool:
        return all(r.trace.cpu_only for replay in self.replays for r in replay.ranks)

    @property
    def device(self) -> str:
        return "CPU" if self.cpu_only else "GPU"

    @cached_property
    def means(self) -> list[float]:
        """The mean step of each rank."""
        return [sum(s.seconds for s in steps) / len(steps) if steps else nan for steps in self.steps]

    @cached_property
    def slowest(self) -> int:
        return int(np.argmax([0.0 if isnan(m) else m for m in self.means])) if self.means else 0

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        rows = zip(self.replays, self.timelines, strict=True)
        overheads = [
            {"kind": kind.name, "key": key, "thread": role.name.lower(), **asdict(value)}
            for (kind, key, role), value in self.overheads.table.items()
        ]
        return {
            "kind": "trace",
            "ranks": [self._rank(r, t, i) for r, t in rows for i in range(len(r.run))],
            "overheads": overheads,
            "mismatched_collectives": sum(r.run.mismatched for r in self.replays),
            "critical_path": [asdict(p) for p in self.path[: self.top]],
            "late": [asdict(x) for x in self.late],
            "notes": self.notes,
        }

    def _rank(self, replay: Replay, timeline: Timeline, i: int) -> dict[str, Any]:
        trace, run = replay.ranks[i].trace, replay.run
        return {
            "rank": run.rank(i),
            "path": trace.path,
            "gpus": trace.gpus[:1],
            "host_events": len(trace.host),
            "gpu_events": len(trace.gpu),
            "linked_share": float((trace.gpu.launch >= 0).mean()) if len(trace.gpu) else 0.0,
            "clock_offset_us": run.offset_ns[i] / 1e3,
            "gpu_clock_shift_us": run.gpu_shift_ns[i] / 1e3,
            "hidden_gpu_s": float(replay.ranks[i].hidden.sum()) * 1e-9,
            "ignored_events": trace.ignored,
            "steps_s": [s.seconds for s in measured_steps(replay, i)],
            "replayed_steps_s": [s.seconds for s in replay.steps(timeline, i)],
            "activity_s": asdict(explain.activity(replay, i)),
            "ops": [asdict(o) for o in explain.ops(replay, i)[: self.top]],
            "kernels": [asdict(o) for o in explain.kernels(replay, i)[: self.top]],
        }
