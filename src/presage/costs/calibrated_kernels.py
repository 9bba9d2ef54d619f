"""Kernel times of a captured step on a calibrated GPU: law times correction, cache state, power limit.

An op without a model is timed like one that moves as many tensors (`likeness`) or by its FLOPs and bytes (`roofline`);
either way the source is reported, and none is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from presage.costs.cache import Cache, input_shares
from presage.costs.call import Call, from_graph
from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.costs.corrections import (
    Fp32ConvCorrection,
    Fp32GemmCorrection,
    TableCorrection,
    carried,
    shortest_kernel,
    transfer_streaming,
)
from presage.costs.cudnn import with_engines
from presage.costs.families import BY_OP, FAMILIES, Law
from presage.costs.families.fused import FUSED_OPS as FUSED
from presage.costs.families.fused import fused_parts
from presage.costs.families.pointwise import alike
from presage.costs.kernel_model import CALIBRATED_ERROR, TRANSFERRED_ERROR, OpTime, Power, Source, roofline_time
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.errors import PresageError
from presage.graph.families import family
from presage.graph.graph import HOST_MEMORY, ON_HOST, STAGED, Graph, Op, references
from presage.graph.work import flops
from presage.hardware import Gpu, gpu

TENSOR_KINDS = ("bf16", "fp16", "tf32")
Floats = npt.NDArray[np.float64]
READ = 0.6  # of what a streaming kernel moves, what it reads
# Inputs that a GEMM has read last: sums of gradients right after it in 62 traces take 0.86 of the measured time by a
# warm cache, 1.07 by a cold one (1.45 where one block reads long columns) and 1.00 so.
FARTHER, FAR = 1.15, 5e-7


@dataclass(frozen=True)
class CalibratedKernels:
    """Every family's law with fitted corrections, a KernelModel. A GPU that was not calibrated gets another's."""

    gpu: Gpu
    trees: dict[str, Trees]  # by family: ln(seconds / law)
    counts: dict[str, Trees]  # by family: ln(launches / the law's)
    cache: Cache
    power: Power
    source: dict[str, Any] = field(default_factory=dict)  # the pack's header, rows by family
    own: Mapping[str, TableCorrection] = field(default_factory=dict)  # by family, for a GPU that published tables timed
    own_of: str = ""  # the GPU they timed, where it is another of the same architecture
    single: Fp32GemmCorrection | None = None  # corrections of float32 GEMMs, where the other GPU's do not fit
    convolved: Fp32ConvCorrection | None = None  # of float32 convolutions

    @property
    def transferred(self) -> str:
        """The GPU the corrections were measured on, where it is another one."""
        return "" if self.source.get("key", self.gpu.key) == self.gpu.key else str(self.source["gpu"])

    @property
    def calibrated(self) -> Gpu:
        """The GPU the corrections were measured on."""
        return gpu(str(self.source.get("key", self.gpu.key)))

    @property
    def rates(self) -> Rates:
        return Rates.of(self.gpu)

    @property
    def shortest(self) -> float:
        """Seconds of the shortest kernel, where the corrections of another architecture do not tell it; else 0."""
        return shortest_kernel(self.gpu, self.calibrated)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the corrections are from, if from another GPU."""
        other = self.transferred
        if not other:
            return ()
        name, tables = self.gpu.name, self.own_of or "it"
        if not self.own:
            return (f"{name} was not calibrated: kernel corrections and host costs were measured on an {other}",)
        return (
            f"{name} was not calibrated: bf16 GEMMs and attention follow tables measured on {tables} (attention "
            f"backward is scaled from its forward); other corrections and host costs were measured on an {other}",
        )

    def error(self, graph: Graph) -> float:
        """The same for every step."""
        del graph
        return TRANSFERRED_ERROR if self.transferred else CALIBRATED_ERROR

    def op_times(self, graph: Graph) -> list[OpTime]:
        """Kernel time and power demand of every op of a step, at the full clock."""
        shares = input_shares(graph, self.cache)
        plans = [_plan(graph, op) for op in graph.ops]
        by_key = times_of(self, describe(self, (c for _, parts in plans for c in parts)))
        times = []
        for op, (cold, far), (source, parts) in zip(graph.ops, shares.tolist(), plans, strict=True):
            found = [by_key[c.key] for c in parts if c.key in by_key]
            if len(found) < len(parts):
                source, found = "roofline", []
            t = _op_time(graph, op, self, source, parts, found, cold, far)
            t = t if op.speed == 1.0 else replace(t, seconds=t.seconds / op.speed)
            if found and any(BY_OP[c.name].name not in self.trees for c in parts):
                t = replace(t, source="roofline")  # of a family that was not fitted, the law alone
            times.append(_with_power(graph, op, self, t, parts, found))
        return times


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call with a warm and with a cold cache, at the full clock."""

    warm: float
    cold: float
    launches: float
    law: Law
    latent: bool  # waits for its inputs before it computes; else it streams

    def at(self, cold: float, far: float = 0.0) -> float:
        """With these shares of the inputs in memory, and in the cache but farther away. A stream reads memory and cache
        at the same time."""
        distant = far * (min(self.cold, FARTHER * self.warm + FAR) - self.warm)
        if self.latent:
            return self.warm + cold * (self.cold - self.warm) + distant
        return max(self.warm + distant, self.cold * (1 - READ * (1 - cold)))


class Described(NamedTuple):
    """A call as its family's model sees it."""

    call: Call
    law: Law
    features: Sequence[float]


def describe(models: CalibratedKernels, calls: Iterable[Call]) -> dict[Any, Described]:
    """Each different call by its key. One with arguments that its family does not know is left out."""
    out: dict[Any, Described] = {}
    known = {c.key: c for c in calls}
    for key, call in zip(known, with_engines([*known.values()], models.gpu), strict=True):
        family = BY_OP[call.name]
        try:
            law = family.law(call, models.rates)
            out[key] = Described(call, law, [*family.features(call, law), 0.0])
        except (ValueError, IndexError, KeyError, TypeError, ArithmeticError):
            continue
    return out


def call_times(models: CalibratedKernels, calls: Sequence[Call]) -> list[CallTime]:
    """Every call's times; the calls must be of ops that have a model."""
    described = describe(models, calls)
    unknown = next((c for c in calls if c.key not in described), None)
    if unknown is not None:
        raise PresageError(f"{unknown.name}: its model cannot read these inputs: {unknown.inputs}")
    times = times_of(models, described)
    return [times[c.key] for c in calls]


def times_of(models: CalibratedKernels, described: Mapping[Any, Described]) -> dict[Any, CallTime]:
    by_family: dict[str, dict[Any, Described]] = {}
    for key, one in described.items():
        by_family.setdefault(BY_OP[one.call.name].name, {})[key] = one
    times: dict[Any, CallTime] = {}
    for name, calls in by_family.items():
        times |= _family_times(models, name, calls)
    return times


def _family_times(models: CalibratedKernels, name: str, described: Mapping[Any, Described]) -> dict[Any, CallTime]:
    """Times of one family's calls: its law and its corrections; the law alone where the family was not fitted."""
    family, laws = FAMILIES[name], [d.law for d in described.values()]
    if name not in models.trees:
        return {
            key: CallTime(d.law.seconds, d.law.seconds, d.law.launches, d.law, family.computes)
            for key, d in described.items()
        }
    x = np.array([d.features for d in described.values()], np.float32)
    if x.shape[1] != models.trees[name].features:
        raise PresageError(f"{name} models of an earlier presage: remove the pack's kernels.npz to fit them again")
    launches = np.array([law.launches for law in laws]) * np.exp(models.counts[name].predict(x))
    warm, cold = _seconds(models, name, described, x)
    least = np.maximum(warm, [family.cold(law) for law in laws])
    warm, cold = (np.hypot(seconds, launches * models.shortest) for seconds in (warm, np.maximum(cold, least)))
    columns = zip(described, warm, cold, launches, laws, strict=True)
    return {key: CallTime(float(w), float(d), float(n), law, family.computes) for key, w, d, n, law in columns}


def _seconds(
    models: CalibratedKernels, name: str, described: Mapping[Any, Described], x: npt.NDArray[Any]
) -> tuple[Floats, Floats]:
    """With a warm and with a cold cache."""
    calls, laws = [d.call for d in described.values()], [d.law for d in described.values()]
    if models.transferred and not FAMILIES[name].computes:
        return transfer_streaming(FAMILIES[name], models.trees[name], calls, laws, models.calibrated, models.gpu)
    seconds = np.array([law.seconds for law in laws]) * _own_factors(models, name, described)
    out = []
    for share in (0.0, 1.0):
        x[:, -1] = share
        known = models.trees[name].predict(x)
        if models.transferred:
            known = carried(known, FAMILIES[name], models.gpu, models.calibrated)
        if models.convolved is not None and name == "conv":
            known = models.convolved.corrected(known, calls, laws, models.rates)
        if models.single is not None and name == "gemm":
            known = models.single.corrected(known, calls, laws, models.rates, float(models.gpu.compute_capability))
        out.append(seconds * np.exp(known))
    return out[0], out[1]


def _own_factors(models: CalibratedKernels, name: str, described: Mapping[Any, Described]) -> Floats:
    """Factors by published tables of this GPU, over the corrections transferred from another."""
    own, calls = models.own.get(name), list(described.values())
    if own is None:
        return np.ones(len(calls))
    return own.factors([d.call for d in calls], [d.law for d in calls], models.rates)


def _with_power(
    graph: Graph, op: Op, models: CalibratedKernels, t: OpTime, parts: list[Call], times: list[CallTime]
) -> OpTime:
    """The time with what the power limit needs: FLOPs, bytes, watts, whether tensor cores do it."""
    power = models.power
    if times and t.seconds > 0:
        kind, model = _kind(parts[0]), BY_OP[parts[0].name]
        work, moved = (sum(getattr(f.law, k) for f in times) for k in ("flops", "bytes"))
        watts = power.demand(t.seconds, work, kind, moved, model.works(parts[0]))
        return replace(t, flops=work, nbytes=moved, watts=watts, tensor_cores=model.computes and kind in TENSOR_KINDS)
    if op.name == SCALED:  # an 8-bit operation takes about half the energy of a 16-bit one
        work = flops(graph, op)
        return replace(t, flops=work, watts=power.demand(t.seconds, work / 2, "bf16", 0.0), tensor_cores=True)
    return replace(t, watts=power.base) if op.kernels else t


def _kind(call: Call) -> str:
    """The type of number the tensor cores see: the narrowest among the inputs."""
    kinds = {t.dtype for t in call.tensors if t.sizes}
    for dtype, kind in (("bfloat16", "bf16"), ("float16", "fp16")):
        if dtype in kinds:
            return kind
    return "tf32" if call.tf32 else "fp32"


def _plan(graph: Graph, op: Op) -> tuple[Source, list[Call]]:
    """How an op is to be timed, and the calls it is the sum of."""
    if not op.kernels:
        return "none", []
    if op.cost is not None:
        return "roofline", []
    call = from_graph(graph, op)
    if op.name in FUSED:
        return "likeness", fused_parts(call)
    if op.name in BY_OP and (call.tensors or op.name == "aten::arange"):
        return "model", BY_OP[op.name].parts(call)
    like = alike(call)
    if like and family(op.name) == "elementwise":
        return "likeness", [Call(like, call.tensors)]
    return "roofline", []


def _op_time(
    graph: Graph,
    op: Op,
    models: CalibratedKernels,
    source: Source,
    parts: list[Call],
    times: list[CallTime],
    cold: float,
    far: float,
) -> OpTime:
    kind = family(op.name)
    if source == "none":
        return OpTime(0.0, 0, kind, "none", host=host_op_seconds(graph, op))
    if host_bytes(graph, op):
        seconds, first = host_copy(graph, op, models.gpu)
        return OpTime(seconds, 1, kind, "model", host=first)
    if op.name == SCALED:
        return OpTime(scaled_seconds(graph, op, models.gpu), 1, kind, "model")
    if op.cost is not None and op.cost.seconds:
        return OpTime(op.cost.seconds, op.cost.launches, kind, "model")
    if source == "roofline":
        return roofline_time(graph, op, models.gpu, max(models.rates.floor, models.shortest))
    launches = max(1, round(sum(t.launches for t in times)))
    at_once = BY_OP[parts[0].name].at_once(parts[0], launches)
    return OpTime(sum(t.at(cold, far) for t in times), launches, kind, source, at_once)


# ---- copies between host and GPU memory over PCIe
#
# Pinned memory: a start, and the bytes at a share of what the bus can carry (copies.json of data/h200_pack: 1.4 us and
# 55.3 of 64 GB/s). Pageable memory: the host copies it to or from pinned memory of the driver's, piece by piece. To the
# GPU at the rates below, the geometric means of two machines with an H200 (that of copies.json, whose host had the data
# in its cache, and one measured anew: 9.4 GB/s of 1 and 4 MiB, 7.8 of 64 MiB); to the host as in copies.json. It is the
# host that takes this time, so other hosts are assumed to take as long, and no copy is faster than from pinned memory.
# What the driver takes over at once (STAGED) the host copies before the GPU begins; of more, the first piece.

START, REACHED = 1.4e-6, 0.864
PAGEABLE_SIZES = np.log([1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26])
TO_GPU = np.array([7.4e9, 13e9, 11.8e9, 12.1e9, 12.3e9, 8.5e9])
TO_HOST = np.array([5.2e9, 9.2e9, 11.5e9, 15.1e9, 16.9e9, 17.6e9])
PIECE = 1 << 20
RANDOM, RANDOM_NUMBER = ("rand", "normal", "uniform"), 6.5e-9
NEW_MEMORY, HOST_FILLS = 1 << 25, 8.5e9


def host_bytes(graph: Graph, op: Op) -> int:
    """Bytes that a copy moves between host and GPU; 0 for any other op."""
    if op.name != "aten::copy_":
        return 0
    tensors = [graph.tensors[i] for i in references(op.inputs)][:2]
    there = [graph.storages[t.storage].name in ON_HOST for t in tensors]
    return max(t.nbytes for t in tensors) if any(there) and not all(there) else 0


def host_copy(graph: Graph, op: Op, gpu: Gpu) -> tuple[float, float]:
    """Seconds of the GPU, and of the host before it, of a copy between them."""
    nbytes, tensors = host_bytes(graph, op), [graph.tensors[i] for i in references(op.inputs)][:2]
    pinned = host_copy_seconds(nbytes, gpu)
    names = [graph.storages[t.storage].name for t in tensors]
    if HOST_MEMORY not in names:
        return pinned, 0.0
    to_host = names[0] == HOST_MEMORY
    total = max(pinned, _pageable_seconds(nbytes, TO_HOST if to_host else TO_GPU))
    if to_host:
        return total, 0.0
    first = total - pinned if nbytes <= STAGED else _pageable_seconds(PIECE, TO_GPU)
    return total - first, first


def host_copy_seconds(nbytes: int, gpu: Gpu) -> float:
    """GPU seconds of a copy of pinned memory."""
    return START + nbytes / (REACHED * gpu.pcie)


def host_op_seconds(graph: Graph, op: Op) -> float:
    """Seconds of the host to fill large tensors of its own (data/h200_host_memory.json): random numbers one by one; of
    other ops only what the allocator takes anew from the system counts, smaller results stay in caches."""
    filled = [t for t in graph.outputs_of(op) if graph.storages[t.storage].name in ON_HOST]
    if any(word in op.name for word in RANDOM):
        return RANDOM_NUMBER * sum(t.elements for t in filled)
    return sum(t.nbytes for t in filled if t.nbytes >= NEW_MEMORY) / HOST_FILLS


def _pageable_seconds(nbytes: int, rates: Floats) -> float:
    return START + nbytes / float(np.interp(np.log(max(nbytes, 1)), PAGEABLE_SIZES, rates))


# ---- Scaled 8-bit GEMMs, by the closed-form law: a GPU without fp8 units gets that of the next wider type

SCALED = "aten::_scaled_mm"


def scaled_seconds(graph: Graph, op: Op, gpu: Gpu) -> float:
    """Seconds at the full clock; the left operand is row-major and the right one column-major, as fp8 units require."""
    left, right = graph.inputs_of(op)[:2]
    shape = GemmShape(left.shape[0], right.shape[1], left.shape[1], rhs_k_major=True)
    return ClosedFormKernels.of(gpu).gemm(shape, "fp8")
