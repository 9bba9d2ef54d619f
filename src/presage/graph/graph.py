"""A Graph: one step of one rank as it would run on a GPU, with no times in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, Literal, TypeAlias

import msgspec

from presage.errors import PresageError

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "other"]
Thread: TypeAlias = Literal["main", "autograd"]
Role: TypeAlias = Literal["parameter", "gradient", "optimizer", "buffer", "input", "activation", "workspace"]

MOST_BYTES = 1 << 50  # of a step's memory, far above any GPU's: sums of it stay below what 64 bits hold
TOO_LARGE = "is larger than 1 PiB, as no step is"
# The names of the storages that stand for all memory of the host: copies from and to it use PCIe.
HOST_MEMORY, PINNED_MEMORY = "host memory", "pinned host memory"
ON_HOST = frozenset({HOST_MEMORY, PINNED_MEMORY})
STAGED = 2 << 20  # bytes of pageable memory that a copy to the GPU takes over at once; of more it waits for the GPU

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor as an op saw it. Views share a storage; `id` is the tensor's place in `Graph.tensors`."""

    id: int
    storage: int  # place in Graph.storages
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0  # elements from the storage's start

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major with no holes (size-1 and empty dimensions do not matter)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return self.elements == 0
            expected *= size
        return True


class Ref(msgspec.Struct, frozen=True, gc=False, tag="t", tag_field="k"):
    """A tensor argument, by its place in `Graph.tensors`."""

    id: int


# A scalar, a tensor, or lists of them two deep: what op schemas have.
Single: TypeAlias = Ref | bool | int | float | str | None
Arg: TypeAlias = Single | list[Single | list[Single]]


UNNAMED = "a profiler's trace does not tell inputs and gradients apart: give an execution trace or the code"


class OpCost(msgspec.Struct, frozen=True, gc=False):
    """What an op is said to cost: FLOPs and bytes moved, or seconds; in so many kernels."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    launches: int = 1


class Op(msgspec.Struct, frozen=True):
    """One op that reaches the GPU (or only the host, where `kernels` is False), under the name a CUDA run would show.

    `within` are the ops around it, outermost first, as the profiler would nest them (`aten::linear`, or
    `autograd::engine::evaluate_function: AddmmBackward0`, `AddmmBackward0`, ...).
    """

    name: str  # 'aten::addmm'
    overload: str
    inputs: tuple[Arg, ...]
    outputs: tuple[int, ...]
    phase: Phase
    thread: Thread
    module: str = ""  # 'blocks.3.attn.qkv': where its forward (or the forward it is the backward of) ran
    within: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # names of the inputs, in order, where the op's schema has them
    writes: tuple[int, ...] = ()  # tensors among its inputs that it changes in place
    kernels: bool = True  # whether it launches anything on the GPU; views and bookkeeping do not
    sync: bool = False  # the host waits for the GPU here (.item(), .cpu(), nonzero)
    opaque: bool = False  # known only by its inputs and outputs (a custom op without a fake implementation)
    sequence: int = -1  # autograd's number: a backward op has its forward op's
    line: str = ""  # 'model.py:41', the user's line, where known
    stream: str = ""  # where its kernels run; '' is the stream of all that is not told otherwise
    group: str = ""  # of a collective, the dimension of ranks that take part: 'dp', 'tp'
    issued: str | None = None  # of a collective, the stream that called it: it comes after that one's kernels before it
    replayed: str = ""  # the CUDA graph it is part of: the host starts the whole graph with one call
    speed: float = 1.0  # its kernels are so many times as fast as they are known to be
    compiled: str = ""  # the call of a compiled function that it is part of: 'inductor#2', 'inductor, CUDA graphs#1'
    cost: OpCost | None = None  # of a custom kernel, as its author or its arguments say
    assumed: tuple[int, ...] = ()  # the graph's assumptions that decided whether it runs, or on how much
    recorded: OpCost | None = None  # seconds and launches of its kernels in the profiler's trace it is from


class Storage(msgspec.Struct, frozen=True, gc=False):
    """A piece of GPU memory."""

    id: int
    nbytes: int
    role: Role
    name: str = ""  # the parameter's or buffer's name
    module: str = ""  # where it was made


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A storage is allocated or freed: before op number `op` runs (len(ops) for the end of the step)."""

    op: int
    storage: int
    allocates: bool


class Assumption(msgspec.Struct, frozen=True):
    """A number that the code read, and that follows from data which a capture does not have."""

    line: str  # 'train.py:41', the line that read it
    what: str  # 'a truth value', 'a number', 'the size of aten::nonzero', 'a tensor copied to the host'
    value: str  # what it was taken to be
    decides: bool  # the code branched on it, or steps with other values ran other ops
    given: bool = False  # the value is the user's


class Graph(msgspec.Struct, frozen=True):
    """One step. Storages without an allocation event were there before it; those never freed are there after it."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    source: str = ""  # 'train.py:build'
    arguments: dict[str, str] = {}
    flags: dict[str, bool | str] = {}  # 'allow_tf32', 'cudnn.allow_tf32', ...
    torch: str = ""
    notes: tuple[str, ...] = ()  # what could not be captured exactly
    # Of tensors that look something up, by id, where known: distinct values, and how often the most frequent one comes.
    facts: dict[int, tuple[int, int]] = {}
    # Of a script's data loader, on the host that captured it: 'batch_seconds', 'workers', 'batches' of a step.
    loading: dict[str, float] = {}
    assumptions: tuple[Assumption, ...] = ()  # what was read and is not known
    groups: dict[str, tuple[int, ...]] = {}  # of code that spreads itself over ranks: who is in the groups of its ops
    ranks: tuple[int, ...] = ()  # that run this step, where it is that of some ranks alone
    memory_known: bool = True  # not of a profiler's trace, which names no tensor
    variant: dict[str, bool | int | str] = {}  # changes made around the code while it was captured (capture.Variant)
    largest: float = 1.0  # work of the largest step over this one's, where steps differ at random

    def inputs_of(self, op: Op) -> list[Tensor]:
        """The tensors among an op's inputs, lists flattened, in order."""
        return [self.tensors[i] for i in references(op.inputs)]

    def outputs_of(self, op: Op) -> list[Tensor]:
        return [self.tensors[i] for i in op.outputs]


# ---- arguments of an op: by name where its schema has names, else by position


def aten(names: str) -> list[str]:
    """Full names of torch's own ops, from a line of short ones."""
    return [f"aten::{n}" for n in names.split()]


def argument(op: Op, name: str, place: int | None = None) -> Arg:
    """The argument called `name`, or the one at `place` where the op has no names; None where it is left out."""
    if op.names:
        place = op.names.index(name) if name in op.names else None
    return op.inputs[place] if place is not None and place < len(op.inputs) else None


def flag(op: Op, name: str, place: int | None = None) -> bool:
    return bool(argument(op, name, place))


def optional_tensor(graph: Graph, op: Op, place: int) -> Tensor | None:
    value = op.inputs[place] if place < len(op.inputs) else None
    return graph.tensors[value.id] if isinstance(value, Ref) else None


def references(values: Iterable[Any]) -> Iterator[int]:
    """Ids of the tensors among arguments, lists flattened, in order."""
    for value in values:
        if isinstance(value, Ref):
            yield value.id
        elif isinstance(value, list):
            yield from references(value)


def tensor(graph: Graph, op: Op, place: int) -> Tensor:
    """The tensor that has to be at this place of the op's inputs."""
    result = optional_tensor(graph, op, place)
    if result is None:
        raise PresageError(f"{op.name}: input {place} should be a tensor")
    return result


def tensors(graph: Graph, value: Arg) -> list[Tensor]:
    """The tensors in one argument: none, itself, or those of the list."""
    items = value if isinstance(value, list) else [value]
    return [graph.tensors[i.id] for i in items if isinstance(i, Ref)]


def output_mask(op: Op) -> tuple[bool, ...]:
    """Which gradients are asked for; all of them where the op does not say."""
    value = argument(op, "output_mask", len(op.inputs) - 1)
    return tuple(bool(v) for v in value) if isinstance(value, list) and len(value) >= 3 else (True, True, True)


# ---- validity


def check(graph: Graph) -> Graph:
    """The graph itself if it is valid, else an error that names the first field that is not."""
    for field, problem in faults(graph):
        raise PresageError(f"graph {graph.source or '(no source)'}: {field}: {problem}")
    return graph


def faults(graph: Graph) -> Iterator[tuple[str, str]]:
    """What is wrong, as (field, problem). None of it: the graph is valid, which means

    - tensors and storages stand at the place their id says, and everything an op or tensor refers to is there;
    - sizes are not negative and below a pebibyte, a tensor has a stride per dimension (or none if it is sparse) and a
      dtype of known size;
    - what an op writes in place is among its inputs;
    - facts are about tensors that are there, of whose values at least one is distinct and comes at least once;
    - events are in program order; a storage is allocated at most once, freed at most once, and not before that;
    - no op uses a storage before it is allocated, or after it is freed.

    Lifetimes are looked at only where all references hold.
    """
    broken = False
    for fault in (*_places(graph), *_references(graph), *_event_references(graph), *_facts(graph)):
        broken = True
        yield fault
    if not broken:
        yield from _lifetimes(graph)


def _places(graph: Graph) -> Iterator[tuple[str, str]]:
    for i, t in enumerate(graph.tensors):
        problem = _tensor_fault(graph, i, t)
        if problem:
            yield f"tensors[{i}]", problem
    for i, s in enumerate(graph.storages):
        if s.id != i:
            yield f"storages[{i}].id", f"is {s.id}, and should be its place"
        if s.nbytes < 0:
            yield f"storages[{i}].nbytes", "is negative"
    if sum(s.nbytes for s in graph.storages) > MOST_BYTES:
        yield "storages", TOO_LARGE


def _tensor_fault(graph: Graph, place: int, t: Tensor) -> str:
    if t.id != place:
        return f"has id {t.id}, which should be its place"
    if not 0 <= t.storage < len(graph.storages):
        return f"names storage {t.storage} of {len(graph.storages)}"
    if t.dtype not in DTYPE_BYTES:
        return f"has the unknown dtype {t.dtype!r}"
    if len(t.shape) != len(t.strides) and t.strides:
        return f"has {len(t.shape)} dimensions and {len(t.strides)} strides"
    if min(numbers := (*t.shape, *t.strides, t.offset)) < 0:
        return "has a negative size, stride or offset"
    return TOO_LARGE if max(*numbers, t.nbytes) > MOST_BYTES else ""


def _references(graph: Graph) -> Iterator[tuple[str, str]]:
    known = len(graph.tensors)
    for i, op in enumerate(graph.ops):
        inputs = set(references(op.inputs))
        for field, ids in (("inputs", inputs), ("outputs", op.outputs), ("writes", op.writes)):
            if any(not 0 <= n < known for n in ids):
                yield f"ops[{i}].{field}", f"names a tensor that is not there ({op.name}; there are {known})"
        if not inputs.issuperset(op.writes):
            yield f"ops[{i}].writes", f"names a tensor that is not among the inputs of {op.name}"
        if op.names and len(op.names) != len(op.inputs):
            yield f"ops[{i}].names", f"has {len(op.names)} names for the {len(op.inputs)} inputs of {op.name}"


def _event_references(graph: Graph) -> Iterator[tuple[str, str]]:
    before = 0
    for i, e in enumerate(graph.events):
        if not 0 <= e.storage < len(graph.storages):
            yield f"events[{i}].storage", f"names storage {e.storage} of {len(graph.storages)}"
        if not 0 <= e.op <= len(graph.ops):
            yield f"events[{i}].op", f"names op {e.op} of {len(graph.ops)}"
        elif e.op < before:
            yield f"events[{i}].op", f"is {e.op}, before the event ahead of it ({before})"
        before = max(before, e.op)


def _facts(graph: Graph) -> Iterator[tuple[str, str]]:
    for i, (distinct, most) in graph.facts.items():
        if not 0 <= i < len(graph.tensors):
            yield f"facts[{i}]", f"names a tensor that is not there (there are {len(graph.tensors)})"
        elif distinct < 1 or most < 1:
            yield f"facts[{i}]", f"says that {distinct} values are distinct and one comes {most} times"


def uses(graph: Graph, op: Op) -> set[int]:
    """The storages an op touches."""
    ids = [*references(op.inputs), *op.outputs]
    return {graph.tensors[i].storage for i in ids}


def _lifetimes(graph: Graph) -> Iterator[tuple[str, str]]:
    allocated: dict[int, int] = {}
    freed: dict[int, int] = {}
    for i, e in enumerate(graph.events):
        if e.storage in freed:
            yield f"events[{i}]", f"storage {e.storage} was freed before"
        elif e.allocates and e.storage in allocated:
            yield f"events[{i}]", f"storage {e.storage} was allocated before"
        (allocated if e.allocates else freed).setdefault(e.storage, e.op)
    for i, op in enumerate(graph.ops):
        for storage in sorted(uses(graph, op)):
            if i < allocated.get(storage, 0):
                yield f"ops[{i}]", f"{op.name} uses storage {storage} before it is allocated (op {allocated[storage]})"
            if i >= freed.get(storage, len(graph.ops)):
                yield f"ops[{i}]", f"{op.name} uses storage {storage} after it is freed (op {freed[storage]})"
