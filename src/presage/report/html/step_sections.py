"""Sections that several pages of a step share: its timeline, its memory, its roofline, its ranks."""

from __future__ import annotations

import numpy as np

from presage.engine import Lane, LaneKind
from presage.graph.families import family
from presage.graph.graph import Graph, Role
from presage.memory.step_memory import Holding, MemoryProfile
from presage.prediction.rank_results import RankClass, RankResults
from presage.prediction.step_detail import StepDetail, StepWindow
from presage.report import memory_tables
from presage.report.html.charts.heat import heat_figure, heat_table
from presage.report.html.charts.lanes import Bars
from presage.report.html.charts.memory import memory_figure
from presage.report.html.charts.roofline import roofline_figure
from presage.report.html.page import Section, Table, table_of
from presage.report.html.timeline import lanes_section, timeline_bars
from presage.report.memory_tables import WORDS
from presage.report.rank_tables import rank_table
from presage.text import amount, percent, seconds, shorten, size

__all__ = [
    "family_of",
    "memory_section",
    "ranks_section",
    "roofline_section",
    "step_bars",
    "step_timeline_section",
]

TENSORS = 20  # of those alive at the peak
COSTLY = 20
HELD: tuple[Role, ...] = (
    "parameter",
    "optimizer",
    "gradient",
    "buffer",
    "input",
    "activation",
    "workspace",
)  # from the bottom up
TERA = 1e12


# ---- the timeline


def step_timeline_section(
    shown: StepWindow, many: RankResults | None = None, title: str = "Timeline of a step"
) -> Section:
    """One step once it has settled, lane by lane."""
    begin, end = shown.window
    names = {k.rank: f"{_short(k)}: " for k in many.kinds} if many is not None and many.ranks > 1 else {}
    bars = timeline_bars(shown.timeline, shown.window, _group, lambda lane: names.get(lane.rank, "") + lane.name)
    lead = (
        "One step once it has settled, from the end of the one before to its own end; the host's threads are at work "
        "on what the GPU will run next. Colours are families of ops."
    )
    return lanes_section(title, bars, lead, end - begin)


def step_bars(shown: StepWindow, prefix: str = "") -> Bars:
    """One rank's step as bars."""
    return timeline_bars(shown.timeline, shown.window, _group, lambda lane: prefix + lane.name)


def family_of(name: str) -> str:
    return "host" if name == "(host)" else family(name)


def _group(name: str, lane: Lane) -> str:
    return "communication" if lane.kind is LaneKind.COMMUNICATION else family_of(name)


def _short(k: RankClass) -> str:
    return f"rank {k.rank}" + (f" (+{k.ranks - 1:,})" if k.ranks > 1 else "")


def _kind(k: RankClass) -> str:
    return f"rank {k.rank}" + (f" (and {k.ranks - 1:,} like it)" if k.ranks > 1 else "")


# ---- ranks


def ranks_section(many: RankResults) -> Section:
    """What each kind of rank does in a step; the colour tells who is off."""
    columns = ("compute", "exposed", "wait", "host")
    names = [_kind(k) for k in many.kinds]
    table = np.array([[getattr(k, c) for c in columns] for k in many.kinds])
    shown = ("compute", "exposed communication", "waits for ranks", "host")
    alike, several = [k.ranks for k in many.kinds], len(names) > 1
    figure = heat_figure(names, shown, table, alike=alike, apart=True) if several else None
    slow = max(many.kinds, key=lambda k: k.wait)
    lead = (
        "Ranks that do the same are one row; red is more than most ranks take, blue is less. "
        f"{_kind(slow).capitalize()} waits longest for others, {seconds(slow.wait)}."
    )
    if len(many.kinds) == 1:
        lead = f"All {many.ranks:,} ranks do the same: none waits for a slower one."
    cells = [heat_table("ranks", names, shown, table, title="The cells")] if several else []
    tables = (table_of(rank_table(many, most=len(many.kinds))), *cells)
    return Section("Ranks", tables, figure, lead)


# ---- memory


def memory_section(graph: Graph, profile: MemoryProfile, capacity: int, title: str = "Memory over the step") -> Section:
    """What is held at each op, and what is alive at the peak."""
    at, kinds = profile.timeline, profile.timeline.kinds
    held = {WORDS[k]: kinds[k] for k in HELD if k in kinds and kinds[k].any()}
    ops = [op.name for op in graph.ops]
    figure = memory_figure(at.allocated, at.reserved, held, capacity, _phases(graph), ops) if ops else None
    tables = (
        table_of(memory_tables.role_table(profile)),
        alive_table(graph, profile),
        table_of(memory_tables.peak_table(profile, _op(graph, profile.peak_op))),
    )
    return Section(title, tables, figure, _memory_lead(graph, profile, capacity))


def _memory_lead(graph: Graph, profile: MemoryProfile, capacity: int) -> str:
    room = capacity - profile.peak_allocated
    fits = f"{size(room)} below what the GPU has" if room >= 0 else f"{size(-room)} more than the GPU has"
    roles = profile.by_role()
    most = next(iter(roles), None)
    share = f", most of it {WORDS[most]} ({percent(roles[most] / profile.peak_allocated)})" if most else ""
    return (
        f"Memory is highest in {_op(graph, profile.peak_op)}: {size(profile.peak_allocated)}, {fits}{share}. Areas add "
        "up to what is allocated; the dotted line is what PyTorch's allocator has taken from the GPU."
    )


def _op(graph: Graph, number: int) -> str:
    if not 0 <= number < len(graph.ops):
        return "the time before the first op"
    op = graph.ops[number]
    return f"{op.name}" + (f" of {op.module}" if op.module else "") + f" ({op.phase})"


def _phases(graph: Graph) -> list[tuple[str, int, int]]:
    """Stretches of ops of one phase; short ones are part of their neighbours'."""
    out: list[tuple[str, int, int]] = []
    least = max(1, len(graph.ops) // 25)
    for i, op in enumerate(graph.ops):
        if out and out[-1][0] == op.phase:
            out[-1] = (op.phase, out[-1][1], i + 1)
        else:
            out.append((op.phase, i, i + 1))
    return [p for p in out if p[2] - p[1] >= least]


def alive_table(graph: Graph, profile: MemoryProfile, most: int = TENSORS) -> Table:
    """The largest tensors alive at the peak: who made them, and their shapes."""
    made = {e.storage: e.op for e in graph.events if e.allocates}
    shapes: dict[int, str] = {}
    for t in graph.tensors:
        text = f"{t.dtype}[{'x'.join(map(str, t.shape))}]"
        if t.nbytes == graph.storages[t.storage].nbytes or t.storage not in shapes:
            shapes.setdefault(t.storage, text)
    rows = tuple(_alive(graph, h, made, shapes) for h in profile.top(most))
    title = f"Largest of {len(profile.holdings):,} alive at the peak"
    return Table(("tensor", "kind", "made by", "module", "shape", "bytes"), rows, title, frozenset(range(5)))


def _alive(graph: Graph, h: Holding, made: dict[int, int], shapes: dict[int, str]) -> tuple[str, ...]:
    op = made.get(h.storage, -1)
    by = graph.ops[op].name if 0 <= op < len(graph.ops) else "before the step" if h.storage >= 0 else ""
    name = h.name or (f"output of {by}" if op >= 0 else f"storage {h.storage}")
    return shorten(name), WORDS[h.role], by, shorten(h.module), shapes.get(h.storage, ""), size(h.nbytes)


# ---- the roofline


def roofline_section(detail: StepDetail) -> Section | None:
    """How near the GPU's limits the ops run."""
    if not any(w.moved for w in detail.work):
        return None
    figure = roofline_figure(detail.work, detail.gpu.memory_bandwidth, detail.peaks)
    total = sum(w.seconds for w in detail.work)
    least = sum(w.least for w in detail.work)
    without = sum(1 for w in detail.work if not w.moved and not w.flops)
    lead = (
        f"Each dot is a kind of op, its area the time all of them take. Lines are what the {detail.gpu.name} can do at "
        f"most: together the ops need {seconds(least)} at those limits and take {seconds(total)} "
        f"({percent(least / total if total else 0.0)} of the limits). FLOPs are those of matrix products; ops without "
        "any are below, by the bytes they move."
    )
    if without:
        lead += f" {without} kinds that move nothing are left out."
    return Section("How near the limits", (work_table(detail),), figure, lead)


def work_table(detail: StepDetail, most: int = COSTLY) -> Table:
    """The costliest ops with what they compute and move."""
    columns = ("op", "phase", "calls", "time", "FLOPs", "bytes", "FLOPs/byte", "TFLOP/s", "TB/s", "of the limit")
    rows = []
    for w in detail.work[:most]:
        name = shorten(f"{w.name.removeprefix('aten::')} {w.shapes}", 70)
        cells = (amount(w.flops), size(w.moved), f"{w.flops / w.moved:.4g}" if w.flops and w.moved else "-")
        rates = (f"{w.flops / w.seconds / TERA:.4g}" if w.flops else "-", f"{w.moved / w.seconds / TERA:.3g}")
        rows.append((name, w.phase, str(w.calls), seconds(w.seconds), *cells, *rates, percent(w.of_peak)))
    return Table(columns, tuple(rows), "Costliest ops", frozenset({0, 1}))
