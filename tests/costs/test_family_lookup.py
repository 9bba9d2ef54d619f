"""Lookups, scatters and sorts: what must hold of their laws. How well few draws tell of other shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path

import numpy as np
import pytest

from presage.costs.call import Call, Shape, Value
from presage.costs.families import FAMILIES
from presage.costs.families.embedding import GRADIENTS, lookup
from presage.costs.families.index import moved
from presage.costs.rates import Rates
from presage.hardware import gpu
from presage_fit import kernel_models as fit
from presage_fit import pack
from presage_fit.kernel_models import from_leaf

ROOT = Path(__file__).resolve().parents[2]
RATES = Rates.of(gpu("h200"))
PACK = ROOT / "data" / "h200_pack"
OURS = ("attention", "embedding", "index", "rnn", "sort")


def shape(*sizes: int, dtype: str = "float32") -> Shape:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return Shape(sizes, tuple(strides), dtype)


def index(*sizes: int) -> Shape:
    return shape(*sizes, dtype="int64")


def bag(count: int, rows: int, dim: int, bags: int) -> Call:
    inputs = (shape(rows, dim), index(count), index(bags), False, 0, False, None, False, -1)
    return Call("aten::_embedding_bag", inputs)


def bag_gradient(count: int, rows: int, dim: int, bags: int, most: float = 0.0) -> Call:
    inputs = (shape(bags, dim), index(count), index(count), index(bags), index(0), rows, False, 0, None, -1)
    return Call("aten::_embedding_bag_dense_backward", inputs, facts={"most": most} if most else {})


def gradient(count: int, rows: int, dim: int) -> Call:
    return Call("aten::embedding_dense_backward", (shape(count, dim), index(count), rows, -1, False))


def picked(x: Shape, *indices: Value) -> Call:
    return Call("aten::index", (x, tuple(indices)))


def put(rows: int, count: int, columns: int, most: float = 0.0) -> Call:
    inputs = (shape(rows, columns), (index(count),), shape(count, columns), True, False)
    return Call("aten::_index_put_impl_", inputs, facts={"most": most} if most else {})


def family_of(call: Call) -> str:
    return next(name for name, f in FAMILIES.items() if call.name in f.ops)


def seconds(call: Call) -> float:
    return FAMILIES[family_of(call)].law(call, RATES).seconds


@pytest.mark.parametrize("rows", [1000, 1_000_000, 40_000_000])
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_more_indices_take_longer(rows: int, dim: int) -> None:
    for make in (
        lambda n: bag(n, rows, dim, n // 8),
        lambda n: bag_gradient(n, rows, dim, n // 8),
        lambda n: gradient(n, rows, dim),
        lambda n: picked(shape(rows, dim), index(n)),
        lambda n: put(rows, n, dim),
    ):
        times = [seconds(make(n)) for n in (10_000, 100_000, 1_000_000, 10_000_000)]
        assert all(b > a for a, b in pairwise(times))
        assert 1.5 < times[-1] / times[-2] < 15


def test_a_frequent_row_makes_a_gradient_slow() -> None:
    plain, skewed = bag_gradient(1_000_000, 100_000, 64, 10_000), bag_gradient(1_000_000, 100_000, 64, 10_000, 3e5)
    assert seconds(skewed) > 1.5 * seconds(plain)
    assert seconds(put(100_000, 1_000_000, 64, 3e5)) > 2 * seconds(put(100_000, 1_000_000, 64))


def test_several_indices_go_together() -> None:
    x = shape(8, 100, 200, 3)
    found = moved(picked(x, None, index(50), index(50)))
    assert (found.count, found.rows, found.before, found.columns) == (50, 100 * 200, 8, 3)
    assert moved(picked(x, index(5, 1), index(5, 1))).columns == 200 * 3


def test_features_of_odd_shapes() -> None:
    calls = [
        bag(1, 2, 1, 1), gradient(1, 1, 1), picked(shape(3, 5), index()), picked(shape(7), index(0)), put(2, 1, 1),
        Call("aten::gather", (shape(4, 9), 1, index(4, 1), False)),
        Call("aten::scatter_", (shape(4, 9), 1, index(4, 1), 1.0)),
        Call("aten::index_add", (shape(4, 9), 0, index(3), shape(3, 9), 1)),
        Call("aten::masked_select", (shape(4, 9), shape(4, 9, dtype="bool"))),
        Call("aten::sort", (shape(5), -1, False)), Call("aten::topk", (shape(2, 70_000), 5, -1, True, True)),
        Call("aten::nonzero", (shape(1, dtype="bool"),)), Call("aten::_unique2", (index(10), True, False, False)),
    ]  # fmt: skip
    lengths: dict[str, set[int]] = {}
    for call in calls:
        family = FAMILIES[family_of(call)]
        law = family.law(call, RATES)
        row = family.features(call, law)
        assert law.seconds > 0 and all(isfinite(v) for v in row), call
        lengths.setdefault(family.name, set()).add(len(row))
    assert all(len(found) == 1 for found in lengths.values())


@pytest.fixture(scope="module")
def measured() -> pack.Pack:
    return pack.read(PACK)


@pytest.fixture(scope="module")
def samples(measured: pack.Pack) -> dict[str, list[fit.KernelSample]]:
    """Of our families; other draws are only counted, for they decide which are held out."""
    families = {n: r if n in OURS else tuple(replace(x, ops=()) for x in r) for n, r in measured.families.items()}
    return fit.samples(replace(measured, families=families))


@pytest.mark.slow
def test_unknown_indices_count_as_uniform(measured: pack.Pack) -> None:
    """What is taken for granted of indices is what uniform ones have."""
    ratios = []
    for row in measured.rows("embedding"):
        for leaf in row.ops if row.params["alpha"] == 0 else ():
            found = lookup(Call(leaf.op, from_leaf(leaf, row.params).inputs)) if leaf.op in GRADIENTS else None
            if found and found.count > 1000:  # of fewer, chance decides
                ratios.append((found.distinct / row.params["distinct"], found.most / row.params["most"]))
    distinct, most = np.abs(np.log(np.array(ratios))).T
    assert np.quantile(distinct, 0.99) < 0.05
    assert np.quantile(most, 0.9) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "most_90", "most_beyond"),
    [
        ("attention", 0.045, 0.22, 0.06),
        ("embedding", 0.03, 0.15, 0.08),
        ("index", 0.13, 0.55, 0.35),
        ("rnn", 0.18, 0.9, 0.3),
        ("sort", 0.05, 0.45, 0.13),
    ],
)
def test_held_out_shapes(
    samples: dict[str, list[fit.KernelSample]], name: str, most: float, most_90: float, most_beyond: float
) -> None:
    some = samples[name]
    rows = fit.table(FAMILIES[name], some, RATES)
    test, beyond = fit.held_out(some, rows)
    model = fit.fit_family(FAMILIES[name], rows.part(~test & ~beyond))
    errors = np.abs(rows.law * np.exp(model.predict(rows.x)) / rows.seconds - 1)
    assert geomean(errors[test]) < most
    assert np.quantile(errors[test], 0.9) < most_90
    assert geomean(errors[beyond]) < most_beyond


def geomean(errors: fit.Array) -> float:
    return float(np.exp(np.log(np.maximum(errors, 4e-4)).mean()))


def scattered(reduction: str, most: float) -> Call:
    inputs = (shape(1000, 64), 0, index(8000, 64), shape(8000, 64), reduction, True)
    return Call("aten::scatter_reduce_", inputs, facts={"distinct": 990.0, "most": most})


def test_scatters_that_compare_wait_for_records_and_others_add() -> None:
    law = FAMILIES["index"].law
    few, many = (law(scattered("amax", most), RATES).seconds for most in (10.0, 4000.0))
    added = law(scattered("mean", 10.0), RATES).seconds
    plain = law(
        Call("aten::scatter_add_", scattered("sum", 10.0).inputs[:4], facts={"distinct": 990.0, "most": 10.0}), RATES
    )
    assert few < many < 100 * few
    assert added == plain.seconds != few


def test_counting_into_few_bins_takes_longer() -> None:
    law = FAMILIES["sort"].law
    times = [law(Call("aten::histc", (shape(1 << 20), bins, 0, 0)), RATES).seconds for bins in (2, 64, 4096)]
    assert times[0] > times[1] >= 0.5 * times[2]
    assert law(Call("aten::nonzero", (shape(1 << 20, dtype="bool"),)), RATES).seconds < 1e-4
