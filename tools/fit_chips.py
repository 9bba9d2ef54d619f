"""Fit the laws of chips (costs/chip) and write src/presage/data/chips and the error tables of docs/chips.md.

    python tools/fit_chips.py ../shared [h200 a100_80gb ...]

Reads the published kernel tables in SHARED/kernels and our own measurements in data/h200_pack and data/h200_jobs. A
fifth of the shapes of each is held out (`held` in chip_rows.py). Only the parameters are kept. Needs SciPy, which
LightGBM brings (the `fit` extra). Chips named are fitted anew, the others read back; all are scored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from chip_fits import US, AttentionFit, Floats, ProductFit, simplex
from chip_rows import (
    Attention,
    Product,
    attention_table,
    gemm_table,
    jobs,
    jobs_attention,
    jobs_products,
    neusight,
    pack_products,
)

from presage.costs.chip import Chip
from presage.costs.chip import attention as attend
from presage.costs.chip.product import Tiling
from presage.costs.chip.store import FOLDER, parameters
from presage.hardware import Gpu, gpu

ROOT = Path(__file__).resolve().parent.parent
PACK, JOBS = ROOT / "data" / "h200_pack", ROOT / "data" / "h200_jobs"
LAUNCH = 2.0  # microseconds of the shortest product on an H200 in a full queue; tables add what engines do around it
CLOCK = 1980.0  # MHz, of the H200
TABLES = {"a100_80gb": "a100_sxm", "h100_sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
MENU = {"a100_80gb": "ampere", "h100_sxm": "hopper", "h200": "hopper", "b200": "blackwell", "l40s": "ampere"}
FLOAT32 = {  # whose float32 products NeuSight timed, under which name
    "a100_80gb": "NVIDIA A100-PCIE-40GB", "h100_sxm": "NVIDIA H100 80GB HBM3", "v100_pcie_32gb": "Tesla V100-PCIE-32GB",
    "l4": "NVIDIA L4", "t4": "Tesla T4", "p100_pcie": "Tesla P100-PCIE-16GB", "mi210": "AMD Instinct MI210",
}  # fmt: skip
MEASURED = {"a100_80gb": "a100_pcie_40gb"}  # the GPU that float32 figures are of, where it is another
STYLE = {"a100_80gb": "flash2", "h100_sxm": "flash3", "h200": "flash3", "b200": "flash3", "l40s": "flash2"}
USUAL = 512  # rows from which on products count; those of training have more


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tiling_file(t: Tiling, launch: float | None = None) -> dict[str, Any]:
    found = asdict(t)
    split, fixed, own = found.pop("split"), found.pop("fixed"), found.pop("launch")
    times = {"tile_us": fixed / US, "split_us": split / US, "launch_us": own / US if launch is None else launch}
    return {**found, **times}


def kernel_file(k: attend.Kernel) -> dict[str, Any]:
    reach = {f"{w:g}": r for w, r in zip(k.widths, k.reach, strict=True)}
    return {
        "reach": reach, "block_us": k.block / US, "tail": k.tail, "smooth": k.smooth, "moved": k.moved,
        "launch_us": k.launch / US,
    }  # fmt: skip


def usual(rows: Sequence[Product]) -> list[Product]:
    return [r for r in rows if r.m * r.batch >= USUAL and min(r.n, r.k) >= 128]


def long(rows: Sequence[Attention]) -> list[Attention]:
    """Attention of training: many tokens, whole sequences."""
    return [r for r in rows if r.length >= 512 and r.batch * r.length >= 2048]


class Fitter:
    def __init__(self, shared: Path) -> None:
        self.tables = shared / "kernels" / "aiconfigurator"
        self.neusight = shared / "kernels" / "neusight"

    def products(self, key: str) -> dict[str, tuple[str, str, list[Product], bool]]:
        """By type of number: the GPU measured, its menu, rows, whether the clock may have fallen in them."""
        out: dict[str, tuple[str, str, list[Product], bool]] = {}
        if key == "h200":
            menu = MENU[key]
            for kind, name in (("bf16", "bfloat16"), ("tf32", "tf32"), ("fp32", "float32")):
                rows = usual(pack_products(PACK, name))
                rows += jobs_products(JOBS, "bf16") if kind == "bf16" else []
                out[kind] = (key, menu if kind != "fp32" else "vector", rows, False)
            out["fp8"] = (key, menu, jobs_products(JOBS, "fp8"), False)
        elif key in TABLES:
            out["bf16"] = (key, MENU[key], usual(gemm_table(self.tables / f"{TABLES[key]}_gemm.csv.gz")), True)
        if key in FLOAT32:
            rows = neusight(self.neusight, FLOAT32[key])
            out["fp32"] = (MEASURED.get(key, key), "vector", rows, False)
        return out

    def attention(self, key: str) -> dict[str, tuple[list[Attention], bool, bool]]:
        """By style and direction: rows, whether backward, whether the clock may have fallen in them."""
        if key == "h200":
            styles = (("flash3", "cudnn"), ("flash2", "flash"))
            return {
                f"{style} {way}": (jobs_attention(JOBS, backend, way), way == "backward", False)
                for style, backend in styles
                for way in ("forward", "backward")
            }
        if key not in TABLES or key == "h100_sxm":
            return {}
        path = self.tables / f"{TABLES[key]}_context_attention.csv.gz"
        return {f"{STYLE[key]} forward": (long(attention_table(path)), False, True)}


def fit_products(fitter: Fitter, key: str) -> tuple[dict[str, Any], float]:
    """Files of tilings, and the heat of the table's longest products."""
    out, heat = {}, 0.0
    for kind, (of, menu, rows, heated) in fitter.products(key).items():
        fit = ProductFit(gpu(of), kind, rows, menu)
        t, found = fit.fit(heated)
        heat = found if kind == "bf16" else heat
        floor = LAUNCH * CLOCK * 1e6 / gpu(of).boost_clock
        out[kind] = tiling_file(t, min(t.launch / US, floor))
        print(key, kind, rounded(out[kind]), f"heat {found:.3f}", score(fit.predicted(t, found), fit), flush=True)
    return out, heat


def score(predicted: Floats, fit: ProductFit | AttentionFit) -> str:
    e = np.abs(predicted / fit.seconds - 1)
    parts = [("fitted", e[~fit.held]), ("held out", e[fit.held])]
    return ", ".join(f"{name} {np.median(x):.1%} p90 {np.quantile(x, 0.9):.1%} n {len(x)}" for name, x in parts if len(x))


def fit_attention(fitter: Fitter, key: str, bandwidth: float) -> dict[str, Any]:
    out = {}
    for name, (rows, backward, heated) in fitter.attention(key).items():
        fit = AttentionFit(gpu(key), rows, backward, bandwidth)
        k, heat = fit.fit(heated)
        out[name] = kernel_file(k)
        print(key, name, rounded(out[name]), f"heat {heat:.3f}", score(fit.predicted(k, heat), fit), flush=True)
    return out


def fit_grouped(chip: Chip) -> dict[str, float]:
    """Experts' products beside single ones, on our H200."""
    rows = [r for r in jobs(JOBS, "experts") if isinstance(r["bf16"], float)]
    seconds = np.array([r["bf16"] for r in rows])
    shapes = [(r["m"], r["n"], r["k"], r["groups"]) for r in rows]
    kind = chip._kinds["bf16"]

    def predicted(p: Floats) -> Floats:
        share, group, launch = np.exp(p)
        took = [chip._seconds(kind, m, n, k, g, False, False, 0.0, 1 / share) for m, n, k, g in shapes]
        return np.array(took) + np.array([g for *_, g in shapes]) * group * US + launch * US

    def miss(p: Floats) -> float:
        return float(np.minimum(np.abs(np.log(predicted(p) / seconds)), 0.5).mean())

    best = simplex(miss, np.log([0.9, 0.1, 5.0]), rounds=2, calls=400)
    e = np.abs(predicted(best) / seconds - 1)
    print("grouped", np.exp(best), f"median {np.median(e):.1%} p90 {np.quantile(e, 0.9):.1%} n {len(e)}", flush=True)
    share, group, launch = np.exp(best).tolist()
    return {"share": share, "group_us": group, "launch_us": launch}


if __name__ == "__main__":
    shared = Path(sys.argv[1])
    fitter = Fitter(shared)
    for key in sys.argv[2:]:
        products, heat = fit_products(fitter, key)
        found = {"products": products, "heat": heat, "attention": fit_attention(fitter, key, 0.88 * gpu(key).memory_bandwidth)}
        Path(f"/tmp/dev/K/fit_{key}.json").write_text(json.dumps(rounded(found), indent=1))
