"""The answer of `presage replay`: measured steps re-simulated, and what they would take with edits."""

from __future__ import annotations

from functools import partial
from math import nan

from presage.report.answer import Answer, DataTable, Fact, Section, Tone, data_table, sections_of
from presage.report.html.charts.bars import band_figure, grouped_figure, time_unit
from presage.report.html.charts.lanes import LaneTasks, lanes_section
from presage.report.spread_tables import noise_section
from presage.report.terms import plural, signed
from presage.report.trace_answer import short_op
from presage.report.trace_tasks import measured_tasks, replayed_tasks, shown_ranks, shown_step, step_window
from presage.text import percent, seconds
from presage.whatif.replay_result import ReplayFindings, SimulatedReplay, mean_seconds

GOOD_ERROR, FAIR_ERROR = 0.02, 0.05  # of a step
EQUAL = 0.0005  # of a step: less is no change
PATH_ROWS = 14
NOT_SHOWN = "work that no trace event shows counts as a gap where it was"


def replay_answer(f: ReplayFindings, page: bool = True) -> Answer:
    """Everything `presage replay` shows; `page`: with the timelines."""
    run = f.runs[0].before.replay
    clock = ", on one clock" if len(run.ranks) > 1 and run.run.one_clock else ""
    return Answer(
        title="replay",
        question="What if parts of this run took other times?" if f.edits else "Does presage understand this run?",
        subject=f"replay of {plural(len(f.rows), 'rank')}{clock}" + (f": {', '.join(f.edits)}" if f.edits else ""),
        headline=headline(f),
        facts=_facts(f),
        sections=sections_of(
            _steps_section(f),
            _error_section(f),
            noise_section(f.spread) if f.spread is not None else None,
            _timeline_section(f) if page else None,
            _path_section(f),
        ),
        notes=(*(f"why: {reason}" for reason in f.reasons), *f.notes, NOT_SHOWN),
        to_data=f.to_json,
    )


def headline(f: ReplayFindings) -> str:
    if f.spread is not None:
        p50, p95 = (f.spread.steps[q].value for q in (0.5, 0.95))
        drawn = f"drawn with noise {seconds(p50)}, p95 {signed(p95 / p50 - 1)} over it"
        return f"{_replay_text(f).rstrip('.')}; {drawn}."
    return _replay_text(f)


def _replay_text(f: ReplayFindings) -> str:
    replay = f"measured {seconds(f.measured)}/step, replayed {seconds(f.replayed)} ({signed(f.error, 2)})"
    if f.edited is None:
        known = "the step's dependencies are understood" if abs(f.error) <= FAIR_ERROR else "a dependency is missing"
        return f"{replay[0].upper()}{replay[1:]}: {known}."
    gain = "no change" if abs(f.change) < EQUAL else f"{signed(f.change)} against the replay"
    return f"With the edits {seconds(f.edited)}/step, {gain}; {replay}."


def _facts(f: ReplayFindings) -> tuple[Fact, ...]:
    tone: Tone = "good" if abs(f.error) <= GOOD_ERROR else "warn" if abs(f.error) <= FAIR_ERROR else "bad"
    facts = [
        Fact("Measured", seconds(f.measured), "per step, slowest rank"),
        Fact("Replayed", seconds(f.replayed), "from durations alone"),
        Fact("Error", percent(f.error, 2), f"over {plural(sum(len(m) for _, m, _, _ in f.rows), 'step')}", tone),
    ]
    if f.edited is not None:
        better: Tone = "good" if f.change < -GOOD_ERROR / 2 else "bad" if f.change > GOOD_ERROR / 2 else ""
        facts.append(Fact("With the edits", seconds(f.edited), f"{signed(f.change)} against the replay", better))
    return tuple(facts)


# ---- sections


def _steps_section(f: ReplayFindings) -> Section:
    """Seconds per step: of one rank step by step, of several their means."""
    if len(f.rows) == 1:
        values = [[s.seconds for s in kind or ()] for kind in f.rows[0][1:]]
        names, along, text = [str(i) for i in range(len(values[0]))], "step", "Each step as measured and as replayed."
    else:
        ranks = [row[1:] for row in f.rows]
        values = [[mean_seconds(row[k] or ()) for row in ranks] for k in range(3)]
        names, along, text = [name for name, *_ in f.rows], "rank", "The mean step of each rank."
    kinds = ("measured", "replayed", "with the edits")[: 2 if f.edited is None else 3]
    series = dict(zip(kinds, values, strict=False))
    unit = time_unit(max((v for row in series.values() for v in row), default=0.0))
    return Section(
        "Measured and replayed", (replay_table(f),), partial(grouped_figure, names, series, along, unit), text
    )


def replay_table(f: ReplayFindings) -> DataTable:
    """Measured and replayed steps, and the edited ones."""
    edited = f.edited is not None
    rows = []
    for rank, measured, replayed, changed in f.rows:
        for i, (m, r) in enumerate(zip(measured, replayed, strict=True)):
            cells = [rank, str(i), seconds(m.seconds), seconds(r.seconds), percent(r.seconds / m.seconds - 1, 2)]
            if changed is not None:
                cells += [seconds(changed[i].seconds), percent(changed[i].seconds / r.seconds - 1, 1)]
            rows.append(cells)
    columns = ("rank", "step", "measured", "replayed", "error", *(["edited", "change"] if edited else []))
    return data_table("Replay", columns, rows, wrap=True)


def _error_section(f: ReplayFindings) -> Section:
    """The replay's error, step by step."""
    several = len(f.rows) > 1
    rows = [
        (f"rank {name}, step {i}" if several else str(i), r.seconds / m.seconds - 1 if m.seconds else nan)
        for name, measured, replayed, _ in f.rows
        for i, (m, r) in enumerate(zip(measured, replayed, strict=True))
    ]
    where, worst = max(rows, key=lambda r: abs(r[1]), default=("", nan))
    at = where if several else f"step {where}"
    text = f"Replay error per step; worst {signed(worst, 2)} ({at}). Green is within ±{percent(FAIR_ERROR, 0)}."
    table = data_table("Errors", ("step", "error"), [(name, percent(e, 2)) for name, e in rows])
    chart = partial(band_figure, [n for n, _ in rows], [e for _, e in rows], FAIR_ERROR)
    return Section("Replay error", (table,), chart, text, where="page")


def _timeline_section(f: ReplayFindings) -> Section | None:
    """One step of one rank: as measured, as replayed, and with the edits."""
    first = f.runs[0]
    replay = first.before.replay
    shown = [i for i in shown_ranks(replay) if i < len(f.rows)]
    place = max(shown, key=lambda i: mean_seconds(f.rows[i][1]))
    measured = f.rows[place][1]
    if not measured:
        return None
    k = shown_step(measured)
    windows = [step_window([measured], k)]
    parts = [measured_tasks(replay, [place], windows[0], "measured: ")]
    for prefix, simulated in (("replayed: ", first.before), ("edited: ", first.after)):
        if simulated is not None:
            windows.append(step_window([simulated.steps(place)], k))
            parts.append(replayed_tasks(simulated.replay, simulated.timeline, [place], windows[-1], prefix))
    tasks = LaneTasks.joined(parts)
    if not len(tasks):
        return None
    wholes = [end - begin for (begin, end), part in zip(windows, parts, strict=True) for _ in part.lanes]
    text = f"Step {k} of rank {f.rows[place][0]}, each from its own start; colours are op families."
    return lanes_section("Timelines", tasks, text, wholes)


def _path_section(f: ReplayFindings) -> Section | None:
    """The critical path before and after."""
    run = f.runs[0]
    before, after = _path_times(run.before), _path_times(run.after) if run.after is not None else {}
    names = sorted({*before, *after}, key=lambda n: -max(before.get(n, 0.0), after.get(n, 0.0)))[:PATH_ROWS]
    if not names:
        return None
    series = {"replayed": [before.get(n, 0.0) for n in names]}
    if after:
        series["with the edits"] = [after.get(n, 0.0) for n in names]
    unit = time_unit(max(v for values in series.values() for v in values))
    rows = [(n, *(seconds(values[i]) for values in series.values())) for i, n in enumerate(names)]
    table = data_table("Time on the critical path", ("work", *series), rows)
    text = "The chain of work that sets the end of the last step: what is not on it gains nothing."
    return Section(
        "Critical path", (table,), partial(grouped_figure, names, series, "", unit, across=True), text, "page"
    )


def _path_times(simulated: SimulatedReplay) -> dict[str, float]:
    times: dict[str, float] = {}
    for p in simulated.path:
        name = f"{p.kind}: {short_op(p.name, 50)}"
        times[name] = times.get(name, 0.0) + p.seconds
    return times
