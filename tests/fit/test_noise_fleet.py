"""Fleets of GPUs: planted ones are found again, ranges hold, the slow end of real ones is predicted from 50 GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from presage.errors import InputError, PresageError
from presage.noise.distribution import LogNormal, Mixture
from presage_fit.fleet import (
    SHARES,
    SLOW,
    Fleet,
    Tail,
    body_sd,
    fit_fleet,
    fit_tail,
    known_fleets,
    share_weights,
    without,
)
from presage_fit.fleet_files import MeasuredFleet, fleet_columns, read_fleet
from presage_validation.fleet import expected_largest, score_fleets

TABLES = "variability"


def planted(seed: int, gpus: int = 400, sd: float = 0.02, share: float = 0.03, own: float = 0.003) -> MeasuredFleet:
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, sd, gpus) + np.where(rng.random(gpus) < share, rng.normal(0.26, 0.02, gpus), 0.0)
    rows = np.repeat(np.arange(gpus), 5)
    times = 2.5 * np.exp(logs[rows] + rng.normal(0, own, len(rows)))
    return MeasuredFleet("planted", tuple(f"gpu{g}" for g in rows), ("work",) * len(rows), tuple(times.tolist()))


def test_a_planted_fleet_is_found_again() -> None:
    fleet = fit_fleet(planted(0))
    found = fleet.tail.numbers()
    truth = {"sd": 0.02, "share": 0.03, "factor": np.exp(0.26)}
    for name, value in truth.items():
        assert found[name].low * 0.97 <= value <= found[name].high * 1.03, name
    assert fleet.rank_sd().value == pytest.approx(0.02, rel=0.1)
    assert fleet.variation.temporal == pytest.approx(0.003, rel=0.05)
    assert fleet.variation.usual == pytest.approx(0.003, rel=0.1)
    assert fleet.variation.lasting == pytest.approx(1.0, abs=0.03)
    noise = fleet.belief().noise
    assert noise.of("products").rank == fleet.rank_sd().value
    assert noise.slow.share == found["share"].value
    assert set(fleet.belief("streams").noise.spread) == {"streams"}


def test_what_does_not_last_is_no_effect_of_the_gpu() -> None:
    """GPUs that are all alike, each timed five times with much noise: their medians differ, but not for long."""
    fleet = fit_fleet(planted(1, sd=1e-6, share=0.0, own=0.05))
    assert fleet.tail.numbers()["sd"].value > 0.02
    assert fleet.rank_sd().value < 0.012


def test_neither_units_nor_the_order_of_rows_count() -> None:
    first = planted(2, gpus=60)
    order = np.random.default_rng(0).permutation(60)
    moved = np.concatenate([np.arange(5) + 5 * g for g in order])  # GPUs in another order, each one's rows in theirs
    other = MeasuredFleet(
        "other", *(tuple(np.array(x)[moved].tolist()) for x in (first.gpus, first.works, first.times))
    )
    milli = replace(other, times=tuple(t * 1000 for t in other.times))
    a, b = fit_fleet(first), fit_fleet(milli)
    assert a.gpus == b.gpus
    np.testing.assert_allclose(a.factors, b.factors)
    assert a.largest(256).value == pytest.approx(b.largest(256).value)


def test_each_kind_of_work_is_compared_with_itself() -> None:
    """The same GPUs on two kinds of work, one a hundred times as long."""
    one = planted(3, gpus=60)
    long = replace(one, works=("long",) * len(one.times), times=tuple(100 * t for t in one.times))
    both = MeasuredFleet("both", one.gpus + long.gpus, one.works + long.works, one.times + long.times)
    np.testing.assert_allclose(fit_fleet(both).factors, fit_fleet(one).factors)


def test_the_largest_of_a_fleet_is_that_of_its_distribution() -> None:
    ones = np.ones(1)
    tail = Tail(0.0, 0.02 * ones, 0.01 * ones, 10 * ones, 0.1 * ones)
    same = Mixture((LogNormal(1.0, 0.02), LogNormal(float(np.exp(0.2)), 0.02)), (0.99, 0.01))
    rng = np.random.default_rng(0)
    for n in (16, 256):
        drawn = same.sample(rng, (4000, n)).max(axis=1)
        assert tail.largest(n).value == pytest.approx(drawn.mean(), abs=4 * drawn.std() / np.sqrt(4000))
    assert tail.quantile(0.99).value == pytest.approx(float(same.quantile(0.99)), rel=2e-3)
    assert tail.largest_quantile(256, 0.5).value == pytest.approx(float(same.largest(256).quantile(0.5)), rel=2e-3)


def test_more_gpus_are_never_faster() -> None:
    tail = fit_fleet(planted(4, gpus=50)).tail
    largest = [tail.largest(n).value for n in (1, 8, 64, 512, 4096)]
    assert largest == sorted(largest)
    assert all(e.low <= e.value <= e.high for e in tail.numbers().values())


def test_ranges_hold_on_fleets_as_the_model_has_them() -> None:
    """60 fleets with shares as other fleets have them and sizes as assumed: 9 of 10 ranges should hold the truth."""
    rng = np.random.default_rng(7)
    weights = share_weights(SHARES, known_fleets())
    held = []
    for _ in range(60):
        share, size = rng.choice(SHARES, p=weights), np.exp(rng.uniform(np.log(3), np.log(60)))
        logs = 0.01 * rng.standard_normal(50)
        slow = rng.random(50) < share
        logs[slow] = 0.01 * size * (1 + 0.1 * rng.standard_normal(int(slow.sum())))
        ones = np.ones(1)
        truth = Tail(0.0, 0.01 * ones, share * ones, size * ones, 0.1 * ones).largest(256).value
        found = fit_tail(logs, known_fleets()).largest(256)
        held.append(found.low <= truth * 1.005 and truth <= found.high * 1.005)
    assert 0.8 <= np.mean(held) <= 0.99


def test_a_large_fleet_takes_no_longer_than_its_bins() -> None:
    rng = np.random.default_rng(0)
    logs = np.concatenate([rng.normal(0, 0.02, 27_000), rng.normal(0.3, 0.01, 300)])
    found = fit_tail(logs, known_fleets()).numbers()
    assert found["sd"].value == pytest.approx(0.02, rel=0.05)
    assert found["share"].value == pytest.approx(300 / 27_300, rel=0.2)
    assert found["factor"].value == pytest.approx(np.exp(0.3), rel=0.02)


def test_other_fleets_say_how_common_slow_gpus_are() -> None:
    few = [replace(f, slow=0) for f in known_fleets()]
    many = [replace(f, slow=f.gpus // 10) for f in known_fleets()]
    average = [float(share_weights(SHARES, f) @ SHARES) for f in (few, known_fleets(), many)]
    assert average == sorted(average)
    assert average[0] < 0.005
    assert average[2] == pytest.approx(0.1, abs=0.03)
    logs = np.random.default_rng(0).normal(0, 0.02, 50)
    assert fit_tail(logs, few).largest(256).value < fit_tail(logs, many).largest(256).value


def test_a_fleet_is_judged_without_its_site() -> None:
    left = without("sgemm-longhorn")
    assert {f.site for f in left} == {"frontera", "ls6"}
    assert without("lammps-frontera") == tuple(f for f in known_fleets() if f.site != "frontera")
    assert without("summit") == known_fleets()


def test_what_is_shipped_of_known_fleets_is_in_their_tables(shared: Path) -> None:
    for known in known_fleets():
        (path,) = [p for p in (shared / TABLES).glob("*.csv") if known.name in p.name]
        fleet = fit_fleet(read_fleet(path))
        logs = np.log(fleet.factors)
        assert len(logs) == known.gpus
        assert int(np.sum(logs > SLOW * body_sd(logs))) == known.slow
        assert body_sd(logs) == pytest.approx(known.body_sd, abs=1e-5)
        assert fleet.factors.max() == pytest.approx(known.largest, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "gpus", "spatial", "temporal"),
    [("sgemm-longhorn", 392, 0.0194, 0.0029), ("frontera-bert", 276, 0.010, 0.0019), ("resnet-ls6", 219, 0.128, None)],
)
def test_published_variations_are_found(
    shared: Path, name: str, gpus: int, spatial: float, temporal: float | None
) -> None:
    found = fit_fleet(read_fleet(shared / TABLES / f"{name}-agg.csv"))
    assert len(found.gpus) == gpus
    assert found.variation.spatial == pytest.approx(spatial, rel=0.01)
    assert found.variation.temporal == (None if temporal is None else pytest.approx(temporal, rel=0.03))


def test_the_expected_largest_is_that_over_all_sets() -> None:
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0, 3.0])
    for n in range(1, 7):
        brute = np.mean([max(c) for c in combinations(values.tolist(), n)])
        assert expected_largest(values, n) == pytest.approx(brute)


@pytest.mark.slow
def test_the_slow_end_of_real_fleets_is_predicted(shared: Path, tmp_path: Path) -> None:
    names = sorted((shared / TABLES).glob("*-agg.csv"))
    small = tmp_path / "small.csv"
    small.write_text("uuid,perf\n" + "".join(f"g{i},1.{i}\n" for i in range(20)))
    result = score_fleets([*names, small], sets=12)
    ours = result.metrics()
    for metric, s in ours.items():
        assert s.median <= 0.015, metric
        assert s.mape < result.baselines["normal"].metrics()[metric].mape, metric
        assert s.mape < result.baselines["sample"].metrics()[metric].mape, metric
    assert [s.row for s in result.skipped] == ["small.csv"]
    assert result.sizes["frontera-bert"] == (276, 226, 256)
    again = score_fleets([shared / TABLES / "frontera-bert-agg.csv"], sets=12)
    assert again.metrics() == result.metrics("frontera-bert"), "the same seed, the same figures"
    assert set(result.to_json()["baselines"]) == {"normal", "sample"}


def rows(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "gpus.csv"
    path.write_text(text)
    return path


def test_columns_are_known_by_name_or_told(tmp_path: Path) -> None:
    table = "node,device,tflops,kern\n" + "".join(f"n{i // 4},{i % 4},{100 + i},k\n" for i in range(12))
    found = read_fleet(rows(table, tmp_path))
    assert found.gpus[5] == "n1-1"
    assert found.times[0] == pytest.approx(1 / 100), "a rate is turned over"
    assert found.works[0] == "k"
    odd = "card,took\n" + "".join(f"{i},{1 + i}\n" for i in range(12))
    with pytest.raises(InputError, match="which column is the GPU"):
        read_fleet(rows(odd, tmp_path))
    assert len(set(read_fleet(rows(odd, tmp_path), {"gpu": "card", "time": "took"}).gpus)) == 12
    with pytest.raises(InputError, match="nope: is not a column"):
        read_fleet(rows(odd, tmp_path), {"gpu": "nope"})
    assert fleet_columns(["uuid", "perf"])
    assert fleet_columns(["hostname", "gpu_index", "time_ms"])
    assert not fleet_columns(["step", "seconds"])
    assert not fleet_columns(["uuid", "temperature"])


def test_bad_rows_are_named_and_bad_tables_refused(tmp_path: Path) -> None:
    table = "uuid,perf\n" + "".join(f"g{i},{1 + i / 100}\n" for i in range(10)) + "g3,nan\n,1\ng4,-2\ng5\n"
    found = fit_fleet(read_fleet(rows(table, tmp_path)))
    assert isinstance(found, Fleet)
    assert [row for row, _ in found.skipped] == ["line 12", "line 13", "line 14", "line 15"]
    with pytest.raises(InputError, match="no row in it"):
        read_fleet(rows("uuid,perf\n", tmp_path))
    with pytest.raises(InputError, match="has 2 GPUs: it takes 8"):
        fit_fleet(read_fleet(rows("uuid,perf\na,1\nb,2\n", tmp_path)))
    with pytest.raises(PresageError, match="no table of a fleet to score"):
        score_fleets([rows("uuid,perf\na,1\nb,2\n", tmp_path)])


def test_odd_fleets_are_told_as_they_are() -> None:
    """Most GPUs the same to the last digit; one ten times as slow; all the same."""
    same = np.concatenate([np.zeros(40), np.full(10, 0.01)])
    assert fit_tail(same, known_fleets()).numbers()["sd"].value == pytest.approx(0.005, rel=0.5)
    stuck = np.append(np.random.default_rng(0).normal(0, 0.004, 60), np.log(10))
    assert fit_tail(stuck, known_fleets()).largest(256).value == pytest.approx(10, rel=0.1)
    assert fit_tail(np.zeros(50), known_fleets()).largest(256).value == pytest.approx(1, abs=1e-3)
