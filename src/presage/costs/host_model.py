"""Host time of a step: seconds per op as T1 to T5, shared by all workloads of a machine.

    T1  between the last op and this one     T4  the launch calls
    T2  from its start to its first launch   T5  between its launches
    T3  from its last launch to its end      (an op that launches nothing: all in T2)

The sum of an op's terms (see `host_units`) is its host time at the machine's usual pace, without a profiler. How it
splits around the launches is one share for all ops. A host's pace differs from run to run and from thread to thread:
`pace` says by how much. The numbers are a file (`data/h200/host.toml`), made by `tools/fit_host.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.costs.host_constants import COMPILED_US, CUDA_GRAPH_US, hook_us
from presage.costs.host_factors import SAME, HostFactors
from presage.costs.host_units import Term, extra_launches, host_terms, host_units, named, step_end_terms
from presage.errors import InputError, PresageError
from presage.files.decoding import convert_record
from presage.files.reading import DATA, read_toml
from presage.graph.graph import Graph
from presage.graph.work import WAIT

Floats = NDArray[np.float64]
US = 1e-6
ROLES = ("forward", "backward", "optimizer")
# Events that a profiler records, by class of term: ops, launch calls, and the engine's call of a backward node.
_EVENTS = {
    "leaf forward kernel": 2, "leaf backward kernel": 2, "leaf optimizer kernel": 2, "leaf": 1, "wrap": 1,
    "second launch": 1, "further launch": 1, "gap backward": 1,
}  # fmt: skip


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a host's speed varies, as standard deviations of the logarithm, of each thread by itself."""

    run_sd: float  # from run to run
    step_sd: float  # from step to step within a run
    step_correlation: float  # of a step with the one before
    machine_sd: float = 0.0  # of both threads together, from machine to machine and from hour to hour


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The small times between host and GPU, in microseconds as in the file."""

    launch_call_us: float  # one launch call (T4)
    before_launch: float  # the share of an op's other host time that comes before its first launch
    launch_latency_us: float  # from a launch call's start to the kernel's, on an idle stream
    kernel_gap_us: float  # between two kernels of a stream, both queued
    queue_depth: int  # launches the host may be ahead of the GPU
    replay_call_us: float = CUDA_GRAPH_US["call_us"]  # to start a CUDA graph
    replay_node_us: float = CUDA_GRAPH_US["node_us"]  # and for each kernel in it
    replay_gap_us: float = CUDA_GRAPH_US["gap_us"]  # between two kernels of a CUDA graph


class HostFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Provenance of a fitted host model."""

    gpu: str
    software: str
    date: str
    traces: int
    steps: int  # steps measured without a profiler that set the level
    profiler_us_per_event: float  # what the profiler's own cost was found to be, and taken off
    left_out_error: float  # mean absolute error of those steps' host time, each left out of the fit in turn
    left_out_sd: float  # standard deviation of the logarithm of the same


@dataclass(frozen=True, eq=False)
class HostCosts:
    """Host seconds by op, at the usual pace; `end` comes after the last."""

    t1: Floats
    t2: Floats
    t3: Floats
    t4: Floats  # all launch calls of the op
    t5: Floats  # all times between them
    end: float
    unknown: tuple[str, ...]  # ops that the model has never seen: they got the mean of their class

    @property
    def seconds(self) -> Floats:
        return self.t1 + self.t2 + self.t3 + self.t4 + self.t5

    @property
    def total(self) -> float:
        return float(self.seconds.sum()) + self.end


@dataclass(frozen=True)
class HostModel:
    """Host time by term, in microseconds, with the pace and call costs of the machine; `factors`: how many times as
    long another host takes, whose `name` and `note` say which it is and how it is known."""

    fitted: HostFit
    pace: Pace
    calls: Calls
    us: Mapping[str, float]
    factors: HostFactors = SAME
    name: str = ""
    note: str = ""
    assumed: bool = False  # no host was given

    def costs(self, graph: Graph, launches: Sequence[int]) -> HostCosts:
        """The host seconds of every op, given how many things each launches."""
        if len(launches) != len(graph.ops):
            raise ValueError(f"{len(graph.ops)} ops, but launches of {len(launches)}")
        profiler_units = host_units(graph)
        gap, own, extra = np.zeros((3, len(graph.ops)))
        for i, before, own_terms in host_terms(graph, profiler_units):
            hook = hook_us(graph.ops[i])
            gap[i], own[i] = (self._sum(before), self._sum(own_terms)) if hook is None else (0.0, hook)
            extra[i] = self._sum(extra_launches(graph.ops[i].name, launches[i]))
        self._replay(graph, launches, gap, own, extra)
        gap, own, extra = (np.maximum(us, 0.0) * US for us in (gap, own, extra))
        eager = [u for u in profiler_units if not graph.ops[u.ops[0]].replayed]
        end = max(self._sum(step_end_terms(eager)), 0.0) * US if eager or not profiler_units else 0.0
        found = self._split(gap, own, extra, np.asarray(launches, np.float64), end, self._unknown(graph))
        return found if self.factors == SAME else self._scaled(found, graph)

    def _replay(self, graph: Graph, launches: Sequence[int], gap: Floats, own: Floats, extra: Floats) -> None:
        """Ops of a CUDA graph cost no host time; the first carries the graph launch."""
        first: dict[str, int] = {}
        begun = {op.compiled and op.replayed: gap[i] for i, op in reversed(list(enumerate(graph.ops)))}
        for i, op in enumerate(graph.ops):
            if op.replayed:
                gap[i] = own[i] = extra[i] = 0.0
                own[first.setdefault(op.replayed, i)] += self.calls.replay_node_us * launches[i]
        for name, i in first.items():
            own[i] += self.calls.replay_call_us + (begun[name] if graph.ops[i].compiled else 0.0)

    def _scaled(self, c: HostCosts, graph: Graph) -> HostCosts:
        """The costs on the host of `factors`, each thread and the launch calls by their own."""
        f = self.factors
        by_op = np.array([f.autograd if op.thread == "autograd" else f.main for op in graph.ops])
        t1, t2, t3, t5 = (t * by_op for t in (c.t1, c.t2, c.t3, c.t5))
        return replace(c, t1=t1, t2=t2, t3=t3, t4=c.t4 * f.launch, t5=t5, end=c.end * f.main)

    def on_host(self, factors: HostFactors, machine_sd: float, name: str, note: str) -> HostModel:
        """The model of another host, so many times as slow."""
        pace = msgspec.structs.replace(self.pace, machine_sd=machine_sd)
        return replace(self, pace=pace, factors=factors, name=name, note=note)

    def with_terms(self, us: Mapping[str, float]) -> HostModel:
        """A copy with other terms."""
        return replace(self, us=us)

    def profiled(self) -> HostModel:
        """The host beside a profiler: every event that this records, an op or a launch call, costs it time."""
        us, each = dict(self.us), self.fitted.profiler_us_per_event
        for key in us:
            if not named(key):
                us[key] += each * (_EVENTS.get(key) or next((n for k, n in _EVENTS.items() if key.startswith(k)), 0))
        return self.with_terms(us)

    def _sum(self, each: Iterable[Term]) -> float:
        return sum(self._of(key) * times for key, times in each if times)

    def _of(self, key: str) -> float:
        value = self.us.get(key, COMPILED_US.get(key))
        return value if value is not None else self._elsewhere.get(_without_role(key), 0.0) if named(key) else 0.0

    @cached_property
    def _elsewhere(self) -> dict[str, float]:
        """How a name differs from its class in the other roles, for those it was never seen in."""
        out: dict[str, list[float]] = {}
        for key, value in self.us.items():
            if named(key):
                out.setdefault(_without_role(key), []).append(value)
        return {key: float(np.mean(values)) for key, values in out.items()}

    def _unknown(self, graph: Graph) -> tuple[str, ...]:
        known = {key.partition(": ")[2] for key in self.us if key.startswith("leaf")}
        fused = ("triton::", "fused::", WAIT)  # their host time goes by what they are, not by name
        return tuple(
            sorted({op.name for op in graph.ops if hook_us(op) is None and not op.name.startswith(fused)} - known)
        )

    def _split(
        self, gap: Floats, own: Floats, extra: Floats, launches: Floats, end: float, unknown: tuple[str, ...]
    ) -> HostCosts:
        """An op's time around its launches: first launch in its own time, others in the extra."""
        call = self.calls.launch_call_us * US
        first = np.where(launches > 0, np.minimum(call, own / 2), 0.0)
        later = np.minimum(call * np.maximum(launches - 1, 0), extra)
        rest = own - first
        before = np.where(launches > 0, self.calls.before_launch * rest, rest)
        return HostCosts(gap, before, rest - before, first + later, extra - later, end, unknown)


def _without_role(key: str) -> str:
    kind, _, name = key.partition(": ")
    return f"{' '.join(w for w in kind.split() if w not in ROLES)}: {name}"


def host_model(gpu: str | Path = "h200") -> HostModel:
    """The host model that ships for a GPU's machine, or one from a file."""
    if isinstance(gpu, Path) or str(gpu).endswith(".toml"):
        return read(gpu)
    path = DATA / str(gpu) / "host.toml"
    if not path.is_file():
        raise PresageError(f"no host model of {gpu!r} ships with presage: give a file made by tools/fit_host.py")
    return read(path)


def read(path: str | Path) -> HostModel:
    """A host model from its file."""
    return model_of(path, read_toml(path))


def is_host_model(table: Mapping[str, Any]) -> bool:
    """Whether the contents of a file are a fitted host model."""
    return "names_us" in table or ("us" in table and "calls" in table)


def model_of(path: str | Path, table: Mapping[str, Any]) -> HostModel:
    """A host model from the contents of its file."""
    try:
        file = convert_record(table, _File)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at `$.")
        raise InputError(path, what, where.strip("`") or None) from e
    if file.version != 1:
        raise InputError(path, f"is version {file.version}, and this presage reads 1", "version")
    terms = file.us | {f"{kind}: {n}": v for kind, names in file.names_us.items() for n, v in names.items()}
    return HostModel(file.fitted, file.pace, file.calls, terms)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    fitted: HostFit
    pace: Pace
    calls: Calls
    us: dict[str, float]
    names_us: dict[str, dict[str, float]]
