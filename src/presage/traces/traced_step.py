"""One rank's execution trace on its way to a Graph. What a trace does not hold is assumed, and listed in the Graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from presage.costs.lookups.captured import SORT_AND_UPDATE
from presage.errors import InputError
from presage.graph.builder import GraphBuilder, Lifetime, new_op, row_major_strides
from presage.graph.families import family
from presage.graph.graph import DTYPE_BYTES, HOST_MEMORY, Assumption, Graph, Op, OpCost, Ref, Role
from presage.graph.work import WAIT
from presage.traces.execution_graph import Argument, ExecutionGraph, TensorRef, tensors
from presage.traces.profiled_step import TF32, recorded_of
from presage.traces.traced_groups import COMMS, awaited, collectives, exchanged, peer_of
from presage.traces.traced_memory import TracedMemory, itemsize
from presage.traces.traced_ops import TRITON, TracedOp, parse_schema, traced_ops, written

LOOKUP = "embedding_codegen_lookup"  # FBGEMM's ops for many tables at once
LOOKUP_BACKWARD = "torch::autograd::CppNode<SplitLookup"
STEP, UPDATE = "ProfilerStep#", "Optimizer.step#"
ASSUMED = {
    "allow_tf32": "whether GEMMs in float32 use TF32",
    "cudnn.allow_tf32": "whether convolutions in float32 use TF32",
    "indices": "the distribution of index values",
}
LOOKS_UP = frozenset({"embedding", "index"})  # families whose time follows from the values of an index


def step_window(trace: ExecutionGraph) -> tuple[int, int]:
    """Where the step lies among the nodes: the last `ProfilerStep` with an update, else between two updates."""
    begins = [i for i, n in enumerate(trace.nodes) if n.name.startswith(STEP)]
    updates = [i for i, n in enumerate(trace.nodes) if n.name.startswith(UPDATE)]
    end = len(trace.nodes)
    if begins:
        windows = list(zip(begins, [*begins[1:], end], strict=True))
        whole = [w for w in windows if any(w[0] <= u < w[1] for u in updates)]
        return (whole or windows)[-1]
    if len(updates) < 2:
        return 0, end
    return _after(trace, updates[-2]), _after(trace, updates[-1])


def _after(trace: ExecutionGraph, place: int) -> int:
    """The place of the first node that is not inside this one."""
    inside = {trace.nodes[place].id}
    for i in range(place + 1, len(trace.nodes)):
        if trace.nodes[i].parent not in inside:
            return i
        inside.add(trace.nodes[i].id)
    return len(trace.nodes)


@dataclass
class _Assumptions:
    """Settings and values that decide how long ops take and that the trace does not hold."""

    flags: Mapping[str, bool | str]
    given: frozenset[str]
    known: Collection[str]
    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, name: str, inputs: Sequence[TensorRef]) -> tuple[int, ...]:
        """Those that an op hangs on."""
        kind = family(name)
        about = TF32.get(kind) if any(t.dtype == "float32" for t in inputs) else None
        if kind in LOOKS_UP and any(t.dtype in ("int64", "int32") for t in inputs):
            about = "indices"
        if about is None or about in self.known:
            return ()
        return (self.numbers.setdefault(about, len(self.numbers)),)

    def listed(self) -> tuple[Assumption, ...]:
        return tuple(
            Assumption(name, ASSUMED[name], str(self.flags.get(name, "uniform")).lower(), True, name in self.given)
            for name in self.numbers
        )


class TracedStep:
    """The step that a trace recorded, to be made a Graph once its place among the ranks is known."""

    def __init__(
        self,
        trace: ExecutionGraph,
        flags: Mapping[str, bool | str],
        given: frozenset[str],
        known: Collection[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        """`given`: settings that the user gave; `known`: those that the trace tells."""
        self.trace, self.flags, self.notes = trace, flags, tuple(notes)
        self.memory = TracedMemory(trace)
        self.first, last = step_window(trace)
        self.collectives = {i: c for i, c in collectives(trace).items() if self.first <= i < last}
        self.numbered = {c.number: i for i, c in self.collectives.items() if c.number >= 0}
        self.ops = [
            op
            for op in traced_ops(trace, self.memory)
            if self.first <= op.position < last and (op.node.name != COMMS or self._meets(op) is not None)
        ]
        self._check()
        self.roles = self._roles()
        self.builder = GraphBuilder()
        self.assumptions = _Assumptions(flags, given, known)
        self._storages: dict[int, int] = {}  # by life
        self._host = -1  # the storage that stands for the host's memory
        self._tensors: dict[Any, int] = {}
        self._views: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # strides, where only views tell them
        self._strides = self._bytes = False  # assumed: strides of tensors, sizes of dtypes

    def _check(self) -> None:
        if self.trace.dropped_deps and not any(n.parent is not None for n in self.trace.nodes):
            problem = (
                "does not say which op calls which, so that work would count twice: convert it with a newer Chakra"
            )
            raise InputError(self.trace.path, problem)
        if any(op.kernels for op in self.ops):
            return
        if any(True for n in self.trace.nodes for _ in tensors(n.inputs)):
            raise InputError(self.trace.path, "has no op on a GPU: record the step on one")
        problem = "says nothing of the tensors of its ops: record it with torch.profiler.ExecutionTraceObserver"
        raise InputError(self.trace.path, problem)

    def _meets(self, op: TracedOp) -> int | None:
        """Where the collective is that an op is, or waits for."""
        return op.position if op.position in self.collectives else self.numbered.get(awaited(op.node))

    def graph(self, rank: int, world: int, alone: bool) -> Graph:
        """The Graph of a rank; where its trace is the only one, for all of them."""
        groups: dict[str, tuple[int, ...]] = {}
        for op in self.ops:
            name, ranks = self._group(op, rank, world)
            if name:
                groups[name] = ranks
            self.builder.append(self._op(op, name))
        self._earlier_gradients()
        if groups and alone and world > 1:
            self.builder.notes.append(f"the trace is of rank {rank}: the other {world - 1} are taken to do the same")
        self.builder.notes += self._notes()
        return self.builder.build(
            frees_first=True,
            source=Path(self.trace.path).name,
            flags=dict(self.flags),
            groups=groups,
            ranks=(tuple(range(world)) if alone else (rank,)) if groups else (),
            assumptions=self.assumptions.listed(),
            memory_known=self.trace.held is None,
        )

    def _notes(self) -> list[str]:
        out = list(self.notes or ("from a trace: memory is taken to be freed after its last use",))
        if self._strides:
            out.append("the trace has no strides: tensors are taken to be contiguous unless a view says otherwise")
        if self._bytes:
            out.append("dtypes that are not known are taken to have a byte an element")
        if self.trace.dropped_deps:
            out.append(f"the callers of {self.trace.dropped_deps:,} calls are missing in the trace")
        return out

    def _group(self, op: TracedOp, rank: int, world: int) -> tuple[str, tuple[int, ...]]:
        """The process group of a collective and the ranks in it; of a message, its two ends."""
        place = self._meets(op) if op.node.name == COMMS else None
        if place is None:
            return "", ()
        one = self.collectives[place]
        size = one.size or world
        first = 0 if size >= world else rank // size * size  # neighbours, where the trace does not say
        ranks = one.ranks or tuple(range(first, first + size))
        if one.kind not in ("c10d::send", "c10d::recv_"):
            return (one.group if len(ranks) < world else "world"), ranks
        here, there = ranks.index(rank) if rank in ranks else 0, peer_of(self.trace.nodes[place])
        pair = (here, there) if one.kind == "c10d::send" else (there, here)
        return f"{one.group} {pair[0]} to {pair[1]}", tuple(ranks[i] for i in pair if i < len(ranks))

    # ---- ops and tensors

    def _op(self, op: TracedOp, group: str) -> Op:
        node, read, returned = op.node, self.memory.read[op.position], self.memory.returned[op.position]
        if node.name == COMMS:
            return self._collective(op, group)
        schema = parse_schema(node.op_schema)
        inputs = tuple(self._argument(a, read) for a in node.inputs)
        changed = tuple(self._tensor(t, read) for t in written(node)) if op.kernels else ()
        self._note_strides(op)
        outputs = [self._tensor(t, {t.storage: life}) for t, life in op.made]
        outputs += [self._tensor(t, returned) for t in tensors(node.outputs)]
        return new_op(
            name=f"triton::{op.kernel.removeprefix(TRITON)}" if op.kernel else node.name,
            overload=schema.overload,
            inputs=inputs,
            outputs=tuple(outputs),
            phase=op.phase,
            thread=op.thread,
            within=op.within,
            names=schema.names[: len(inputs)] if len(schema.names) >= len(inputs) > 0 else (),
            writes=changed,
            kernels=op.kernels,
            sync=op.sync,
            stream=str(node.attrs.get("stream") or ""),
            module=str(node.attrs.get("module") or ""),
            sequence=op.sequence,
            opaque=bool(op.made) or bool(node.attrs.get("opaque")),
            recorded=recorded_of(node),
            cost=self._cost(op),
            assumed=self.assumptions.of(node.name, list(tensors(node.inputs))) if op.kernels else (),
        )

    def _cost(self, op: TracedOp) -> OpCost | None:
        """Bytes of a kernel whose inputs the trace does not name (it reads as much as it writes), and of a lookup in
        tables (the rows it reads, and the result)."""
        if isinstance(known := op.node.attrs.get("cost"), OpCost):
            return known
        if op.kernel and not any(True for _ in tensors(op.node.inputs)):
            return OpCost(bytes=2.0 * sum(t.elements * itemsize(t) for t, _ in op.made))
        if op.node.name.startswith(LOOKUP_BACKWARD):
            return OpCost(bytes=2.0 * sum(t.elements * itemsize(t) for t, _ in op.made), launches=SORT_AND_UPDATE)
        results = list(tensors(op.node.outputs))
        if LOOKUP not in op.node.name or not results:
            return None
        indices = [t.elements for t in tensors(op.node.inputs) if t.dtype in ("int64", "int32")]
        width = results[0].shape[-1] if results[0].shape else 1
        return OpCost(bytes=float((max(indices, default=1) * width + results[0].elements) * itemsize(results[0])))

    def _note_strides(self, op: TracedOp) -> None:
        """Keep the strides that views by `as_strided` say, for a trace that has none."""
        given = {t.id for t in tensors(op.node.inputs)}
        for t in tensors(op.node.outputs):
            if t.strides is not None or t.id in given:
                continue
            self._views.pop((t.id, t.shape), None)
            steps = op.node.inputs[2] if op.node.name == "aten::as_strided" and len(op.node.inputs) > 2 else None
            if isinstance(steps, tuple) and len(steps) == len(t.shape) and all(type(n) is int for n in steps):
                self._views[t.id, t.shape] = steps  # type: ignore[assignment]

    def _collective(self, op: TracedOp, group: str) -> Op:
        place = self._meets(op)
        assert place is not None
        into, sent = exchanged(self.trace.nodes[place])
        lives = {**self.memory.returned[place], **self.memory.read[place]}
        written_to, others = ([self._tensor(t, lives) for t in some] for some in (into, sent))
        if place != op.position:
            tensors_of = [Ref(t) for t in (*written_to, *others)]
            return new_op(WAIT, [tensors_of], phase=op.phase, thread=op.thread, kernels=False, group=group)
        return new_op(
            name=self.collectives[place].kind,
            inputs=tuple([Ref(t) for t in some] for some in (written_to, others) if some),
            phase=op.phase,
            thread=op.thread,
            within=tuple(name for name in op.within if not name.startswith("c10d::")),
            writes=tuple(written_to),
            recorded=recorded_of(op.node),
            group=group,
            stream=group,
            issued="",
        )

    def _argument(self, value: Argument, lives: Mapping[int, int]) -> Any:
        if isinstance(value, TensorRef):
            return Ref(self._tensor(value, lives))
        return [self._argument(v, lives) for v in value] if isinstance(value, tuple) else value

    def _tensor(self, t: TensorRef, lives: Mapping[int, int]) -> int:
        storage = self._storage(t, lives[t.storage])
        self._bytes |= t.dtype not in DTYPE_BYTES
        self._strides |= t.strides is None
        dtype = t.dtype if t.dtype in DTYPE_BYTES else "uint8"
        strides = self._views.get((t.id, t.shape)) if t.strides is None else t.strides
        strides = row_major_strides(t.shape) if strides is None else strides
        key = storage, t.shape, strides, dtype, t.offset
        if key not in self._tensors:
            self._tensors[key] = self.builder.add_tensor(storage, t.shape, dtype, t.offset, strides)
        return self._tensors[key]

    # ---- memory

    def _storage(self, t: TensorRef, life: int) -> int:
        if t.device == "cpu":
            if self._host < 0:
                self._host = self.builder.add_storage(0, "input", HOST_MEMORY, lifetime="always")
            return self._host
        if life not in self._storages:
            role, before = self.roles[life], self._before(life)
            lifetime: Lifetime = "always" if before else "kept" if role == "gradient" else "while used"
            self._storages[life] = self.builder.add_storage(self.memory.lives[life].nbytes, role, lifetime=lifetime)
        return self._storages[life]

    def _before(self, life: int) -> bool:
        """Whether memory was there before the step."""
        if self.trace.held is not None:
            return self.roles[life] == "parameter"
        return self.memory.lives[life].begin < self.first

    def _earlier_gradients(self) -> None:
        """Gradients of the step before are there until this one drops them, before its first op."""
        for life in [*self._storages]:
            if self.roles[life] == "gradient" and not self._before(life):
                self.builder.add_storage(self.memory.lives[life].nbytes, "gradient", lifetime="dropped")

    def _roles(self) -> list[Role]:
        """What each piece of memory is for, from who uses it: the optimizer, the model, or both."""
        updates, model, changed = set[int](), set[int](), set[int]()
        if self.trace.held is not None:
            held = {r[s] for r in self.memory.read for s in self.trace.held & r.keys()}
            return ["parameter" if life in held else "activation" for life in range(len(self.memory.lives))]
        for op in self.ops:
            read = self.memory.read[op.position]
            (updates if op.phase == "optimizer" else model).update(read.values())
            (updates if op.phase == "optimizer" else model).update(self.memory.returned[op.position].values())
            if op.kernels and op.phase == "forward":
                changed.update(read[t.storage] for t in written(op.node))
        return [self._role(life, updates, model, changed) for life in range(len(self.memory.lives))]

    def _role(self, life: int, updates: set[int], model: set[int], changed: set[int]) -> Role:
        if life in updates and life in model:
            return "parameter" if self._before(life) else "gradient"
        if not self._before(life):
            return "activation"
        return "optimizer" if life in updates else "buffer" if life in changed else "input"
