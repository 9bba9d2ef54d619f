"""The page of `presage replay`: measured steps found again by the engine, and what they would take with edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from presage.report import tables
from presage.report.html.charts.beside import beside_figure
from presage.report.html.charts.lanes import Bars
from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.page import Fact, Page, Section, Table, Tone, table_of
from presage.report.html.timeline import lanes_section
from presage.report.html.trace_bars import measured_bars, replayed_bars, shown_ranks, shown_step, step_window
from presage.text import percent, seconds, shorten
from presage.traces.explain import PathPart, critical_parts
from presage.traces.replay import Replay, StepTime, measured_steps
from presage.whatif.replay_effect import step_path

__all__ = ["RankSteps", "Replayed", "replay_page"]

GOOD_ERROR, FAIR_ERROR = 0.02, 0.05  # of a step
ALIKE = 0.0005  # of a step: less is no change
PERCENT = Unit("%", 0.01)
PATH_ROWS = 14

# A rank's name and its steps: measured, replayed, and with edits where there are any.
RankSteps = tuple[str, Sequence[StepTime], Sequence[StepTime], Sequence[StepTime] | None]


@dataclass(frozen=True, eq=False)
class Replayed:
    """What the command found: rows of all ranks, the edits with their reasons, and the first run before and after."""

    rows: Sequence[RankSteps]
    edits: Sequence[str]
    reasons: Sequence[str]
    replay: Replay
    changed: Replay | None

    @property
    def measured(self) -> float:
        """A step of the slowest rank."""
        return max((_mean(m) for _, m, _, _ in self.rows), default=nan)

    @property
    def replayed(self) -> float:
        return max((_mean(r) for _, _, r, _ in self.rows), default=nan)

    @property
    def edited(self) -> float | None:
        found = [_mean(e) for *_, e in self.rows if e is not None]
        return max(found) if found else None

    @property
    def error(self) -> float:
        return self.replayed / self.measured - 1 if self.measured else nan


def _mean(steps: Sequence[StepTime]) -> float:
    return sum(s.seconds for s in steps) / len(steps) if steps else 0.0


def replay_page(found: Replayed, command: str = "") -> Page:
    """All there is to see of a replay."""
    several = len(found.replay.ranks) > 1
    what = f"{len(found.rows)} ranks" if len(found.rows) > 1 else "one rank"
    question = "What if parts of this run took other times?" if found.edits else "Does presage understand this run?"
    sections = [
        _steps_section(found),
        _error_section(found),
        _timeline_section(found),
        _path_section(found),
    ]
    return Page(
        title="replay",
        question=f"{question} {', '.join(found.edits) if found.edits else 'The measured durations through the engine'}"
        f" ({what}{', on one clock' if several and found.replay.run.one_clock else ''})",
        answer=_answer(found),
        facts=_facts(found),
        sections=tuple(s for s in sections if s is not None),
        notes=_notes(found),
        command=command,
    )


def _answer(found: Replayed) -> str:
    again = f"the replay finds the measured {seconds(found.measured)} again ({percent(found.error, 2)} off)"
    if found.edited is None:
        told = f"From durations alone, without any start times, {again}: the step's dependencies are understood."
        if abs(found.error) > FAIR_ERROR:
            told = (
                f"From durations alone, without any start times, a step takes {seconds(found.replayed)} and not the "
                f"{seconds(found.measured)} measured ({percent(found.error, 1)}): something it waits for is not seen."
            )
        return told
    change = found.edited / found.replayed - 1 if found.replayed else nan
    gain = f"{percent(abs(change))} {'less' if change < 0 else 'more'} than without"
    gain = "as long as without" if abs(change) < ALIKE else gain
    return f"With {', '.join(found.edits)} a step takes {seconds(found.edited)}, {gain}; as it is, {again}."


def _facts(found: Replayed) -> tuple[Fact, ...]:
    tone: Tone = "good" if abs(found.error) <= GOOD_ERROR else "warn" if abs(found.error) <= FAIR_ERROR else "bad"
    steps = sum(len(m) for _, m, _, _ in found.rows)
    facts = [
        Fact("Measured", seconds(found.measured), "a step of the slowest rank"),
        Fact("Replayed", seconds(found.replayed), "from durations alone"),
        Fact("Error", percent(found.error, 2), f"over {steps:,} step{'s' if steps != 1 else ''}", tone),
    ]
    if found.edited is not None:
        change = found.edited / found.replayed - 1 if found.replayed else nan
        better: Tone = "good" if change < -GOOD_ERROR / 2 else "bad" if change > GOOD_ERROR / 2 else ""
        facts.append(Fact("With the edits", seconds(found.edited), f"{percent(change)} against the replay", better))
    return tuple(facts)


def _notes(found: Replayed) -> tuple[str, ...]:
    out = [f"because {reason}" for reason in found.reasons]
    out.append("what is not in the trace is not in the replay: work that no event shows counts as a gap where it was")
    return tuple(out)


# ---- sections


def _places(found: Replayed) -> tuple[list[str], list[list[StepTime]], str]:
    """What the bars are of: the steps of the only rank, or the ranks, each with its steps."""
    if len(found.rows) == 1:
        _, measured, replayed, edited = found.rows[0]
        return [str(i) for i in range(len(measured))], [*map(list, (measured, replayed, edited or []))], "step"
    return [name for name, *_ in found.rows], [], "rank"


def _series(found: Replayed) -> tuple[list[str], dict[str, list[float]], str]:
    """Seconds a step: of the only rank step by step, of several ranks their means."""
    names, single, along = _places(found)
    kinds = ("measured", "replayed", "with the edits")
    if single:
        values = [[s.seconds for s in steps] for steps in single]
    else:
        values = [[_mean(m) for _, m, _, _ in found.rows], [_mean(r) for _, _, r, _ in found.rows]]
        values.append([_mean(e or ()) for *_, e in found.rows])
    shown = 2 if found.edited is None else 3
    return names, dict(list(zip(kinds, values, strict=True))[:shown]), along


def _steps_section(found: Replayed) -> Section:
    names, series, along = _series(found)
    unit = time_unit(max((v for values in series.values() for v in values), default=0.0))
    lead = (
        "Each step as it was measured and as the engine finds it" if along == "step" else "The mean step of each rank"
    )
    table = table_of(tables.replay_table(found.rows))
    return Section("Measured and replayed", (table,), beside_figure(names, series, along, unit), f"{lead}.")


def _error_section(found: Replayed) -> Section:
    """How far the replay is off, step by step."""
    rows = [
        (f"rank {name}, step {i}" if len(found.rows) > 1 else str(i), r.seconds / m.seconds - 1 if m.seconds else nan)
        for name, measured, replayed, _ in found.rows
        for i, (m, r) in enumerate(zip(measured, replayed, strict=True))
    ]
    worst = max(rows, key=lambda r: abs(r[1]), default=("", nan))
    lead = (
        f"Replayed over measured, less one: the farthest off is {_where(found, worst[0])} with {percent(worst[1], 2)}."
    )
    table = Table(("step", "error"), tuple((name, percent(e, 2)) for name, e in rows), "Errors")
    figure = beside_figure([n for n, _ in rows], {"error": [e for _, e in rows]}, "step", PERCENT)
    return Section("How far off", (table,), figure, lead)


def _where(found: Replayed, step: str) -> str:
    return step if len(found.rows) > 1 else f"step {step}"


def _timeline_section(found: Replayed) -> Section | None:
    """One step of one rank: as measured, as replayed, and with the edits, one below the other."""
    replay = found.replay
    place = max(shown_ranks(replay), key=lambda i: _mean(measured_steps(replay, i)))
    measured = measured_steps(replay, place)
    if not measured:
        return None
    k, before = shown_step(measured), replay.simulate()
    windows = [step_window([measured], k), step_window([replay.steps(before, place)], k)]
    parts = [measured_bars(replay, [place], windows[0], "measured: ")]
    parts.append(replayed_bars(replay, before, [place], windows[1], "replayed: "))
    if found.changed is not None:
        after = found.changed.simulate()
        windows.append(step_window([found.changed.steps(after, place)], k))
        parts.append(replayed_bars(found.changed, after, [place], windows[2], "edited: "))
    bars = Bars.joined(parts)
    if not len(bars):
        return None
    wholes = [end - begin for (begin, end), part in zip(windows, parts, strict=True) for _ in part.lanes]
    lead = f"Step {k} of rank {found.rows[place][0]}, each from its own start; colours are families of ops."
    return lanes_section("Timelines", bars, lead, wholes)


def _path_section(found: Replayed) -> Section | None:
    """What sets the length, before and after."""
    before = _path(found.replay)
    after = _path(found.changed) if found.changed is not None else {}
    names = sorted({*before, *after}, key=lambda n: -max(before.get(n, 0.0), after.get(n, 0.0)))[:PATH_ROWS]
    if not names:
        return None
    series = {"replayed": [before.get(n, 0.0) for n in names]}
    if after:
        series["with the edits"] = [after.get(n, 0.0) for n in names]
    unit = time_unit(max(v for values in series.values() for v in values))
    rows = tuple((n, *(seconds(values[i]) for values in series.values())) for i, n in enumerate(names))
    lead = "The chain of work that sets when the last step ends: what is not on it gains nothing."
    figure = beside_figure(names, series, "", unit, across=True)
    return Section("Critical path", (Table(("on the path", *series), rows, "Time on the path"),), figure, lead)


def _path(replay: Replay) -> dict[str, float]:
    timeline = replay.simulate()
    found: dict[str, float] = {}
    for p in critical_parts(replay, timeline, step_path(replay, timeline)):
        found[_name(p)] = found.get(_name(p), 0.0) + p.seconds
    return found


def _name(p: PathPart) -> str:
    return f"{p.kind}: {shorten(p.name.removeprefix('autograd::engine::evaluate_function: '), 50)}"
