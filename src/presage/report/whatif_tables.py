"""Tables and sentences of what-ifs. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from presage.prediction.step import Quantiles, StepResult
from presage.report.plain import plain_table
from presage.text import percent, seconds, size
from presage.whatif.before_after import Range, WhatIf
from presage.whatif.suggest import Suggestions

__all__ = [
    "before_after_table",
    "cautions",
    "edit_table",
    "headline",
    "missing_table",
    "remarks",
    "stage_table",
    "suggested",
    "tried_table",
    "whys",
]

ALIKE = 0.002  # of a memory: a smaller change is none
TOLD = 5  # reasons told


def headline(found: WhatIf) -> str:
    """The question and the answer."""
    return f"{_where(found.base)}\n[bold]{escape(', '.join(found.edits))}[/bold]: {escape(_answer(found))}"


def _where(p: StepResult) -> str:
    given = ", ".join(f"{k}={v}" for k, v in p.arguments.items())
    return f"[bold]{escape(p.source or 'graph')}[/bold]{escape(f' ({given})' if given else '')} on {escape(p.gpu)}"


def _answer(found: WhatIf) -> str:
    step = f"{seconds(found.base.step.p50)} -> {seconds(found.edited.step.p50)} a step"
    each = f", {_x(found.per_work.p50)} a {found.unit}" if found.unit else ""
    return f"{step}, {_times(found.speedup)}{each}, memory {_memory(found)}; because {found.reason}"


def _times(r: Range) -> str:
    """1.73x as fast (1.35x to 2.19x)."""
    return f"{_x(r.p50)} as fast ({_x(r.p5)} to {_x(r.p95)})"


def _x(value: float) -> str:
    return f"{value:.3g}x" if value < 0.995 or value > 1.005 else "1x"


def _memory(found: WhatIf) -> str:
    change, least = found.memory_change, ALIKE * found.base.peak_memory
    return "the same" if abs(change) <= least else f"{'+' if change > 0 else '-'}{size(abs(change))}"


def before_after_table(found: WhatIf) -> Table:
    table = plain_table("Before and after", "", "before", "after", "change")
    a, b = found.base, found.edited
    table.add_row("step time", seconds(a.step.p50), seconds(b.step.p50), _share(a.step.p50, b.step.p50))
    table.add_row("  nine runs of ten", _between(a.step), _between(b.step), "")
    for name, key in (("GPU active", "gpu_active"), ("host, by itself", "host")):
        x, y = getattr(a, key), getattr(b, key)
        table.add_row(name, seconds(x), seconds(y), _share(x, y))
    table.add_row("launches", str(a.launches), str(b.launches), _share(a.launches, b.launches))
    table.add_row("peak memory", size(a.peak_memory), size(b.peak_memory), _share(a.peak_memory, b.peak_memory))
    table.add_row("bound", a.bound, b.bound, "")
    if found.unit:
        one = f"time a {found.unit} (relative)"
        table.add_row(one, "1", f"{1 / found.per_work.p50:.3g}", _share(found.per_work.p50, 1.0))
    return table


def _between(q: Quantiles) -> str:
    return f"{seconds(q.p5)} to {seconds(q.p95)}"


def _share(a: float, b: float) -> str:
    return percent(b / a - 1).replace("-0.0%", "0.0%") if a else "-"


def stage_table(found: WhatIf, title: str = "One by one") -> Table:
    """Each edit on top of those before it."""
    table = plain_table(title, "edit", "step", "speed-up", "GPU active", "host", "launches", "peak memory")
    table.add_row("as it is", *_cells(found.base, None))
    for s in found.stages:
        table.add_row(escape(f"+ {s.edit}"), *_cells(s.told, s.speedup))
    return table


def _cells(p: StepResult, faster: Range | None) -> list[str]:
    return [
        seconds(p.step.p50), "" if faster is None else _x(faster.p50), seconds(p.gpu_active), seconds(p.host),
        str(p.launches), size(p.peak_memory),
    ]  # fmt: skip


def remarks(found: WhatIf) -> list[str]:
    """What to know before trusting it."""
    out = [f"confidence: {found.sureness} (shorter in {percent(found.confidence, 0)} of the draws)"]
    if not found.fits:
        p = found.edited
        out.append(f"does not fit: {size(p.peak_memory)} are needed and the GPU has {size(p.memory)}")
    if found.modelled < 0.99:
        rest = percent(1 - found.modelled, 0)
        out.append(f"{rest} of the GPU time of new ops is from FLOPs and bytes alone: {_names(found.edited)}")
    out += [f"caution: {c}" for c in found.cautions]
    return [*out, *(f"note: {note}" for note in found.edited.notes)]


def _names(p: StepResult, most: int = 6) -> str:
    names = p.coverage.fallback_ops
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- suggestions


def suggested(found: Suggestions) -> str:
    """The best edit, and the best ones together."""
    lines = [f"{_where(found.base)}: {seconds(found.base.step.p50)} a step"]
    gains = [w for w in found.tried if w.fits and w.speedup.p50 > 1]
    if not gains:
        lines.append("no edit that was tried makes it shorter")
    for what, one in (("best", next(iter(gains), None)), ("together", found.combination)):
        if one is not None:
            lines.append(f"{what}: [bold]{escape(', '.join(one.edits))}[/bold]: {escape(_answer(one))}")
    return "\n".join(lines)


def tried_table(title: str, tried: Sequence[WhatIf]) -> Table:
    """Edits one by one, best first; where a step has more samples, the speed-up of a sample as well."""
    several = any(w.unit for w in tried)
    columns = ("step", "speed-up", "nine of ten", *(["a sample"] if several else []), "memory", "confidence")
    table = plain_table(title, "edit", *columns, fold=False)
    for w in tried:
        cells = [seconds(w.edited.step.p50), _x(w.speedup.p50), f"{_x(w.speedup.p5)} to {_x(w.speedup.p95)}"]
        cells += [_x(w.per_work.p50) if w.unit else ""] if several else []
        memory = _memory(w) if w.fits else f"{_memory(w)}, too much"
        table.add_row(escape(", ".join(w.edits)), *cells, memory, w.sureness)
    return table


def whys(found: Suggestions) -> str:
    """The reasons of the first few, and of faster kernels."""
    some = [*found.tried[:TOLD], *found.supposed]
    lines = [f"{some[0].limit[0].upper()}{some[0].limit[1:]}:"] if some else []
    return "\n".join([*lines, *(f"  {', '.join(w.edits)}: {w.because}" for w in some)])


def cautions(found: Suggestions) -> list[str]:
    """What to look out for with the edits shown, each caution once."""
    by: dict[str, list[str]] = {}
    for w in found.tried:
        for caution in w.cautions:
            by.setdefault(caution, []).extend(w.edits)
    return [f"caution with {', '.join(dict.fromkeys(edits))}: {caution}" for caution, edits in by.items()]


def missing_table(rows: Sequence[tuple[str, str]]) -> Table:
    table = plain_table("Not applicable", "edit", "why", left=2)
    for edit, why in rows:
        table.add_row(escape(edit), escape(why))
    return table


def edit_table(title: str, rows: Sequence[tuple[str, str, str]]) -> Table:
    """Edits by name, value and rule."""
    table = plain_table(title, "edit", "rule", left=2)
    for name, value, rule in rows:
        told = f"[={value[1:]}" if value.startswith("[") else f"={value}" if value else ""
        table.add_row(escape(f"{name}{told}"), escape(rule))
    return table
