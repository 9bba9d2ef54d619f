"""`presage accuracy faults`: the public log, cut by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from presage_validation.faults import METRICS, score_faults

LOG = "runs/faults/stepfun_faults.csv"


def test_the_later_days_of_the_public_log(shared: Path) -> None:
    """The share of time lost is not predicted within its bar of 20% (see docs/faults.md); its intervals hold it, and
    it is closer than a constant rate with the median repair."""
    found = score_faults([shared / LOG])
    rows = {(r.metric, r.group): r for r in found.rows}
    assert len(rows) == 3 * len(METRICS)
    lost = [r for r in found.rows if r.metric == "share_lost"]
    assert all(
        found.intervals[r.metric, r.group][0] <= r.measured <= found.intervals[r.metric, r.group][1] for r in lost
    )
    ours = found.metrics()
    assert ours["share_lost"].mape < found.baselines["median_repair"].metrics()["share_lost"].mape
    assert ours["fault_rate"].median < 0.2
    assert found.to_json()["bar"] == 0.2


def test_two_logs_of_one_fleet(shared: Path, tmp_path: Path) -> None:
    """The later one, cut from the same log, gives what a cut gives; the size of the fleet is known by its name."""
    text = (shared / LOG).read_text().splitlines()
    early, late = [text[0]], [text[0]]
    for line in text[1:]:
        node, start, end, *rest = line.split(",")
        if float(start) < 100:
            gone = end and float(end) <= 100
            early.append(",".join([node, start, end if gone else "", *rest]))
        if float(start) >= 100 or not end or float(end) > 100:
            late.append(",".join([node, start, end, *rest[:-1], "yes" if float(start) < 100 else ""]))
    one, two = tmp_path / "stepfun_early.csv", tmp_path / "stepfun_late.csv"
    one.write_text("\n".join(early))
    two.write_text("\n".join(late))
    found = score_faults([one, two])
    cut = next(
        r for r in score_faults([shared / LOG]).rows if r.group.startswith("days 0-100") and r.metric == "share_lost"
    )
    mine = next(r for r in found.rows if r.metric == "share_lost")
    assert mine.measured == pytest.approx(cut.measured, rel=0.02)
    assert mine.predicted == pytest.approx(cut.predicted, rel=0.1)
