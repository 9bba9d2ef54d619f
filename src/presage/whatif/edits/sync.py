"""Waits of the host for the GPU, taken out."""

from __future__ import annotations

import re

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.edit import replace_ops
from presage.graph.graph import Graph, Op
from presage.whatif.edits.edit import Change, NotApplicable, valued

__all__ = ["EDITS", "no_sync"]

# Ops that do nothing else than to wait, or to bring over one number for the host to look at.
ONLY_WAITS = ("cuda::synchronize", "aten::_local_scalar_dense")


def no_sync(pattern: str = "") -> Change:
    """No more waits in the ops whose name or line matches; in all where nothing is said."""
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise PresageError(f"{pattern!r} is not a regular expression: {e}") from e

    def change(graph: Graph) -> Graph:
        waits = [i for i, op in enumerate(graph.ops) if op.sync]
        found = [i for i in waits if wanted.search(graph.ops[i].name) or wanted.search(graph.ops[i].line)]
        if not found:
            others = ", ".join(dict.fromkeys(_told(graph.ops[i]) for i in waits[:3]))
            raise NotApplicable(
                f"no wait for the GPU at {pattern}: choose from {others}" if waits else "no wait for the GPU"
            )
        return replace_ops(graph, {i: _free(graph.ops[i]) for i in found})

    return change


def _told(op: Op) -> str:
    return f"{op.name} ({op.line})" if op.line else op.name


def _free(op: Op) -> list[Op]:
    return [] if op.name in ONLY_WAITS else [replace(op, sync=False)]


EDITS = (
    valued(
        "no_sync",
        "The host no longer waits for the GPU at .item(), .cpu(), nonzero or synchronize (all, or where the op or the "
        "line matches): copies go on without it, a number is not read at all. The host must not need the result.",
        "REGEX",
        no_sync,
        tried=("",),
        needed=False,
    ),
)
