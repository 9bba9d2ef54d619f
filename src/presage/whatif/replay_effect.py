"""How much of what edits change lay on the critical path: why they gain what they gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Timeline
from presage.text import percent, seconds
from presage.traces.explain import critical_parts
from presage.traces.replay import Replay

KINDS = {"host": "host", "kernel": "kernels", "collective": "collectives"}
LEAST = 0.002  # of the path: less is none


@dataclass(frozen=True)
class ReplayEffect:
    """Seconds of a run: work taken away, how much of it lay on the critical path, and shares of the path."""

    taken: float  # below 0: added
    on_path: float  # likewise
    gained: float  # when the last step ends
    path: float
    waits: int  # dependencies taken away
    before: Mapping[str, float]  # share of the path by kind
    after: Mapping[str, float]

    @property
    def reason(self) -> str:
        """A sentence without its end."""
        verb = "go" if self.taken >= 0 else "are added"
        work = f"{seconds(abs(self.taken))} of work {verb}" if self.taken else ""
        waits = f"{self.waits} wait{'s go' if self.waits > 1 else ' goes'}" if self.waits else ""
        what = " and ".join(x for x in (work, waits) if x) or "nothing changes"
        least = LEAST * self.path
        if self.taken > 0 and not self.waits and self.on_path < least and abs(self.gained) < least:
            return f"{what}, but none of it on the critical path ({_shares_text(self.before)}): nothing gained"
        part = f", {seconds(abs(self.on_path))} of it on the critical path" if self.taken and self.on_path else ""
        return f"{what}{part} ({_shares_text(self.before)}); then the path is {_shares_text(self.after)}"


def replay_effect(before: Replay, after: Replay, was: Timeline, then: Timeline) -> ReplayEffect:
    """From a replay and its edited form, with their timelines."""
    path, later = step_path(before, was), step_path(after, then)
    less = before.durations - after.durations
    return ReplayEffect(
        taken=float(less.sum()),
        on_path=float(less[path].sum()),
        gained=float(was.end[path[-1]] - then.end[later[-1]]),
        path=float(was.end[path[-1]] - was.start[path[0]]),
        waits=len(before.program.edges) - len(after.program.edges),
        before=_shares(before, was, path),
        after=_shares(after, then, later),
    )


def step_path(replay: Replay, timeline: Timeline) -> NDArray[np.int64]:
    """The critical path to the end of the last step of the slowest rank. Threads that go on after it do not count."""
    ends = [replay.steps(timeline, place)[-1:] for place in range(len(replay.ranks))]
    done = max((steps[0].done for steps in ends if steps), default=float(timeline.end.max()))
    return timeline.path_to(int(np.argmin(np.abs(timeline.end - done))))


def _shares(replay: Replay, timeline: Timeline, path: NDArray[np.int64]) -> dict[str, float]:
    parts = critical_parts(replay, timeline, path)
    total = sum(p.seconds for p in parts) or 1.0
    return {kind: sum(p.seconds for p in parts if p.kind == kind) / total for kind in KINDS}


def _shares_text(shares: Mapping[str, float]) -> str:
    some = [f"{KINDS[kind]} {percent(share, 0)}" for kind, share in shares.items() if share >= 0.005]
    return ", ".join(some)
