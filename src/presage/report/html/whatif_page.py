"""The pages of `presage whatif`: a step before and after edits, and what every edit would gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from presage.hardware import gpus
from presage.memory.gpu_limits import H200, GpuLimits
from presage.memory.step_memory import memory_profile
from presage.prediction.step import StepProgram, StepResult
from presage.prediction.step_detail import step_window
from presage.report import whatif_tables as tables
from presage.report.html.charts.beside import beside_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.lanes import Bars
from presage.report.html.charts.ranges import Ranged, ranges_figure
from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.page import Fact, Page, Section, Table, Tone, plain, table_of
from presage.report.html.predict_page import families_section, step_facts
from presage.report.html.step_sections import memory_section, step_bars
from presage.report.html.timeline import lanes_section
from presage.text import percent, seconds, size
from presage.whatif.before_after import WhatIf
from presage.whatif.suggest import Suggestions

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["suggest_page", "whatif_page"]

TIMES = Unit("x", 1.0)  # as fast
ALIKE = 0.002  # of a memory: less is the same
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
FEW = 20  # draws: fewer have no shape
IDLE = "idle"


# ---- edits applied


def whatif_page(found: WhatIf, command: str = "") -> Page:
    """A step before and after."""
    asked, _ = plain(tables.headline(found)).split("\n", 1)
    name = ", ".join(found.edits)
    sections = [
        _before_after(found),
        _stages(found) if found.stages else None,
        _sure(found),
        _timelines(found, name),
        *_memories(found, name),
    ]
    return Page(
        title=f"{name}: would it help?",
        question=f"Would {name} help? {asked}",
        answer=_answer(found, name),
        facts=_facts(found),
        sections=tuple(s for s in sections if s is not None),
        notes=(f"because {found.reason}", *tables.remarks(found)),
        command=command,
    )


def _answer(found: WhatIf, name: str) -> str:
    """How much it helps, how sure that is, what it does to memory, and what sets the pace."""
    r, (before, after) = found.speedup, found.step
    sure = f"nine runs of ten between {_x(r.p5)} and {_x(r.p95)}"
    each = f", {_x(found.per_work.p50)} a {found.unit}" if found.unit else ""
    took = f"With {name} a step takes {seconds(after.p50)} in place of {seconds(before.p50)}"
    fits = "" if found.fits else f", which does not fit ({size(found.edited.peak_memory)})"
    return f"{took}: {_x(r.p50)} as fast ({sure}){each}, with {_memory_told(found)}{fits}; without it {found.limit}."


def _memory_told(found: WhatIf) -> str:
    change = found.memory_change
    if abs(change) <= ALIKE * found.base.peak_memory:
        return "the same memory"
    return f"{size(abs(change))} {'more' if change > 0 else 'less'} memory"


def _x(value: float) -> str:
    return f"{value:.3g}x"


def _facts(found: WhatIf) -> tuple[Fact, ...]:
    faster, change = found.speedup, found.memory_change
    tone: Tone = "good" if faster.p5 > 1 else "bad" if faster.p95 < 1 else "warn"
    memory = (
        "the same"
        if abs(change) <= ALIKE * found.base.peak_memory
        else f"{'+' if change > 0 else '-'}{size(abs(change))}"
    )
    a, b = found.base, found.edited
    return (
        Fact("Speed-up", _x(faster.p50), f"{_x(faster.p5)} to {_x(faster.p95)}", tone),
        Fact("Step time", seconds(b.step.p50), f"was {seconds(a.step.p50)}"),
        Fact("GPU active", seconds(b.gpu_active), f"was {seconds(a.gpu_active)}"),
        Fact("Host, by itself", seconds(b.host), f"was {seconds(a.host)}"),
        Fact("Memory", memory, f"{size(b.peak_memory)} of {size(b.memory)}", "good" if found.fits else "bad"),
        Fact("Confidence", found.sureness, f"shorter in {percent(found.confidence, 0)} of the draws"),
    )


def _before_after(found: WhatIf) -> Section:
    """Families of ops side by side."""
    before, after = _parts(found.base), _parts(found.edited)
    names = sorted({*before, *after}, key=lambda n: (n == IDLE, -max(before.get(n, 0.0), after.get(n, 0.0))))
    series = {"before": [before.get(n, 0.0) for n in names], "after": [after.get(n, 0.0) for n in names]}
    unit = time_unit(max((v for values in series.values() for v in values), default=0.0))
    rows = tuple(
        (n, seconds(a), seconds(b), seconds(b - a) if abs(b - a) > 1e-9 else "0")
        for n, a, b in zip(names, series["before"], series["after"], strict=True)
    )
    table = Table(("family", "before", "after", "change"), rows, "GPU time by family")
    lead = "GPU time of each family of ops in a step before and after, and the time in which the GPU has nothing to do."
    figure = beside_figure(names, series, "", unit, across=True) if names else None
    return Section("Before and after", (table_of(tables.before_after_table(found)), table), figure, lead)


def _parts(p: StepResult) -> dict[str, float]:
    """Seconds by family, and idle: together the step."""
    parts = {f.name: f.gpu for f in p.families if f.gpu > 0}
    rest = p.step.p50 - sum(parts.values())
    return {**parts, **({IDLE: rest} if rest > 0 else {})}


def _stages(found: WhatIf, title: str = "One by one") -> Section:
    rows = [_ranged("as it is", found.base)]
    rows += [_ranged(f"+ {s.edit}", s.told) for s in found.stages]
    unit = time_unit(max(r.middle for r in rows))
    lead = "Each edit on top of those before it: the step time, and the range that nine runs of ten lie in."
    figure = ranges_figure(rows, unit, f"step time, {unit.name}")
    return Section(title, (table_of(tables.stage_table(found, title)),), figure, lead)


def _ranged(name: str, p: StepResult) -> Ranged:
    return Ranged(name, p.step.p5, p.step.p50, p.step.p95)


def _sure(found: WhatIf) -> Section | None:
    """The step with the edits, beside the one without."""
    before, after = (np.array(p.drawn) for p in (found.base, found.edited))
    if len(after) < FEW or len(before) != len(after) or not (after > 0).all():
        return None
    lead = (
        f"{len(after):,} runs with the edits, each on a machine that also ran the step as it is: shorter than that in "
        f"{percent(found.confidence, 0)} of them. What edits bring in is known less well than what is there already."
    )
    ratios = np.quantile(before / after, LEVELS)
    rows = tuple((f"p{100 * p:g}", _x(float(v))) for p, v in zip(LEVELS, ratios, strict=True))
    told = (
        distribution_table(after, title="Step time with the edits"),
        Table(("quantile", "speed-up"), rows, "Speed-up"),
    )
    figure = distribution_figure(after, what="runs", marks={"as it is": found.base.step.p50})
    return Section("How sure that is", told, figure, lead)


def _timelines(found: WhatIf, name: str) -> Section | None:
    if not found.programs:
        return None
    shown = [step_window(program) for program in found.programs]
    parts = [step_bars(one, prefix) for one, prefix in zip(shown, ("before: ", "after: "), strict=True)]
    wholes = [one.window[1] - one.window[0] for one, bars in zip(shown, parts, strict=True) for _ in bars.lanes]
    lead = f"One step once it has settled, as it is and with {name}, on one scale."
    return lanes_section("Timelines", Bars.joined(parts), lead, wholes)


def _memories(found: WhatIf, name: str) -> list[Section]:
    """Memory before and after, where it changes; else after alone."""
    changed = abs(found.memory_change) > ALIKE * found.base.peak_memory
    pairs = list(zip(found.programs, (found.base, found.edited), ("before", f"with {name}"), strict=False))
    return [_memory(*pair) for pair in (pairs if changed else pairs[-1:])]


def _memory(program: StepProgram, told: StepResult, what: str) -> Section:
    held = memory_profile(program.graph, chip=_chip(told.gpu), kinds=True)
    return memory_section(program.graph, held, told.memory, f"Memory {what}")


def _chip(name: str) -> GpuLimits:
    return next((g for g in gpus() if g.name == name), H200)


# ---- suggestions


def suggest_page(found: Suggestions, command: str = "") -> Page:
    """Every edit that was tried, the best first."""
    asked = plain(tables.suggested(found)).split("\n")[0]
    best = found.combination or next(iter(_gains(found.tried)), None)
    sections = [
        _ranking(found.tried) if found.tried else None,
        _stages(found.combination, "Together, one by one") if found.combination is not None else None,
        _supposed(found.supposed) if found.supposed else None,
        families_section(found.base),
        _why(found) if found.tried else None,
        _missing(found) if found.not_applicable else None,
    ]
    return Page(
        title="what would help",
        question=f"What would make it faster? {asked}",
        answer=_best(found, best),
        facts=_suggest_facts(found, best),
        sections=tuple(s for s in sections if s is not None),
        notes=tuple(tables.cautions(found)),
        command=command,
    )


def _gains(tried: Sequence[WhatIf]) -> list[WhatIf]:
    return [w for w in tried if w.fits and w.speedup.p50 > 1]


def _best(found: Suggestions, best: WhatIf | None) -> str:
    now = seconds(found.base.step.p50)
    if best is None:
        return f"None of the {len(found.tried)} edits tried makes the step of {now} shorter."
    r = best.speedup
    return (
        f"{_listed(best.edits)} {'gain' if len(best.edits) > 1 else 'gains'} most of {len(found.tried)} edits tried: "
        f"{now} become {seconds(best.edited.step.p50)} a step, {_x(r.p50)} as fast (nine runs of ten between "
        f"{_x(r.p5)} and {_x(r.p95)}); {best.limit}."
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} together"


def _suggest_facts(found: Suggestions, best: WhatIf | None) -> tuple[Fact, ...]:
    gains = _gains(found.tried)
    facts = [Fact("Edits tried", str(len(found.tried)), f"{len(gains)} make it shorter")]
    if gains:
        one = gains[0]
        facts.append(Fact("Best alone", _x(one.speedup.p50), ", ".join(one.edits), "good"))
    if best is not None and found.combination is not None:
        facts.append(Fact("Best together", _x(best.speedup.p50), ", ".join(best.edits), "good"))
    return (*facts, *step_facts(found.base)[:3])


def _ranking(tried: Sequence[WhatIf]) -> Section:
    lead = (
        "How many times as fast the step is with each edit, and the range nine runs of ten lie in: green helps, red "
        "harms, grey is not sure. One is the step as it is."
    )
    return Section("Edits, best first", (table_of(tables.tried_table("Edits, best first", tried)),), _bars(tried), lead)


def _supposed(supposed: Sequence[WhatIf]) -> Section:
    table = table_of(tables.tried_table("If kernels were twice as fast", supposed))
    lead = "Nobody has these kernels: it tells what better ones could bring at most."
    return Section("If kernels were twice as fast", (table,), _bars(supposed), lead)


def _bars(tried: Sequence[WhatIf]) -> Figure:
    rows = [Ranged(", ".join(w.edits), w.speedup.p5, w.speedup.p50, w.speedup.p95) for w in tried]
    return ranges_figure(rows, TIMES, "times as fast", base=1.0, judged=True)


def _why(found: Suggestions) -> Section:
    rows = tuple((", ".join(w.edits), w.because) for w in (*found.tried, *found.supposed))
    limit = found.tried[0].limit
    lead = f"{limit[0].upper()}{limit[1:]}: what each edit changes about that."
    return Section("Why", (Table(("edit", "what it changes"), rows, "Reasons", frozenset({0, 1})),), None, lead)


def _missing(found: Suggestions) -> Section:
    table = table_of(tables.missing_table(found.not_applicable))
    return Section("Not applicable here", (table,), None, "Edits that have nothing to change in this step, and why.")
