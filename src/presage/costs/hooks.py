"""Host time around collectives: the calls themselves, and what DDP and FSDP2 do in hooks of their own.

A collective costs its thread about 70 us, whatever its kind, size and GPU: 79 to 106 us in the profiled traces of seven
machines, of which the profiler's own 11 to 14 events are about 20. The hooks are Python and C++ code of the framework,
measured on the H200's host with PyTorch 2.11 (`workloads/ranks.py`, `data/h200_ranks`) as differences between a step
with ranks and its twin without. They go with the host's pace as all host time does.

    stacks_2, stacks_20            8 blocks of 2 or 20 parameters: what a block costs, and what a parameter
    with and without reshard       of it, what a gather costs
    fused optimizer or a loop      what a tensor costs an optimizer's op when it is a part (a DTensor)

FBGEMM's table-batched embeddings: medians of the issue times of 351 groups of tables, on the same kind of host.
"""

from __future__ import annotations

from presage.graph.arguments import references
from presage.graph.collective import collective
from presage.graph.graph import Op

__all__ = ["COLLECTIVE_US", "HOOKS_US", "hook_us"]

COLLECTIVE_US = 70.0

# A framework's own work: microseconds each time, and for each tensor it is about. The names are those of annotations
# that the frameworks put into traces, or made alike; an op within one of them is part of it.
HOOKS_US = {
    "DDP::forward": (400.0, 0.0),
    "reducer::mul_out": (15.0, 0.0),
    "reducer::copy_bucket_to_grad": (2.6, 0.0),
    "FSDP::all_gather": (160.0, 5.0),
    "FSDP::all_gather_copy_out": (175.0, 10.0),
    "FSDP::post_backward_reduce": (1140.0, 20.0),
    "FSDP::reshard": (100.0, 0.0),
    "FSDP::cast": (250.0, 0.0),
    "FSDP::update": (0.0, 6.0),
    "TBE::forward": (520.0, 0.0),
    "TBE::backward": (840.0, 0.0),
}


def hook_us(op: Op) -> float | None:
    """Microseconds of the host that an op takes for what it is, where it is one of these."""
    if collective(op):
        return COLLECTIVE_US
    name = op.within[0] if op.within else op.name
    if name not in HOOKS_US:
        return None
    once, each = HOOKS_US[name]
    return once + (each * sum(1 for _ in references(op.inputs)) if each else 0.0)
