"""The page of `presage trace`: where the time of measured steps went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from presage.engine import Timeline
from presage.report import tables
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.heat import heat_figure, heat_table
from presage.report.html.charts.stacks import stacks_figure
from presage.report.html.charts.units import time_unit
from presage.report.html.page import Fact, Page, Section, Table, table_of
from presage.report.html.timeline import lanes_section
from presage.report.html.trace_bars import measured_bars, shown_ranks, shown_step, step_window
from presage.text import percent, seconds, shorten
from presage.traces import explain
from presage.traces.explain import Idle, LaneActivity, PathPart
from presage.traces.overheads import Overheads
from presage.traces.replay import Replay, StepTime, measured_steps

__all__ = ["Traced", "trace_page"]

IDLE = {"host": "waits for the host", "sync": "host was waiting for the GPU", "gap": "gaps between kernels",
        "unexplained": "unexplained"}  # fmt: skip
SLOW_RANK = 0.01  # of a step: who makes others wait longer than that is named


@dataclass(frozen=True, eq=False)
class Traced:
    """What the command found: runs, each replayed, with what to call their ranks; `place` is the rank to tell of."""

    replays: Sequence[Replay]
    timelines: Sequence[Timeline]
    names: Sequence[Sequence[str]]
    overheads: Overheads
    place: int = 0
    top: int = 10

    @property
    def one(self) -> Replay:
        return self.replays[0]

    @property
    def every(self) -> list[tuple[Replay, int, str]]:
        return [(r, i, self.names[k][i]) for k, r in enumerate(self.replays) for i in range(len(r.run))]


@dataclass(frozen=True, eq=False)
class _Seen:
    """By rank of all runs: its name, its steps, what its GPU did."""

    names: list[str]
    steps: list[list[StepTime]]
    activity: list[LaneActivity]
    cpu_only: bool

    @property
    def mean(self) -> list[float]:
        return [sum(s.seconds for s in steps) / len(steps) if steps else float("nan") for steps in self.steps]

    @property
    def device(self) -> str:
        return "CPU" if self.cpu_only else "GPU"


def trace_page(traced: Traced, command: str = "") -> Page:
    """All there is to see in traces."""
    every = traced.every
    seen = _Seen(
        [name for *_, name in every],
        [measured_steps(r, i) for r, i, _ in every],
        [explain.activity(r, i) for r, i, _ in every],
        all(r.ranks[i].trace.cpu_only for r, i, _ in every),
    )
    single = len(traced.replays) == 1
    path = explain.critical_parts(traced.one, traced.timelines[0]) if single else []
    sections = [
        _activity_section(seen),
        _timeline_section(traced) if single else None,
        _steps_section(seen),
        _path_section(path, traced.top) if path else None,
        _late_section(traced, seen) if single and len(traced.one.run) > 1 else None,
        _ops_section(traced, seen) if single else None,
        _overhead_section(traced),
    ]
    what = f"{len(every)} rank{'s' if len(every) > 1 else ''}" if single else f"{len(traced.replays)} traces"
    return Page(
        title=f"trace of {what}",
        question=f"Where does the time of these steps go? {what}, {_gpu(traced, seen)}",
        answer=_answer(seen, path, _worst(traced) if single else None, "rank" if single else "trace"),
        facts=_facts(seen),
        sections=tuple(s for s in sections if s is not None),
        notes=_notes(traced),
        command=command,
    )


def _gpu(traced: Traced, seen: _Seen) -> str:
    gpus = traced.one.ranks[traced.place].trace.gpus
    return gpus[0] if gpus else "CPU only" if seen.cpu_only else "GPU not named"


def _notes(traced: Traced) -> tuple[str, ...]:
    out = ["times are those the profiler saw: it slows the host itself, so that steps without it are shorter"]
    wrong = sum(r.run.mismatched for r in traced.replays)
    if wrong:
        out.append(f"{wrong} collectives could not be matched between ranks: each rank's is on its own")
    return tuple(out)


# ---- the answer


def _answer(seen: _Seen, path: Sequence[PathPart], worst: tuple[int, float] | None, each: str) -> str:
    """The one sentence: of the slowest rank."""
    slow = _slowest(seen)
    a, mean = seen.activity[slow], seen.mean[slow]
    took = f"A step takes {seconds(mean)}" if not isnan(mean) else f"The trace spans {seconds(a.span)}"
    who = f" on {each} {seen.names[slow]}, the slowest" if len(seen.names) > 1 else ""
    why = _late_told(seen, worst) or _path_told(path)
    return f"{took}{who}: {_pace(a, seen.device)}{why}."


def _slowest(seen: _Seen) -> int:
    return int(np.argmax([0.0 if isnan(m) else m for m in seen.mean])) if seen.mean else 0


def _pace(a: LaneActivity, device: str) -> str:
    """What the device does, and what most of the rest goes to."""
    if not a.span:
        return f"nothing runs on the {device}"
    waits = 0.0 if isnan(a.waiting_for_ranks) else a.waiting_for_ranks
    rest = {
        "waits for the host": a.idle.host,
        "waits until the host has noticed that it is done": a.idle.sync,
        "waits for other ranks": waits,
        "only moves data": a.exposed_communication - waits,
        "is between two kernels": a.idle.gap,
    }
    what, took = max(rest.items(), key=lambda p: p[1])
    told = f", and for {percent(took / a.span, 0)} it {what}" if took > 0.01 * a.span else ""
    return f"the {device} computes for {percent(a.compute / a.span, 0)} of the time{told}"


def _path_told(path: Sequence[PathPart]) -> str:
    """What the chain that sets the length consists of."""
    total = sum(p.seconds for p in path)
    if not total:
        return ""
    share = {k: sum(p.seconds for p in path if p.kind == k) / total for k in ("host", "kernel", "collective")}
    what, part = max(share.items(), key=lambda kv: kv[1])
    words = {"host": "the host's work", "kernel": "kernels", "collective": "collectives"}
    return f"; what sets its length is {percent(part, 0)} {words[what]}"


def _worst(traced: Traced) -> tuple[int, float] | None:
    """The rank that makes the others wait longest, and how long all together."""
    rows = explain.lateness(traced.one) if len(traced.one.run) > 1 else []
    worst = max(rows, key=lambda r: r.made_others_wait, default=None)
    return (worst.rank, worst.made_others_wait) if worst is not None and worst.made_others_wait > 0 else None


def _late_told(seen: _Seen, worst: tuple[int, float] | None) -> str:
    span = max((a.span for a in seen.activity), default=0.0)
    if worst is None or worst[1] < SLOW_RANK * span:
        return ""
    return f"; rank {worst[0]} is late most, and makes the others wait {seconds(worst[1])} in all"


def _facts(seen: _Seen) -> tuple[Fact, ...]:
    slow = _slowest(seen)
    a, mean = seen.activity[slow], seen.mean[slow]
    span = a.span or 1.0
    count = len(seen.steps[slow])
    facts = [
        Fact("Step time", seconds(mean), f"mean of {count} step{'s' if count != 1 else ''}"),
        Fact(f"{seen.device} active", percent(a.active / span), f"{seconds(a.active)} of {seconds(a.span)}"),
        Fact("Idle, host late", percent(a.idle.host / span), "", "warn" if a.idle.host > 0.1 * span else ""),
        Fact("Exposed communication", percent(a.exposed_communication / span), _overlap(a)),
    ]
    if len(seen.names) > 1:
        fast = min((m for m in seen.mean if not isnan(m)), default=float("nan"))
        facts.append(Fact("Fastest rank", seconds(fast), f"of {len(seen.names):,}, mean step"))
    return tuple(facts)


def _overlap(a: LaneActivity) -> str:
    return f"{percent(a.overlap)} of it is hidden" if a.communication else "there is none"


# ---- sections


def _activity_section(seen: _Seen) -> Section:
    """What each GPU did, stacked."""
    parts = _stack(seen)
    unit = time_unit(max((a.span for a in seen.activity), default=0.0))
    one = [(name, values[0]) for name, values in parts.items()]
    several = len(seen.names) > 1
    figure = stacks_figure(seen.names, parts, "rank", unit) if several else parts_figure(one, seen.activity[0].span)
    slow = seen.activity[_slowest(seen)]
    cause, took = max(((IDLE[k], getattr(slow.idle, k)) for k in IDLE), key=lambda x: x[1])
    lead = f"All that each {seen.device} did from the first step's start to the last one's end."
    if took > 0.01 * (slow.span or 1.0):
        lead += f" Most of the idle time is because it {_because(cause)}: {percent(took / slow.span)} of the span."
    rows = list(zip(seen.names, seen.activity, strict=True))
    numbers = heat_table("rank", seen.names, list(parts), np.array(list(parts.values())).T, unit, "In time")
    return Section("Where the time goes", (table_of(tables.activity_table(rows, seen.device)), numbers), figure, lead)


def _because(cause: str) -> str:
    return cause if cause.startswith("waits") else f"has {cause}" if cause.startswith("gaps") else f"is idle ({cause})"


def _stack(seen: _Seen) -> dict[str, list[float]]:
    waits = [0.0 if isnan(a.waiting_for_ranks) else a.waiting_for_ranks for a in seen.activity]
    moved = [a.exposed_communication - w for a, w in zip(seen.activity, waits, strict=True)]
    parts = {"compute": [a.compute for a in seen.activity], "communication": moved, "waits for other ranks": waits}
    for key, name in IDLE.items():
        parts[name] = [_part(a.idle, key) for a in seen.activity]
    return {name: values for name, values in parts.items() if any(v > 0 for v in values)} or {"idle": waits}


def _part(idle: Idle, key: str) -> float:
    return float(getattr(idle, key))


def _timeline_section(traced: Traced) -> Section | None:
    replay, places = traced.one, shown_ranks(traced.one)
    steps = [measured_steps(replay, i) for i in places]
    k = shown_step(max(steps, key=len)) if steps else 0
    window = step_window(steps, k)
    bars = measured_bars(replay, places, window)
    if not len(bars):
        return None
    some = ", ".join(traced.names[0][i] for i in places)
    whose = "" if len(places) == len(replay.ranks) else f" of ranks {some} (the late, the slowest and the fastest)"
    which = ", which is of middle length" if max(map(len, steps)) > 2 else ""
    lead = f"Step {k}{whose} as it was measured{which}; colours are families of ops."
    return lanes_section("Timeline of a step", bars, lead, window[1] - window[0])


def _steps_section(seen: _Seen) -> Section:
    """Step by step: bars of one rank, a heat map of several."""
    table = table_of(tables.step_table(list(zip(seen.names, seen.steps, strict=True))))
    most = max((len(s) for s in seen.steps), default=0)
    took = np.full((len(seen.names), most), np.nan)
    for i, steps in enumerate(seen.steps):
        took[i, : len(steps)] = [s.seconds for s in steps]
    heads = [f"step {k}" for k in range(most)]
    if len(seen.names) > 1 and most:
        figure = heat_figure(seen.names, heads, took)
        lead = "Every step of every rank; red is longer than the ranks' usual for that step, blue is shorter."
        return Section("Step times", (heat_table("rank", seen.names, heads, took), table), figure, lead)
    unit = time_unit(float(np.nanmax(took, initial=0.0)))
    figure = (
        stacks_figure([str(k) for k in range(most)], {"step time": took[0].tolist()}, "step", unit) if most else None
    )
    return Section("Step times", (table,), figure, "Each step, from the end of the one before to its own.")


def _path_section(path: Sequence[PathPart], top: int) -> Section:
    total = sum(p.seconds for p in path)
    sums: dict[str, float] = {}
    for p in path:
        sums[f"{p.kind}: {_short(p.name)}"] = sums.get(f"{p.kind}: {_short(p.name)}", 0.0) + p.seconds
    lead = (
        "The chain of work that sets when the last step ends: only what is on it makes the run shorter. Host time is "
        "by op, GPU time by kernel."
    )
    table = table_of(tables.path_table(path, max(top, 20)))
    return Section("Critical path", (table,), parts_figure(list(sums.items()), total) if total else None, lead)


def _short(name: str) -> str:
    return shorten(name.removeprefix("autograd::engine::evaluate_function: "), 44)


def _late_section(traced: Traced, seen: _Seen) -> Section:
    """Who makes others wait, and what each rank does otherwise."""
    rows = explain.lateness(traced.one)
    columns = ("compute", "exposed communication", "waits for ranks", "idle", "made others wait")
    cells = np.array([
        [a.compute, a.exposed_communication, a.waiting_for_ranks, a.idle.total, r.made_others_wait]
        for a, r in zip(seen.activity, rows, strict=True)
    ])  # fmt: skip
    worst = max(rows, key=lambda r: r.made_others_wait)
    lead = (
        f"Rank {worst.rank} came last {worst.times_last} times, and the others waited "
        f"{seconds(worst.made_others_wait)} for it in all. Red is more than most ranks have, blue is less."
    )
    figure = heat_figure([f"rank {n}" for n in seen.names], columns, cells, apart=True)
    told = (
        table_of(tables.late_table(rows)),
        heat_table("rank", seen.names, columns, cells, title="The cells"),
        table_of(tables.meeting_table(explain.late_meetings(traced.one, traced.top))),
    )
    return Section("Who is late", told, figure, lead)


def _ops_section(traced: Traced, seen: _Seen) -> Section:
    name, place = traced.names[0][traced.place], traced.place
    kinds = ("collective", "collective") if seen.cpu_only else ("GPU", "kernel")
    ops, kernels = explain.ops(traced.one, place), explain.kernels(traced.one, place)
    total = sum(o.gpu for o in ops)
    figure = parts_figure([(_short(o.name), o.gpu) for o in ops], total) if total else None
    lead = f"What took the {seen.device} longest on rank {name}, over all steps: ops by what they launched."
    told = (
        table_of(tables.op_table(ops, max(traced.top, 20), name, kinds[0])),
        table_of(tables.kernel_table(kernels, max(traced.top, 20), name, kinds[1])),
    )
    return Section("Ops and kernels", told, figure, lead)


def _overhead_section(traced: Traced) -> Section:
    table: Table = table_of(tables.overhead_table(traced.overheads, traced.top))
    lead = "What the host takes for each op beside the work itself (T1 to T5), as the profiler saw it."
    return Section("Host overheads", (table,), None, lead)
