"""Edits: what one might change about a training step, or about a trace of it.

    from presage.edits import cuda_graph, fused_adam
    faster = cuda_graph(fused_adam(graph))

An edit of a step is a function Graph -> Graph; some capture the step again with the change made around its code, for
which the graph must know its source. One that has nothing to change raises `NotApplicable`. `EDITS` lists them by name
with the rule each applies; an edit with a value (`checkpoint=blocks`) is made by a function (`checkpoint("blocks")`).
Edits of a trace's replay (`scale`, `remove`, `drop_rank_delay`) make functions Replay -> Replay.
"""

from __future__ import annotations

from presage.capture.variants import NotApplicable
from presage.whatif.edits import captured, chains, scheduling, tables
from presage.whatif.edits import fp8 as low_precision
from presage.whatif.edits.captured import (
    accumulate,
    autocast,
    bf16,
    channels_last,
    checkpoint,
    foreach_adam,
    fused_adam,
    fused_attention,
    tf32,
)  # fmt: skip
from presage.whatif.edits.chains import compiled, fused_chains
from presage.whatif.edits.edit import CaptureEdit, Change, Edit, EditKind
from presage.whatif.edits.fp8 import fp8
from presage.whatif.edits.scheduling import cuda_graph, faster, no_sync, overlap
from presage.whatif.edits.tables import table_batched
from presage.whatif.replay_edits import (
    TARGETS,
    drop_rank_delay,
    edited,
    parse_remove,
    parse_scale,
    remove,
    scale,
)  # fmt: skip

__all__ = [
    "EDITS", "TARGETS", "CaptureEdit", "Change", "Edit", "EditKind", "NotApplicable", "accumulate", "autocast", "bf16",
    "channels_last", "checkpoint", "compiled", "cuda_graph", "drop_rank_delay", "edited", "faster", "foreach_adam",
    "fp8", "fused_adam", "fused_attention", "fused_chains", "no_sync", "overlap", "parse_remove", "parse_scale",
    "remove", "scale", "table_batched", "tf32",
]  # fmt: skip

EDITS: dict[str, EditKind[Edit]] = {
    kind.name: kind
    for kind in (
        *scheduling.EDITS, *captured.EDITS, *tables.EDITS, *chains.EDITS, *low_precision.EDITS,
    )
}  # fmt: skip
