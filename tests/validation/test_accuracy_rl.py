"""The claim on published reinforcement-learning steps: the bar is met on rows that no figure was fitted to."""

import csv
from pathlib import Path

import numpy as np
import pytest

from commands import runner
from presage.prediction.post_training.software import step_error
from presage_validation import command
from presage_validation.post_training import score_post_training

PUBLISHED = Path(__file__).parents[2] / "docs/published_rl.csv"


@pytest.fixture(scope="module")
def scored():  # type: ignore[no-untyped-def]
    return score_post_training(PUBLISHED)


@pytest.mark.slow
def test_published_steps(scored) -> None:  # type: ignore[no-untyped-def]
    held = scored.metrics()["step (held)"]
    assert held.n == 50
    assert held.median < 0.15  # 12.1%
    assert held.mape < 0.18  # 15.9%
    assert abs(held.bias) < 0.10
    within = np.mean([abs(r.error) < 0.25 for r in scored.rows if r.metric == "step (held)"])
    assert within > 0.7  # 37 of 50
    assert not scored.skipped


@pytest.mark.slow
def test_the_interval_holds_nine_tenths(scored) -> None:  # type: ignore[no-untyped-def]
    ratios = [r.measured / r.predicted for r in scored.rows if r.metric == "step (held)"]
    error = step_error()
    assert error.runs == len(ratios)
    assert np.mean([error.low <= x <= error.high for x in ratios]) == pytest.approx(0.9, abs=0.05)


@pytest.mark.slow
def test_nothing_held_had_a_part_in_the_fit(scored) -> None:  # type: ignore[no-untyped-def]
    with PUBLISHED.open(newline="") as file:
        sources = {(r["use"], r["source"]) for r in csv.DictReader(file)}
    seen, held = ({s for use, s in sources if use == kind} for kind in ("seen", "held"))
    assert seen
    assert not seen & held
    assert scored.metrics()["rollout (seen)"].mape < 0.05


def test_rows_that_cannot_be_predicted_are_named(tmp_path: Path) -> None:
    with PUBLISHED.open(newline="") as file:
        rows = list(csv.DictReader(file))[8:10]
    rows[0]["model"] = "no-such"
    with (tmp_path / "t.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    out = runner(command.command)("rl", tmp_path / "t.csv")
    assert "step (held)" in out
    assert "no-such" in out
