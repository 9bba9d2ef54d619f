"""Kernel times learned from traces: a GPU's own models, corrected by what the calls of some traces took.

ln(measured / predicted) is a Gaussian process: a sum of independent effects, each with the standard deviation that it
has before anything was measured (`EFFECTS`). What traces show of a call counts for others as far as they share them:

    bandwidth, arithmetic   the GPU's rates differ from those it is predicted with: a call follows them as far as its
                            prediction does (`elasticity`: priced once more with a rate that is higher)
    short                   kernels so short that neither rate sets their time
    family, op              the same for all sizes: a family of ops, and one op on one type of number
    size                    of an op, for sizes near one another: interpolates between those that were measured
    call                    the same op on the same shapes

Few samples, or samples that disagree, leave a correction near 1 and a wide range; a call that was measured gets its
measured time. The standard deviations are round numbers, the same for every GPU; none is fitted. Over models that were
calibrated on the GPU itself the effects are a quarter as large: what a few traces show counts less there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.families import BY_OP, FAMILIES
from presage.costs.kernel_model import CALIBRATED_ERROR, OpTime, Power
from presage.graph.graph import Graph, Op
from presage.hardware import Gpu

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Effects(NamedTuple):
    """Standard deviations of the logarithm, before any measurement."""

    bandwidth: float = 0.3
    arithmetic: float = 0.3  # half of its variance is common to all types of number
    short: float = 0.3
    family: float = 0.1
    op: float = 0.1
    size: float = 0.2
    call: float = 0.1
    noise: float = 0.05  # of one sample, and TICK seconds of clocks

    def scaled(self, factor: float) -> Effects:
        """Models that are known to be nearer, or farther off; a repeated call tells the same of them."""
        return Effects(*(sd if name in ("call", "noise") else factor * sd for name, sd in self._asdict().items()))


EFFECTS = Effects()
CALIBRATED_SCALE = 0.25
TICK = 1e-6
NEAR = 1.0  # sizes are near one another within this factor, as a logarithm: seconds, FLOPs per byte
SHORT = 5e-6  # seconds
HIGHER = 1.25  # a rate, to see what follows it
COLUMNS = ("seconds", "bandwidth", "arithmetic", "intensity")


@dataclass(frozen=True, eq=False)
class CallTable:
    """Distinct calls: what they are, and what is predicted of them."""

    family: tuple[str, ...]
    op: tuple[str, ...]  # with the type of number: 'aten::mm bfloat16'
    call: Ints  # a digest of op, type and shapes
    seconds: Floats  # predicted
    bandwidth: Floats  # elasticity: 1 where twice the bandwidth halves the time
    arithmetic: Floats
    intensity: Floats  # ln(FLOPs per byte), 0 where not known

    def __len__(self) -> int:
        return len(self.call)

    def part(self, at: Ints) -> CallTable:
        """The calls at these places."""
        family, op = (tuple(x[i] for i in at.tolist()) for x in (self.family, self.op))
        seconds, bandwidth, arithmetic, intensity = (getattr(self, c)[at] for c in COLUMNS)
        return CallTable(family, op, self.call[at], seconds, bandwidth, arithmetic, intensity)

    @property
    def short(self) -> Floats:
        """How far a call's time is that of a short kernel."""
        left = np.clip(1.0 - self.bandwidth - self.arithmetic, 0.0, 1.0)
        return left * np.clip(SHORT / self.seconds, 0.0, 1.0)


def joined(tables: Sequence[CallTable]) -> CallTable:
    """Several tables as one."""
    family, op = (tuple(x for t in tables for x in getattr(t, name)) for name in ("family", "op"))
    call, seconds, *rest = (np.concatenate([getattr(t, name) for t in tables]) for name in ("call", *COLUMNS))
    return CallTable(family, op, call, seconds, rest[0], rest[1], rest[2])


class StepCalls(NamedTuple):
    """The priced calls of a step, and for each op the place of its call; -1 for an op that is not priced by a model."""

    table: CallTable
    place: Ints


def step_calls(base: CalibratedKernels, graph: Graph, times: Sequence[OpTime]) -> StepCalls:
    """Distinct calls of a step, of which `times` are predicted."""
    priced = [i for i, (op, t) in enumerate(zip(graph.ops, times, strict=True)) if _is_priced(op, t)]
    kinds = [_kind(graph, graph.ops[i]) for i in priced]
    digests = [_digest(graph, graph.ops[i], kind) for i, kind in zip(priced, kinds, strict=True)]
    _, first, number = np.unique(np.array(digests, np.int64), return_index=True, return_inverse=True)
    place = np.full(len(graph.ops), -1, np.int64)
    place[priced] = number
    bandwidth, arithmetic = (_elasticity(base, graph, what)[priced] for what in ("bandwidth", "arithmetic"))
    seconds = np.array([times[i].seconds for i in priced])
    calls = np.bincount(number, minlength=len(first))
    means = [np.bincount(number, x, len(first)) / calls for x in (seconds, bandwidth, arithmetic)]
    ops = [graph.ops[priced[k]] for k in first.tolist()]
    table = CallTable(
        tuple(_family(op, times[priced[k]]) for op, k in zip(ops, first.tolist(), strict=True)),
        tuple(f"{op.name} {kinds[k]}" for op, k in zip(ops, first.tolist(), strict=True)),
        np.array(digests, np.int64)[first],
        means[0],
        means[1],
        means[2],
        np.array([_intensity(times[priced[k]]) for k in first.tolist()]),
    )
    return StepCalls(table, place)


def _is_priced(op: Op, t: OpTime) -> bool:
    return op.kernels and op.cost is None and not op.group and t.seconds > 0.0


def _family(op: Op, t: OpTime) -> str:
    return BY_OP[op.name].name if op.name in BY_OP else t.family


def _kind(graph: Graph, op: Op) -> str:
    """The type of number of the first floating-point tensor: tf32 where products of it run so."""
    dtype = next((t.dtype for t in graph.inputs_of(op) if "float" in t.dtype and t.shape), "")
    flag = "cudnn.allow_tf32" if "conv" in op.name or "rnn" in op.name else "allow_tf32"
    computes = op.name in BY_OP and BY_OP[op.name].computes
    return "tf32" if dtype == "float32" and computes and graph.flags.get(flag) else dtype


def _digest(graph: Graph, op: Op, kind: str) -> int:
    inputs = [(t.shape, t.strides, t.dtype) for t in graph.inputs_of(op)]
    text = repr((op.name, kind, inputs, [t.shape for t in graph.outputs_of(op)]))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _intensity(t: OpTime) -> float:
    return float(np.log(t.flops / t.nbytes)) if t.flops > 0 and t.nbytes > 0 else 0.0


def _elasticity(base: CalibratedKernels, graph: Graph, what: str) -> Floats:
    """By op: how much shorter it is predicted to be where a rate is higher."""
    slow, fast = (
        np.array([t.seconds for t in replace(base, gpu=_with_rate(base.gpu, what, factor)).op_times(graph)])
        for factor in (1.0 / HIGHER, HIGHER)
    )
    ratio = np.divide(slow, fast, out=np.ones(len(slow)), where=fast > 0)
    return np.asarray(np.clip(np.log(np.maximum(ratio, 1e-9)) / (2.0 * np.log(HIGHER)), 0.0, 1.0))


def _with_rate(chip: Gpu, what: str, factor: float) -> Gpu:
    if what == "arithmetic":
        return replace(chip, peak={k: v * factor for k, v in chip.peak.items()})
    copy = chip.sustained_copy * factor if chip.sustained_copy else None
    return replace(chip, memory_bandwidth=chip.memory_bandwidth * factor, sustained_copy=copy)


def covariance(a: CallTable, b: CallTable, sd: Effects) -> Floats:
    """Covariance of the logarithms of two tables' corrections."""

    def same(name: str) -> Floats:
        x, y = np.array(getattr(a, name)), np.array(getattr(b, name))
        return np.asarray(x[:, None] == y[None, :], np.float64)

    def product(x: Floats, y: Floats) -> Floats:
        return np.multiply.outer(x, y)

    def near(name: str) -> Floats:
        x, y = (np.log(t.seconds) if name == "seconds" else t.intensity for t in (a, b))
        return np.exp(-0.5 * (np.subtract.outer(x, y) / NEAR) ** 2)

    long, op = product(1.0 - a.short, 1.0 - b.short), same("op")
    types = 0.5 + 0.5 * (np.array([o.split(" ")[-1] for o in a.op])[:, None] == [o.split(" ")[-1] for o in b.op])
    out = sd.bandwidth**2 * product(a.bandwidth, b.bandwidth)
    out += sd.arithmetic**2 * product(a.arithmetic, b.arithmetic) * types
    out += sd.short**2 * product(a.short, b.short)
    out += long * (sd.family**2 * same("family") + sd.op**2 * op)
    out += op * sd.size**2 * near("seconds") * near("intensity")
    return np.asarray(out + sd.call**2 * same("call"))


@dataclass(frozen=True, eq=False)
class LearnedCorrection:
    """Corrections of calls, from calls that were measured."""

    calls: CallTable
    measured: Floats  # seconds
    scale: float = 1.0  # of the effects

    @cached_property
    def effects(self) -> Effects:
        return EFFECTS.scaled(self.scale)

    @cached_property
    def _precision(self) -> Floats:
        noise = self.effects.noise**2 + (TICK / self.measured) ** 2
        return np.asarray(np.linalg.inv(covariance(self.calls, self.calls, self.effects) + np.diag(noise)))

    @cached_property
    def _weights(self) -> Floats:
        return np.asarray(self._precision @ np.log(self.measured / self.calls.seconds))

    def mean(self, calls: CallTable) -> Floats:
        """ln of the factor of each call."""
        return np.asarray(covariance(calls, self.calls, self.effects) @ self._weights)

    def uncertainty(self, calls: CallTable) -> Floats:
        """Covariance of what is left unknown."""
        across = covariance(calls, self.calls, self.effects)
        return np.asarray(covariance(calls, calls, self.effects) - across @ self._precision @ across.T)

    def error(self, calls: CallTable, shares: Floats) -> float:
        """Standard deviation of the logarithm of a sum of which the calls are these shares."""
        return float(np.sqrt(max(0.0, float(shares @ self.uncertainty(calls) @ shares))))

    @property
    def unknown_families(self) -> tuple[str, ...]:
        """Families of kernels without a sample."""
        return tuple(sorted(set(FAMILIES) - set(self.calls.family)))


@dataclass(frozen=True, eq=False)
class LearnedKernels:
    """A GPU's models with what was learned from traces: a KernelModel."""

    base: CalibratedKernels
    correction: LearnedCorrection
    notes: tuple[str, ...] = ()
    _seen: dict[int, tuple[Graph, StepCalls, list[OpTime]]] = field(default_factory=dict, repr=False)

    @property
    def gpu(self) -> Gpu:
        return self.base.gpu

    @property
    def power(self) -> Power:
        return self.base.power

    @property
    def transferred(self) -> str:
        return self.base.transferred

    def op_times(self, graph: Graph) -> list[OpTime]:
        """Kernel time of every op at the full clock, corrected."""
        _, calls, times = self._step(graph)
        factor = np.append(np.exp(self.correction.mean(calls.table)), 1.0)[calls.place]
        return [self._corrected(t, float(f)) for t, f in zip(times, factor, strict=True)]

    def _corrected(self, t: OpTime, factor: float) -> OpTime:
        """A kernel's energy stays what it is."""
        base = self.power.base
        watts = base + (t.watts - base) / factor if t.watts > base else t.watts
        return t if factor == 1.0 else replace(t, seconds=t.seconds * factor, watts=watts)

    def error(self, graph: Graph) -> float:
        """What the samples leave unknown of this step, and what calibrated models are off by at best."""
        _, calls, _ = self._step(graph)
        times = self.op_times(graph)
        used = calls.place >= 0
        seconds = np.array([t.seconds for t in times])
        sums = np.bincount(calls.place[used], seconds[used], len(calls.table))
        share = sums / max(float(seconds.sum()), 1e-12)
        return float(np.hypot(CALIBRATED_ERROR, self.correction.error(calls.table, share)))

    def _step(self, graph: Graph) -> tuple[Graph, StepCalls, list[OpTime]]:
        """The step priced without corrections; that of the last graph is kept."""
        if id(graph) not in self._seen:
            times = self.base.op_times(graph)
            self._seen.clear()
            self._seen[id(graph)] = graph, step_calls(self.base, graph, times), times
        return self._seen[id(graph)]
