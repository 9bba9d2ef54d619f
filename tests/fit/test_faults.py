"""Logs of faults: made-up ones whose rates, repairs and repeat offenders are known, and the mistakes in tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from presage.errors import InputError, PresageError
from presage.runs.sets import read_reliability
from presage_fit.fault_files import write_failures
from presage_fit.fault_log import FaultLog, check_follows, read_fault_log
from presage_fit.faults import FaultModel, fit_faults, fit_repair, forecast

NODES, DAYS = 400, 200.0


def made_up(
    rate: float = 0.005, hours: float = 100.0, shape: float = 1.0, frailty: float = 0.0, relapse: float = 0.0
) -> FaultLog:
    """Nodes that alternate between service (exponential) and repair (Weibull)."""
    rng, rows = np.random.default_rng(7), []
    scale = hours / float(np.exp(_log_gamma(1 + 1 / shape)))
    for node in range(NODES):
        own = rate * (rng.gamma(1 / frailty) * frailty if frailty else 1.0)
        clock = rng.exponential(1 / own)
        while clock < DAYS:
            end = clock + scale * rng.weibull(shape) / 24
            rows.append((node, clock, end if end < DAYS else np.inf))
            clock = end + (rng.exponential(0.5) if rng.random() < relapse else rng.exponential(1 / own))
    node, start, back = (np.array(x) for x in zip(*rows, strict=True))
    return FaultLog("made up", NODES, 0.0, DAYS, node.astype(np.int64), start, back, ("GPU",) * len(rows))


def _log_gamma(x: float) -> float:
    from math import lgamma

    return lgamma(x)


@pytest.fixture(scope="module")
def plain() -> FaultModel:
    return fit_faults(made_up())


def test_availability_is_mtbf_over_mtbf_and_mttr(plain: FaultModel) -> None:
    assert plain.log.share_lost() == pytest.approx(100 / (100 + 24 / 0.005), rel=0.1)
    assert plain.rate == pytest.approx(0.005, rel=0.1)
    assert plain.repair.mean == pytest.approx(100.0, rel=0.15)
    assert plain.repair.shape == pytest.approx(1.0, abs=0.12)
    assert plain.frailty < 0.25
    assert plain.relapses.share < 0.1


def test_a_steady_fleet_is_predicted_within_a_fifth(plain: FaultModel) -> None:
    found = forecast(plain, 100.0)
    assert np.median(found.rate) == pytest.approx(0.005, rel=0.2)
    assert found.share.mean() == pytest.approx(100 / (100 + 24 / 0.005), rel=0.2)
    low, high = np.quantile(found.away_p95, [0.02, 0.98])
    assert low <= np.quantile(plain.log.away(), 0.95) <= high


def test_repairs_that_are_not_over_count_as_longer() -> None:
    rng = np.random.default_rng(0)
    hours, seen = rng.exponential(300.0, 4000), rng.uniform(0, 400.0, 4000)
    away = hours > seen
    some = fit_repair(np.minimum(hours, seen), away, np.ones(4000))
    assert some.mean == pytest.approx(300.0, rel=0.1)
    assert fit_repair(hours[~away], np.zeros((~away).sum(), bool), np.ones((~away).sum())).mean < 200


def test_heavy_tails_repeat_offenders_and_relapses_are_found() -> None:
    heavy = fit_faults(made_up(shape=0.5))
    assert heavy.repair.shape == pytest.approx(0.5, abs=0.08)
    assert heavy.repair.median < 0.35 * heavy.repair.mean
    assert fit_faults(made_up(frailty=2.0)).frailty == pytest.approx(2.0, rel=0.5)
    again = fit_faults(made_up(relapse=0.3)).relapses
    assert again.share == pytest.approx(0.3, abs=0.07)
    assert again.days == pytest.approx(0.5, rel=0.3)


def test_forecasts_know_repeat_offenders(plain: FaultModel) -> None:
    offenders = forecast(fit_faults(made_up(frailty=2.0)), 100.0)
    assert np.median(offenders.worst_tenth) > np.median(forecast(plain, 100.0).worst_tenth) + 0.15


def test_what_is_known_on_a_day(plain: FaultModel) -> None:
    log = plain.log
    seen = log.between(0.0, 100.0)
    assert (seen.start < 100).all()
    assert seen.back[np.isfinite(seen.back)].max() <= 100
    after = log.between(100.0, 200.0)
    assert seen.new.sum() + after.new.sum() == log.new.sum()
    both = 0.5 * (seen.share_lost() + after.share_lost())
    assert both == pytest.approx(log.share_lost(), rel=1e-9)


def test_the_file_goes_back_into_runs(plain: FaultModel, tmp_path: Path) -> None:
    write_failures(plain, tmp_path / "f.toml")
    kind = read_reliability(tmp_path / "f.toml")
    assert kind.at(8).unplanned * 86400 == pytest.approx(plain.log.rate, rel=1e-3)
    assert kind.failures[0].repair is not None
    assert kind.failures[0].repair.mean / 3600 == pytest.approx(plain.repair.mean, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "nodes", "why"),
    [
        ("node,start_day\nn1,3\n", 400, "no column end_day"),
        ("node,start_day,end_day\nn1,3,4\n", None, "--nodes"),
        ("node,start_day,end_day\nn1,3,4\n", 400, "1 faults"),
        ("node,start_day,end_day\n" + "".join(f"n{i},{i},{i}.5\n" for i in range(30)), 10, "more than the 10"),
    ],
)
def test_tables_that_are_no_logs(text: str, nodes: int | None, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(InputError, match=why):
        read_fault_log(tmp_path / "x.csv", nodes)


def test_rows_that_cannot_be_are_named(tmp_path: Path) -> None:
    rows = "".join(f"n{i},{i},{i}.5\n" for i in range(30))
    (tmp_path / "x.csv").write_text(f"node,start_day,end_day\n{rows}n3,9,2\n")
    log = read_fault_log(tmp_path / "x.csv", 40)
    assert log.skipped == (("line 32", "needs a node, a start_day, and an end_day that is not before it"),)
    with pytest.raises(PresageError, match="goes on where the first ends"):
        check_follows(log, log)
