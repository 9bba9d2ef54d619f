"""ClosedFormKernels: kernel times by closed laws with few fitted parameters, for thousands of plans a second.

GEMMs and fused attention have laws of their own; all else is bound by memory, at the share of the bandwidth that its
kind of kernels reaches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.costs.closed_form.op_shapes import Accumulated, MemoryBound, OpShape, shape_of
from presage.costs.closed_form.parameters import ClosedFormParameters, parameter_source, parameters
from presage.costs.families import attention, gemm
from presage.costs.families.attention import AttentionParameters, AttentionShape
from presage.costs.families.gemm import GemmShape
from presage.costs.kernel_model import CALIBRATED_ERROR, TRANSFERRED_ERROR, OpTime, Power, least_seconds
from presage.costs.rates import REACHED_FLOPS
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.hardware.architecture import architecture
from presage.hardware.gpu import Gpu, gpu

Bytes = TypeVar("Bytes", float, NDArray[np.float64])  # one number, or many
KINDS = tuple(gemm.WIDTHS)
FITTED_AS = {"fp16": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}
STAND_INS = {"nvfp4": "mxfp8", "mxfp8": "fp8", "fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
REMEMBERED = 65_536  # calls
MOST_BASE = 0.4  # of the power limit
SUMMED = 4.0  # bytes an element at the rate of copies: what a sum in fp32 costs beside a result in bf16 (h200_jobs)
ADDED = 6.0  # bytes an element of a kernel that adds a bf16 result to a bf16 sum


class _Numbers(NamedTuple):
    """Inputs of the GEMM law for one dtype."""

    tiles: gemm.TileTimes
    width: float  # bytes an element
    unaligned: tuple[float, float, float]
    turned: float
    tensor: bool


class ClosedFormKernels:
    """Laws with one GPU's parameters, a KernelModel. All times are seconds on an idle GPU at its full clock.

    `attention_style` is the implementation of fused attention: flash1, flash2, flash3 (cuDNN's kernels too).
    """

    def __init__(self, gpu: Gpu, attention_style: str = "flash2") -> None:
        key = parameter_source(gpu)
        self.gpu, self.transferred = gpu, "" if key == gpu.key else key
        self.style = attention_style if attention_style in attention.STYLES else "flash2"
        self.parameters = p = parameters(key)
        self._slower = p.clock / gpu.boost_clock  # what takes cycles takes so much longer
        self._numbers = {kind: _numbers(gpu, p, kind, self._slower) for kind in KINDS}
        self._attention = {name: _slowed(k, self._slower) for name, k in p.attention.items()}
        self._bandwidth = {kind: share * gpu.memory_bandwidth for kind, share in p.stream.items()}
        self.power = _power(gpu, p)
        self.gemm = lru_cache(REMEMBERED)(self._gemm)
        self.attention = lru_cache(REMEMBERED)(self._attention_seconds)

    @staticmethod
    def of(gpu: Gpu, attention_style: str = "flash2") -> ClosedFormKernels:
        """The model of a GPU, made once."""
        return _of(gpu, attention_style)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the parameters are from, if from another GPU."""
        if not self.transferred:
            return ()
        return (f"no kernels of {self.gpu.name} were measured: efficiencies are those of {gpu(self.transferred).name}",)

    # ---- the seam

    def error(self, graph: Graph) -> float:
        """The same for every step."""
        del graph
        return TRANSFERRED_ERROR if self.transferred else CALIBRATED_ERROR

    def op_times(self, graph: Graph) -> list[OpTime]:
        """The time of every op of a graph; transfers between GPUs take no time here."""
        return [self._op_time(graph, op) for op in graph.ops]

    def _op_time(self, graph: Graph, op: Op) -> OpTime:
        kind_of_op = family(op.name)
        if not op.kernels or kind_of_op == "communication":
            return OpTime(0.0, 0, kind_of_op, "none")
        if op.cost is not None:
            floor = self.memory_bound(op.cost.bytes, 1)
            return OpTime(
                op.cost.seconds or max(floor, least_seconds(graph, op, self.gpu, REACHED_FLOPS)),
                op.cost.launches,
                kind_of_op,
                "roofline",
            )
        shape = shape_of(graph, op)
        if isinstance(shape, MemoryBound):
            seconds = self.memory_bound(shape.nbytes, shape.launches, shape.kind)
            if shape.source == "roofline":  # it computes as well: a convolution
                seconds = max(seconds, least_seconds(graph, op, self.gpu, REACHED_FLOPS))
            energy = shape.nbytes * self.power.per_byte
            watts = self.power.base + energy / seconds
            return OpTime(
                seconds / op.speed, shape.launches, kind_of_op, shape.source, nbytes=shape.nbytes, watts=watts
            )
        seconds, launches, work = self._compute_seconds(shape)
        flops, nbytes = shape.shape.flops, shape.nbytes
        watts = self.power.base + self.power.energy({work: flops}, nbytes) / seconds
        return OpTime(
            seconds / op.speed, launches, kind_of_op, "model",
            flops=flops, nbytes=nbytes, watts=watts, tensor_cores=shape.kind != "fp32",
        )  # fmt: skip

    def _compute_seconds(self, op: OpShape) -> tuple[float, int, str]:
        """Seconds, launches, and the name of the FLOPs' energy."""
        if isinstance(op.shape, AttentionShape):
            work = "attention_backward" if op.shape.backward else "attention"
            return self.attention(op.shape, kind=op.kind), 1, work
        seconds = self.gemm(op.shape, op.kind, op.accumulated is Accumulated.IN_FP32)
        if op.accumulated is not Accumulated.BY_A_KERNEL:
            return seconds, 1, op.kind
        return seconds + self.memory_bound(ADDED * op.shape.groups * op.shape.m * op.shape.n), 2, op.kind

    # ---- laws

    def _gemm(self, shape: GemmShape, kind: str = "bf16", accumulate: bool = False) -> float:
        """GEMMs of one type of number in one launch. `accumulate`: into an fp32 sum, which is read and written."""
        if shape.groups == 1:
            results = shape.batch * shape.m * shape.n if accumulate else 0
            return self.gemm_at(shape, kind) + SUMMED * results / self._bandwidth["copy"]
        g = self.parameters.grouped
        extra = (shape.groups * g["group_us"] + g["launch_us"]) * 1e-6 * self._slower
        extra += SUMMED * (shape.groups * shape.m * shape.n if accumulate else 0) / self._bandwidth["copy"]
        all_at_once = GemmShape(shape.m, shape.n, shape.k, shape.groups)
        return self.gemm_at(all_at_once, kind, slow=1.0 / g["share"]) + extra

    def gemm_at(self, s: GemmShape, kind: str, slow: float = 1.0) -> float:
        """Seconds of a GEMM whose arithmetic is `slow` times slower than the law's."""
        p = self._numbers[kind]
        stored = max(p.width, 2.0) * s.batch * s.m * s.n
        moved = p.width * s.batch * (s.m * s.k + s.k * s.n) + stored
        if p.tensor:
            slow *= gemm.alignment_factor(s, p.width, p.unaligned) * (p.turned if s.lhs_m_major else 1.0)
        return gemm.gemm_seconds(s.m, s.n, s.k, s.batch, slow, moved, stored, p.tiles)

    def _attention_seconds(self, shape: AttentionShape, style: str = "", kind: str = "bf16") -> float:
        """The fused kernels of one direction."""
        style = style if style in attention.STYLES else self.style
        k = self._attention[f"{style} {'backward' if shape.backward else 'forward'}"]
        s, backward = shape, shape.backward
        peak = self._peak(kind) / self.gpu.sms
        both = s.dim + s.value_dim
        share = attention.peak_share(k, both / 2)
        flops = 2.0 * attention.ROWS**2 * both * (attention.BACKWARD if backward else 1.0)
        rows = s.heads * s.queries * (3 if backward else 1) + s.kv_heads * s.keys * (2 if backward else 1)
        nbytes = 2.0 * s.batch * both * rows
        tile = flops / (peak * share) * attention.window_slowdown(style, s)
        edge = attention.EDGE.get(style, 0.0)
        return attention.attention_seconds(s, tile, nbytes, self.gpu.sms, self._bandwidth["copy"], k, edge)

    def _peak(self, kind: str) -> float:
        while kind not in self.gpu.peak:
            kind = STAND_INS[kind] if kind != "bf16" or "fp16" not in self.gpu.peak else "fp16"
        return self.gpu.peak[kind]

    def memory_bound(self, nbytes: Bytes, launches: int = 1, kind: str = "copy") -> Bytes:
        """Kernels that are bound by memory, by the bytes they read and write."""
        return launches * self.parameters.launch + nbytes / self._bandwidth.get(kind, self._bandwidth["other"])


@lru_cache(512)
def _of(gpu: Gpu, attention_style: str) -> ClosedFormKernels:
    return ClosedFormKernels(gpu, attention_style)


def _numbers(gpu: Gpu, p: ClosedFormParameters, kind: str, slower: float) -> _Numbers:
    """The fitted tiling of a type of number, or that of the nearest one that the GPU has."""
    peak = _peaks(gpu)
    there = kind
    while there not in peak:
        there = STAND_INS[there]
    fitted = p.products[FITTED_AS.get(there, there)]
    times = gemm.TileTimes(
        menu=gemm.tile_times(replace(fitted, fixed=fitted.fixed * slower), peak[there] / gpu.sms),
        sms=gpu.sms, bandwidth=fitted.bandwidth * gpu.memory_bandwidth, fill=fitted.fill, smooth=fitted.smooth,
        overlap=fitted.overlap, store=fitted.store, split=fitted.split * slower, launch=fitted.launch * slower,
    )  # fmt: skip
    return _Numbers(times, gemm.WIDTHS[there], fitted.unaligned, fitted.turned, there != "fp32")


def _peaks(gpu: Gpu) -> dict[str, float]:
    """By type of number, those with block scales included."""
    peak = {k: v for k, v in gpu.peak.items() if k != "fp4"}
    if "fp8" in peak and architecture(gpu.architecture).nvfp4:
        peak |= {"mxfp8": peak["fp8"], "nvfp4": gpu.peak.get("fp4", 2 * peak["fp8"])}
    return peak


def _slowed(k: AttentionParameters, slower: float) -> AttentionParameters:
    return replace(k, block=k.block * slower, launch=k.launch * slower)


def _power(gpu: Gpu, p: ClosedFormParameters) -> Power:
    energies = {k.removesuffix("_pJ"): v * 1e-12 for k, v in p.power.items() if k.endswith("_pJ") and k != "byte_pJ"}
    base = min(p.power["base_share"] * p.limit, MOST_BASE * gpu.power_limit)  # of the chip, not of a limit set on it
    return Power(gpu.power_limit, base, p.power["byte_pJ"] * 1e-12, energies, p.power["slope"])
