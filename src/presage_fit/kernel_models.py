"""Kernel models fitted from a calibration pack: for every family trees that correct its law, and counts of launches."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.call import Call, Shape, Value
from presage.costs.cudnn import with_engines
from presage.costs.families import BY_OP, FAMILIES, KernelFamily
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.errors import PresageError
from presage.graph.dtypes import DTYPES
from presage.hardware import gpu
from presage_fit.boosting import fit, joined, no_trees
from presage_fit.cache_power import fit_cache, fit_power
from presage_fit.pack import Leaf, Pack, read

Array = npt.NDArray[Any]
SHARE_HELD_OUT, EXTRAPOLATION = 0.2, 0.97
SHARES: dict[str, Any] = {"feature_fraction": 0.8, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 0.1}
WIDE, AGAIN, FASTER = 0.3, 300, 0.1  # bound, rounds and rate of the further trees of uneven families
SHRUNK = {"lambda_l2": 20.0}  # leaves of uneven families, of which few rows say little
TOLD_LEAVES = 2  # times as many where the library told, for there is more to learn
# Spread of the repeats over their median, of kernels of any length and of those that take LONG; a cold cache's time
# over a warm one's, but for seconds that a timer may be off; two times that tell the same.
DISTURBED, DISTURBED_LONG, LONG, QUIETER, OFF, AGREEING = 0.1, 0.03, 3e-4, 0.97, 2e-7, 1.03
COLDER, TO_READ = 0.15, 3.5e-13  # the most a cold cache adds: a share and seconds a byte, besides COLD_STARTS
COLD_STARTS = 1e-5
REDUCES = ("aten::scatter_reduce", "aten::scatter_reduce_")
COUNTED = {"aten::bincount": ("values",)}  # what the times of an op depend on besides, in the parameters of its draws


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One measured call."""

    call: Call
    seconds: float
    cold: float | None
    launches: int
    draw: int  # samples of one draw are held out together


def samples(pack: Pack) -> dict[str, list[KernelSample]]:
    """Every leaf op of every draw that has a model, by family; with what libraries tell of it."""
    found, chip = _samples(pack), gpu(pack.header.gpu)
    return {n: [replace(s, call=c) for s, c in zip(some, with_engines([s.call for s in some], chip), strict=True)]
            for n, some in found.items()}  # fmt: skip


def _samples(pack: Pack) -> dict[str, list[KernelSample]]:
    out: dict[str, list[KernelSample]] = {name: [] for name in FAMILIES}
    seen: dict[str, int] = {}
    for sweep, rows in pack.families.items():
        for row in rows:
            number = seen.setdefault(_drawn(sweep, row.params), len(seen) + 1)
            for leaf in row.ops:
                family = BY_OP.get(leaf.op)
                if family is not None and leaf.seconds > 0:
                    call = from_leaf(leaf, row.params)
                    # the profiler does not spell out lists of single numbers
                    listed = bool(call.inputs[0]) or ("_foreach_" not in leaf.op and "_fused_" not in leaf.op)
                    times = undisturbed(leaf, sum(t.nbytes for t in call.tensors))
                    if times and (call.tensors or leaf.op == "aten::arange") and listed:
                        out[family.name].append(KernelSample(call, *times, len(leaf.kernels), number))
    return out


def undisturbed(leaf: Leaf, nbytes: float) -> tuple[float, float | None] | None:
    """Seconds with a warm and with a cold cache; None where repeats differ, or a cold cache seems faster, and no two
    times agree on the shortest. Another process may have used the GPU meanwhile, which only adds."""
    warm, cold = leaf.seconds, leaf.cold
    spread = max(DISTURBED_LONG * warm, min(DISTURBED * warm, DISTURBED_LONG * LONG))
    if leaf.spread >= spread or (cold is not None and cold < QUIETER * warm - OFF):
        last = sum(seconds for _, seconds in leaf.kernels) or warm
        warm, other = sorted((warm, last, cold or inf))[:2]
        if other > AGREEING * warm:
            return None
    if cold is None or cold > (1 + COLDER) * warm + COLD_STARTS + TO_READ * nbytes:
        return warm, None
    return warm, max(warm, cold)


def _drawn(sweep: str, params: Mapping[str, Any]) -> str:
    """Equal for draws of equal parameters, which are held out together; what was measured of the draw aside."""
    return repr((sweep, sorted((k, v) for k, v in params.items() if k not in ("distinct", "most", "workspace"))))


def from_leaf(leaf: Any, params: Mapping[str, Any]) -> Call:
    """A leaf op of a pack's row. What the profiler leaves out is in the draw's parameters."""
    parts = zip(leaf.dims, leaf.types, leaf.strides, leaf.concrete, strict=False)
    inputs = [_seen(dims, kind, strides, text, params) for dims, kind, strides, text in parts]
    if "count" in params and (leaf.op == "aten::index" or "samples" in params):
        picked = Shape((int(params["count"]),), (1,), "int64")
        behind = {"pair": (None, picked, picked), "row": (None, picked)}  # a dimension of samples
        inputs[1] = behind[params["what"]] if "samples" in params else (picked,)
    if leaf.op in REDUCES and len(inputs) > 4:
        inputs[4] = params.get("op")  # a name, which the profiler does not tell
    facts = {k: float(params[k]) for k in ("distinct", "most", *COUNTED.get(leaf.op, ())) if k in params}
    if leaf.op in REDUCES and params.get("fresh") is False:
        facts["settled"] = 1.0
    tf32 = params.get("kind") == "tf32" or params.get("tf32", False)
    return Call(leaf.op, tuple(inputs), bool(tf32), facts)


def _seen(dims: Any, kind: str, strides: Any, text: Any, params: Mapping[str, Any]) -> Value:
    if kind in DTYPES and isinstance(dims, list):
        return Shape(tuple(dims), tuple(strides), DTYPES[kind])
    if kind == "TensorList":
        dtype = str(params.get("dtype", "float32"))
        lists = strides if len(strides) == len(dims) else [[1] for _ in dims]
        return tuple(Shape(tuple(d), tuple(s), dtype) for d, s in zip(dims, lists, strict=True))
    return _literal(text) if isinstance(text, str) and text else None


@cache
def _literal(text: str) -> Value:
    """A number, a flag or a list of them as the profiler writes it; other text as it is."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class SampleTable:
    """Features (the last column: 1 with a cold cache), laws and measured seconds of a family's samples."""

    x: Array
    law: Array
    seconds: Array
    sample: Array  # which sample a row is of

    def part(self, keep: Array) -> SampleTable:
        return SampleTable(self.x[keep], self.law[keep], self.seconds[keep], self.sample[keep])


def table(family: KernelFamily, some: Iterable[KernelSample], rates: Rates) -> SampleTable:
    rows = list(_rows(family, some, rates))
    if not rows:
        return SampleTable(np.zeros((0, 1)), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    x, law, seconds, sample = zip(*rows, strict=True)
    return SampleTable(np.array(x), np.array(law), np.array(seconds), np.array(sample, np.int64))


def _rows(
    family: KernelFamily, some: Iterable[KernelSample], rates: Rates
) -> Iterator[tuple[Array, float, float, int]]:
    """With a warm and with a cold cache; where the library was asked, both once more without what it told."""
    for i, sample in enumerate(some):
        law = family.law(sample.call, rates)
        x = np.array([*family.features(sample.call, law), 0.0], np.float32)
        for known in (x, _untold(x, family.told)):
            if known is not None:
                yield known, law.seconds, sample.seconds, i
                if sample.cold:
                    cold = known.copy()
                    cold[-1] = 1.0
                    yield cold, law.seconds, sample.cold, i


def _untold(x: Array, told: int | None) -> Array | None:
    """Features as they are where the library was not asked; None where it was not."""
    if told is None or not x[told]:
        return None
    out = x.copy()
    out[told], out[told + 1 : -1] = 0.0, np.nan
    return out


def fit_family(family: KernelFamily, rows: SampleTable, seed: int = 0) -> Trees:
    """Trees for ln(measured / law): those of rows of which the library told, and those of the others. Where it told of
    none, all calls get the same trees, also those of which it tells later."""
    told = np.zeros(len(rows.x), np.bool_) if family.told is None else rows.x[:, family.told] > 0.5
    if family.told is None or not told.any():
        return _fit(family, rows, seed)
    finer, out = replace(family, leaves=TOLD_LEAVES * family.leaves), no_trees(rows.x.shape[1])
    for of, settings in ((True, finer), (False, family)):
        out = joined(out, _fit(settings, rows.part(told == of), seed), ((family.told, 0.5, of),))
    return out


def _fit(family: KernelFamily, rows: SampleTable, seed: int) -> Trees:
    """A narrow bound finds what most rows of a kind take and never reaches a few that run on another kernel ten times
    slower: where a family has such rows, further trees with a wide bound do."""
    target = np.log(rows.seconds / rows.law)
    settings: dict[str, Any] = {"leaves": family.leaves, "min_leaf": family.least, "seed": seed, "objective": "huber"}
    extra = SHARES | (SHRUNK if family.uneven else {})
    trees = fit(
        rows.x, target, rounds=family.rounds, rate=family.rate, extra=extra | {"alpha": family.bound}, **settings
    )
    if not family.uneven:
        return trees
    left = target - trees.predict(rows.x.astype(np.float32))
    more = fit(rows.x, left, rounds=AGAIN, rate=FASTER, extra=extra | {"alpha": WIDE}, **settings)
    return joined(trees, more, ())


def held_out(some: list[KernelSample], rows: SampleTable, seed: int = 0) -> tuple[Array, Array]:
    """Which rows are of the random fifth of draws, and which of the extrapolation region (the largest 3% by law)."""
    draws = np.array([s.draw for s in some])[rows.sample]
    chosen = np.random.default_rng(seed).random(int(draws.max()) + 1) < SHARE_HELD_OUT
    large = rows.law > np.quantile(rows.law, EXTRAPOLATION)
    return chosen[draws] & ~large, large


def fit_counts(family: KernelFamily, some: list[KernelSample], rows: SampleTable, rates: Rates) -> Trees:
    """Trees for ln(launches / the law's)."""
    expected = [max(1, s.launches) / family.law(s.call, rates).launches for s in some]
    target = np.log(np.array(expected)[rows.sample])
    if family.uneven:  # one launch or thousands: each group of a convolution by itself
        return fit(rows.x, target, rounds=300, leaves=63, rate=0.15, min_leaf=4)
    return fit(rows.x, target, rounds=80, leaves=min(15, family.leaves), rate=0.15, min_leaf=8,
               objective="regression_l1")  # fmt: skip


def fit_models(
    pack: Pack, tell: Callable[[str], None] = lambda _: None, families: Iterable[str] = FAMILIES
) -> CalibratedKernels:
    """Fit every family (or these) that the pack has rows of."""
    chip = gpu(pack.header.gpu)
    rates, found = Rates.of(chip), samples(pack)
    trees, counts, rows = {}, {}, {}
    for name in families:
        family = FAMILIES[name]
        if not found[name]:
            continue  # its law alone tells
        if len(found[name]) < 40:
            raise PresageError(
                f"{pack.folders[0]}: only {len(found[name])} rows of {name}; calibrate that family first"
            )
        tell(name)
        data = table(family, found[name], rates)
        trees[name], counts[name] = fit_family(family, data), fit_counts(family, found[name], data, rates)
        rows[name] = len(found[name])
    source = {
        "key": chip.key,
        "gpu": pack.header.gpu,
        "torch": pack.header.torch,
        "date": pack.header.date,
        "rows": rows,
    }
    return CalibratedKernels(
        chip, trees, counts, fit_cache(pack.table("cache")), fit_power(pack.table("power")), source
    )


def fit_pack(folder: Path) -> CalibratedKernels:
    """Kernel models of a raw calibration pack."""
    return fit_models(read(folder))
