"""Fit the weights inside the laws of several families (see LAWS) from a calibration pack.

    python tools/fit_laws.py data/h200_pack [embedding index sort rnn pool resample]

Such a law is a sum of physical parts with a weight each, by the path an op takes. The weights are found by least
squares of ln(time) over the rows that are not held out, and printed beside those in the module: put them there, and fit
the trees again (tools/fit_kernels.py). Needs the `fit` extra (LightGBM brings SciPy).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from presage.costs.call import Call
from presage.costs.families import FAMILIES, embedding, index, pool, resample, rnn, sort
from presage.costs.families.common import fitted_numbers
from presage.costs.rates import Rates
from presage.hardware import gpu
from presage_fit.kernel_models import held_out, samples, table
from presage_fit.pack import read

Floats = NDArray[np.float64]
Parts = Callable[[Call, Rates], tuple[str, list[float]]]
STARTS = 8


def _embedding(call: Call, rates: Rates) -> tuple[str, list[float]]:
    k = embedding.lookup(call)
    name = embedding.path(call, k)
    return name, embedding.PARTS[name](k, rates)


def _index(call: Call, rates: Rates) -> tuple[str, list[float]]:
    m = index.moved(call)
    name = index.path(call, m)
    return name, index.parts(name, m, rates)


def _resample(call: Call, rates: Rates) -> tuple[str, list[float]]:
    r = resample.resampling(call)
    layout = "last" if r.channels_last else "planar"
    return f"{r.name.removeprefix('aten::')} {layout} {r.width}", resample.parts(r, rates)


def _pool(call: Call, rates: Rates) -> tuple[str, list[float]]:
    p = pool.pool(call)
    return f"{p.path} {2 if p.width == 2 else 4}", pool.parts(p, rates)


LAWS: dict[str, tuple[Parts, dict[str, tuple[float, ...]]]] = {
    "embedding": (_embedding, embedding.WEIGHTS),
    "index": (_index, index.WEIGHTS),
    "sort": (lambda call, rates: (sort.path(call), sort.parts(call, rates)), sort.WEIGHTS),
    "pool": (_pool, fitted_numbers("pool")["weights"]),
    "resample": (_resample, fitted_numbers("resample")["weights"]),
    "rnn": (lambda call, rates: (rnn.path(call), rnn.parts(call, rates)), rnn.WEIGHTS),
}


def weights(parts: Floats, seconds: Floats) -> Floats:
    """Those that make the weighted sum of the parts agree best with the times, in logarithms and few outliers aside."""
    used = parts.sum(0) > 0
    x = parts[:, used]
    middle = np.array([np.median(column[column > 0]) for column in x.T])
    start = np.log(np.median(seconds) / middle / x.shape[1])
    rng = np.random.default_rng(0)

    def misfit(logs: Floats) -> Floats:
        return np.asarray(np.log(x @ np.exp(logs) + 1e-30) - np.log(seconds))

    tries = [start, *(start + rng.normal(0, 1.5, len(start)) for _ in range(STARTS))]
    best = min((least_squares(misfit, t, loss="soft_l1", f_scale=0.1) for t in tries), key=lambda r: float(r.cost))
    out = np.zeros(parts.shape[1])
    out[used] = np.exp(best.x)
    return out


def error(parts: Floats, seconds: Floats, found: Floats) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median(np.abs(parts @ found / seconds - 1)))


def report(name: str, calls: list[tuple[str, list[float], float]]) -> None:
    now = LAWS[name][1]
    for path in sorted({p for p, _, _ in calls}):
        rows = [(parts, t) for p, parts, t in calls if p == path]
        x, seconds = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
        found = weights(x, seconds)
        here = np.array(now.get(path, np.zeros(len(found))))
        print(f"{name}: {path} ({len(rows)} rows)")
        print(f"  fitted     {tuple(float(f'{w:.3g}') for w in found)}  median error {error(x, seconds, found):.1%}")
        print(f"  in module  {tuple(here.tolist())}  median error {error(x, seconds, here):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("family", nargs="*", choices=[*LAWS, []], default=[])
    args = parser.parse_args()
    pack = read(args.pack)
    found, rates = samples(pack), Rates.of(gpu(pack.header.gpu))
    for name in args.family or LAWS:
        some = found[name]
        rows = table(FAMILIES[name], some, rates)
        fifth, largest = held_out(some, rows)
        kept = sorted({int(i) for i in rows.sample[~fifth & ~largest]})
        report(name, [(*LAWS[name][0](some[i].call, rates), some[i].seconds) for i in kept])


if __name__ == "__main__":
    main()
