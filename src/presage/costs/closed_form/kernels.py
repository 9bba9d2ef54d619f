"""A Chip: how long the kernels of a transformer's training take on a GPU, at its full clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from presage.costs.closed_form import attention_law as attend
from presage.costs.closed_form import gemm_law as gemm
from presage.costs.closed_form.parameters import Parameters, parameters, relative
from presage.costs.closed_form.power_law import Power
from presage.hardware.gpu import Gpu

__all__ = ["Chip"]

KINDS = tuple(gemm.WIDTHS)
FITTED_AS = {"fp16": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}
STAND_INS = {"nvfp4": "mxfp8", "mxfp8": "fp8", "fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
REMEMBERED = 65_536  # calls
MOST_BASE = 0.4  # of the power limit
SUMMED = 4.0  # bytes an element at the rate of copies: what a sum in fp32 costs beside a result in bf16 (h200_jobs)


class _Kind(NamedTuple):
    """What the law of products needs of one type of number."""

    menu: tuple[gemm.Tile, ...]
    width: float
    bandwidth: float
    fill: float
    smooth: float
    overlap: float
    store: float
    split: float
    launch: float
    unaligned: tuple[float, float, float]
    turned: float
    tensor: bool


class Chip:
    """Laws with one GPU's parameters. All times are seconds on an idle GPU at its full clock; `slowdown` says what the
    power limit adds over a step."""

    def __init__(self, gpu: Gpu) -> None:
        key = relative(gpu)
        self.gpu, self.transferred = gpu, "" if key == gpu.key else key
        self.parameters = p = parameters(key)
        self._slower = p.clock / gpu.boost_clock  # what takes cycles takes so much longer
        self._kinds = {kind: _kind(gpu, p, kind, self._slower) for kind in KINDS}
        self._attention = {name: _slowed(k, self._slower) for name, k in p.attention.items()}
        self._bandwidth = {kind: share * gpu.memory_bandwidth for kind, share in p.stream.items()}
        self.power = _power(gpu, p)
        self.product = lru_cache(REMEMBERED)(self._product)
        self.grouped = lru_cache(REMEMBERED)(self._grouped)
        self.attention = lru_cache(REMEMBERED)(self._attend)

    @staticmethod
    def of(gpu: Gpu) -> Chip:
        """The one of a GPU; made once."""
        return _of(gpu)

    def _product(
        self, m: int, n: int, k: int, kind: str = "bf16", batch: int = 1, left: bool = False, right: bool = False,
        accumulate: bool = False,
    ) -> float:  # fmt: skip
        """y[m, n] = x[m, k] w[k, n], `batch` times. `left`: x lies with m contiguous; `right`: w with k contiguous.
        `accumulate`: y is an fp32 sum, read and written."""
        return self.shaped(kind, m, n, k, batch, left, right) + self._sums(batch * m * n if accumulate else 0)

    def _sums(self, results: int) -> float:
        return SUMMED * results / self._bandwidth["copy"]

    def shaped(
        self, kind: str, m: int, n: int, k: int, batch: int, left: bool = False, right: bool = False, slow: float = 1.0
    ) -> float:
        """A product whose arithmetic is `slow` times slower than the law's."""
        p = self._kinds[kind]
        stored = max(p.width, 2.0) * batch * m * n
        moved = p.width * batch * (m * k + k * n) + stored
        if p.tensor:
            slow *= gemm.aligned(m, n, k, left, right, p.width, p.unaligned) * (p.turned if left else 1.0)
        return gemm.law(
            m, n, k, batch, slow, moved, stored, p.menu, self.gpu.sms, p.bandwidth, p.fill, p.smooth, p.overlap,
            p.store, p.split, p.launch,
        )  # fmt: skip

    def _grouped(self, groups: int, m: int, n: int, k: int, kind: str = "bf16", accumulate: bool = False) -> float:
        """`groups` products of m rows each in one launch; `accumulate` as in `product`."""
        g = self.parameters.grouped
        extra = (groups * g["group_us"] + g["launch_us"]) * 1e-6 * self._slower
        extra += self._sums(groups * m * n if accumulate else 0)
        return self.shaped(kind, m, n, k, groups, slow=1.0 / g["share"]) + extra

    def _attend(
        self, batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int = 0,
        causal: bool = True, window: int = 0, backward: bool = False, style: str = "flash2", kind: str = "bf16",
    ) -> float:  # fmt: skip
        """The fused kernels of one direction. Under a causal mask the queries are the last of the keys."""
        value_dim = value_dim or dim
        style = style if style in attend.STYLES else "flash2"
        k = self._attention[f"{style} {'backward' if backward else 'forward'}"]
        peak = self._peak(kind) / self.gpu.sms
        both = dim + value_dim
        share = attend.share(k, both / 2)
        flops = 2.0 * attend.ROWS**2 * both * (attend.BACKWARD if backward else 1.0)
        blocks, tiles, longest = attend.walks(queries, keys, causal, window)
        nbytes = (
            2.0 * batch * both * (heads * queries * (3 if backward else 1) + kv_heads * keys * (2 if backward else 1))
        )
        return attend.law(
            batch * heads, blocks, tiles, longest, causal, flops / (peak * share), nbytes, self.gpu.sms,
            self._bandwidth["copy"], k,
        )  # fmt: skip

    def _peak(self, kind: str) -> float:
        while kind not in self.gpu.peak:
            kind = STAND_INS[kind] if kind != "bf16" or "fp16" not in self.gpu.peak else "fp16"
        return self.gpu.peak[kind]

    def stream(self, nbytes: float, launches: int = 1, kind: str = "copy") -> float:
        """Kernels that are bound by memory: bytes read and written."""
        return launches * self.parameters.launch + nbytes / self._bandwidth.get(kind, self._bandwidth["other"])

    def slowdown(self, tensor: float, other: float, flops: Mapping[str, float], nbytes: float) -> float:
        """How much longer tensor-core kernels take in a step with `tensor` seconds of them and `other` seconds of other
        kernels and of waiting, all at the full clock. FLOPs by type of number; attention's are "attention" and
        "attention_backward"."""
        return self.power.slowdown(self.power.energy(flops, nbytes), tensor, other)


@lru_cache(256)
def _of(gpu: Gpu) -> Chip:
    return Chip(gpu)


def _kind(gpu: Gpu, p: Parameters, kind: str, slower: float) -> _Kind:
    """The fitted tiling of a type of number, or that of the nearest one that the GPU has."""
    peak = _peaks(gpu)
    there = kind
    while there not in peak:
        there = STAND_INS[there]
    fitted = p.products[FITTED_AS.get(there, there)]
    return _Kind(
        gemm.tiles(replace(fitted, fixed=fitted.fixed * slower), peak[there] / gpu.sms), gemm.WIDTHS[there],
        fitted.bandwidth * gpu.memory_bandwidth, fitted.fill, fitted.smooth, fitted.overlap, fitted.store,
        fitted.split * slower, fitted.launch * slower, fitted.unaligned, fitted.turned,
        there != "fp32",
    )  # fmt: skip


def _peaks(gpu: Gpu) -> dict[str, float]:
    """By type of number, those with scales of blocks included."""
    peak = {k: v for k, v in gpu.peak.items() if k != "fp4"}
    if "fp8" in peak and gpu.architecture == "Blackwell":
        peak |= {"mxfp8": peak["fp8"], "nvfp4": gpu.peak.get("fp4", 2 * peak["fp8"])}
    return peak


def _slowed(k: attend.Kernel, slower: float) -> attend.Kernel:
    return replace(k, block=k.block * slower, launch=k.launch * slower)


def _power(gpu: Gpu, p: Parameters) -> Power:
    energies = {k.removesuffix("_pJ"): v * 1e-12 for k, v in p.power.items() if k.endswith("_pJ") and k != "byte_pJ"}
    base = min(p.power["base_share"] * p.limit, MOST_BASE * gpu.power_limit)  # of the chip, not of a limit set on it
    return Power(gpu.power_limit, base, p.power["byte_pJ"] * 1e-12, energies, p.power["slope"])
