"""Failure rates: what ships, what users write, and what mistakes in it are told as."""

from __future__ import annotations

from math import exp
from pathlib import Path

import numpy as np
import pytest

from presage.errors import InputError, PresageError
from presage.runs.failures import DAY, ByScale, Failure, Reliability
from presage.runs.sets import DEFAULT, names, read_reliability, reliability

HOUR = 3600.0


def test_llama3s_counts() -> None:
    kind = reliability("llama3")
    counts = {f.name: f.per_node_day * 54 * 2048 for f in kind.failures}
    assert round(sum(n for f, n in zip(kind.failures, counts.values(), strict=True) if not f.planned)) == 419
    assert round(sum(counts.values())) == 466
    assert round(counts["faulty GPU"]) == 148
    risk = kind.at(16384)
    assert risk.mttf / HOUR == pytest.approx(3.09, abs=0.005)
    assert 1 / risk.rate / HOUR == pytest.approx(2.78, abs=0.005)
    assert 4 < (risk.detect + risk.restart) / 60 < 6  # the usual figure is five minutes


@pytest.mark.parametrize(
    ("name", "gpus", "hours"),
    [("rsc1", 16384, 1.8), ("rsc1", 131072, 0.225), ("ft-hsdp", 32768, 2.55), ("ft-hsdp", 98304, 0.3)],
)
def test_published_times_between_failures(name: str, gpus: int, hours: float) -> None:
    assert reliability(name).at(gpus).mttf / HOUR == pytest.approx(hours, rel=0.01)


def test_all_sets_say_where_they_are_from() -> None:
    assert DEFAULT in names()
    for name in names():
        kind = reliability(name)
        assert {"failures", "restart_s", "detect", "node", "repair_hours", "slow", "rate_sd"} <= kind.sources.keys()
        assert 2e-3 < kind.at(8).unplanned * DAY < 7e-3


def test_the_spread_between_sites_is_that_of_the_sets() -> None:
    """Of those that count failures of jobs: stepfun counts nodes taken out of service, for stress tests too."""
    rates = [reliability(name).at(8).unplanned for name in names() if name != "stepfun"]
    assert np.log(rates).std(ddof=1) == pytest.approx(reliability(DEFAULT).rate_sd, abs=0.01)


def test_by_scale() -> None:
    restart = reliability("ft-hsdp").restart
    assert [round(restart.at(g)) for g in (8, 16384, 22528, 65536, 98304, 10**6)] == [200, 200, 300, 600, 900, 900]
    assert 300 < restart.at(40_000) < 600
    growth = reliability("ft-hsdp").growth
    assert growth.at(1024) == 1.0
    assert growth.at(98304) == pytest.approx(2.83)
    with pytest.raises(PresageError, match="rise"):
        ByScale(((8.0, 1.0), (8.0, 2.0)))


def test_overlapping_episodes_are_not_counted_twice() -> None:
    e = reliability("llama3").slow[0]
    assert e.minutes.mean == pytest.approx(24.0)
    assert e.lost.mean == pytest.approx(24 * 60 * (1 - 1 / e.factor))
    few, many = (reliability("llama3").at(g) for g in (8, 8_000_000))
    assert few.episodes(e) == pytest.approx(e.per_node_day / DAY, rel=1e-4)
    busy = e.per_node_day * many.nodes / DAY * e.minutes.mean * 60
    assert many.episodes(e) * e.minutes.mean * 60 == pytest.approx(1 - exp(-busy))


def test_growth_is_not_for_what_is_planned() -> None:
    both = (Failure("x", 1e-3), Failure("y", 1e-3, planned=True))
    risk = Reliability("z", both, growth=ByScale(((8.0, 1.0), (80.0, 3.0)))).at(80)
    assert risk.rates[0] == pytest.approx(3 * risk.rates[1])
    assert risk.unplanned == pytest.approx(risk.rates[0])


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    return path


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    text = """
        per_1000_node_days = 4.0
        restart_s = 120
        repair_hours = 2
        shape = 0.8
        [[failures]]
        name = "GPU"
        share = 0.75
        node = 1.0
        [[failures]]
        name = "disk"
        per_1000_node_days = 1.0
        detect_s = 5
        [[slow]]
        name = "hot"
        per_1000_node_days = 1.0
        minutes = 10
        factor = 2.0
    """
    kind = reliability(str(written(tmp_path, text)))
    assert kind.name == "ours"
    assert [f.per_node_day for f in kind.failures] == pytest.approx([3e-3, 1e-3])
    assert (kind.repair.mean, kind.shape, kind.at(8).restart, kind.rate_sd) == (7200.0, 0.8, 120.0, 0.0)
    assert kind.slow[0].lost.mean == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "x: is unknown"),
        ("name = 3", "name: is 3"),
        ("failures = 3", "failures: write one"),
        ("[[failures]]\ncount = 3", "failures.0.name: is missing"),
        ("[[failures]]\nname = 'a'", "failures.0: needs one of"),
        ("[[failures]]\nname = 'a'\ncount = 3", "failures.0.count: needs node_days"),
        ("[[failures]]\nname = 'a'\nshare = 1.0", "failures.0.share: needs per_1000_node_days"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = 'b'", "failures.0.per_1000_node_days: is 'b', not a number"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = -1", "failures.0.per_1000_node_days: is -1"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = nan", "is nan: it should be a finite number"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = 1\nnode = 2", "failures.0.node: is 2: it should be 0 to 1"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = 1\nplanned = 2", "failures.0.planned: is 2"),
        ("[[failures]]\nname = 'a'\nper_1000_node_days = 1\ntypo = 2", "failures.0.typo: is unknown"),
        ("restart_s = 'a'", "restart_s: should be a number"),
        ("restart_s = [[8, 1], [4, 2]]", "rise"),
        ("restart_s = 0", "above 0"),
        ("sources = 3", "sources: should be a table"),
        ("[[slow]]\nname = 'a'\nper_1000_node_days = 1\nfactor = 0.5", "slow.0.factor: is 0.5"),
        ("shape = 0", "shape: is 0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=r"ours\.toml") as e:
        read_reliability(written(tmp_path, text))
    assert told in str(e.value)


def test_unknown_names() -> None:
    with pytest.raises(PresageError, match=r"choose from .*llama3"):
        reliability("llama9")
