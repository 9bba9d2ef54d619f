"""A Graph: one step of one rank as it would run on a GPU, with no times in it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Literal, TypeAlias

import msgspec

__all__ = [
    "DTYPE_BYTES",
    "HOST_MEMORY",
    "Arg",
    "Event",
    "Graph",
    "Op",
    "Phase",
    "Ref",
    "Role",
    "Storage",
    "Tensor",
    "Thread",
]

Phase: TypeAlias = Literal["forward", "backward", "optimizer", "other"]
Thread: TypeAlias = Literal["main", "autograd"]
Role: TypeAlias = Literal["parameter", "gradient", "optimizer", "buffer", "input", "activation", "workspace"]

HOST_MEMORY = "host memory"  # the name of the storage that stands for all of it: copies from and to it use PCIe

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
    replayed: str = ""  # the CUDA graph it is part of: the host starts the whole graph with one call
    speed: float = 1.0  # its kernels are so many times as fast as they are known to be


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
    variant: dict[str, bool | int | str] = {}  # changes made around the code while it was captured (capture.Variant)

    def inputs_of(self, op: Op) -> list[Tensor]:
        """The tensors among an op's inputs, lists flattened, in order."""
        return [self.tensors[i] for i in _refs(op.inputs)]

    def outputs_of(self, op: Op) -> list[Tensor]:
        return [self.tensors[i] for i in op.outputs]


def _refs(arguments: Iterable[Any]) -> list[int]:
    out: list[int] = []
    for a in arguments:
        if isinstance(a, Ref):
            out.append(a.id)
        elif isinstance(a, list):
            out += _refs(a)
    return out
