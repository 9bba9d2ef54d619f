"""Fit the corrections of float32 products (costs/single.py): python tools/fit_single.py ../shared data/h200_pack

From NeuSight's train tables of bmm and linear, and from the float32 products of an H200's pack. Rows that host time
rules are left out, and those that took three times as long as the law. What the law misses of a GPU as a whole is taken
off first, for the law is to tell of GPUs and the trees of shapes. Every fifth shape is held out to see how well shapes
that were not fitted are told, and every GPU of the tables in turn to see what share of a correction holds on a GPU that
was not fitted; what is written is fitted on all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from presage.costs.call import Call
from presage.costs.corrections import FP32_FILE, fp32_features, is_fp32_gemm
from presage.costs.families import gemm
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.hardware import Gpu, gpu
from presage_fit.boosting import fit
from presage_fit.kernel_models import samples
from presage_fit.pack import read
from presage_validation.kernel_tables import read_table

TABLES = ("train_linear.csv.gz", "train_bmm.csv.gz")
SHORTEST = 2e-4  # seconds; below, tables see the host
LARGE = 2e10  # FLOPs
FURTHEST = 1.1  # from the law, in logarithms
OWN, SHARES = "h200", (0.0, 0.25, 0.5, 0.75, 1.0)
OUT = Path(__file__).resolve().parents[1] / "src" / "presage" / "data" / FP32_FILE
Floats = NDArray[np.float64]


def rows(shared: Path, pack: Path) -> Iterator[tuple[Gpu, Call, float]]:
    for name in TABLES:
        for s in read_table(shared / "kernels" / "neusight" / name).shapes:
            if s.seconds > SHORTEST:
                yield s.gpu, s.call, s.seconds
    own = read(pack)
    for one in samples(own)["gemm"]:
        if is_fp32_gemm(one.call) and one.seconds > SHORTEST / 10:
            yield gpu(own.header.gpu), one.call, one.seconds


def table(found: Iterator[tuple[Gpu, Call, float]]) -> tuple[Floats, Floats, NDArray[np.bool_], NDArray[np.str_]]:
    """Features, ln(seconds / law) less each GPU's level, which rows are held out, and the GPU of each."""
    x, y, held, of = [], [], [], []
    for chip, call, seconds in found:
        rates = Rates.of(chip)
        law = gemm.law(call, rates)
        apart = float(np.log(seconds / law.seconds))
        if abs(apart) < FURTHEST:
            x.append(fp32_features(call, law, rates, float(chip.compute_capability)))
            y.append(apart)
            of.append((chip.key, call.name == "aten::bmm" and law.flops > LARGE))
            held.append(crc32(repr(gemm.gemm_call(call)).replace("GemmCall", "Product").encode()) % 5 == 0)
    return np.array(x), np.array(y) - _levels(np.array(y), of), np.array(held), np.array([key for key, _ in of])


def _levels(y: Floats, of: list[tuple[str, bool]]) -> Floats:
    """What large batched products take over the law, in the middle, by GPU: clocks and heat of the day."""
    keys, large = (np.array(c) for c in zip(*of, strict=True))
    middles = {key: np.median(y[large & (keys == key)]) for key in set(keys.tolist())}
    return np.array([middles[key] for key in keys.tolist()])


def trees(x: Floats, y: Floats) -> Trees:
    extra = {"feature_fraction": 0.7, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 1.0, "alpha": 0.15}
    return fit(x, y, rounds=250, leaves=24, rate=0.06, min_leaf=60, seed=0, objective="huber", extra=extra)


def left_out(x: Floats, y: Floats, keys: NDArray[np.str_]) -> None:
    """Prints how far GPUs are off that were left out of the fit, by the share of the correction that counts."""
    errors: dict[float, list[float]] = {share: [] for share in SHARES}
    for key in sorted(set(keys.tolist()) - {OWN}):
        mine = keys == key
        found = trees(x[~mine], y[~mine]).predict(x[mine].astype(np.float32))
        for share, seen in errors.items():
            seen.append(float(np.abs(np.expm1(share * found - y[mine])).mean()))
        print(f"{key}: " + ", ".join(f"{share:g} {seen[-1]:.1%}" for share, seen in errors.items()))
    print("left out: " + ", ".join(f"{share:g} {np.mean(seen):.1%}" for share, seen in errors.items()))


def main(shared: str, pack: str) -> None:
    x, y, held, keys = table(rows(Path(shared), Path(pack)))
    left_out(x, y, keys)
    apart = np.abs(np.expm1(trees(x[~held], y[~held]).predict(x[held].astype(np.float32)) - y[held]))
    print(f"{len(y)} rows; law alone {np.abs(np.expm1(-y)).mean():.1%}, held-out shapes {apart.mean():.1%}")
    with OUT.open("wb") as f:
        np.savez_compressed(f, **trees(x, y).to_arrays("single"))
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
