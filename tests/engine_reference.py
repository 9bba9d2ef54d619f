"""The engine's answers, computed slowly from the definitions: plain Python, no code shared with the engine.

A Sketch lists its tasks in an order in which each may only wait for earlier ones, which the engine is not told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

HOST, COMPUTE, COMMUNICATION = "host", "compute", "communication"


@dataclass(frozen=True)
class Line:
    """A lane: one task at a time, `gap` seconds between them."""

    rank: int
    kind: str
    gap: float = 0.0


@dataclass(frozen=True)
class Job:
    """A task. Those with the same `meeting` start together and take the longest of their `seconds`."""

    line: int
    seconds: float
    release: float = 0.0
    meeting: int | None = None
    key: int = 0  # where it comes among the engine's tasks: nothing may depend on it


@dataclass(frozen=True)
class Arrow:
    before: int
    after: int
    delay: float = 0.0
    from_start: bool = False


@dataclass(frozen=True)
class Sketch:
    lines: tuple[Line, ...]
    jobs: tuple[Job, ...]
    arrows: tuple[Arrow, ...] = ()

    def arrows_in(self, job: int) -> list[Arrow]:
        """What a job waits for: its arrows, and the job before it on its lane."""
        here = self.jobs[job].line
        earlier = [j for j in range(job) if self.jobs[j].line == here]
        queue = [Arrow(earlier[-1], job, self.lines[here].gap)] if earlier else []
        return [a for a in self.arrows if a.after == job] + queue

    def mates(self, job: int) -> list[int]:
        meeting = self.jobs[job].meeting
        return [
            j for j in range(len(self.jobs)) if j == job or (meeting is not None and self.jobs[j].meeting == meeting)
        ]

    def seconds(self, job: int) -> float:
        return max(self.jobs[j].seconds for j in self.mates(job))


@dataclass(frozen=True)
class Times:
    ready: list[float]
    start: list[float]
    end: list[float]

    @property
    def finish(self) -> float:
        return max(self.end, default=0.0)


def times(sketch: Sketch) -> Times:
    """Raise every time to what its rule asks for, again and again, until all rules hold."""
    jobs = range(len(sketch.jobs))
    waits = [sketch.arrows_in(j) for j in jobs]
    mates = [sketch.mates(j) for j in jobs]
    seconds = [sketch.seconds(j) for j in jobs]
    now = Times([0.0 for _ in jobs], [0.0 for _ in jobs], list(seconds))
    while True:
        ready = [max([sketch.jobs[j].release, *(_allowed(now, a) for a in waits[j])]) for j in jobs]
        start = [max(ready[m] for m in mates[j]) for j in jobs]
        then = Times(ready, start, [start[j] + seconds[j] for j in jobs])
        if then == now:
            return now
        now = then


def _allowed(now: Times, arrow: Arrow) -> float:
    return (now.start if arrow.from_start else now.end)[arrow.before] + arrow.delay


def slack(sketch: Sketch) -> list[float]:
    """The finish less the time at which each job's start would begin to push it: start + what must follow a start."""
    jobs = range(len(sketch.jobs))
    leaving = [[a for k in jobs for a in sketch.arrows_in(k) if a.before == j] for j in jobs]

    @cache
    def after_start(job: int) -> float:
        follow = [
            (0.0 if a.from_start else sketch.seconds(job)) + a.delay + after_start(a.after)
            for mate in sketch.mates(job)
            for a in leaving[mate]
        ]
        return max([sketch.seconds(job), *follow])

    run = times(sketch)
    return [run.finish - (run.start[j] + after_start(j)) for j in jobs]


def copies(sketch: Sketch, steps: int, carried: tuple[Arrow, ...] = ()) -> Sketch:
    """The same step `steps` times; carried arrows lead from each copy to the next. Releases hold for the first."""
    n = len(sketch.jobs)
    meetings = 1 + max([j.meeting for j in sketch.jobs if j.meeting is not None], default=0)
    jobs = [
        replace(
            job,
            release=job.release if k == 0 else 0.0,
            meeting=None if job.meeting is None else job.meeting + k * meetings,
        )
        for k in range(steps)
        for job in sketch.jobs
    ]
    inside = [replace(a, before=a.before + k * n, after=a.after + k * n) for k in range(steps) for a in sketch.arrows]
    across = [
        replace(a, before=a.before + (k - 1) * n, after=a.after + k * n) for k in range(1, steps) for a in carried
    ]
    return Sketch(sketch.lines, tuple(jobs), tuple(inside + across))


def step_ends(sketch: Sketch, steps: int, carried: tuple[Arrow, ...] = ()) -> list[float]:
    """When everything of the first k copies is done, for k = 1..steps."""
    run, n = times(copies(sketch, steps, carried)), len(sketch.jobs)
    return [max(run.end[: k * n], default=0.0) for k in range(1, steps + 1)]


def rate(sketch: Sketch, carried: tuple[Arrow, ...] = ()) -> float:
    """Seconds per step in the long run: the least at which no circle of waits, through however many steps, gains.

    Found by halving. A circle gains if going round it again and again raises times without end.
    """
    n, two = len(sketch.jobs), copies(sketch, 2, carried)
    length = [sketch.seconds(j) for j in range(n)]
    waits = [
        (mate % n, a.before % n, (0.0 if a.from_start else length[a.before % n]) + a.delay, a.before < n)
        for j in range(n, 2 * n)
        for a in two.arrows_in(j)
        for mate in two.mates(j)
    ]

    def gains(period: float) -> bool:
        time = [0.0] * n
        for _ in range(n + 1):
            raised = False
            for after, before, seconds, crosses in waits:
                offer = time[before] + seconds - period * crosses
                if offer > time[after] + 1e-12:
                    time[after], raised = offer, True
        return raised

    delays = [a.delay for a in (*sketch.arrows, *carried)] + [sketch.lines[j.line].gap for j in sketch.jobs]
    low, high = 0.0, sum(length) + sum(map(abs, delays))
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return high


def stuck(sketch: Sketch) -> set[int]:
    """Jobs that never start: what is left when all that wait for nobody left are taken away, again and again."""
    left = set(range(len(sketch.jobs)))
    while free := {j for j in left if not any(a.before in left for m in sketch.mates(j) for a in sketch.arrows_in(m))}:
        left -= free
    return left


def exposed(sketch: Sketch, rank: int, grid: float) -> tuple[float, float]:
    """Count grid cells with a transfer (or else only a wait for one) and no compute. All times lie on the grid."""
    run = times(sketch)

    def covered(at: float, kind: str, begin: list[float]) -> bool:
        lines = [i for i, x in enumerate(sketch.lines) if x.rank == rank and x.kind == kind]
        return any(begin[j] <= at < run.end[j] for j, job in enumerate(sketch.jobs) if job.line in lines)

    transfer = wait = 0
    for cell in range(round(run.finish / grid)):
        at = cell * grid
        if not covered(at, COMPUTE, run.start):
            moving = covered(at, COMMUNICATION, run.start)
            transfer += moving
            wait += covered(at, COMMUNICATION, run.ready) and not moving
    return transfer * grid, wait * grid
