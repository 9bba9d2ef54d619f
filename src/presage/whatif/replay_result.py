"""ReplayFindings: runs re-simulated as measured, and with edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

from presage.engine import Timeline
from presage.prediction.draws.distribution import StepDistribution
from presage.traces.explain import PathPart, critical_parts
from presage.traces.replay import Replay, StepTime, measured_steps
from presage.whatif.replay_effect import replay_effect, step_path

# A rank's name and its steps: measured, replayed, and edited where there are edits.
RankSteps = tuple[str, Sequence[StepTime], Sequence[StepTime], Sequence[StepTime] | None]


@dataclass(frozen=True, eq=False)
class SimulatedReplay:
    """A replay with its timeline and critical path, each computed on first use."""

    replay: Replay

    @cached_property
    def timeline(self) -> Timeline:
        return self.replay.simulate()

    @cached_property
    def path(self) -> list[PathPart]:
        return critical_parts(self.replay, self.timeline, step_path(self.replay, self.timeline))

    def steps(self, place: int) -> list[StepTime]:
        return self.replay.steps(self.timeline, place)


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """One run as replayed, and with edits where there are any; `names` label its ranks."""

    names: Sequence[str]
    before: SimulatedReplay
    after: SimulatedReplay | None = None

    @cached_property
    def rows(self) -> list[RankSteps]:
        """Steps of each rank."""
        a, b = self.before, self.after
        return [
            (name, measured_steps(a.replay, i), a.steps(i), None if b is None else b.steps(i))
            for i, name in enumerate(self.names)
        ]

    @cached_property
    def reasons(self) -> list[str]:
        """Why the edits gain what they gain."""
        a, b = self.before, self.after
        return [] if b is None else [replay_effect(a.replay, b.replay, a.timeline, b.timeline).reason]


@dataclass(frozen=True, eq=False)
class ReplayFindings:
    """Replayed runs and the edits applied to them."""

    runs: Sequence[ReplayedRun]
    edits: Sequence[str] = ()
    spread: StepDistribution | None = None  # of the first run, with its edits, under a noise model

    @cached_property
    def rows(self) -> list[RankSteps]:
        """Steps of the ranks of all runs."""
        return [row for run in self.runs for row in run.rows]

    @property
    def reasons(self) -> list[str]:
        return [reason for run in self.runs for reason in run.reasons]

    @property
    def notes(self) -> list[str]:
        """What in the traces contradicts itself."""
        return [note for run in self.runs for note in run.before.replay.run.notes]

    @property
    def measured(self) -> float:
        """The mean measured step of the slowest rank."""
        return max((mean_seconds(m) for _, m, _, _ in self.rows), default=nan)

    @property
    def replayed(self) -> float:
        return max((mean_seconds(r) for _, _, r, _ in self.rows), default=nan)

    @property
    def edited(self) -> float | None:
        means = [mean_seconds(e) for *_, e in self.rows if e is not None]
        return max(means) if means else None

    @property
    def error(self) -> float:
        return self.replayed / self.measured - 1 if self.measured else nan

    @property
    def change(self) -> float:
        return self.edited / self.replayed - 1 if self.edited is not None and self.replayed else nan

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        ranks = [
            {
                "rank": rank,
                "measured_s": [s.seconds for s in measured],
                "replayed_s": [s.seconds for s in replayed],
                "error": [r.seconds / m.seconds - 1 for m, r in zip(measured, replayed, strict=True)],
                "edited_s": None if edited is None else [s.seconds for s in edited],
            }
            for rank, measured, replayed, edited in self.rows
        ]
        return {
            "kind": "replay",
            "edits": list(self.edits),
            "reasons": self.reasons,
            "ranks": ranks,
            "notes": self.notes,
            **({"distribution": self.spread.to_json()} if self.spread else {}),
        }


def mean_seconds(steps: Sequence[StepTime]) -> float:
    return sum(s.seconds for s in steps) / len(steps) if steps else 0.0
