"""Plots as files (.svg, .png, .pdf), drawn with matplotlib, which is imported when needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.errors import PresageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS = (".svg", ".png", ".pdf")
COLORS = ("#2f6fb0", "#d1702f", "#4a9a5b", "#8a5fb0", "#b0413e", "#7a7a7a")
GRID = "#dddddd"


@dataclass(frozen=True)
class ErrorBar:
    """A change with its standard error; `color`: the number of its kind."""

    name: str
    value: float
    error: float = 0.0
    color: int = 0


@dataclass(frozen=True)
class BarPanel:
    """BarPanel of one panel, from 0 to the left and right."""

    title: str
    bars: tuple[ErrorBar, ...]


@dataclass(frozen=True)
class LinePanel:
    """A panel of values at the same places; `stacked`: parts of a whole, else lines."""

    title: str
    values: dict[str, tuple[float, ...]]
    stacked: bool = False
    from_zero: bool = False


def draw_bars(path: Path, title: str, panels: Sequence[BarPanel], kinds: Sequence[str] = ()) -> None:
    """A tornado: panels side by side, the longest bar on top; `kinds` name the colors."""
    figure = _figure(path, 5.6 * len(panels), 1.5 + 0.27 * max(len(p.bars) for p in panels))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _bars(axis, panel)
    for i, kind in enumerate(kinds):
        axes[0].barh([0], [0], color=COLORS[i % len(COLORS)], label=kind)
    if kinds:
        figure.legend(loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    _write(figure, path)


def _bars(axis: Any, panel: BarPanel) -> None:
    shown = list(reversed(panel.bars))
    at = range(len(shown))
    colors = [COLORS[b.color % len(COLORS)] for b in shown]
    axis.barh(at, [b.value for b in shown], color=colors, height=0.68, zorder=2)
    axis.errorbar([b.value for b in shown], at, xerr=[b.error for b in shown], fmt="none", ecolor="#333333", lw=1)
    axis.set_yticks(at, [b.name for b in shown], fontsize=9)
    for y, b in enumerate(shown):
        gap, side = (-4, "right") if b.value < 0 else (4, "left")
        end = b.value + (b.error if b.value >= 0 else -b.error)
        axis.annotate(
            f"{b.value:.2g}", (end, y), (gap, 0), textcoords="offset points", ha=side, va="center", fontsize=8
        )
    axis.axvline(0, color="#333333", lw=0.8, zorder=3)
    axis.margins(x=0.12, y=0.02)
    _dress(axis, panel.title, "x")


def draw_lines(path: Path, title: str, places: Sequence[str], label: str, panels: Sequence[LinePanel]) -> None:
    """Panels side by side over the same places, which `label` names."""
    figure = _figure(path, 4.4 * len(panels), 4.1)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        (_stack if panel.stacked else _lines)(axis, panel)
        axis.set_xticks(range(len(places)), places, fontsize=8, rotation=30 if _crowded(places) else 0)
        axis.set_xlabel(label, fontsize=9)
        _dress(axis, panel.title, "y")
    figure.suptitle(title, fontsize=11)
    _write(figure, path)


def _crowded(places: Sequence[str]) -> bool:
    return sum(map(len, places)) > 34


def _lines(axis: Any, panel: LinePanel) -> None:
    for i, (name, values) in enumerate(panel.values.items()):
        axis.plot(range(len(values)), values, "-o", color=COLORS[i % len(COLORS)], label=name, markersize=4.5)
    if panel.from_zero:
        axis.set_ylim(0, 1.15 * max(max(v) for v in panel.values.values()))
    axis.margins(x=0.08, y=0.15)
    if len(panel.values) > 1:
        axis.legend(frameon=False, fontsize=8)


def _stack(axis: Any, panel: LinePanel) -> None:
    """Parts on top of each other, the first at the bottom; room above for what they are called."""
    height = [0.0] * max(len(v) for v in panel.values.values())
    for i, (name, values) in enumerate(panel.values.items()):
        axis.bar(range(len(values)), values, 0.62, height, color=COLORS[i % len(COLORS)], label=name, zorder=2)
        height = [h + v for h, v in zip(height, values, strict=True)]
    many = len(panel.values) > 1
    axis.set_ylim(0, (1.28 if many else 1.05) * max(height) if max(height) > 0 else 1.0)
    if many:
        axis.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)


def _dress(axis: Any, title: str, along: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.grid(True, axis=along, color=GRID, linewidth=0.6, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def check_plottable(path: Path) -> None:
    """Raise, before any work, if no plot can be written there."""
    if path.suffix not in KINDS:
        raise PresageError(f"{path}: a plot's name should end in {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise PresageError("plots need matplotlib, which is not installed: pip install 'presage[plot]'") from e


def _figure(path: Path, width: float, height: float) -> Figure:
    check_plottable(path)
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "presage"  # the same data, the same file
    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: Figure, path: Path) -> None:
    from presage.files import write_whole

    out = BytesIO()
    when = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    figure.savefig(out, format=path.suffix[1:], metadata={when: None} if when else None, dpi=110)
    write_whole(path, out.getvalue())
