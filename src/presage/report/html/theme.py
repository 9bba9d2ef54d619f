"""How charts look: two templates, light and dark, and colours that keep their meaning from page to page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e45756", "#d6a72c", "#9d755d", "#e88fa0", "#7f8fa6",
)  # fmt: skip
ACCENT, GOOD, BAD, MUTED = "#4c78a8", "#3f9a5a", "#d9534f", "#9aa3ad"

# What has one colour wherever it appears: in reports of steps, jobs, plans and runs, and on the page of `presage ui`.
# Other names take the palette's colours in their order.
_COLOURS = {
    "#4c78a8": "GEMM|matrix multiply|compute|fused",
    "#f58518": "attention",
    "#72b7b2": "memory-bound kernels|elementwise",
    "#b0739e": "normalisation",
    "#9d755d": "reduction",
    "#a5a04a": "copy and cast",
    "#e88fa0": "softmax and loss|logits and loss",
    "#c98bdb": "embedding|index",
    "#2f9e8f": "convolution|recurrent",
    "#7f6bb3": "optimizer|optimizer state",
    "#54a24b": "TP communication",
    "#9bcb5b": "CP communication",
    "#1b7f5c": "EP communication",
    "#d6a72c": "PP communication",
    "#e45756": "DP communication|communication|collective|gradients and parameters between replicas",
    "#f2a0a0": "FSDP communication",
    "#c3c9d0": "pipeline bubble|idle|waiting for other ranks|waiting for ranks|waiting for the GPU",
    "#9aa3ad": "host|idle, waiting for the host",
    "#8c6d8c": "stragglers and jitter",
    "#6aa6e8": "forward",
    "#1f4e8c": "backward",
    "#a9c8f0": "weight gradients",
    "#3d7f7a": "weights|parameters",
    "#b5566b": "gradients",
    "#e8b04a": "activations",
    "#b58b4c": "working memory of a layer|workspace",
    "#8f8f96": "buffers",
    "#cbb8dd": "inputs",
    "#5f6873": "CUDA context and NCCL",
    "#6f7780": "p50",
    "#d81b60": "p95",
    "#8a0f4a": "p99",
    "#7f8fa6": "before|measured",
    "#3b6ea5": "after|replayed",
    "#3f9a5a": "with the edits|useful steps",
}
MEANINGS = {name: colour for colour, names in _COLOURS.items() for name in names.split("|")}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own where it has a meaning, else the next of the palette that is free."""
    names = list(dict.fromkeys(names))
    known = {n: MEANINGS[key] for n in names if (key := n.removesuffix(" (exposed)")) in MEANINGS}
    free = [c for c in PALETTE if c not in known.values()] or list(PALETTE)
    others = [n for n in names if n not in known]
    return {n: known.get(n) or free[others.index(n) % len(free)] for n in names}


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
