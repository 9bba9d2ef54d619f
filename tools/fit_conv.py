"""Fit the corrections of float32 convolutions (costs/corrections.py): python tools/fit_conv.py ../shared

From NeuSight's train table of convolutions forward on a T4 and an A100 80 GB; those of a V100 and a P100 in the same
file are only scored. What the law misses of a GPU as a whole is taken off first, as for products (tools/fit_single.py):
the law is to tell of GPUs and the trees of shapes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.costs.corrections import FP32_CONV_FILE, fp32_conv_features
from presage.costs.families import conv
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage_fit.boosting import fit
from presage_validation.kernel_tables import MeasuredKernel, read_table
from presage_validation.score import Row, score

TABLE = "train_conv.csv.gz"
FITTED = ("t4", "a100_pcie_80gb")
OUT = Path(__file__).resolve().parents[1] / "src" / "presage" / "data" / FP32_CONV_FILE
Floats = NDArray[np.float64]


def table(shapes: list[MeasuredKernel]) -> tuple[Floats, Floats]:
    """Features, and the law's seconds."""
    x, law = [], []
    for s in shapes:
        rates = Rates.of(s.gpu)
        found = conv.law(s.call, rates)
        x.append(fp32_conv_features(conv.conv(s.call), found, rates))
        law.append(found.seconds)
    return np.array(x), np.array(law)


def trees(x: Floats, y: Floats) -> Trees:
    extra = {"feature_fraction": 0.7, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 1.0, "alpha": 0.15}
    return fit(x, y, rounds=400, leaves=31, rate=0.06, min_leaf=40, seed=0, objective="huber", extra=extra)


def main(shared: str) -> None:
    by_gpu: dict[str, list[MeasuredKernel]] = {}
    for s in read_table(Path(shared) / "kernels" / "neusight" / TABLE).shapes:
        by_gpu.setdefault(s.gpu.key, []).append(s)
    x, law = {}, {}
    for key, shapes in by_gpu.items():
        x[key], law[key] = table(shapes)
    ratio = {key: np.log(np.array([s.seconds for s in by_gpu[key]]) / law[key]) for key in FITTED}
    target = np.concatenate([ratio[key] - np.median(ratio[key]) for key in FITTED])
    found = trees(np.concatenate([x[key] for key in FITTED]), target)
    for key, shapes in by_gpu.items():
        times = law[key] * np.exp(found.predict(x[key].astype(np.float32)))
        rows = [Row("time", key, s.name, float(t), s.seconds) for s, t in zip(shapes, times, strict=True)]
        errors = score(rows)
        print(f"{key}: {'fitted' if key in FITTED else 'scored'}, geomean {errors.geomean:.1%}, MAPE {errors.mape:.1%}")
    with OUT.open("wb") as f:
        np.savez_compressed(f, **found.to_arrays("single"))
    print(OUT.name, OUT.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
