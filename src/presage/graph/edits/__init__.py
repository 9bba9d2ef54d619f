"""Edits of a graph: what one might change about a training step, each a pure function Graph -> Graph.

    from presage.graph.edits import cuda_graph, fused_adam
    faster = cuda_graph(fused_adam(graph))

An edit that has nothing to work on raises `NotApplicable`. `EDITS` lists them by name, with the rule each applies; an
edit with a value (`checkpoint=blocks`) is made by a function (`checkpoint("blocks")`).
"""

from __future__ import annotations

from presage.graph.edits.accumulate import EDITS as ACCUMULATE
from presage.graph.edits.accumulate import accumulate
from presage.graph.edits.attention import EDITS as ATTENTION
from presage.graph.edits.attention import fused_attention
from presage.graph.edits.autocast import EDITS as AUTOCAST
from presage.graph.edits.autocast import autocast
from presage.graph.edits.chains import EDITS as CHAINS
from presage.graph.edits.chains import fused_chains
from presage.graph.edits.checkpoint import EDITS as CHECKPOINT
from presage.graph.edits.checkpoint import checkpoint
from presage.graph.edits.compile import EDITS as COMPILE
from presage.graph.edits.compile import compiled
from presage.graph.edits.edit import Change, Edit, NotApplicable
from presage.graph.edits.fp8 import EDITS as FP8
from presage.graph.edits.fp8 import fp8
from presage.graph.edits.layout import EDITS as LAYOUT
from presage.graph.edits.layout import channels_last
from presage.graph.edits.optimizer import EDITS as OPTIMIZER
from presage.graph.edits.optimizer import foreach_adam, fused_adam
from presage.graph.edits.overlap import EDITS as OVERLAP
from presage.graph.edits.overlap import overlap
from presage.graph.edits.precision import EDITS as PRECISION
from presage.graph.edits.precision import bf16, tf32
from presage.graph.edits.replay import EDITS as REPLAY
from presage.graph.edits.replay import cuda_graph
from presage.graph.edits.speed import EDITS as SPEED
from presage.graph.edits.speed import faster
from presage.graph.edits.sync import EDITS as SYNC
from presage.graph.edits.sync import no_sync
from presage.graph.edits.tables import EDITS as TABLES
from presage.graph.edits.tables import table_batched

__all__ = [
    "EDITS",
    "Change",
    "Edit",
    "NotApplicable",
    "accumulate",
    "autocast",
    "bf16",
    "channels_last",
    "checkpoint",
    "compiled",
    "cuda_graph",
    "faster",
    "foreach_adam",
    "fp8",
    "fused_adam",
    "fused_attention",
    "fused_chains",
    "no_sync",
    "overlap",
    "table_batched",
    "tf32",
]

EDITS: dict[str, Edit] = {
    edit.name: edit
    for module in (
        REPLAY, OPTIMIZER, TABLES, CHECKPOINT, ACCUMULATE, SYNC, SPEED, OVERLAP, COMPILE, CHAINS, PRECISION, AUTOCAST,
        ATTENTION, LAYOUT, FP8,
    )
    for edit in module
}  # fmt: skip
