"""CUDA graphs: stretches of a step that the host starts with one call each."""

from __future__ import annotations

from msgspec.structs import replace

from presage.graph.graph import Graph, Op
from presage.whatif.edits.edit import NotApplicable, plain
from presage.whatif.edits.optimizer import capturable

__all__ = ["EDITS", "cuda_graph"]

LEAST = 2  # kernels that a graph is worth making for


def cuda_graph(graph: Graph) -> Graph:
    """The step as CUDA graphs: one, or one for each stretch between the places where the host waits for the GPU.

    Adam becomes capturable for it, which without its fused form is more work for the GPU.
    """
    graph = capturable(graph)
    stretches = [s for s in _stretches(graph.ops) if sum(graph.ops[i].kernels for i in s) >= LEAST]
    if not stretches:
        raise NotApplicable("no stretch of the step launches two kernels without waiting for the GPU between them")
    names = {i: f"graph {k}" for k, stretch in enumerate(stretches, 1) for i in stretch}
    ops = tuple(replace(op, replayed=names[i]) if i in names else op for i, op in enumerate(graph.ops))
    return replace(graph, ops=ops)


def _stretches(ops: tuple[Op, ...]) -> list[list[int]]:
    """Ops between those that cannot be in a graph: those that wait, and those of an unknown kind."""
    found: list[list[int]] = [[]]
    for i, op in enumerate(ops):
        if op.sync or op.opaque:
            found.append([])
        else:
            found[-1].append(i)
    return found


EDITS = (
    plain(
        "cuda_graph",
        "Each stretch of the step without a wait for the GPU becomes one CUDA graph: the host makes one call for it, "
        "and its kernels follow each other with a shorter gap. Adam becomes capturable. Code that runs otherwise while "
        "a graph is made of it (attention masks of transformers) is captured that way. Shapes must not change.",
        cuda_graph,
    ),
)
