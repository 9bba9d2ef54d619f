"""Sums of many steps: exact variances, against steps drawn one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.distribution import LogNormal
from presage.noise.model import Stalls
from presage.runs.steps import StepTimes, sum_variance


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_the_variance_of_a_sum_is_that_of_its_covariances(n: int, correlation: float) -> None:
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    assert float(sum_variance(np.array(float(n)), correlation)) == pytest.approx((correlation**lags).sum())


def test_sums_of_20_steps_vary_as_measured() -> None:
    """A correlation of 0.6 makes sums of 20 steps vary 3.5 times as much as independent steps; 0.9 makes it 11."""
    assert float(sum_variance(np.array(20.0), 0.6)) / 20 == pytest.approx(3.6, abs=0.1)
    assert float(sum_variance(np.array(20.0), 0.9)) / 20 == pytest.approx(11, abs=1)


def test_single_steps_have_the_spread_they_are_given() -> None:
    t = StepTimes(10.0, run_sd=0.03, sd=0.04)
    drawn = t.drawn(np.random.default_rng(0), 200_000, 1.0)
    assert drawn.mean() == pytest.approx(10.0, rel=1e-3)
    assert np.log(drawn).std() == pytest.approx(0.05, rel=0.01)
    stalls = Stalls(36.0, LogNormal(20.0, 0.5))
    stalled = replace(t, stalls=stalls).drawn(np.random.default_rng(0), 200_000, 1.0)
    assert (stalled > 20).mean() == pytest.approx((1 - np.exp(-0.1)) * 0.9, rel=0.1)


def test_runs_differ_by_their_own_factor_and_by_presages_error() -> None:
    mean, _ = StepTimes(1.0, run_sd=0.03, model_sd=0.04).runs(np.random.default_rng(0), 200_000)
    assert np.log(mean).std() == pytest.approx(0.05, rel=0.01)
    assert np.median(mean) == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"seconds": 1.0, "correlation": 1.0}])
def test_impossible_steps(wrong: dict[str, float]) -> None:
    with pytest.raises(PresageError, match="seconds above 0"):
        StepTimes(**wrong)  # type: ignore[arg-type]
