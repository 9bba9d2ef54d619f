"""Edits of a graph: what one might change about a training step, each a pure function Graph -> Graph.

    from presage.graph.edits import cuda_graph, fused_adam
    faster = cuda_graph(fused_adam(graph))

An edit that has nothing to work on raises `NotApplicable`. `EDITS` lists them by name, with the rule each applies; an
edit with a value (`checkpoint=blocks`) is made by a function (`checkpoint("blocks")`).
"""

from __future__ import annotations

from presage.graph.edits.edit import Change, Edit, NotApplicable
from presage.graph.edits import replay
from presage.graph.edits.replay import cuda_graph

__all__ = ["EDITS", "Change", "Edit", "NotApplicable", "cuda_graph"]

EDITS: dict[str, Edit] = {edit.name: edit for module in (replay,) for edit in module.EDITS}
