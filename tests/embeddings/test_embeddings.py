"""Embedding lookups that know their data: laws as properties, skews, shards, files of parameters, other GPUs."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from index_draws import draws
from presage.costs.lookups.lookup_law import characteristic_time, lookup_traffic
from presage.costs.lookups.lookup_model import load_lookup_parameters
from presage.costs.lookups.row_reuse import BINS, FIRST, fit_alpha, zipf
from presage.costs.lookups.table import table_arrays
from presage.embeddings import Reuse, Table, embedding_model
from presage.errors import InputError, PresageError
from presage.hardware import gpus
from presage_fit.embeddings import least, save_lookup_parameters

MODEL = embedding_model("h200")


def table(
    rows: int = 1_000_000, dim: int = 128, pooling: float = 20, alpha: float = 1.05, dtype: str = "float32"
) -> Table:
    return Table(f"{rows}x{dim}", rows, dim, pooling, Reuse(alpha), dtype)


MIXED = [
    table(dim=d, rows=r, pooling=p, alpha=a)
    for d, r, p, a in ((16, 900, 3, 0.0), (64, 10**6, 30, 1.2), (128, 10**7, 8, 0.6))
]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9, 1.0, 1.05, 1.5])
@pytest.mark.parametrize(("rows", "count"), [(100, 50_000), (50_000, 200_000), (5_000_000, 300_000)])
def test_expected_use_of_rows_is_what_draws_give(alpha: float, rows: int, count: int) -> None:
    uses = np.unique(draws(alpha, rows, count), return_counts=True)[1]
    seen = np.bincount(np.log2(uses).astype(int), minlength=BINS)[:BINS]
    expected = zipf(alpha, rows, float(count))
    assert expected.distinct == pytest.approx(len(uses), rel=0.01)
    assert (np.abs(expected.rows - seen) <= 6 * np.sqrt(expected.rows + 1) + 0.02 * seen).all()
    assert float((expected.rows * expected.uses).sum()) == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9, 1.05, 1.2, 1.5])
def test_skew_from_distinct_rows(alpha: float) -> None:
    distinct = len(np.unique(draws(alpha, 200_000, 400_000)))
    assert fit_alpha(distinct, 400_000, 200_000) == pytest.approx(alpha, abs=0.02)


def test_histograms_and_skews_agree() -> None:
    """A counted table in its batch as its skew says; in another batch, by the skew of its distinct rows."""
    picked = draws(1.05, 10**6, 20 * 8192)
    uses = np.unique(picked, return_counts=True)[1]
    hist = np.bincount(np.log2(uses).astype(int), minlength=BINS) / len(uses)
    counted = replace(table(), reuse=Reuse(None, tuple(hist), len(picked), len(uses), uses.max()))
    for batch, rel in ((8192, 0.02), (2048, 0.03), (32768, 0.03)):
        for of in (MODEL.forward, MODEL.backward):
            assert of([counted], batch) == pytest.approx(of([table()], batch), rel=rel)


def test_a_rounded_histogram_keeps_its_most_used_row() -> None:
    """Of millions of rows the hottest is a share of nothing, but not of the lookups."""
    reuse = Reuse(None, (1.0,), lookups=3e6, distinct=2e6, top=1e6)
    found = reuse.at(3e6, 10**8)
    assert float((found.rows * found.uses)[10:].sum()) == pytest.approx(1e6, rel=0.35)


def test_more_work_takes_longer() -> None:
    for of in (MODEL.forward, MODEL.backward):
        base = of(MIXED, 8192)
        assert of(MIXED, 16384) > 1.2 * base and of([*MIXED, table()], 8192) > base
        assert of([replace(t, pooling=2 * t.pooling) for t in MIXED], 8192) > 1.1 * base


def test_what_repeats_is_cheaper() -> None:
    """The more rows repeat, the fewer come from memory and are updated."""
    for of in (MODEL.forward, MODEL.backward):
        times = [of([table(alpha=a, rows=10**7)] * 8, 32768) for a in (0.0, 0.9, 1.2)]
        assert times[0] > 1.3 * times[1] > 1.3 * times[2]


def test_optimizers_widths_and_cold_caches() -> None:
    one = [table(alpha=0.0, rows=10**7)] * 4
    assert MODEL.backward(one, 8192) > 1.1 * MODEL.backward(one, 8192, optimizer="sgd")
    assert MODEL.forward(one, 8192, optimizer="sgd") == pytest.approx(MODEL.forward(one, 8192), rel=0.1)
    half = [replace(t, dtype="float16") for t in one]
    assert MODEL.forward(half, 8192) < 0.85 * MODEL.forward(one, 8192)
    few = [table(rows=5000, pooling=2)]
    for of in (MODEL.forward, MODEL.backward):
        assert of(few, 512, cold=True) > 1.05 * of(few, 512)
        assert of(one, 65536, cold=True) == pytest.approx(of(one, 65536), rel=0.05)


def test_terms_add_up_to_groups() -> None:
    """Any order, any split of the sums; nothing held takes nothing; a search's many groups as one by one."""
    terms = MODEL.terms(MIXED, 4096, optimizer="sgd", lengths="poisson")
    total = terms.sum(axis=0)
    many = np.stack([total, terms[0], np.zeros(terms.shape[1]), terms[::-1].sum(axis=0)])
    for of, one in ((MODEL.forward_of, MODEL.forward), (MODEL.backward_of, MODEL.backward)):
        found = of(many)
        whole, first = (one(t, 4096, optimizer="sgd", lengths="poisson") for t in (MIXED, MIXED[:1]))
        assert found == pytest.approx([whole, first, 0.0, whole], rel=1e-9)


def test_a_hundred_thousand_placements_a_second() -> None:
    import time

    terms = MODEL.terms(MIXED, 4096)
    many = np.broadcast_to(terms.sum(axis=0), (50_000, terms.shape[1]))
    start = time.process_time()
    MODEL.forward_of(many, corrected=False)
    MODEL.backward_of(many, corrected=False)
    assert time.process_time() - start < 2.5  # 0.05 s on a machine at rest


def test_parts_of_tables() -> None:
    whole = table(rows=1_000_001, dim=96)
    rows, half = whole.rows_part(4), whole.columns_part(2)
    assert (rows.rows, rows.dim, rows.pooling) == (250_001, 96, 5) and (half.rows, half.dim, half.pooling) == (
        1_000_001,
        48,
        20,
    )
    assert rows.lookups(8192).distinct == pytest.approx(whole.lookups(8192).distinct / 4, rel=1e-3)
    assert rows.rows_part(2).lookups(8192).count == whole.lookups(8192).count / 8
    assert half.lookups(8192).distinct == whole.lookups(8192).distinct
    for of in (MODEL.forward, MODEL.backward):
        for part in (rows, half):
            assert of([part] * 2, 65536) < 1.05 * of([whole] * 2, 65536)


def test_caches_hold_what_fits() -> None:
    k = table_arrays([table(rows=1000, alpha=0.0), table(rows=10**7, alpha=0.0, pooling=200)], 8192)
    params = {"cache": 20e6, "own_cache": 1e5, "sms": 132.0}
    found = lookup_traffic(k, params, adaptive=True, varied=False)
    assert found.again[0] == 0.0  # half a megabyte stays
    assert 0.8 < found.again[1] / (k.count[1] - k.distinct[1]) < 1.0  # of gigabytes little does
    assert (found.near <= k.count).all() and (found.near >= k.distinct * 0.99).all()
    held = characteristic_time(k.rows, k.uses, np.array([1e4, 1e4]))
    filled = (k.rows * -np.expm1(-k.uses * held[:, None])).sum(axis=1)
    assert filled[1] == pytest.approx(1e4, rel=1e-3)


def test_other_gpus_follow_their_facts() -> None:
    work = [table(alpha=a, rows=10**7) for a in (0.0, 0.6, 1.05)] * 6
    times = {g.key: (embedding_model(g).forward(work, 65536), embedding_model(g).backward(work, 65536)) for g in gpus()}
    assert all(np.isfinite(t).all() and min(t) > 0 for t in times.values())
    for slow, fast in (("h100_sxm", "h200"), ("a100_80gb", "h100_sxm"), ("v100_32gb", "a100_80gb"), ("h200", "b200")):
        assert times[slow][0] > times[fast][0] and times[slow][1] > times[fast][1], (slow, fast)


def test_mistakes_are_told() -> None:
    for wrong, said in (({"optimizer": "adam"}, "optimizer 'adam'"), ({"lengths": "long"}, "lengths 'long'")):
        with pytest.raises(PresageError, match=said):
            MODEL.forward(MIXED, 512, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PresageError, match="dtype 'int4'"):
        table(dtype="int4")
    with pytest.raises(PresageError, match="at least 1"):
        table(rows=0)


def test_parameters_as_a_file(tmp_path: Path) -> None:
    save_lookup_parameters(load_lookup_parameters(), tmp_path / "p.json")
    again = embedding_model("h200", load_lookup_parameters(tmp_path / "p.json"))
    assert again.forward(MIXED, 4096) == MODEL.forward(MIXED, 4096) and len(load_lookup_parameters().seen) == 351
    (tmp_path / "old.json").write_text('{"version": 0}')
    (tmp_path / "bad.json").write_text("[]")
    for name, said in (("old", "fit it again"), ("bad", "not a file of embedding parameters"), ("none", "not a file")):
        with pytest.raises(InputError, match=said):
            load_lookup_parameters(tmp_path / f"{name}.json")


def test_least_squares_find_a_law_again() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 100, 200)
    measured = (3.0 + 0.5 * x) * np.exp(rng.normal(0, 0.02, 200))
    measured[:10] *= 3  # outliers count less
    found = least(lambda p: p["start"] + p["slope"] * x, {"start": 1.0, "slope": 1.0}, measured, pull=1e-3)
    assert found["start"] == pytest.approx(3, rel=0.1) and found["slope"] == pytest.approx(0.5, rel=0.05)


def test_mlperf_tables() -> None:
    value = json.loads(files("presage").joinpath("data/dlrm/mlperf_dcnv2.json").read_text())
    tables = [Table(t["name"], t["rows"], t["dim"], t["pooling"], Reuse(t["alpha"])) for t in value["tables"]]
    assert len(tables) == 26 and sum(t.pooling for t in tables) == 214 and "mlcommons" in value["source"]
    assert sum(t.rows for t in tables) == 204_184_588 and {t.dim for t in tables} == {128}
    assert MODEL.forward(tables, 8192) < MODEL.backward(tables, 8192)


def test_histograms_have_their_bins() -> None:
    assert FIRST[0] == 1 and FIRST[5] == 32 and len(FIRST) == BINS == 17
