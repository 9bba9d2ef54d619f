"""Host time besides a machine's fitted terms: collectives, hooks of frameworks, compiled code, CUDA graphs.

The numbers and where they are from: `data/host_constants.toml`.
"""

from __future__ import annotations

from collections.abc import Sequence

from presage.files.reading import shipped_toml
from presage.graph.graph import Op, references
from presage.graph.work import collective

_FILE = shipped_toml("host_constants.toml")  # microseconds
COLLECTIVE_US: float = _FILE["collective"]["call_us"]
# Work of a framework in a hook: for each call, and for each tensor of it. An op within such a hook is part of it.
HOOKS_US: dict[str, tuple[float, float]] = {k: (h["call_us"], h["tensor_us"]) for k, h in _FILE["hooks"].items()}
COMPILED_KERNEL, COMPILED_CALL, COMPILED_GRAPH = "compiled kernel", "compiled call", "compiled graph"
LATER_GRAPH, FUSED_GRAPH = "later compiled graph", "compiled graph of fused kernels"
COMPILED_US: dict[str, float] = _FILE["compiled"]
CUDA_GRAPH_US: dict[str, float] = _FILE["cuda_graph"]
LAYER: dict[str, float] = _FILE["layer"]
LOADER: dict[str, float] = _FILE["loader"]
TAKING: dict[str, list[float]] = _FILE["taking"]


def hook_us(op: Op) -> float | None:
    """Microseconds of host time of a collective or of a framework's hook; None for other ops."""
    if collective(op):
        return COLLECTIVE_US
    name = op.within[0] if op.within else op.name
    if name not in HOOKS_US:
        return None
    once, each = HOOKS_US[name]
    return once + (each * sum(1 for _ in references(op.inputs)) if each else 0.0)


def compiled_graph(ops: Sequence[Op], first: bool) -> str:
    """The host term of a call of compiled code, of these ops."""
    if all(op.name.startswith("triton::") for op in ops if op.kernels):
        return FUSED_GRAPH
    return COMPILED_GRAPH if first else LATER_GRAPH


def is_compiled(op: Op) -> bool:
    """Whether an op runs in compiled code."""
    return bool(op.within) and op.within[-1].startswith("CompiledFunction")
