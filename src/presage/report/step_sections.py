"""Sections that several answers about a step share: its timeline, its memory, its roofline, its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from presage.engine import Lane, LaneKind
from presage.graph.families import family
from presage.graph.graph import Graph, Role
from presage.hardware import Gpu
from presage.memory.step_memory import Holding, MemoryProfile
from presage.prediction.breakdown import RooflinePoint
from presage.prediction.rank_results import RankClass, RankResults
from presage.prediction.step import StepResult
from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.heat import heat_figure, heat_table
from presage.report.html.charts.lanes import LaneTasks, lanes_section, timeline_tasks
from presage.report.html.charts.points import memory_figure, roofline_figure
from presage.report.terms import ROLES, family_name, peak_share, share_of
from presage.text import amount, percent, seconds, shorten, size

TENSORS, COSTLY = 20, 20  # rows
STACKED: tuple[Role, ...] = ("parameter", "optimizer", "gradient", "buffer", "input", "activation", "workspace")
TERA = 1e12


# ---- timeline


def step_timeline_section(p: StepResult) -> Section:
    """One steady-state step, lane by lane."""
    many, (begin, end) = p.many, p.window.window
    names = {k.rank: f"{_short_rank(k)}: " for k in many.kinds} if many is not None and many.ranks > 1 else {}
    tasks = timeline_tasks(p.timeline, (begin, end), _group, lambda lane: names.get(lane.rank, "") + lane.name)
    text = "One steady-state step: while the GPU runs it, host threads launch the next one. Colours are op families."
    return lanes_section("Timeline of a step", tasks, text, end - begin)


def step_tasks(p: StepResult, prefix: str = "") -> LaneTasks:
    """The tasks of one rank's step."""
    return timeline_tasks(p.timeline, p.window.window, _group, lambda lane: prefix + lane.name)


def _group(name: str, lane: Lane) -> str:
    if lane.kind is LaneKind.COMMUNICATION:
        return "communication"
    return "host" if name == "(host)" else family_name(family(name))


def _short_rank(k: RankClass) -> str:
    return f"rank {k.rank}" + (f" (+{k.ranks - 1:,})" if k.ranks > 1 else "")


# ---- ranks


def ranks_section(many: RankResults, table: DataTable) -> Section:
    """What each class of ranks does in a step; colours show which ones differ."""
    names = [f"rank {k.rank}" + (f" (and {k.ranks - 1:,} like it)" if k.ranks > 1 else "") for k in many.kinds]
    if len(names) == 1:
        return Section("Ranks", (table,), None, f"All {many.ranks:,} ranks do the same: none waits for a slower one.")
    values = np.array([[k.compute, k.exposed, k.wait, k.host] for k in many.kinds])
    columns = ("compute", "exposed communication", "waiting for ranks", "host")
    chart = partial(heat_figure, names, columns, values, alike=[k.ranks for k in many.kinds], apart=True)
    slow = max(range(len(names)), key=lambda i: many.kinds[i].wait)
    text = (
        "Equal ranks share a row; red is above the median rank, blue below. "
        f"{names[slow].capitalize()} waits longest for others, {seconds(many.kinds[slow].wait)}."
    )
    return Section("Ranks", (table, heat_table("ranks", names, columns, values, title="Heat map")), chart, text)


# ---- memory


def memory_section(p: StepResult, title: str = "Memory over the step") -> Section:
    """Memory at each op by kind, and what is alive at the peak."""
    graph, profile, capacity = p.graph, p.memory, p.gpu_memory
    at, kinds = profile.timeline, profile.timeline.kinds
    held = {ROLES[k]: kinds[k] for k in STACKED if k in kinds and kinds[k].any()}
    ops = [op.name for op in graph.ops]
    chart = partial(memory_figure, at.allocated, at.reserved, held, capacity, _phases(graph), ops) if ops else None
    tables = (role_table(profile), alive_table(graph, profile), peak_table(profile, _op(graph, profile.peak_op)))
    return Section(title, tables, chart, _memory_text(graph, profile, capacity), where="page")


def _memory_text(graph: Graph, profile: MemoryProfile, capacity: int) -> str:
    room = capacity - profile.peak_allocated
    fits = f"{size(room)} below the GPU's capacity" if room >= 0 else f"{size(-room)} above the GPU's capacity"
    roles = profile.by_role()
    most = next(iter(roles), None)
    share = f", most of it {ROLES[most]} ({percent(roles[most] / profile.peak_allocated)})" if most else ""
    return (
        f"Memory peaks in {_op(graph, profile.peak_op)}: {size(profile.peak_allocated)}, {fits}{share}. Areas add up "
        "to the allocated memory; the dotted line is what PyTorch's caching allocator has reserved."
    )


def peak_table(profile: MemoryProfile, peak_op: str) -> DataTable:
    """The peaks and where they are reached."""
    rows = [
        ("peak allocated", size(profile.peak_allocated)),
        ("peak reserved", size(profile.peak_reserved)),
        ("unused of reserved", f"{profile.fragmentation:.1%}"),
        ("between steps", size(profile.after)),
        ("peak reached in", peak_op),
    ]
    return data_table("Memory", ("", "bytes"), rows)


def role_table(profile: MemoryProfile) -> DataTable:
    """What is alive at the peak, by kind."""
    amounts = profile.by_role()
    total = sum(amounts.values())
    rows = [(ROLES[k], size(n), f"{n / total:.1%}") for k, n in amounts.items()]
    return data_table("Alive at the peak", ("kind", "bytes", "share"), rows)


def _op(graph: Graph, number: int) -> str:
    if not 0 <= number < len(graph.ops):
        return "the time before the first op"
    op = graph.ops[number]
    return f"{op.name}" + (f" of {op.module}" if op.module else "") + f" ({op.phase})"


def _phases(graph: Graph) -> list[tuple[str, int, int]]:
    """Stretches of ops of one phase (name, first, end); short ones are left out."""
    out: list[tuple[str, int, int]] = []
    least = max(1, len(graph.ops) // 25)
    for i, op in enumerate(graph.ops):
        if out and out[-1][0] == op.phase:
            out[-1] = (op.phase, out[-1][1], i + 1)
        else:
            out.append((op.phase, i, i + 1))
    return [p for p in out if p[2] - p[1] >= least]


def alive_table(graph: Graph, profile: MemoryProfile) -> DataTable:
    """The largest tensors alive at the peak: the op that allocated them, and their shapes."""
    makers = {e.storage: e.op for e in graph.events if e.allocates}
    shapes: dict[int, str] = {}
    for t in graph.tensors:
        text = f"{t.dtype}[{'x'.join(map(str, t.shape))}]"
        if t.nbytes == graph.storages[t.storage].nbytes or t.storage not in shapes:
            shapes.setdefault(t.storage, text)
    rows = [_alive_row(graph, h, makers, shapes) for h in profile.top(TENSORS)]
    title = f"Largest of {len(profile.holdings):,} alive at the peak"
    return data_table(title, ("tensor", "kind", "allocated by", "module", "shape", "bytes"), rows, text=5)


def _alive_row(graph: Graph, h: Holding, makers: Mapping[int, int], shapes: Mapping[int, str]) -> tuple[str, ...]:
    op = makers.get(h.storage, -1)
    by = graph.ops[op].name if 0 <= op < len(graph.ops) else "before the step" if h.storage >= 0 else ""
    name = h.name or (f"output of {by}" if op >= 0 else f"storage {h.storage}")
    return shorten(name), ROLES[h.role], by, shorten(h.module), shapes.get(h.storage, ""), size(h.nbytes)


# ---- roofline


def step_roofline_section(p: StepResult) -> Section | None:
    """How near the GPU's limits the ops run."""
    more = " FLOPs are those of GEMMs; ops without any are below, by the bytes they move."
    if without := sum(1 for w in p.roofline if not w.moved and not w.flops):
        more += f" {without} kinds that move nothing are left out."
    dots = "Each dot is a kind of op, its area the total time."
    return roofline_section(p.roofline, p.basis.gpu, dots, more, _work_table(p.roofline))


def roofline_section(
    points: Sequence[RooflinePoint], gpu: Gpu, dots: str, more: str, table: DataTable
) -> Section | None:
    """Points against the GPU's limits; `dots` and `more` say what they are."""
    if not any(w.moved for w in points):
        return None
    total, least = (sum(getattr(w, k) for w in points) for k in ("seconds", "least"))
    run = sorted({w.peak for w in points if w.flops})
    peaks = {" and ".join(d for d, p in gpu.peak.items() if p == peak) or "peak": peak for peak in run}
    text = (
        f"{dots} Lines are the limits of the {gpu.name}: at those limits it would take {seconds(least)}; it takes "
        f"{seconds(total)} ({share_of(least, total, 'the limit')}).{more}{_above_text(points)}"
    )
    chart = partial(roofline_figure, points, gpu.memory_bandwidth, peaks, gpu.l2)
    return Section("Roofline", (table,), chart, text, where="page")


def _above_text(points: Sequence[RooflinePoint]) -> str:
    """Why dots lie above a line, where any do."""
    above = {w.limit for w in points if w.of_peak > 1}
    memory = " Dots above the memory line find their data in the L2 cache." if "memory" in above else ""
    peak = " Dots above a peak run at a higher clock than its datasheet's." if "compute" in above else ""
    return memory + peak


def roofline_cells(w: RooflinePoint) -> tuple[str, ...]:
    """TFLOP/s, TB/s and the share of the limit."""
    rate = f"{w.flops / w.seconds / TERA:.4g}" if w.flops else "-"
    return rate, f"{w.moved / w.seconds / TERA:.3g}", peak_share(w.of_peak, w.limit)


def _work_table(work: Sequence[RooflinePoint]) -> DataTable:
    """The costliest ops with what they compute and move."""
    columns = ("op", "phase", "calls", "time", "FLOPs", "bytes", "FLOPs/byte", "TFLOP/s", "TB/s", "of the limit")
    rows = [
        (
            shorten(f"{w.name.removeprefix('aten::')} {w.shapes}", 70), w.phase, str(w.calls), seconds(w.seconds),
            amount(w.flops), size(w.moved), f"{w.flops / w.moved:.4g}" if w.flops and w.moved else "-",
            *roofline_cells(w),
        )
        for w in work[:COSTLY]
    ]  # fmt: skip
    return data_table("Costliest ops", columns, rows, text=2)
