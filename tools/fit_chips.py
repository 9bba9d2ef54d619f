"""Fit the laws of chips (costs/chip): writes src/presage/data/chips/*.json, and errors into docs/chips.md.

    python tools/fit_chips.py ../shared [--score] [h200 a100_80gb ...]

Reads the published kernel tables in SHARED/kernels and our own measurements in data/h200_pack and data/h200_jobs. A
fifth of the shapes of each is held out (`held` in chip_rows.py). Only the parameters are kept. Needs SciPy, which
LightGBM brings (the `fit` extra). --score fits nothing.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from chip_facts import (
    ALIKE,
    ENERGIES,
    ENERGIES_OF,
    FACTS,
    FLASH1,
    FP8,
    OWN_STREAMS,
    REACH,
    RELATED,
    SHARES,
    STREAMS,
    SUSTAINED,
)
from chip_fits import US, AttentionFit, Floats, ProductFit, simplex
from chip_power import fit_power, flop_energy, scaled_energy
from chip_rows import Product, jobs
from chip_score import write_scores
from chip_sources import JOBS, Sources

from presage.costs.closed_form import ClosedFormKernels
from presage.costs.closed_form.parameters import FOLDER, merge_base, parameters
from presage.costs.families.attention import AttentionParameters
from presage.costs.families.gemm import GemmParameters, GemmShape
from presage.hardware import gpu

File = dict[str, Any]
LAUNCH = 2.0  # microseconds of the shortest product on an H200 in a full queue; tables add what engines do around it
CLOCK = 1980e6  # Hz, of the H200
OWN = "h200"  # measured by ourselves; the others lean on it


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tiling_file(t: GemmParameters, launch: float) -> File:
    found = asdict(t)
    split, fixed, own = found.pop("split"), found.pop("fixed"), found.pop("launch")
    return {**found, "tile_us": fixed / US, "split_us": split / US, "launch_us": min(own / US, launch)}


def kernel_file(k: AttentionParameters) -> File:
    reach = {f"{w:g}": r for w, r in zip(k.widths, k.reach, strict=True)}
    times = {"block_us": k.block / US, "launch_us": k.launch / US}
    return {"reach": reach, "tail": k.tail, "smooth": k.smooth, "moved": k.moved, **times}


def products(sources: Sources, key: str) -> tuple[File, float]:
    """Files of tilings, and the heat of the table's longest products."""
    out, heat = {}, 0.0
    for kind, source in sources.products(key).items():
        fit = ProductFit(gpu(source.gpu), kind, source.rows, source.menu)
        t, found = fit.fit(source.heated)
        heat = found if kind == "bf16" else heat
        out[kind] = tiling_file(t, LAUNCH * CLOCK / gpu(source.gpu).boost_clock)
        tell(key, kind, fit.predicted(t, found), fit)
    return out, heat


def tell(key: str, name: str, predicted: Floats, fit: ProductFit | AttentionFit) -> None:
    e = np.abs(predicted / fit.seconds - 1)
    parts = [("fitted", e[~fit.held]), ("held out", e[fit.held])]
    text = ", ".join(f"{n} {np.median(x):.1%} p90 {np.quantile(x, 0.9):.1%} n {len(x)}" for n, x in parts if len(x))
    print(f"{key} {name}: {text}", flush=True)


def attention(sources: Sources, key: str, heat: float) -> File:
    """Tables show how long sequences run; what short ones cost besides is the engines', so the H200's is taken."""
    out = {}
    for name, rows in sources.attention(key).items():
        bandwidth = SHARES.get(key, SHARES[OWN]) * gpu(key).memory_bandwidth
        fit = AttentionFit(gpu(key), rows, name.endswith("backward"), bandwidth)
        like = parameters(OWN).attention[name] if key != OWN else None
        k = fit.fit(heat / 2, like)  # its kernels draw less than products do
        out[name] = kernel_file(k)
        tell(key, name, fit.predicted(k, heat / 2), fit)
    return out


def grouped(chip: ClosedFormKernels) -> File:
    """Experts' products beside single ones, on our H200."""
    rows = [r for r in jobs(JOBS, "experts") if isinstance(r["bf16"], float)]
    seconds, groups = np.array([r["bf16"] for r in rows]), np.array([r["groups"] for r in rows])
    shapes = [(r["m"], r["n"], r["k"], r["groups"]) for r in rows]
    keep = ~np.array([Product(m, n, k, 1, 0.0).held for m, n, k, _ in shapes])

    def predicted(p: Floats) -> Floats:
        share, group, launch = np.exp(p)
        took = [chip.gemm_at(GemmShape(m, n, k, g), "bf16", slow=1 / share) for m, n, k, g in shapes]
        return np.asarray(np.array(took) + groups * group * US + launch * US)

    def miss(p: Floats) -> float:
        return float(np.minimum(np.abs(np.log(predicted(p) / seconds))[keep], 0.5).mean())

    best = simplex(miss, np.log([0.9, 0.1, 5.0]), rounds=2, calls=400)
    share, group, launch = np.exp(best).tolist()
    return {"share": share, "group_us": group, "launch_us": launch}


def own_file(sources: Sources) -> File:
    """The H200's: everything measured."""
    found, _ = products(sources, OWN)
    fused = attention(sources, OWN, 0.0)
    for way in ("forward", "backward"):
        fused[f"flash1 {way}"] = slower(fused[f"flash2 {way}"], FLASH1)
    empty = {"share": 1.0, "group_us": 0.0, "launch_us": 0.0}  # until they are fitted, with the chip that this makes
    file = {
        "gpu": OWN, "clock_MHz": CLOCK / 1e6, "source": FACTS[OWN], "launch_us": 1.5, "products": found,
        "grouped": empty, "attention": fused, "stream": STREAMS, "power": fit_power(JOBS),
    }  # fmt: skip
    write(OWN, file)
    return {**file, "grouped": grouped(ClosedFormKernels(gpu(OWN)))}


def slower(kernel: File, share: float) -> File:
    return {**kernel, "reach": {w: r * share for w, r in kernel["reach"].items()}}


def other_file(sources: Sources, key: str, own: File) -> File:
    """One with a table, or with facts of the like; what neither has is the H200's, as shares of the peak."""
    found, heat = products(sources, key)
    base = RELATED.get(key, OWN)
    file: File = {"gpu": key, "base": base, "clock_MHz": gpu(key).boost_clock / 1e6, "source": FACTS[key]}
    for kind, reach in REACH.get(key, {}).items():
        found[kind] = {**merge_base(FOLDER / f"{base}.json")["products"][kind], "reach": reach}
    if "bf16" in found:
        for kind in ("fp8", "tf32"):
            ratio = own["products"][kind]["reach"] / own["products"]["bf16"]["reach"]
            if kind == "fp8" and gpu(key).architecture != gpu(OWN).architecture:
                ratio = FP8
            found[kind] = {**found["bf16"], "reach": found["bf16"]["reach"] * ratio}
    file["products"] = found
    measured = attention(sources, key, heat)
    file["attention"] = alike(own, ALIKE[key]) if key in ALIKE else related_attention(measured, own, key)
    if key in SHARES:
        scale = SHARES[key] / SHARES[OWN]
        file["stream"] = {kind: share * scale for kind, share in STREAMS.items()}
    if key in OWN_STREAMS:
        file["stream"] = {**STREAMS, **file.get("stream", {}), **OWN_STREAMS[key]}
    write(key, file)
    lasting = 1 + heat if heat else SUSTAINED.get(key, 0.0)
    if key in ENERGIES:
        file["power"] = scaled_energy(own["power"], ENERGIES[key], ENERGIES_OF.get(key, ()))
    elif lasting:
        file["power"] = flop_energy(ClosedFormKernels(gpu(key)), own["power"], lasting)
    return file


def related_attention(measured: File, own: File, key: str) -> File:
    """Forward as measured; other head widths and the way back as they are to it on the H200."""
    if not measured:
        return {}
    style = next(iter(measured)).split()[0]
    forward = measured[f"{style} forward"]
    there = own["attention"][f"{style} forward"]["reach"]
    scale = forward["reach"]["128"] / there["128"]
    reach = {w: forward["reach"].get(w, r * scale) for w, r in there.items()}
    forward = {**forward, "reach": reach}
    back = own["attention"][f"{style} backward"]
    backward = {
        **back,
        "reach": {w: r * reach.get(w, scale) / there[w] for w, r in back["reach"].items() if w in there},
    }
    out = {f"{style} forward": forward, f"{style} backward": backward}
    if style == "flash2":  # where the newer kernels do not run
        out |= {f"flash3 {way}": out[f"flash2 {way}"] for way in ("forward", "backward")}
        out |= {f"flash1 {way}": slower(out[f"flash2 {way}"], FLASH1) for way in ("forward", "backward")}
        return out
    return out | older(own, key)


def alike(own: File, reach: float) -> File:
    """FlashAttention-2 in every style's place, at this share for heads of 128."""
    out = {}
    for way in ("forward", "backward"):
        second = own["attention"][f"flash2 {way}"]
        kernel = slower(second, reach / own["attention"]["flash2 forward"]["reach"]["128"])
        out |= {f"{style} {way}": kernel for style in ("flash2", "flash3")}
        out[f"flash1 {way}"] = slower(kernel, FLASH1)
    return out


def older(own: File, key: str) -> File:
    """Kernels written for older tensor cores run at the rate they have on the H200, by SM and clock."""
    this, that = gpu(key), gpu(OWN)
    rate = this.sms * this.boost_clock / (that.sms * that.boost_clock) * that.peak["bf16"] / this.peak["bf16"]
    names = [f"{s} {w}" for s in ("flash1", "flash2") for w in ("forward", "backward")]
    return {name: slower(own["attention"][name], rate) for name in names}


def write(key: str, file: File) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(rounded(file), indent=1)
    text = re.sub(r"\[\s+([\d.,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)  # short lists on a line
    (FOLDER / f"{key}.json").write_text(text + "\n")
    parameters.cache_clear()


def main() -> None:
    arguments = [a for a in sys.argv[1:] if a != "--score"]
    sources = Sources(Path(arguments[0]))
    if "--score" not in sys.argv:
        own = own_file(sources)
        write(OWN, own)
        for key in arguments[1:] or [k for k in FACTS if k != OWN]:
            write(key, other_file(sources, key, own))
    write_scores(sources)


if __name__ == "__main__":
    main()
