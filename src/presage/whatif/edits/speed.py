"""Faster (or slower) kernels."""

from __future__ import annotations

import re
from difflib import get_close_matches

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.graph import Graph, Op
from presage.whatif.edits.blocks import around
from presage.whatif.edits.edit import Change, NotApplicable, valued

__all__ = ["EDITS", "faster"]


def faster(pattern: str, factor: float) -> Change:
    """Kernels `factor` times as fast, of the ops whose name, or the name of a module around them, matches."""
    if not 0 < factor < float("inf"):
        raise PresageError(
            f"kernels cannot be {factor:g} times as fast: give a factor above 0, as in faster=aten::mm:2"
        )
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise PresageError(f"{pattern!r} is not a regular expression: {e}") from e

    def change(graph: Graph) -> Graph:
        found = [op.kernels and any(wanted.fullmatch(name) for name in _names(op)) for op in graph.ops]
        if not any(found):
            raise NotApplicable(_close(graph, pattern))
        pairs = zip(graph.ops, found, strict=True)
        return replace(graph, ops=tuple(replace(op, speed=op.speed * factor) if yes else op for op, yes in pairs))

    return change


def _names(op: Op) -> list[str]:
    return [op.name, op.name.removeprefix("aten::"), *around(op.module)]


def _close(graph: Graph, pattern: str) -> str:
    known = list(dict.fromkeys(name for op in graph.ops if op.kernels for name in _names(op)))
    close = get_close_matches(pattern, known, 3, 0.5) or known[:3]
    return f"no op or module called {pattern}" + (f": choose from {', '.join(close)}" if close else "")


def _read(value: str) -> Change:
    pattern, _, factor = value.rpartition(":")
    try:
        return faster(pattern or value, float(factor))
    except ValueError as e:
        raise PresageError(f"faster={value} has no factor: write faster=OP:FACTOR, as in faster=aten::mm:2") from e


EDITS = (
    valued(
        "faster",
        "The kernels of the ops whose name, or the name of a module around them, matches are so many times as fast "
        "(below 1: slower). The host's time for them stays.",
        "OP:FACTOR",
        _read,
    ),
)
