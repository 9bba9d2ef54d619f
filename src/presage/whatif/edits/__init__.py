"""Edits of a graph: what one might change about a training step, each a pure function Graph -> Graph.

    from presage.whatif.edits import cuda_graph, fused_adam
    faster = cuda_graph(fused_adam(graph))

An edit that has nothing to work on raises `NotApplicable`. `EDITS` lists them by name, with the rule each applies; an
edit with a value (`checkpoint=blocks`) is made by a function (`checkpoint("blocks")`).
"""

from __future__ import annotations

from presage.whatif.edits.accumulate import EDITS as ACCUMULATE
from presage.whatif.edits.accumulate import accumulate
from presage.whatif.edits.attention import EDITS as ATTENTION
from presage.whatif.edits.attention import fused_attention
from presage.whatif.edits.autocast import EDITS as AUTOCAST
from presage.whatif.edits.autocast import autocast
from presage.whatif.edits.chains import EDITS as CHAINS
from presage.whatif.edits.chains import fused_chains
from presage.whatif.edits.checkpoint import EDITS as CHECKPOINT
from presage.whatif.edits.checkpoint import checkpoint
from presage.whatif.edits.compile import EDITS as COMPILE
from presage.whatif.edits.compile import compiled
from presage.whatif.edits.edit import Change, Edit, NotApplicable
from presage.whatif.edits.fp8 import EDITS as FP8
from presage.whatif.edits.fp8 import fp8
from presage.whatif.edits.layout import EDITS as LAYOUT
from presage.whatif.edits.layout import channels_last
from presage.whatif.edits.optimizer import EDITS as OPTIMIZER
from presage.whatif.edits.optimizer import foreach_adam, fused_adam
from presage.whatif.edits.overlap import EDITS as OVERLAP
from presage.whatif.edits.overlap import overlap
from presage.whatif.edits.precision import EDITS as PRECISION
from presage.whatif.edits.precision import bf16, tf32
from presage.whatif.edits.replay import EDITS as REPLAY
from presage.whatif.edits.replay import cuda_graph
from presage.whatif.edits.speed import EDITS as SPEED
from presage.whatif.edits.speed import faster
from presage.whatif.edits.sync import EDITS as SYNC
from presage.whatif.edits.sync import no_sync
from presage.whatif.edits.tables import EDITS as TABLES
from presage.whatif.edits.tables import table_batched

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
