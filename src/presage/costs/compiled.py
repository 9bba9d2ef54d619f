"""What compiled code costs the host: a call of a compiled graph, each kernel it launches, each op it calls as it is.

From the steps compile/decoder, encoder and unet of `workloads/edited.py` (`data/h200_edits`, PyTorch 2.11), which wait
for their hosts: three numbers from three steps, each taken relative to its uncompiled twin of the same run, as hosts
differ in pace. Compiled steps measured later are no part of it.
"""

from __future__ import annotations

from presage.graph.graph import Op

__all__ = ["CALL", "COMPILED_US", "GRAPH", "KERNEL", "compiled"]

KERNEL, CALL, GRAPH = "compiled kernel", "compiled call", "compiled graph"
COMPILED_US = {
    KERNEL: 16.0,  # a kernel of its own, from generated Python
    CALL: 12.0,  # an op as it is, beyond what the op takes
    GRAPH: 850.0,  # forward or backward: guards, arguments, saved tensors
}


def compiled(op: Op) -> bool:
    """Whether an op runs in compiled code."""
    return bool(op.within) and op.within[-1].startswith("CompiledFunction")
