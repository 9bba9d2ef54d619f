"""Corrections for GPUs that were not calibrated, fitted on published tables.

`Fp32GemmCorrection`: float32 GEMMs on GPUs that are no Hoppers, one set of trees for all. They see a GEMM by its sizes,
its waves on the GPU and its side of the roofline, and of the GPU only its generation. Fitted (tools/fit_single.py) on
NeuSight's train tables of bmm and linear on A100 40 GB, P100, T4 and V100, and on the float32 GEMMs of our own H200,
each GPU's level taken off first. That it is was decided with labels of T4 and L4 in view (docs/labels.md). On chips
that were not fitted they count by half: with one GPU left out of the fit at a time, its train tables are 21.3% off by
half of them, 22.3% by the law alone and 23.8% by all of them (tools/fit_single.py).

`Fp32ConvCorrection`: float32 convolutions forward on the same GPUs, likewise, of NeuSight's train tables of a T4 and an
A100 80 GB (tools/fit_conv.py); V100 and P100 are left to be scored on. Their gradients, of which no table tells, follow
the law alone. cuDNN's choice of kernels on an H200 is another one.

`carried`: which of the calibrated GPU's corrections of computing kernels hold on another. On one of the same
architecture all; elsewhere those of its architecture's table (hardware/architectures.toml): on GPUs before Ampere not
those of convolutions, on AMD's none, whose libraries are others. What is not carried over is timed by the law alone.

`TableCorrection`: one family on one GPU whose kernels published tables time (tools/fit_tables.py), with what serving
engines add taken off. It looks at sizes and waves, not at layouts or at what is added, which tables do not vary. The
backward pass of an attention is corrected like its forward pass.

`transfer_streaming`: memory-bound kernels. Of a row that is read twice memory may move the second read on one GPU and
L2 on another (`KernelFamily.from_memory`). What a kernel takes on the calibrated GPU over the time of its bytes tells
why. Quicker than its bytes: a cache helps, and does here too where it holds them (on the same architecture in any
case); else it is as quick as with a cold cache, for the law may count more bytes than move. Slower: its instructions or
its waits set the pace, and they go by SMs and clock, not by bandwidth. Element-wise ops, norms and softmax move what
their laws count, and tables of other GPUs show it: beyond the cache these are never quicker than the law. That was
chosen on NeuSight's train tables; its test tables are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from presage.costs.call import Call
from presage.costs.families import KernelFamily, Law, attention, conv, gemm
from presage.costs.families.common import alignment, ln
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.hardware import Gpu
from presage.hardware.architecture import architecture

FP32_FILE, FP32_CONV_FILE = "float32.npz", "float32_conv.npz"
BYTES_COUNT = ("pointwise", "norm", "softmax")  # families whose laws count what they move
FP32_FITTED, FP32_CARRIED = (6.0, 7.0, 7.5, 8.0), 0.5  # compute capabilities; the share that counts elsewhere
FP32_TILES = ((128, 128), (128, 64), (64, 64), (128, 32), (32, 32))
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fp32GemmCorrection:
    """ln(seconds / law) of float32 GEMMs."""

    trees: Trees

    def corrected(
        self, known: Floats, calls: Sequence[Call], laws: Sequence[Law], rates: Rates, capability: float
    ) -> Floats:
        """The corrections that are `known`, with those of float32 GEMMs in their places."""
        out = known.copy()
        at = [i for i, c in enumerate(calls) if is_fp32_gemm(c)]
        if at:
            x = np.array([fp32_features(calls[i], laws[i], rates, capability) for i in at], np.float32)
            out[at] = self.trees.predict(x) * (1.0 if capability in FP32_FITTED else FP32_CARRIED)
        return out


def is_fp32_gemm(call: Call) -> bool:
    return not call.tf32 and gemm.gemm_call(call).kind == "float32"


def fp32_features(call: Call, law: Law, rates: Rates, capability: float) -> list[float]:
    """Features of a float32 GEMM; `capability` is the GPU's compute capability."""
    p = gemm.gemm_call(call)
    t = gemm.tiling(p, rates)
    arithmetic = law.flops / rates.rate("float32")
    memory = law.bytes / rates.bandwidth
    logs = (p.m, p.n, p.k, p.m * p.n * p.batch / rates.sms, arithmetic / memory, arithmetic / law.seconds, t.waves)
    out = [capability, float(p.left), float(p.right), float(p.added), ln(p.batch), *map(ln, logs)]
    out += [
        float(t.rows * t.columns),
        float(t.splits),
        float(min(alignment(p.m), alignment(p.n))),
        float(alignment(p.k)),
    ]
    for rows, columns in FP32_TILES:
        waves = p.batch * ceil(p.m / rows) * ceil(p.n / columns) / rates.sms
        out += [
            waves / ceil(waves),
            ln(ceil(waves)),
            ceil(p.m / rows) * rows / p.m * ceil(p.n / columns) * columns / p.n,
        ]
    return out


@dataclass(frozen=True)
class Fp32ConvCorrection:
    """ln(seconds / law) of float32 convolutions, forward."""

    trees: Trees

    def corrected(self, known: Floats, calls: Sequence[Call], laws: Sequence[Law], rates: Rates) -> Floats:
        """The corrections that are `known`, with those of float32 convolutions in their places."""
        out = known.copy()
        found = [conv.conv(c) for c in calls]
        out[[c.kind == "float32" for c in found]] = 0.0
        at = [i for i, c in enumerate(found) if is_fp32_forward(c)]
        if at:
            x = np.array([fp32_conv_features(found[i], laws[i], rates) for i in at], np.float32)
            out[at] = self.trees.predict(x)
        return out


def is_fp32_forward(c: conv.Conv) -> bool:
    return c.kind == "float32" and c.role == 0 and c.groups == 1 and not c.transposed


def fp32_conv_features(c: conv.Conv, law: Law, rates: Rates) -> list[float]:
    """Sizes, sides of the roofline and waves on the GPU; nothing of the GPU itself."""
    parts, p = conv.parts(c, rates), conv.product(c)
    arithmetic, memory = c.flops / rates.convolved("float32"), parts.moving
    sizes = (p.m, p.n, p.inner, p.inner * p.taps, c.n, prod(c.large), arithmetic / law.seconds, memory / law.seconds)
    more = (arithmetic / memory, p.m * p.n / rates.sms, law.seconds, c.flops, *c.sides)
    out = [float(c.taps), float(prod(c.stride)), *map(ln, (*sizes, *more))]
    out += [float(alignment(c.c)), float(alignment(c.k))]
    for rows, columns in FP32_TILES:
        waves = ceil(p.m / rows) * ceil(p.n / columns) / rates.sms
        padded = ceil(p.m / rows) * rows / p.m * ceil(p.n / columns) * columns / p.n
        out += [*_waves(waves), padded]
    return out + [ln(t / law.seconds) for t in parts.tiles]


def carried(known: Floats, family: KernelFamily, here: Gpu, there: Gpu) -> Floats:
    """Corrections of the GPU `there` as far as they hold on the GPU `here`."""
    if here.architecture == there.architecture or family.name in architecture(here.architecture).carried:
        return known
    return np.zeros(len(known))


def shortest_kernel(here: Gpu, there: Gpu) -> float:
    """Seconds of the shortest kernel on the GPU `here`, where its architecture is not that of the GPU `there`."""
    return 0.0 if here.architecture == there.architecture else architecture(here.architecture).shortest_us * 1e-6


KINDS = ("bfloat16", "float16")  # what tables time, and what runs alike
TILES = ((128, 256), (256, 128), (128, 128), (64, 64))
ROWS = 128


@dataclass(frozen=True)
class TableCorrection:
    """Correction of one family on one GPU."""

    family: str
    ops: tuple[str, ...]  # what their names begin with
    trees: Trees

    def factors(self, calls: Sequence[Call], laws: Sequence[Law], rates: Rates) -> Floats:
        """Factors over the other GPU's correction; 1 where nothing was measured."""
        out = np.ones(len(calls))
        at = [i for i, c in enumerate(calls) if self.knows(c)]
        if at:
            x = np.array([table_features(self.family, calls[i], laws[i], rates) for i in at], np.float32)
            out[at] = np.exp(self.trees.predict(x))
        return out

    def knows(self, call: Call) -> bool:
        return call.name.startswith(self.ops) and all(t.dtype in KINDS for t in call.tensors[:2] if t.sizes)


def table_features(family: str, call: Call, law: Law, rates: Rates) -> list[float]:
    return FEATURES[family](call, law, rates)


def _gemm(call: Call, law: Law, rates: Rates) -> list[float]:
    p = gemm.gemm_call(call)
    logs = (p.m, p.n, p.k, law.flops, law.bytes, law.seconds, p.batch * p.m * p.n, p.m / p.n)
    out = [*map(ln, logs), ln(law.flops / law.bytes), ln(law.flops / law.seconds), ln(law.bytes / law.seconds)]
    for rows, columns in TILES:
        out += _waves(p.batch * ceil(p.m / rows) * ceil(p.n / columns) / rates.sms)
    return out


def _attention(call: Call, _: Law, rates: Rates) -> list[float]:
    a = attention.attention(call)
    heads = a.b * a.h
    sizes = (heads, a.s, a.t, heads * a.s * a.t)
    return [*map(ln, sizes), float(a.d), float("cudnn" in call.name), *_waves(heads * ceil(a.s / ROWS) / rates.sms)]


def _waves(waves: float) -> list[float]:
    return [waves / ceil(waves), ln(ceil(waves))]


FEATURES: Mapping[str, Callable[[Call, Law, Rates], list[float]]] = {"gemm": _gemm, "attention": _attention}


def transfer_streaming(
    family: KernelFamily, trees: Trees, calls: Sequence[Call], laws: Sequence[Law], there: Gpu, here: Gpu
) -> tuple[Floats, Floats]:
    """Seconds with a warm and with a cold cache on the GPU `here`, whose laws are given."""
    rates = Rates.of(there)
    known = [family.law(c, rates) for c in calls]
    x = np.array([[*family.features(c, law), 0.0] for c, law in zip(calls, known, strict=True)], np.float32)
    seconds = np.array([law.seconds for law in known])
    bytes_there, bytes_here = _moving(family, calls, known, there), _moving(family, calls, laws, here)
    slower = there.sms * there.boost_clock / (here.sms * here.boost_clock)
    kept = np.array([law.bytes <= here.l2 or here.architecture == there.architecture for law in laws])
    ratios = []
    for cold in (0.0, 1.0):
        x[:, -1] = cold
        ratios.append(np.exp(trees.predict(x)) * seconds / bytes_there)
    beyond = np.ones(len(calls)) if family.name in BYTES_COUNT else np.minimum(1.0, np.maximum(*ratios))
    out = []
    for ratio in ratios:
        paced = np.maximum(bytes_here, bytes_there * ratio * slower)
        out.append(np.where(ratio <= 1.0, bytes_here * np.where(kept, ratio, beyond), paced))
    return out[0], out[1]


def _moving(family: KernelFamily, calls: Sequence[Call], laws: Sequence[Law], gpu: Gpu) -> Floats:
    """Seconds of the laws, with the bytes that memory moves."""
    bandwidth = Rates.of(gpu).bandwidth
    spared = [(1.0 - family.from_memory(c, gpu)) * law.bytes / bandwidth for c, law in zip(calls, laws, strict=True)]
    return np.asarray(np.array([law.seconds for law in laws]) - np.array(spared), np.float64)
