"""Host time around collectives: the calls themselves, and what DDP and FSDP2 do in hooks of their own.

A collective costs its thread about 70 us, whatever its kind, size and GPU: 79 to 106 us in the profiled traces of seven
machines, of which the profiler's own 11 to 14 events are about 20. The hooks are Python and C++ code of the framework,
measured on the H200's host with PyTorch 2.11 (`workloads/ranks.py`, `data/h200_ranks`): by annotation in the trace,
then all by one factor so that the unprofiled step is met. They go with the host's pace as all host time does.
"""

from __future__ import annotations

from presage.graph.arguments import references
from presage.graph.collective import collective
from presage.graph.graph import Op

__all__ = ["COLLECTIVE_US", "HOOKS_US", "hook_us"]

COLLECTIVE_US = 70.0

# A framework's own work: microseconds each time, and for each tensor it is about. The names are those of annotations
# that the frameworks put into traces, or made alike.
HOOKS_US = {
    "DDP::forward": (120.0, 0.0),
    "DDP::gradient": (3.0, 0.0),
    "DDP::bucket": (35.0, 0.0),
    "FSDP::all_gather": (500.0, 0.0),
    "FSDP::all_gather_copy_out": (330.0, 25.0),
    "FSDP::post_backward_reduce": (800.0, 0.0),
    "FSDP::reshard": (90.0, 0.0),
    "FSDP::update": (0.0, 32.0),
}


def hook_us(op: Op) -> float | None:
    """Microseconds of the host that an op takes for what it is, where it is one of these."""
    if collective(op):
        return COLLECTIVE_US
    if op.name not in HOOKS_US:
        return None
    once, each = HOOKS_US[op.name]
    return once + each * sum(1 for _ in references(op.inputs))
