"""The answers of `presage whatif`: a step before and after edits, and what every edit would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from presage.prediction.step import StepResult
from presage.report.answer import Answer, DataTable, Fact, Section, Tone, data_table, sections_of
from presage.report.html.charts.bars import AxisUnit, IntervalBar, grouped_figure, interval_figure, time_unit
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.lanes import LaneTasks, lanes_section
from presage.report.predict_answer import families_section, step_facts, step_table, subject
from presage.report.step_sections import memory_section, step_tasks
from presage.report.terms import family_name, first_few, gpu_basis, interval
from presage.text import percent, seconds, size
from presage.whatif import ALIASES, OTHERS
from presage.whatif.before_after import Range, WhatIf
from presage.whatif.edits import EDITS
from presage.whatif.replay_names import EDITS as TRACE_EDITS
from presage.whatif.suggest import Suggestions

SPEEDUP = AxisUnit("x", 1.0)
EQUAL = 0.002  # of a memory: less is no change
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
FEWEST = 20  # draws: fewer have no shape
REASONS = 5  # edits whose reasons are given
IDLE = "idle"


def whatif_answer(found: WhatIf, page: bool = False) -> Answer:
    """Everything `presage whatif --apply` shows; `page`: with timelines and memory."""
    name = ", ".join(found.edits)
    return Answer(
        title=name,
        question=f"Would {name} help?",
        subject=subject(found.base),
        headline=f"{name}: {effect_text(found)}.",
        facts=_facts(found),
        sections=sections_of(
            _before_after_section(found), _stages_section(found) if found.stages else None, _spread_section(found),
            *(_detail_sections(found, name) if page else []),
        ),
        notes=notes(found),
        to_data=found.to_json,
        basis=gpu_basis(found.base.basis.gpu),
    )  # fmt: skip


def effect_text(found: WhatIf) -> str:
    """35.3 ms -> 20.1 ms/step, 1.76x as fast (90% interval 1.5x-2x), memory unchanged."""
    step = f"{seconds(found.base.step.p50)} -> {seconds(found.edited.step.p50)}/step"
    each = f", {_x(found.per_work.p50)} per {found.unit}" if found.unit else ""
    fits = "" if found.fits else " (does NOT fit)"
    return f"{step}, {_speedup(found.speedup)}{each}, memory {_memory_change(found)}{fits}"


def _speedup(r: Range) -> str:
    return f"{_x(r.p50)} as fast (90% interval {_x(r.p5)}-{_x(r.p95)})"


def _x(value: float) -> str:
    return f"{value:.3g}x" if value < 0.995 or value > 1.005 else "1x"


def _memory_change(found: WhatIf) -> str:
    if not found.base.memory_known:
        return "not known"
    change, least = found.memory_change, EQUAL * found.base.peak_memory
    return "unchanged" if abs(change) <= least else f"{'+' if change > 0 else '-'}{size(abs(change))}"


def notes(found: WhatIf) -> tuple[str, ...]:
    """What to know before trusting it."""
    out = [f"why: {found.reason}"]
    out += [f"confidence {found.sureness}: faster in {percent(found.confidence, 0)} of the draws"]
    if found.modelled < 0.99:
        rest = percent(1 - found.modelled, 0)
        out.append(
            f"{rest} of the GPU time of new ops is from a roofline: {first_few(found.edited.coverage.fallback_ops)}"
        )
    return (*out, *(f"caution: {c}" for c in found.cautions), *found.edited.notes)


def _facts(found: WhatIf) -> tuple[Fact, ...]:
    a, b = found.base, found.edited
    each = found.per_work
    tone: Tone = "good" if each.p5 > 1 else "bad" if each.p95 < 1 else "warn"
    memory = f"{size(b.peak_memory)} of {size(b.gpu_memory)}" if b.memory_known else ""
    return (
        Fact(
            f"Speed-up per {found.unit}" if found.unit else "Speed-up",
            _x(each.p50),
            f"90% interval {_x(each.p5)}-{_x(each.p95)}",
            tone,
        ),
        Fact("Step time", seconds(b.step.p50), f"was {seconds(a.step.p50)}"),
        Fact("GPU active", seconds(b.gpu_active), f"was {seconds(a.gpu_active)}"),
        Fact("Host time", seconds(b.host), f"was {seconds(a.host)}"),
        Fact("Memory", _memory_change(found), memory, "good" if found.fits else "bad"),
        Fact("Confidence", found.sureness, f"faster in {percent(found.confidence, 0)} of the draws"),
    )


# ---- sections


def _before_after_section(found: WhatIf) -> Section:
    """Op families side by side."""
    before, after = _parts(found.base), _parts(found.edited)
    names = sorted({*before, *after}, key=lambda n: (n == IDLE, -max(before.get(n, 0.0), after.get(n, 0.0))))
    series = {"before": [before.get(n, 0.0) for n in names], "after": [after.get(n, 0.0) for n in names]}
    unit = time_unit(max((v for values in series.values() for v in values), default=0.0))
    rows = [
        (n, seconds(a), seconds(b), seconds(b - a) if abs(b - a) > 1e-9 else "0")
        for n, a, b in zip(names, series["before"], series["after"], strict=True)
    ]
    families = data_table("GPU time by family", ("family", "before", "after", "change"), rows, where="page")
    text = f"GPU time of each op family in a step before and after, and the GPU's idle time. Why: {found.reason}."
    chart = partial(grouped_figure, names, series, "", unit, across=True) if names else None
    return Section("Before and after", (before_after_table(found), families), chart, text)


def _parts(p: StepResult) -> dict[str, float]:
    """Seconds by family, and idle: together the step."""
    parts = {family_name(f.name): f.gpu for f in p.families if f.gpu > 0}
    rest = p.step.p50 - sum(parts.values())
    return {**parts, **({IDLE: rest} if rest > 0 else {})}


def before_after_table(found: WhatIf) -> DataTable:
    a, b = found.base, found.edited
    rows = [
        ("step time", seconds(a.step.p50), seconds(b.step.p50), _change(a.step.p50, b.step.p50)),
        ("  90% interval", interval(a.step.p5, a.step.p95), interval(b.step.p5, b.step.p95), ""),
        ("GPU active", seconds(a.gpu_active), seconds(b.gpu_active), _change(a.gpu_active, b.gpu_active)),
        ("host", seconds(a.host), seconds(b.host), _change(a.host, b.host)),
        ("launches", str(a.launches), str(b.launches), _change(a.launches, b.launches)),
        ("peak memory", size(a.peak_memory), size(b.peak_memory), _change(a.peak_memory, b.peak_memory)),
        ("bound by", a.bound, b.bound, ""),
    ]
    if found.unit:
        one = f"time per {found.unit} (relative)"
        rows.append((one, "1", f"{1 / found.per_work.p50:.3g}", _change(found.per_work.p50, 1.0)))
    return data_table("Before and after", ("", "before", "after", "change"), rows, wrap=True)


def _change(a: float, b: float) -> str:
    return percent(b / a - 1).replace("-0.0%", "0.0%") if a else "-"


def _stages_section(found: WhatIf, title: str = "One by one") -> Section:
    steps = [("as it is", found.base), *((f"+ {s.edit}", s.result) for s in found.stages)]
    bars = [IntervalBar(name, p.step.p5, p.step.p50, p.step.p95) for name, p in steps]
    unit = time_unit(max(r.middle for r in bars))
    text = "Each edit on top of those before it: the step time and its 90% interval."
    speedups = ["", *(_x(s.speedup.p50) for s in found.stages)]
    rows = [
        (
            name,
            seconds(p.step.p50),
            faster,
            seconds(p.gpu_active),
            seconds(p.host),
            str(p.launches),
            size(p.peak_memory),
        )
        for (name, p), faster in zip(steps, speedups, strict=True)
    ]
    columns = ("edit", "step", "speed-up", "GPU active", "host", "launches", "peak memory")
    table = data_table(title, columns, rows, wrap=True)
    return Section(title, (table,), partial(interval_figure, bars, unit, f"step time, {unit.name}"), text)


def _spread_section(found: WhatIf) -> Section | None:
    """The distribution of the step with the edits."""
    before, after = (p.draws for p in (found.base, found.edited))
    if len(after) < FEWEST or len(before) != len(after) or not (after > 0).all():
        return None
    text = (
        f"{len(after):,} runs with the edits, each on a machine that also ran the step as it is: faster in "
        f"{percent(found.confidence, 0)} of them. New work is known less well than existing work."
    )
    rows = [(f"p{100 * q:g}", _x(float(v))) for q, v in zip(LEVELS, np.quantile(before / after, LEVELS), strict=True)]
    tables = (
        distribution_table(after, title="Step time with the edits"),
        data_table("Speed-up", ("quantile", "speed-up"), rows),
    )
    chart = partial(distribution_figure, after, what="runs", marks={"as it is": found.base.step.p50})
    return Section("Uncertainty", tables, chart, text, where="page")


def _detail_sections(found: WhatIf, name: str) -> list[Section]:
    """Timelines, and memory: before and after where it changes, else after alone."""
    both = {"before": found.base, "after": found.edited}
    parts = [step_tasks(p, f"{when}: ") for when, p in both.items()]
    ends = [p.window.window for p in both.values()]
    wholes = [end - begin for (begin, end), tasks in zip(ends, parts, strict=True) for _ in tasks.lanes]
    text = f"One steady-state step as it is and with {name}, on one scale."
    out = [lanes_section("Timelines", LaneTasks.joined(parts), text, wholes)]
    if abs(found.memory_change) > EQUAL * found.base.peak_memory:
        out.append(memory_section(found.base, "Memory before"))
    return [*out, memory_section(found.edited, f"Memory with {name}")]


# ---- suggestions


def suggest_answer(found: Suggestions, everything: bool = False) -> Answer:
    """Everything `presage whatif --suggest` shows; `everything`: also edits that do not apply."""
    gains = [w for w in found.tried if w.fits and w.per_work.p50 > 1]
    missing = found.not_applicable
    hint = [f"{len(missing)} edits do not apply here: --all says why"] if missing and not everything else []
    return Answer(
        title=found.base.source or "training step",
        question="What would make it faster?",
        subject=f"{subject(found.base)}: {seconds(found.base.step.p50)}/step",
        headline=_best_text(found, gains),
        facts=_suggest_facts(found, gains),
        sections=sections_of(
            _tried_section("Edits, best first", found.tried, RANKING) if found.tried else None,
            _tried_section("If kernels were twice as fast", found.supposed, SUPPOSED) if found.supposed else None,
            _stages_section(found.combination, "Together, one by one") if found.combination is not None else None,
            families_section_page(found.base),
            _reasons_section(found) if found.tried else None,
            _missing_section(found, everything) if missing else None,
        ),
        notes=(*cautions(found), *hint),
        to_data=found.to_json,
        basis=gpu_basis(found.base.basis.gpu),
    )


RANKING = (
    "Speed-up per sample with each edit and its 90% interval: green helps, red harms, grey is uncertain. A step of "
    "more samples is judged by its time per sample."
)
SUPPOSED = "Nobody has these kernels: an upper limit of what better ones could bring."


def families_section_page(p: StepResult) -> Section:
    """The unedited step, on the page only."""
    section = families_section(p, step_table(p))
    return Section(section.title, section.tables, section.chart, section.text, where="page")


def _best_text(found: Suggestions, gains: Sequence[WhatIf]) -> str:
    if not gains:
        return f"None of the {len(found.tried)} edits tried makes the step faster."
    lines = [f"Best alone: {', '.join(gains[0].edits)}: {effect_text(gains[0])}."]
    if found.combination is not None:
        lines.append(f"Best together: {', '.join(found.combination.edits)}: {effect_text(found.combination)}.")
    return "\n".join(lines)


def _suggest_facts(found: Suggestions, gains: Sequence[WhatIf]) -> tuple[Fact, ...]:
    facts = [Fact("Edits tried", str(len(found.tried)), f"{len(gains)} make it faster")]
    if gains:
        facts.append(Fact("Best alone", _x(gains[0].per_work.p50), ", ".join(gains[0].edits), "good"))
    best = found.combination
    if best is not None:
        facts.append(Fact("Best together", _x(best.speedup.p50), ", ".join(best.edits), "good"))
    return (*facts, *step_facts(found.base)[:3])


def _tried_section(title: str, tried: Sequence[WhatIf], text: str) -> Section:
    bars = [IntervalBar(", ".join(w.edits), w.per_work.p5, w.per_work.p50, w.per_work.p95) for w in tried]
    chart = partial(interval_figure, bars, SPEEDUP, "speed-up per sample", base=1.0, judged=True)
    return Section(title, (tried_table(title, tried),), chart, text)


def tried_table(title: str, tried: Sequence[WhatIf]) -> DataTable:
    """Edits, best first: the speed-up is that of a sample."""
    rows = []
    for w in tried:
        memory = _memory_change(w) if w.fits else f"{_memory_change(w)}, does not fit"
        cells = (seconds(w.edited.step.p50), _x(w.per_work.p50), f"{_x(w.per_work.p5)}-{_x(w.per_work.p95)}")
        rows.append((", ".join(w.edits), *cells, memory, w.sureness))
    several = any(w.unit for w in tried)
    columns = ("edit", "step", f"speed-up{' per sample' if several else ''}", "90% interval", "memory", "confidence")
    return data_table(title, columns, rows)


def _reasons_section(found: Suggestions) -> Section:
    """Why the first few edits, and faster kernels, gain what they gain."""
    rows = [(", ".join(w.edits), w.because) for w in (*found.tried[:REASONS], *found.supposed)]
    limit = found.tried[0].limit
    title = f"{limit[0].upper()}{limit[1:]}"
    table = data_table(title, ("edit", "what it changes"), rows, text=2, wrap=True)
    return Section("Why", (table,), None, f"{title}: what each edit changes about that.")


def cautions(found: Suggestions) -> list[str]:
    """Each caution once, with the edits it concerns."""
    by: dict[str, list[str]] = {}
    for w in found.tried:
        for caution in w.cautions:
            by.setdefault(caution, []).extend(w.edits)
    return [f"caution with {', '.join(dict.fromkeys(edits))}: {caution}" for caution, edits in by.items()]


def _missing_section(found: Suggestions, everything: bool) -> Section:
    table = data_table("Not applicable", ("edit", "why"), found.not_applicable, text=2, wrap=True)
    text = "Edits that have nothing to change in this step, and why."
    return Section("Not applicable", (table,), None, text, where="both" if everything else "page")


# ---- lists of edits


def step_edits_answer() -> Answer:
    """Everything `presage whatif --list` shows."""
    step = [(e.name, e.value if e.needed or not e.value else f"[{e.value}]", e.rule) for e in EDITS.values()]
    others = [(e.name, e.value, e.rule) for e in OTHERS.values()]
    rows = [
        {"name": name, "value": value, "rule": rule, "of": of, "traces": name in TRACE_EDITS}
        for of, edits in (("step", step), ("setting", others))
        for name, value, rule in edits
    ]
    notes = (
        "FILE.py:FUNCTION, a function of your own from Graph to Graph, and arg:NAME=VALUE are edits too",
        f"other names: {', '.join(f'{a} for {b}' for a, b in ALIASES.items())}",
        f"edits of traces (presage replay --apply): {', '.join(TRACE_EDITS)}",
    )
    tables = {"Edits of the step": step, "Other machines and arguments": others}
    return _edits_answer(tables, {"kind": "edits", "edits": rows, "aliases": ALIASES}, notes)


def replay_edits_answer() -> Answer:
    """Everything `presage replay --list` shows."""
    rows = [{"name": e.name, "value": e.value, "rule": e.rule} for e in TRACE_EDITS.values()]
    edits = [(e.name, e.value, e.rule) for e in TRACE_EDITS.values()]
    return _edits_answer({"Edits of a trace": edits}, {"kind": "edits", "edits": rows})


def _edits_answer(
    tables: Mapping[str, Sequence[tuple[str, str, str]]], data: Mapping[str, Any], notes: tuple[str, ...] = ()
) -> Answer:
    """Edits by name, value and rule: a table for each title."""
    sections = []
    for title, edits in tables.items():
        rows = [(f"{name}{_value_text(value)}", rule) for name, value, rule in edits]
        sections.append(Section(title, (data_table(title, ("edit", "rule"), rows, text=2, wrap=True),)))
    brief = "\n".join(name for edits in tables.values() for name, _, _ in edits)
    return Answer("edits", sections=tuple(sections), notes=notes, to_data=lambda: data, brief=brief)


def _value_text(value: str) -> str:
    return f"[={value[1:]}" if value.startswith("[") else f"={value}" if value else ""
