"""How charts look: two templates, light and dark, and colours that keep their meaning from page to page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e45756", "#d6a72c", "#9d755d", "#e88fa0", "#7f8fa6",
)  # fmt: skip
ACCENT, GOOD, BAD, MUTED = "#4c78a8", "#3f9a5a", "#d9534f", "#9aa3ad"

# Words that have one colour wherever they appear; others take the palette's in their order.
MEANINGS = {
    "matrix multiply": "#4c78a8", "GEMM": "#4c78a8", "compute": "#4c78a8",
    "attention": "#f58518", "convolution": "#54a24b", "embedding": "#54a24b",
    "elementwise": "#72b7b2", "memory-bound kernels": "#72b7b2", "copy and cast": "#d6a72c",
    "normalisation": "#b279a2", "reduction": "#9d755d", "optimizer": "#7f6bb3",
    "softmax and loss": "#e88fa0", "collective": "#e45756", "communication": "#e45756",
    "idle": "#c3c9d0", "pipeline bubble": "#c3c9d0", "idle, waiting for the host": "#9aa3ad", "host": "#9aa3ad",
    "waiting for other ranks": "#c3c9d0", "waiting for the GPU": "#c3c9d0",
}  # fmt: skip


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own where it has a meaning, else the next of the palette that is free."""
    names = list(dict.fromkeys(names))
    taken = {MEANINGS[n] for n in names if n in MEANINGS}
    free = [c for c in PALETTE if c not in taken] or list(PALETTE)
    others = [n for n in names if n not in MEANINGS]
    return {n: MEANINGS.get(n) or free[others.index(n) % len(free)] for n in names}


def template(text: str, grid: str, line: str, hover: str) -> dict[str, Any]:
    axis = {
        "gridcolor": grid, "linecolor": line, "zerolinecolor": line, "tickcolor": line, "automargin": True,
        "title": {"font": {"size": 12}, "standoff": 8}, "ticks": "outside", "ticklen": 4,
    }  # fmt: skip
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": text},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(PALETTE),
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "font": {"size": 11}},
            "margin": {"l": 10, "r": 16, "t": 36, "b": 44},
            "hoverlabel": {"bgcolor": hover, "bordercolor": line, "font": {"family": FONT, "color": text, "size": 12}},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": line, "activecolor": ACCENT},
            "annotationdefaults": {"font": {"color": text, "size": 11}, "arrowcolor": line},
            "shapedefaults": {"line": {"color": line}},
        }
    }


LIGHT = template("#24292f", "#e8ebef", "#b8c0c8", "#ffffff")
DARK = template("#d7dde3", "#2b323a", "#57606a", "#1c2128")
