"""Which nodes of an execution trace are ops of a step, and which of these launch kernels.

A trace has every call of PyTorch's dispatcher inside the call that made it: `aten::linear` holds `aten::addmm`, which
does the work. A Graph has the innermost ops and those outer ones with kernels of their own, as a capture has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from presage.errors import InputError
from presage.graph.graph import Phase, Thread, aten
from presage.traces.execution_graph import ExecutionGraph, ExecutionNode, TensorRef, tensors
from presage.traces.execution_trace import BACKWARD
from presage.traces.traced_groups import COMMS, awaited, collective_name
from presage.traces.traced_memory import TracedMemory

DEEPEST = 200  # calls inside calls
TRITON = "triton_"
UNNAMED = "_input"  # arguments in schemas that presage writes for ops without one
FRAMES = ("autograd::", "torch::autograd::", "[pytorch|", "## ")
EXTENSION = "torch::autograd::CppNode<"  # the backward of an extension's autograd function in C++
# Ops that launch nothing, by name; views and ops on the host alone are known by their arguments.
HOST_OPS = frozenset(
    aten(
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ set_ lift "
        "lift_fresh detach detach_ as_strided_ squeeze_ unsqueeze_ t_ transpose_ alias result_type requires_grad_ "
        "retain_grad is_nonzero item _indices _values indices values _nnz is_coalesced _coalesced_ sparse_dim "
        "dense_dim _sparse_coo_tensor_with_dims_and_tensors record_stream is_pinned"
    )
) | {"detach", "detach_"}
READS = frozenset({"aten::_local_scalar_dense"})  # the host waits for the number
# Ops whose only work is to fill memory. Others that call them have their own kernel besides.
FILLS = frozenset(
    aten(
        "fill_ zero_ zeros zeros_like new_zeros full full_like new_full ones ones_like new_ones scalar_tensor eye "
        "masked_fill"
    )
)


@dataclass(frozen=True, slots=True)
class TracedOp:
    """A node that is an op of the step. `position` is its place in the trace's nodes."""

    position: int
    node: ExecutionNode
    kernels: bool
    sync: bool
    within: tuple[str, ...]
    phase: Phase
    thread: Thread
    sequence: int
    # of kernels that the trace has no op for: the tensors that they alone can have computed, with their memory
    made: tuple[tuple[TensorRef, int], ...] = ()
    kernel: str = ""  # their name, where a compiler gave it one


@dataclass(frozen=True, slots=True)
class OpSchema:
    """What the schema of an op says: overload, names of the inputs, and which of them it changes."""

    overload: str = ""
    names: tuple[str, ...] = ()
    writes: tuple[bool, ...] = ()


@lru_cache(maxsize=1 << 12)
def parse_schema(text: str) -> OpSchema:
    """Parse `aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)`; empty if it fails."""
    head, opening, rest = text.partition("(")
    inside, arrow, _ = rest.rpartition(") -> ")
    if not opening or not arrow:
        return OpSchema()
    names, writes = [], []
    for part in re.split(r",\s*(?![^(\[]*[)\]])", inside):
        kind, _, name = part.partition("=")[0].rpartition(" ")
        if kind:
            names.append(name)
            writes.append("!" in kind)
    named = not any(name.startswith(UNNAMED) for name in names)
    return OpSchema(head.partition(".")[2], tuple(names) if named else (), tuple(writes))


def is_op(node: ExecutionNode) -> bool:
    """Whether a node is a call of an op and not a frame around some (of autograd, of the user, a thread)."""
    if node.name == COMMS:
        return bool(collective_name(node)) or awaited(node) >= 0
    if node.kind not in ("op", "collective") or node.name.startswith(FRAMES):
        return False
    return ("::" in node.name and not node.name.startswith("c10d::")) or node.name in HOST_OPS


def written(node: ExecutionNode) -> list[TensorRef]:
    """The tensors among a node's inputs that its schema says it changes."""
    flags = parse_schema(node.op_schema).writes
    if not flags:
        return list(tensors(node.inputs[:1])) if node.outputs and node.name.endswith("_") else []
    return [t for given, changed in zip(node.inputs, flags, strict=False) if changed for t in tensors((given,))]


def on_host(node: ExecutionNode) -> bool:
    """Whether no tensor of the op is on a GPU."""
    return not any(t.device.startswith("cuda") for t in (*tensors(node.inputs), *tensors(node.outputs)))


def launches_nothing(node: ExecutionNode) -> bool:
    """Whether an op that calls no other is a view, allocates memory, or is the host's alone."""
    if node.name in HOST_OPS or node.name in READS or on_host(node):
        return True
    if node.name == "aten::copy_" and node.inputs[:1] == node.inputs[1:2]:
        return True  # onto itself
    if changed := written(node):
        return not any(t.elements for t in changed)
    outputs = list(tensors(node.outputs))
    if not any(t.elements for t in outputs):
        return True
    return {t.storage for t in outputs} <= {t.storage for t in tensors(node.inputs)}


def hides_kernels(node: ExecutionNode, compiled: str) -> bool:
    """Whether a frame in which memory is made and not filled stands for kernels that no op of the trace shows: those of
    an extension's autograd function, or of a compiler."""
    if node.kind == "op" and node.name.startswith(EXTENSION):
        return any(True for _ in tensors(node.inputs))
    if node.kind != "op" or "::" in node.name or node.name.startswith(FRAMES) or node.name.startswith(TRITON):
        return False
    return bool(compiled) or any(True for _ in tensors(node.inputs))


class _Nest:
    """Per node, bottom up: whether it launches kernels itself, what launches below it, and what that wrote."""

    def __init__(self, graph: ExecutionGraph, memory: TracedMemory) -> None:
        self.nodes, self.memory = graph.nodes, memory
        place = {node.id: i for i, node in enumerate(graph.nodes)}
        self.parent = [place[n.parent] if n.parent is not None else -1 for n in graph.nodes]
        count = len(graph.nodes)
        self.kernels, self.op, self.calls = [False] * count, [False] * count, [False] * count
        self.below, self.fills = [False] * count, [False] * count  # ops with kernels below: others, and fills
        self.wrote: list[set[int]] = [set() for _ in range(count)]  # memory that ops below compute
        self.filled: list[set[int]] = [set() for _ in range(count)]  # memory that they fill
        self.made: list[dict[int, TensorRef]] = [{} for _ in range(count)]  # memory allocated below that none computes
        self.compiled = [""] * count  # a kernel of a compiler below
        self.talks = [False] * count  # a collective below: it fills memory too
        for i in range(count - 1, -1, -1):
            self._settle(i)

    def _settle(self, i: int) -> None:
        node, parent = self.nodes[i], self.parent[i]
        self.op[i] = is_op(node) and not node.on_gpu
        if self.op[i]:
            self.kernels[i] = self._launches(i)
        if node.name in HOST_OPS and not self.made[i] and node.name.startswith("aten::"):
            fresh = self.memory.returned[i]
            begun = {t: fresh[t.storage] for t in tensors(node.outputs) if t.elements and not on_host(node)}
            self.made[i] = {life: t for t, life in begun.items() if self.memory.lives[life].begin == i}
        done = self.wrote[i] | self.filled[i]
        self.made[i] = {} if self.kernels[i] else {life: t for life, t in self.made[i].items() if life not in done}
        if self.made[i] and not self.talks[i] and hides_kernels(node, self.compiled[i]):
            self.op[i] = self.kernels[i] = True
        if parent >= 0 and self.nodes[parent].kind not in ("thread", "process"):
            self._tell(i, parent)

    def _tell(self, i: int, parent: int) -> None:
        """What a node's caller has to know of it."""
        node = self.nodes[i]
        hidden = self.op[i] and not is_op(node)
        self.talks[parent] |= self.talks[i] or node.name == COMMS
        self.compiled[parent] = node.name if node.name.startswith(TRITON) else self.compiled[parent] or self.compiled[i]
        if not hidden:
            self.made[parent] |= self.made[i]
        self.calls[parent] |= self.op[i] or self.calls[i]
        if self.kernels[i] and node.name in FILLS:
            self.fills[parent] = True
            self.filled[parent] |= self._results(i)
        elif self.kernels[i]:
            self.below[parent] = True
            self.wrote[parent] |= set(self.made[i]) if hidden else self._results(i)
        self.below[parent] |= self.below[i]
        self.fills[parent] |= self.fills[i]
        self.filled[parent] |= self.filled[i]
        self.wrote[parent] |= self.wrote[i]

    def _launches(self, i: int) -> bool:
        node = self.nodes[i]
        if node.name == COMMS or "kernels" in node.attrs:  # a trace that presage wrote says it
            return bool(node.attrs.get("kernels", awaited(node) < 0))
        if launches_nothing(node):
            return False
        if self.below[i]:
            return not self._results(i) <= self.wrote[i]
        return not (self.fills[i] and node.name in FILLS)

    def _results(self, i: int) -> set[int]:
        """The lives of the memory that a node computes."""
        node, read, returned = self.nodes[i], self.memory.read[i], self.memory.returned[i]
        out = {returned[t.storage] for t in tensors(node.outputs) if t.elements}
        return out | {read[t.storage] for t in written(node) if t.elements}


def traced_ops(graph: ExecutionGraph, memory: TracedMemory) -> Iterator[TracedOp]:
    """The ops of a trace in the order they began."""
    nest = _Nest(graph, memory)
    around: list[tuple[tuple[str, ...], Phase, int, bool]] = []  # by position: frames, phase, sequence, inside a kernel
    backward_thread = _autograd_thread(graph)
    for i, node in enumerate(graph.nodes):
        within, phase, sequence, hidden = around[nest.parent[i]] if nest.parent[i] >= 0 else ((), "forward", -1, False)
        phase, sequence = _phase(node, phase), sequence if node.sequence is None else node.sequence
        frame = node.kind == "op"
        if len(within) > DEEPEST:
            raise InputError(graph.path, f"calls are nested more than {DEEPEST} deep", f"node {node.id}")
        alone = nest.kernels[i] and not (nest.below[i] or nest.fills[i])
        around.append(((*within, node.name) if frame else within, phase, sequence, hidden or alone))
        if hidden or not nest.op[i] or (nest.calls[i] and not nest.kernels[i]) or node.attrs.get("hidden"):
            continue
        made = () if is_op(node) else tuple((t, life) for life, t in nest.made[i].items())
        thread: Thread = "autograd" if node.thread == backward_thread and phase == "backward" else "main"
        sync = node.name in READS or _copies_to_host(node) or bool(node.attrs.get("sync"))
        kernel = nest.compiled[i] if made else ""
        yield TracedOp(i, node, nest.kernels[i], sync, within, phase, thread, sequence, made, kernel)


def _phase(node: ExecutionNode, around: Phase) -> Phase:
    if node.name.startswith(BACKWARD):
        return "backward"
    if node.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        return "optimizer"
    return around


def _autograd_thread(graph: ExecutionGraph) -> int | None:
    """The thread of the backward pass, where it is not that of the forward pass."""
    return next((n.thread for n in graph.nodes if n.name.startswith(BACKWARD)), None)


def _copies_to_host(node: ExecutionNode) -> bool:
    """A copy from the GPU to pageable memory: the host waits."""
    if node.name != "aten::copy_" or len(node.inputs) < 2:
        return False
    target, source = (next(tensors((a,)), None) for a in node.inputs[:2])
    if target is None or source is None:
        return False
    return target.device == "cpu" and source.device.startswith("cuda") and node.inputs[2:3] != (True,)
