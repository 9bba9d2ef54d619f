"""Charts of points and areas: Pareto fronts, rooflines, memory over a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.prediction.breakdown import RooflinePoint
from presage.report.html.charts.bars import AxisUnit, label, time_unit
from presage.report.html.theme import ACCENT, BAD, GOOD, MUTED, PALETTE, colours
from presage.report.terms import family_name, peak_share
from presage.text import seconds, size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# ---- plans as points, time against memory: the front that none beats in both, the chosen one as a star


GIB = 1024.0**3
PLANS_SHOWN = 3_000
NEAR_FRONT = 1.15  # times the front's time: plans within it are all shown as far as there is room
SLOWEST = 2.0  # times the fastest: what is slower is out of view until one zooms out
WIDEST = 1.12  # times the GPU's memory, likewise


@dataclass(frozen=True)
class PlanPoint:
    """A plan: its name, seconds per step, bytes per GPU."""

    name: str
    seconds: float
    needed: float


def pareto_figure(
    plans: Sequence[PlanPoint],
    front: Sequence[PlanPoint],
    capacity: float,
    chosen: PlanPoint,
    own: PlanPoint | None = None,
    too_large: Sequence[PlanPoint] = (),
    what: str = "step time",
    most: int = PLANS_SHOWN,
) -> Figure:
    """`capacity` in bytes; `what` names the y axis; `own` is the job's own plan; `too_large` are faster plans that do
    not fit."""
    from plotly.graph_objects import Figure

    unit, figure = time_unit(chosen.seconds), Figure()
    kept = [plans[i] for i in thin_plans([p.seconds for p in plans], [p.needed for p in plans], most)]
    _plan_dots(figure, kept, "plans that fit", unit, {"size": 5, "color": ACCENT, "opacity": 0.45})
    grey = {"size": 8, "color": MUTED, "symbol": "x-thin-open", "line": {"width": 2, "color": MUTED}}
    _plan_dots(figure, too_large, "faster, but does not fit", unit, grey)
    _front(figure, front, unit)
    _plan_dots(
        figure, [own] if own else [], "the job's own plan", unit, {"size": 13, "color": PALETTE[1], "symbol": "diamond"}
    )
    star = {"size": 18, "color": GOOD, "symbol": "star", "line": {"width": 1, "color": "white"}}
    _plan_dots(figure, [chosen], "the best plan", unit, star)
    figure.add_vline(x=capacity / GIB, line={"color": BAD, "width": 1.4, "dash": "dash"})
    figure.add_annotation(
        x=capacity / GIB, y=0.5, yref="paper", text="GPU memory", showarrow=False, xanchor="left", textangle=90
    )
    least = min(p.needed for p in (*kept, *front, chosen))
    sides = [0.9 * least / GIB, max(WIDEST * capacity, 1.05 * (own.needed if own else 0.0)) / GIB]
    figure.update_xaxes(title_text="memory per GPU, GiB", zeroline=False, range=sides)
    figure.update_yaxes(
        title_text=f"{what}, {unit.name}", zeroline=False, range=_time_range(kept, too_large, own, chosen, unit)
    )
    return figure.update_layout(height=400, hovermode="closest")


def thin_plans(seconds: Sequence[float], needed: Sequence[float], most: int) -> list[int]:
    """The numbers of at most `most` plans: those near the front, and evenly many of the rest."""
    if len(seconds) <= most:
        return list(range(len(seconds)))
    far = _front_distance(np.asarray(seconds, float), np.asarray(needed, float))
    order = np.argsort(far, kind="stable")
    near = int((far <= NEAR_FRONT).sum())
    first = min(near, most * 2 // 3)
    rest = order[first:]
    return sorted([*order[:first].tolist(), *rest[np.linspace(0, len(rest) - 1, most - first).astype(int)].tolist()])


def _front_distance(seconds: NDArray[np.float64], needed: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times as long as the fastest that needs no more memory."""
    order = np.lexsort((seconds, needed))
    out = np.empty(len(order))
    out[order] = seconds[order] / np.minimum.accumulate(seconds[order])
    return out


def _time_range(
    plans: Sequence[PlanPoint], others: Sequence[PlanPoint], own: PlanPoint | None, chosen: PlanPoint, unit: AxisUnit
) -> list[float]:
    """The range of times shown: from the fastest to what is not much slower."""
    times = [p.seconds for p in (*plans, *others, *([own] if own else []), chosen)]
    low = min(times)
    high = max(min(max(times), SLOWEST * low), own.seconds if own and own.seconds < 2 * SLOWEST * low else 0.0)
    around = 0.06 * max(high - low, 0.01 * high)
    return [(low - around) / unit.size, (high + around) / unit.size]


def _plan_dots(
    figure: Figure, points: Sequence[PlanPoint], name: str, unit: AxisUnit, marker: dict[str, object]
) -> None:
    if not points:
        return
    figure.add_scatter(
        x=np.array([p.needed for p in points]) / GIB, y=np.array([p.seconds for p in points]) / unit.size,
        mode="markers", marker=marker, name=name, text=[_plan_text(p, unit) for p in points],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def _plan_text(p: PlanPoint, unit: AxisUnit) -> str:
    return f"<b>{label(p.name, 90)}</b><br>{unit.format(p.seconds)}, {size(p.needed)}"


def _front(figure: Figure, front: Sequence[PlanPoint], unit: AxisUnit) -> None:
    points = sorted(front, key=lambda p: p.needed)
    figure.add_scatter(
        x=np.array([p.needed for p in points]) / GIB, y=np.array([p.seconds for p in points]) / unit.size,
        mode="lines+markers", name="Pareto front", line={"color": PALETTE[2], "width": 2, "shape": "hv"},
        marker={"size": 7}, text=[_plan_text(p, unit) for p in points], hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


# ---- how near the GPU's limits ops run: FLOP/s against FLOPs a byte for those that multiply, bytes/s for all others


TERA = 1e12
OPS_SHOWN = 1_500  # kinds of ops: the costliest are shown
LARGEST = 34.0  # pixels: the dot of the op that takes longest


def roofline_figure(
    points: Sequence[RooflinePoint], bandwidth: float, peaks: Mapping[str, float], cache: float = 0.0
) -> Figure:
    """A dot a kind of op, its area the time all of them take. `peaks`: FLOP/s by type, of those that are run; `cache`:
    bytes of the L2, in which smaller ops may find their data."""
    from plotly.subplots import make_subplots

    points = points[:OPS_SHOWN]
    multiply = [p for p in points if p.flops and p.moved]
    others = [p for p in points if not p.flops and p.moved]
    rows = [x for x in (multiply, others) if x]
    many = len(rows) == 2
    figure = make_subplots(
        rows=max(len(rows), 1), cols=1, vertical_spacing=0.16, row_heights=[0.6, 0.4] if many else None
    )
    paint, most = colours(family_name(p.family) for p in points), max((p.seconds for p in points), default=1.0)
    if multiply:
        _roof(figure, multiply, bandwidth, peaks)
        _op_dots(figure, multiply, paint, most, 1, products=True)
        _axes(figure, 1, "FLOPs per byte moved", "TFLOP/s")
    if others:
        row, ends = len(rows), _log_range([p.moved / p.calls for p in others])
        _limit_line(figure, row, ends, [bandwidth] * 2, f"memory, {bandwidth / TERA:.3g} TB/s")
        _cache_shade(figure, row, ends[0], min(cache, ends[1]))
        _op_dots(figure, others, paint, most, row, products=False)
        _axes(figure, row, "bytes moved per op (ops without GEMM)", "")
        figure.update_xaxes(ticksuffix="B", exponentformat="SI", dtick=None, row=row, col=1)
        figure.update_yaxes(ticksuffix="B/s", exponentformat="SI", dtick=None, row=row, col=1)
    return figure.update_layout(
        height=520 if many else 330, hovermode="closest", legend={"traceorder": "normal", "itemsizing": "constant"}
    )


def _roof(figure: Figure, points: Sequence[RooflinePoint], bandwidth: float, peaks: Mapping[str, float]) -> None:
    low, high = _log_range([p.flops / p.moved for p in points])
    ridge = max(peaks.values(), default=1.0) / bandwidth
    low, high = min(low, ridge / 20), max(high, 4 * ridge)
    top = max(peaks.values(), default=bandwidth * high)
    _limit_line(
        figure, 1, [low, top / bandwidth], [low * bandwidth / TERA, top / TERA], f"memory, {bandwidth / TERA:.3g} TB/s"
    )
    for dtype, peak in peaks.items():
        _limit_line(figure, 1, [peak / bandwidth, high], [peak / TERA] * 2, f"{dtype}, {peak / TERA:.4g} TFLOP/s")


def _limit_line(figure: Figure, row: int, x: Sequence[float], y: Sequence[float], name: str) -> None:
    """A limit with its name: of the memory's at its left end, of a unit's at its right one, where dots are few."""
    memory = name.startswith("memory")
    figure.add_scatter(
        x=list(x), y=list(y), mode="lines+text", text=[name, ""] if memory else ["", name], textfont={"size": 11},
        textposition=["top right" if row > 1 or x[0] > 1e3 else "bottom right", "top left"] if memory else "top left",
        line={"color": MUTED if memory else BAD, "width": 1.6}, showlegend=False, hoverinfo="skip",
        row=row, col=1, name=name, cliponaxis=False,
    )  # fmt: skip


def _cache_shade(figure: Figure, row: int, low: float, cache: float) -> None:
    """Ops so small that the L2 may hold their data: above the memory's line they run from there."""
    if cache <= low:
        return
    figure.add_vrect(x0=low, x1=cache, fillcolor=MUTED, opacity=0.10, line_width=0, layer="below", row=row, col=1)
    figure.add_annotation(
        x=np.log10(cache), y=0.02, yref=f"y{row if row > 1 else ''} domain", text="fits in L2", showarrow=False,
        xref=f"x{row if row > 1 else ''}", xanchor="right", yanchor="bottom", opacity=0.8,
    )  # fmt: skip


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.5, max(values) * 1.5


def _op_dots(
    figure: Figure, points: Sequence[RooflinePoint], paint: Mapping[str, str], most: float, row: int, products: bool
) -> None:
    for family in dict.fromkeys(family_name(p.family) for p in points):
        own = [p for p in points if family_name(p.family) == family]
        x = [p.flops / p.moved if products else p.moved / p.calls for p in own]
        y = [p.flops / p.seconds / TERA if products else p.moved / p.seconds for p in own]
        figure.add_scatter(
            x=np.array(x), y=np.array(y), mode="markers", name=label(family, 30), legendgroup=family, row=row, col=1,
            showlegend=not any(t.legendgroup == family for t in figure.data), text=[_op_text(p) for p in own],
            hovertemplate="%{text}<extra></extra>",
            marker={
                "size": [p.seconds for p in own], "sizemode": "area", "sizeref": 2 * most / LARGEST**2, "sizemin": 3,
                "color": paint[family], "opacity": 0.8, "line": {"width": 0.6, "color": "rgba(255,255,255,0.6)"},
            },
        )  # fmt: skip


def _op_text(p: RooflinePoint) -> str:
    what = label(f"{p.name.removeprefix('aten::')} {p.shapes}", 76)
    rate = f"{p.flops / p.seconds / TERA:.4g} TFLOP/s" if p.flops else f"{p.moved / p.seconds / TERA:.3g} TB/s"
    calls = f"{p.calls} call{'s' if p.calls > 1 else ''}, {seconds(p.seconds)} together"
    near = f"{size(p.moved / p.calls)} each: {peak_share(p.of_peak, p.limit)} of the limit"
    return f"<b>{what}</b><br>{p.phase}, {calls}<br>{rate}, {near}"


def _axes(figure: Figure, row: int, x: str, y: str) -> None:
    figure.update_xaxes(type="log", title_text=x, dtick=1, row=row, col=1)
    figure.update_yaxes(type="log", title_text=y, dtick=1, row=row, col=1)


# ---- memory over a step, stacked by what it holds, with the peak marked


Bytes = NDArray[np.int64]
GIB = 1024.0**3
STEPS_SHOWN = 1_500  # ops: of more, the highest of each few
NEAR_PEAK = 2.5  # times the peak: a capacity above that would squash the rest


def memory_figure(
    allocated: Bytes,
    reserved: Bytes,
    kinds: Mapping[str, Bytes],
    capacity: float,
    phases: Sequence[tuple[str, int, int]] = (),
    ops: Sequence[str] = (),
) -> Figure:
    """Bytes at each op, in order; `kinds` add up to the allocated. `phases`: name, first op, the one after the last."""
    from plotly.graph_objects import Figure

    kept, figure = _highest(allocated), Figure()
    names = [label(ops[i], 60) if i < len(ops) else f"op {i}" for i in kept.tolist()]
    scale, unit = (GIB, "GiB") if allocated.max(initial=0) >= GIB / 4 else (1024.0**2, "MiB")
    _areas(figure, kept, {k: v / scale for k, v in kinds.items()} or {"allocated": allocated / scale}, names, unit)
    _memory_lines(figure, kept, reserved / scale, capacity / scale, unit, float(reserved.max(initial=0)) / scale)
    _peak(figure, allocated, scale)
    _shades(figure, phases)
    figure.update_xaxes(title_text="ops in order", zeroline=False, range=[0, max(len(allocated) - 1, 1)])
    above = 1.2 * float(max(allocated.max(initial=0), reserved.max(initial=0))) / scale  # room for the names of phases
    figure.update_yaxes(
        title_text=unit, rangemode="tozero", zeroline=False, autorangeoptions={"include": above} if above else None
    )
    return figure.update_layout(height=330, hovermode="x unified")


def _highest(allocated: Bytes) -> NDArray[np.int64]:
    """The op with most memory of each few neighbours; first and last are kept."""
    n = len(allocated)
    if n <= STEPS_SHOWN:
        return np.arange(n)
    edges = np.linspace(0, n, STEPS_SHOWN + 1).astype(np.int64)[:-1]
    best = [a + int(allocated[a:b].argmax()) for a, b in zip(edges, [*edges[1:], n], strict=True)]
    return np.unique([0, *best, n - 1])


def _areas(
    figure: Figure, kept: NDArray[np.int64], kinds: Mapping[str, NDArray[np.float64]], names: list[str], unit: str
) -> None:
    paint = colours(kinds)
    for i, (kind, held) in enumerate(kinds.items()):
        figure.add_scatter(
            x=kept, y=held[kept].astype(np.float32), name=label(kind, 30), stackgroup="held", mode="lines",
            line={"width": 0, "shape": "hv"}, fillcolor=paint[kind],
            text=names if i == 0 else None,
            hovertemplate=f"%{{y:.3~f}} {unit}" + ("<br><i>%{text}</i>" if i == 0 else ""),
        )  # fmt: skip


def _memory_lines(
    figure: Figure, kept: NDArray[np.int64], reserved: NDArray[np.float64], capacity: float, unit: str, peak: float
) -> None:
    figure.add_scatter(
        x=kept, y=reserved[kept].astype(np.float32), name="reserved", mode="lines",
        line={"width": 1.4, "dash": "dot", "color": MUTED, "shape": "hv"}, hovertemplate=f"%{{y:.3~f}} {unit}",
    )  # fmt: skip
    ends = [0, int(kept[-1])] if len(kept) else []
    figure.add_scatter(
        x=ends, y=[capacity] * len(ends), name="GPU memory", mode="lines", line={"width": 1.6, "color": BAD},
        hovertemplate=f"%{{y:.4~g}} {unit}", visible=True if capacity < NEAR_PEAK * peak else "legendonly",
    )  # fmt: skip


def _peak(figure: Figure, allocated: Bytes, scale: float) -> None:
    if not len(allocated):
        return
    at = int(allocated.argmax())
    figure.add_scatter(
        x=[at], y=[allocated[at] / scale], name="peak", mode="markers", hoverinfo="skip",
        marker={"size": 9, "color": ACCENT, "symbol": "diamond", "line": {"width": 1.5, "color": "white"}},
    )  # fmt: skip
    side = "left" if at < 0.6 * len(allocated) else "right"
    figure.add_annotation(
        x=at, y=allocated[at] / scale, text=f"<b>peak</b> {size(float(allocated[at]))}", showarrow=False,
        xanchor=side, xshift=8 if side == "left" else -8, yshift=12,
    )  # fmt: skip


def _shades(figure: Figure, phases: Sequence[tuple[str, int, int]]) -> None:
    """Every other phase on a shade, each with its name below the axis' upper end."""
    for i, (name, first, after) in enumerate(phases):
        if i % 2:
            figure.add_vrect(x0=first, x1=after, fillcolor=MUTED, opacity=0.10, line_width=0, layer="below")
        figure.add_annotation(
            x=(first + after) / 2, y=1, yref="paper", text=label(name, 20), showarrow=False, yanchor="top",
            font={"size": 11}, opacity=0.7,
        )  # fmt: skip
