"""Fits of a chip's laws: least mean error in logarithms, by the simplex method, over rows that are not held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from chip_rows import Attention, Product
from numpy.typing import NDArray
from scipy.optimize import minimize

from presage.costs.families import attention, gemm
from presage.costs.families.gemm import GemmParameters, GemmShape, TileTimes
from presage.hardware import Gpu
from presage_fit.serving import heated

Floats = NDArray[np.float64]
MOST = 0.5  # an error in logarithms beyond which a row does not count more
US = 1e-6
MOST_OF = (8.0, 1.0, 1.0, 1.5)  # block, tail, smooth, moved
LAUNCHES = 3.0  # microseconds of a short attention kernel; backward there are three
FREE = ("reach", "small", "fixed", "fill", "smooth", "overlap", "bandwidth", "store", "split", "launch")
START = {
    "reach": 0.8, "small": 5.0, "fixed": 1.0, "fill": 10.0, "smooth": 0.5, "overlap": 5.0, "bandwidth": 0.85,
    "store": 0.2, "split": 3.0, "launch": 2.5, "heat": 0.05,
}  # fmt: skip
# What cannot be is not tried: matrix units of AMD do float32 at twice the vector peak, hence the reach.
BOUNDS = {
    "reach": (0.1, 1.9), "small": (0.1, 60.0), "fixed": (0.05, 20.0), "fill": (1.0, 256.0), "smooth": (0.0, 1.0),
    "overlap": (1.5, 12.0), "bandwidth": (0.4, 0.95), "store": (0.01, 1.0), "split": (1.0, 40.0), "launch": (1.0, 30.0),
}  # fmt: skip
MENUS: dict[str, tuple[tuple[int, int], ...]] = {
    "ampere": ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64)),
    "hopper": ((128, 256), (256, 128), (192, 192), (128, 192), (128, 128), (64, 256), (128, 64), (64, 64)),
    "blackwell": ((256, 256), (256, 192), (128, 256), (256, 128), (128, 128), (64, 256), (128, 64), (64, 64)),
    "vector": ((128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32)),
}  # fmt: skip
TURNED = 1.5  # Hopper in tf32: weight gradients beside forward products (pack, medians)
# Of the full rate, by 2, 4 and 8 bytes: an H200 (pack) falls back on kernels of the A100, whose own rate is not so far
# above them; a B200's is further.
UNALIGNED = {"Hopper": (0.17, 0.29, 0.33), "Ampere": (0.33, 0.55, 0.62), "Blackwell": (0.08, 0.14, 0.16)}
compiled = numba.njit(gemm.gemm_seconds)


@numba.njit
def _all(x, slow, moved, stored, times):  # type: ignore[no-untyped-def]
    out = np.empty(len(x))
    for i in range(len(x)):
        m, n, k, batch = x[i]
        out[i] = compiled(m, n, k, batch, slow[i], moved[i], stored[i], times)
    return out


class ProductFit:
    """Rows of one type of number on one GPU, and what a tiling says of them."""

    def __init__(self, gpu: Gpu, kind: str, rows: Sequence[Product], menu: str, out: float = 0.0) -> None:
        self.gpu, self.peak, self.menu = gpu, gpu.peak.get(kind, gpu.peak["fp32"]), MENUS[menu]
        self.x = np.array([(r.m, r.n, r.k, r.batch) for r in rows], np.int64)
        self.seconds = np.array([r.seconds for r in rows])
        self.held = np.array([r.held for r in rows])
        self.flops = np.array([r.flops for r in rows])
        width = gemm.WIDTHS[kind]
        tensor = kind != "fp32"
        self.turned = TURNED if kind == "tf32" and gpu.architecture == "Hopper" else 1.0
        self.unaligned = UNALIGNED.get(gpu.architecture, UNALIGNED["Ampere"])
        odd = [gemm.alignment_factor(_shape(r), width, self.unaligned) if tensor else 1.0 for r in rows]
        self.usual = np.array(odd) == 1.0
        self.slow = np.array(odd) * np.where([r.left for r in rows], self.turned, 1.0)
        m, n, k, batch = self.x.T.astype(np.float64)
        self.stored = (out or max(width, 2.0)) * batch * m * n
        self.moved = width * batch * (m * k + k * n) + self.stored

    def tiling(self, p: dict[str, float]) -> GemmParameters:
        p = {name: min(max(value, BOUNDS[name][0]), BOUNDS[name][1]) for name, value in p.items() if name in BOUNDS}
        return GemmParameters(
            self.menu, p["reach"], p["small"], p["fixed"] * US, p["fill"], p["smooth"], p["overlap"], p["bandwidth"],
            p["store"], p["split"] * US, p["launch"] * US, self.unaligned, self.turned,
        )  # fmt: skip

    def predicted(self, t: GemmParameters, heat: float = 0.0, keep: Any = slice(None)) -> Floats:
        """Seconds; `heat` is how much longer the longest products took for the clock that fell under them."""
        times = TileTimes(
            gemm.tile_times(t, self.peak / self.gpu.sms), self.gpu.sms, t.bandwidth * self.gpu.memory_bandwidth, t.fill,
            t.smooth, t.overlap, t.store, t.split, t.launch,
        )  # fmt: skip
        took = _all(self.x[keep], self.slow[keep], self.moved[keep], self.stored[keep], times)
        return heated(took, heat)

    def fit(self, falls: bool, most: int = 3000, start: dict[str, float] = START) -> tuple[GemmParameters, float]:
        """The tiling, and the heat of the rows where their clock may have fallen."""
        free = [*FREE, "heat"] if falls else list(FREE)
        rows = np.flatnonzero(~self.held & self.usual)
        keep = np.random.default_rng(0).choice(rows, min(most, len(rows)), replace=False)

        def tried(logs: Floats) -> tuple[GemmParameters, float]:
            p = dict(zip(free, np.exp(logs), strict=True))
            return self.tiling(p), p.get("heat", 0.0)

        def miss(logs: Floats) -> float:
            t, heat = tried(logs)
            apart = np.abs(np.log(self.predicted(t, heat, keep) / self.seconds[keep]))
            return float(np.minimum(apart, MOST).mean())

        return tried(simplex(miss, np.log([start[name] for name in free])))


def _shape(r: Product) -> GemmShape:
    return GemmShape(r.m, r.n, r.k, r.batch, 1, r.left, r.right)


def simplex(miss: Callable[[Floats], float], start: Floats, rounds: int = 4, calls: int = 1500) -> Floats:
    at = start
    for _ in range(rounds):
        options = {"maxiter": calls, "maxfev": calls, "adaptive": True, "xatol": 1e-3, "fatol": 1e-6}
        at = minimize(miss, at, method="Nelder-Mead", options=options).x
    return np.asarray(at)


class AttentionFit:
    """Rows of one style in one direction on one GPU."""

    def __init__(self, gpu: Gpu, rows: Sequence[Attention], backward: bool, bandwidth: float) -> None:
        self.gpu, self.rows, self.bandwidth = gpu, rows, bandwidth
        self.seconds = np.array([r.seconds for r in rows])
        self.held = np.array([r.held for r in rows])
        self.causal = np.array([r.causal for r in rows])
        walks = [attention.tile_counts(r.length, r.length, r.causal, r.window) for r in rows]
        self.blocks, self.tiles, self.longest = (np.array(c, np.float64) for c in zip(*walks, strict=True))
        self.heads = np.array([r.batch * r.heads for r in rows], np.float64)
        both = np.array([r.dim + r.value_dim for r in rows], np.float64)
        self.width = both / 2
        times = attention.BACKWARD if backward else 1.0
        self.flops = 2.0 * attention.ROWS**2 * both * times * gpu.sms / gpu.peak.get("bf16", gpu.peak["fp16"])
        sides = np.array(
            [
                r.batch * r.length * (r.heads * (3 if backward else 1) + r.kv_heads * (2 if backward else 1))
                for r in rows
            ]
        )
        self.nbytes = 2.0 * both * sides
        self.widths = sorted(set(self.width.tolist()))
        self.launch = LAUNCHES * (3.0 if backward else 1.0)

    def kernel(self, logs: Floats, like: attention.AttentionParameters | None) -> attention.AttentionParameters:
        """Of shares by width and seconds of a block; the rest is another kernel's, or given too."""
        w = len(self.widths)
        p = [*np.exp(logs[w:]), *((like.tail, like.smooth, like.moved) if like else ())]
        block, tail, smooth, moved = (float(min(max(v, 0.01), most)) for v, most in zip(p, MOST_OF, strict=True))
        reach = tuple(min(v, 0.9) for v in np.exp(logs[:w]).tolist())
        return attention.AttentionParameters(
            tuple(self.widths), reach, block * US, tail, smooth, moved, self.launch * US
        )

    def predicted(self, k: attention.AttentionParameters, heat: float = 0.0) -> Floats:
        """As the law says, all rows at once."""
        share = np.array([attention.peak_share(k, w) for w in self.width])
        tile = self.flops / share
        waves = self.heads * self.blocks / self.gpu.sms
        work = self.heads * (self.tiles * tile + self.blocks * k.block) / self.gpu.sms
        tail = k.tail * self.longest * tile * np.minimum(1.0, waves)
        whole = work * (1.0 + (1.0 - k.smooth) * np.where(waves > 1, np.ceil(waves) / waves - 1.0, 0.0))
        most = waves * (self.longest * tile + k.block)
        work = np.where(self.causal, np.minimum(work + tail, most), whole)
        took = k.launch + np.maximum(self.longest * tile + k.block, work) + k.moved * self.nbytes / self.bandwidth
        return heated(took, heat)

    def fit(self, heat: float, like: attention.AttentionParameters | None) -> attention.AttentionParameters:
        """The kernel, where the clock fell by so much in the longest rows."""
        keep = ~self.held

        def miss(logs: Floats) -> float:
            apart = np.abs(np.log(self.predicted(self.kernel(logs, like), heat)[keep] / self.seconds[keep]))
            return float(np.minimum(apart, MOST).mean())

        rest = [1.0] if like else [1.0, 0.5, 0.5, 0.5]
        start = np.log([*([0.5] * len(self.widths)), *rest])
        return self.kernel(simplex(miss, start, rounds=5, calls=3000), like)
