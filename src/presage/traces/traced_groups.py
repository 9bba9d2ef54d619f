"""Collectives and process groups in an execution trace.

PyTorch records each collective in a node `record_param_comms`, whose arguments are the tensors, a number, the process
group, the rank in it (or the root), the collective's name, two lists of split sizes, and since 2024 the first rank of
the group, the stride of its ranks and its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from presage.traces.execution_graph import Argument, ExecutionGraph, ExecutionNode, TensorRef, tensors

COMMS = "record_param_comms"
KINDS = {  # the op that stands for it in a Graph
    "allreduce": "c10d::allreduce_", "all_reduce": "c10d::allreduce_", "allreduce_coalesced": "c10d::allreduce_",
    "barrier": "c10d::allreduce_", "broadcast": "c10d::broadcast_", "reduce": "c10d::broadcast_",
    "scatter": "c10d::broadcast_", "_broadcast_oop": "c10d::broadcast_", "_reduce_oop": "c10d::broadcast_",
    "allgather": "c10d::_allgather_base_", "all_gather": "c10d::_allgather_base_",
    "_allgather_base": "c10d::_allgather_base_", "all_gather_into_tensor_coalesced": "c10d::_allgather_base_",
    "gather": "c10d::_allgather_base_", "reduce_scatter": "c10d::_reduce_scatter_base_",
    "_reduce_scatter_base": "c10d::_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "c10d::_reduce_scatter_base_", "all_to_all": "c10d::alltoall_base_",
    "all_to_allv": "c10d::alltoall_base_", "alltoall_base": "c10d::alltoall_base_", "send": "c10d::send",
    "recv": "c10d::recv_",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """One collective as a rank saw it."""

    kind: str
    group: str
    ranks: tuple[int, ...]  # of the group; empty where the trace does not say
    size: int  # of the group; 0 where the trace does not say
    number: int = -1  # by which a wait names it


def collective_name(node: ExecutionNode) -> str:
    """The name of the collective that a node records; empty for one of a wait or a set-up."""
    name = next((a for a in node.inputs if isinstance(a, str)), "") if node.name == COMMS else ""
    return name if name in KINDS else ""


def awaited(node: ExecutionNode) -> int:
    """The number of the collective that a node records the wait for; -1 for another node."""
    if node.name != COMMS or "wait" not in node.inputs[:4]:
        return -1
    return _number(node.inputs[0])


def _number(value: Argument) -> int:
    first = value[0] if isinstance(value, tuple) and value else value
    return first if type(first) is int else -1


def collective_of(node: ExecutionNode) -> TracedCollective:
    """What a node of a collective says."""
    name = collective_name(node)
    place = next(i for i, a in enumerate(node.inputs) if a == name)
    group, rest = node.inputs[place - 2], [a for a in node.inputs[place + 3 :] if type(a) is int]
    splits = max((len(a) for a in node.inputs[place + 1 : place + 3] if isinstance(a, tuple)), default=0)
    label = " ".join(str(part) for part in group if part != "undefined") if isinstance(group, tuple) else str(group)
    first, stride, size = rest if len(rest) == 3 else (-1, 1, rest[0] if rest else splits)
    ranks = tuple(range(first, first + stride * size, stride)) if first >= 0 and stride > 0 and size > 0 else ()
    if said := re.fullmatch(r"\d+( \d+)*", str(node.attrs.get("ranks", ""))):
        ranks = tuple(map(int, said[0].split()))
    return TracedCollective(KINDS[name], label, ranks, max(size, 0), _number(node.inputs[place - 3]))


def collectives(trace: ExecutionGraph) -> dict[int, TracedCollective]:
    """The collectives of a trace by the place of their nodes; those of one rank alone are none."""
    found = {i: collective_of(n) for i, n in enumerate(trace.nodes) if collective_name(n)}
    return {i: c for i, c in found.items() if c.size != 1}


def world_size(found: Iterable[TracedCollective]) -> int:
    """How many ranks there are, as far as the groups tell: 1 where they do not."""
    return max((max((c.size, *(r + 1 for r in c.ranks))) for c in found), default=1)


def exchanged(node: ExecutionNode) -> tuple[list[TensorRef], list[TensorRef]]:
    """The tensors that a collective receives into, and those it sends besides."""
    given, made = list(tensors(node.inputs)), list(tensors(node.outputs))
    if collective_name(node) == "send":
        return [], given
    into = made or given
    held = {(t.storage, t.offset) for t in into}
    return into, [t for t in given if (t.storage, t.offset) not in held]


def peer_of(node: ExecutionNode) -> int:
    """The other end of a message, as a rank of the group."""
    place = node.inputs.index(collective_name(node))
    rank = node.inputs[place - 1]
    return rank if type(rank) is int and rank >= 0 else 0
