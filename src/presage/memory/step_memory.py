"""The memory of a step: its storages and scratch, replayed through the caching allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.graph.graph import Graph, Op, Role, Storage
from presage.hardware import Gpu
from presage.memory.allocator import Allocator, MemoryBlock, rounded
from presage.memory.workspace import library, library_bytes, transient
from presage.memory.workspace_conv import look_up
from presage.memory.workspace_reduce import H200
from presage.memory.workspace_rnn import reserves

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Holding:
    """An allocation alive at the peak."""

    name: str  # 'blocks.3.attn.qkv.weight', or what holds it where it has no name
    module: str
    role: Role
    nbytes: int  # as the allocator counts it
    since: int  # the op before which it was allocated; -1: before the step
    storage: int = -1  # place in Graph.storages; -1 for scratch and library workspaces


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes at the highest moment of each op; one row per op, in order."""

    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    kinds: Mapping[Role, NDArray[np.int64]] = field(default_factory=dict)  # parts of the allocated, where asked for


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of a step: peaks, timeline, and what is alive at the peak."""

    peak_allocated: int
    peak_reserved: int
    peak_op: int  # the op during which the peak was reached; -1: before the first
    before: int  # allocated when the step starts
    after: int  # allocated when it ends
    timeline: MemoryTimeline
    holdings: tuple[Holding, ...]  # alive at the peak, largest first

    @property
    def fragmentation(self) -> float:
        """The share of reserved memory that holds nothing at the peak of the allocated."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    def by_role(self) -> dict[Role, int]:
        """Bytes at the peak by kind, largest first."""
        return _summed((h.role, h.nbytes) for h in self.holdings)

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Bytes at the peak by module, largest first; `depth` keeps that many parts of the name."""
        return _summed((".".join(h.module.split(".")[:depth]), h.nbytes) for h in self.holdings)

    def top(self, count: int = 10) -> tuple[Holding, ...]:
        return self.holdings[:count]


def memory_profile(graph: Graph, *, steps: int = 2, chip: Gpu = H200, kinds: bool = False) -> MemoryProfile:
    """Replay a step `steps` times, so that later ones find the allocator's cache as the first leaves it.

    The first is the first of a run: it finds no gradients and makes the optimizer's state itself. The timeline
    and holdings are those of the last step; the peaks are the highest of all steps. Scratch is sized as on `chip`.
    `kinds`: also how much of the allocated is parameters, activations, ... at each op. Where steps differ at random the
    peaks are those of the largest, which has as much more of what a step adds as it has work.
    """
    machine = _Machine(graph, chip)
    machine.begin()
    trace = machine.step()
    for _ in range(steps - 1):
        machine.rewind()
        trace = machine.step()
    more = int((graph.largest - 1) * (trace.peak - trace.before))
    return MemoryProfile(
        peak_allocated=machine.state.peak_allocated + more,
        peak_reserved=machine.state.peak_reserved + more,
        peak_op=trace.peak_op,
        before=trace.before,
        after=machine.state.allocated,
        timeline=machine.timeline(trace, kinds),
        holdings=tuple(sorted(machine.holdings(trace), key=lambda h: (-h.nbytes, h.since, h.name))),
    )


class _Trace:
    """Records of one replay of the step."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.peak = before
        self.peak_op = -1
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.start: set[int] = set()  # storages alive before the step


class _Machine:
    """The allocator with a step's storages in it."""

    def __init__(self, graph: Graph, chip: Gpu) -> None:
        self.graph = graph
        self.chip = chip
        self.state = Allocator()
        self.live: dict[int, tuple[MemoryBlock | None, int]] = {}  # storage: its block, and since which op
        self.sizes: dict[int, int] = {}  # storage: bytes it got the last time
        self.libraries: dict[tuple[str, str], tuple[int, int]] = {}  # bytes, and since which op
        self.later: list[int] = []  # optimizer state that the first step is still to make
        self.events = _by_op(graph)
        self.reserves = reserves(graph)
        look_up(graph, chip)

    def begin(self) -> None:
        """What is there before the first step: made in the order of the storages.

        Gradients that a step finds are those of the step before, so the first one finds none; and an optimizer makes
        its state in its first step, out of what the backward pass has given back.
        """
        allocated = {e.storage for e in self.graph.events if e.allocates}
        for s in self.graph.storages:
            if s.id in allocated or s.role == "gradient":
                continue
            if s.role == "optimizer":
                self.later.append(s.id)
            else:
                self._make(s.id, -1)

    def rewind(self) -> None:
        """Turn the state at the end of one step into that at the start of the next.

        A storage that the step freed but had not made is there again under the block of one that it made and kept: a
        gradient, say, that is freed at the start and remade in every step.
        """
        self.later = []
        self.libraries = {key: (size, -1) for key, (size, _) in self.libraries.items()}
        allocated = {e.storage for e in self.graph.events if e.allocates}
        kept = [s for s in self.live if s in allocated]
        gone = [s.id for s in self.graph.storages if s.id not in allocated and s.id not in self.live]
        for storage in gone:
            twin = _same_size(self.graph.storages, storage, kept)
            if twin is None:
                self._make(storage, -1)
            else:
                kept.remove(twin)
                self.live[storage] = self.live.pop(twin)[0], -1
                self.sizes[storage] = self.sizes[twin]
        for storage in kept:
            self.state.release(self.live.pop(storage)[0])

    def step(self) -> _Trace:
        trace = _Trace(self.state.allocated)
        trace.start = set(self.live)
        for number, op in enumerate(self.graph.ops):
            self._apply(number, first_update=bool(self.later) and op.phase == "optimizer")
            scratch = self._scratch(number, op)
            trace.allocated.append(self.state.allocated)
            trace.reserved.append(self.state.reserved)
            if self.state.allocated > trace.peak:
                trace.peak, trace.peak_op = self.state.allocated, number
            for block in scratch:
                self.state.release(block)
        self._apply(len(self.graph.ops))
        return trace

    def timeline(self, trace: _Trace, kinds: bool) -> MemoryTimeline:
        allocated, reserved = (np.array(x, dtype=np.int64) for x in (trace.allocated, trace.reserved))
        return MemoryTimeline(allocated, reserved, self.kinds(trace, allocated) if kinds else {})

    def kinds(self, trace: _Trace, allocated: NDArray[np.int64]) -> dict[Role, NDArray[np.int64]]:
        """Bytes of each kind at each op of the last step; what no storage holds is workspace."""
        change: dict[Role, NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(allocated) + 1, np.int64))
        storages, alive = self.graph.storages, set(trace.start)
        for storage in alive:
            change[storages[storage].role][0] += self.sizes.get(storage, 0)
        for e in self.graph.events:
            if e.allocates != (e.storage in alive):
                size, place = self.sizes.get(e.storage, 0), min(e.op, len(allocated))
                change[storages[e.storage].role][place] += size if e.allocates else -size
                (alive.add if e.allocates else alive.discard)(e.storage)
        change.pop("workspace", None)
        held: dict[Role, NDArray[np.int64]] = {role: np.cumsum(c)[:-1] for role, c in change.items()}
        held["workspace"] = np.maximum(allocated - sum(held.values(), np.zeros_like(allocated)), 0)
        return held

    def holdings(self, trace: _Trace) -> Iterator[Holding]:
        """What was alive at the peak of the last step."""
        alive = dict.fromkeys(trace.start, -1)
        for e in self.graph.events:
            if e.op > trace.peak_op:
                continue
            if e.allocates:
                alive[e.storage] = e.op
            else:
                alive.pop(e.storage, None)
        for storage, since in alive.items():
            s = self.graph.storages[storage]
            if self.sizes.get(storage):
                yield Holding(s.name, s.module, s.role, self.sizes[storage], since, storage)
        for (name, thread), (size, since) in self.libraries.items():
            if since <= trace.peak_op:
                yield Holding(f"{name} ({thread} thread)", "", "workspace", size, -1)
        if trace.peak_op >= 0:
            op = self.graph.ops[trace.peak_op]
            for n in transient(self.graph, op, self.chip):
                yield Holding(op.name, op.module, "workspace", rounded(n), trace.peak_op)

    def _make(self, storage: int, number: int) -> None:
        block = self.state.allocate(self.reserves.get(storage, self.graph.storages[storage].nbytes))
        self.live[storage] = block, number
        self.sizes[storage] = block.size if block is not None else 0

    def _apply(self, number: int, first_update: bool = False) -> None:
        """What is freed and allocated before an op; optimizer state that is still to be made comes in between."""
        events = self.events.get(number, [])
        if first_update:
            place = next((i for i, (_, allocates) in enumerate(events) if allocates), len(events))
            events = [*events[:place], *((storage, True) for storage in self.later), *events[place:]]
            self.later = []
        for storage, allocates in events:
            if allocates:
                self._make(storage, number)
            elif storage in self.live:
                self.state.release(self.live.pop(storage)[0])

    def _scratch(self, number: int, op: Op) -> list[MemoryBlock | None]:
        for name in library(self.graph, op):
            if (name, op.thread) not in self.libraries:
                block = self.state.allocate(library_bytes(self.chip)[name])
                self.libraries[name, op.thread] = block.size if block is not None else 0, number
        return [self.state.allocate(n) for n in transient(self.graph, op, self.chip)]


def _by_op(graph: Graph) -> dict[int, list[tuple[int, bool]]]:
    out: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for e in graph.events:
        out[e.op].append((e.storage, e.allocates))
    return out


def _same_size(storages: Sequence[Storage], wanted: int, among: list[int]) -> int | None:
    """The one that most likely takes the place of `wanted`: of its size, best of its name and kind too."""
    w = storages[wanted]
    fits = [s for s in among if storages[s].nbytes == w.nbytes]
    return max(fits, key=lambda s: (storages[s].name == w.name, storages[s].role == w.role), default=None)


def _summed(pairs: Iterator[tuple[K, int]]) -> dict[K, int]:
    out: dict[K, int] = defaultdict(int)
    for key, n in pairs:
        out[key] += n
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))
