"""A Trace: what the profiler saw on one rank, as columns. Times are integer nanoseconds since the trace's origin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The device of streams that are threads of the host, which carry the collectives of ranks without a GPU.
HOST_DEVICE = -1

Ints = NDArray[np.int64]
Small = NDArray[np.int32]


class HostKind(IntEnum):
    OP = 0  # an operator of the framework
    ANNOTATION = 1  # a named region of the user's or the framework's
    CALL = 2  # a call into the GPU's runtime or driver


class GpuKind(IntEnum):
    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


@dataclass(frozen=True)
class TraceThread:
    pid: str
    tid: str
    name: str = ""


@dataclass(frozen=True)
class TraceStream:
    device: int
    stream: int


@dataclass(frozen=True)
class Collective:
    """What a kernel of a collective says of itself, where the trace has it."""

    name: str
    in_elements: int
    out_elements: int
    dtype: str
    group: str
    group_size: int
    ranks: str


@dataclass(frozen=True)
class Sync:
    """A wait the GPU's own records state: what waited (a stream, or the host), for which stream or recorded event."""

    kind: str
    correlation: int
    stream: int | None
    wait_on_stream: int | None
    record_correlation: int | None


@dataclass(frozen=True)
class Step:
    """One `ProfilerStep` window as the host issued it."""

    name: str
    thread: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class HostEvents:
    """Sorted by thread, then start, then longest first."""

    kind: NDArray[np.int8]
    name: Small
    thread: Small
    start: Ints
    end: Ints
    correlation: Ints  # -1 where there is none; likewise below
    sequence: Ints
    dims: Small
    types: Small
    details: Small
    parent: Small  # the innermost event around it on its thread, or -1

    def __len__(self) -> int:
        return len(self.kind)

    def ancestors(self, events: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The events, then their parents, and so on until all are past the root (-1)."""
        while (events >= 0).any():
            yield events
            events = np.where(events >= 0, self.parent[events], -1)

    def outermost(self, wanted: NDArray[np.bool_]) -> Ints:
        """For each event the outermost wanted one around it (itself included), or -1."""
        out = np.full(len(self), -1, np.int64)
        for around in self.ancestors(np.arange(len(self))):
            hit = (around >= 0) & wanted[around]
            out[hit] = around[hit]
        return out

    def innermost(self, wanted: NDArray[np.bool_]) -> Ints:
        """For each event the innermost wanted one around it (itself included), or -1."""
        out = np.full(len(self), -1, np.int64)
        for around in self.ancestors(np.arange(len(self))):
            hit = (out < 0) & (around >= 0) & wanted[around]
            out[hit] = around[hit]
        return out


@dataclass(frozen=True, eq=False)
class GpuEvents:
    """Work off the host threads that asked for it, sorted by stream, then start."""

    kind: NDArray[np.int8]
    name: Small
    stream: Small
    start: Ints
    end: Ints
    correlation: Ints
    bytes: Ints
    launch: Small  # the host call (or operator) that launched it, or -1 (launched before the window)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank's trace."""

    path: str
    rank: int | None
    world: int | None
    gpus: tuple[str, ...]
    origin_ns: int  # absolute time of 0
    names: tuple[str, ...]
    shapes: tuple[bytes, ...]  # distinct 'Input Dims' and 'Input type' as JSON text; dims and types point into it
    threads: tuple[TraceThread, ...]
    streams: tuple[TraceStream, ...]
    host: HostEvents = field(repr=False)
    gpu: GpuEvents = field(repr=False)
    steps: tuple[Step, ...]
    collectives: dict[int, Collective] = field(repr=False)  # by GPU event
    syncs: tuple[Sync, ...] = field(repr=False)
    forward_of: Small = field(repr=False)  # for a backward host event the forward one, else -1
    ignored: dict[str, int]  # events left out, by category
    has_stacks: bool = False
    machine: str = ""  # the host's name, where the trace has it
    # distinct 'Input Strides' and 'Concrete Inputs' as JSON text, where they were asked for; details point into it
    details: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)

    def host_name(self, event: int) -> str:
        return self.names[int(self.host.name[event])]

    def gpu_name(self, event: int) -> str:
        return self.names[int(self.gpu.name[event])]

    @property
    def cpu_only(self) -> bool:
        """Whether no GPU was at work: then `gpu` holds at most the collectives of host threads."""
        return all(s.device == HOST_DEVICE for s in self.streams)

    @property
    def span(self) -> tuple[int, int]:
        """First start and last end of all that is kept."""
        starts = [int(x.start.min()) for x in (self.host, self.gpu) if len(x)]
        ends = [int(x.end.max()) for x in (self.host, self.gpu) if len(x)]
        return min(starts), max(ends)

    @cached_property
    def is_collective(self) -> NDArray[np.bool_]:
        """Which GPU events are collectives (or sends and receives), by what they say or by their name."""
        by_name = np.array(["nccl" in n.lower() or "rccl" in n.lower() for n in self.names], np.bool_)
        result = by_name[self.gpu.name] & (self.gpu.kind == GpuKind.KERNEL) if len(self.gpu) else np.zeros(0, np.bool_)
        result = result.copy()
        result[list(self.collectives)] = True
        return result

    def shifted_gpu(self, ns: int) -> Trace:
        """The same trace with the GPU's clock moved."""
        return replace(self, gpu=replace(self.gpu, start=self.gpu.start + ns, end=self.gpu.end + ns))
