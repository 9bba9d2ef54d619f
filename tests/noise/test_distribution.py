"""Distributions keep the laws they are used by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import PresageError
from presage.noise.distribution import (
    Distribution,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    Mixture,
    Normal,
    Pareto,
    Spliced,
    Sum,
)
from presage.noise.distribution.composed import fit_pareto, smooth_distribution

RNG = np.random.default_rng(0)
KINDS: list[Distribution] = [
    Normal(3.0, 0.5),
    LogNormal(2.0, 0.3),
    Gamma(1.5, 0.4),
    Pareto(1.0, 0.2, 0.1),
    Pareto(1.0, 0.2, -0.3),
    Pareto(1.0, 0.2, 0.0),
    Empirical(RNG.gamma(3.0, 1.0, 400)),
    Mixture((Normal(1.0, 0.02), Normal(1.2, 0.05)), (0.9, 0.1)),
    Spliced(Normal(0.0, 1.0), Pareto(1.645, 0.4, 0.05), 1.645, 0.05),
    2.0 * Normal(1.0, 0.1) + 0.5,
    Normal(1.0, 0.1) + Gamma(0.5, 0.5),
    Normal(1.0, 0.1).largest(64),
]
NAMES = [type(k).__name__ + str(i) for i, k in enumerate(KINDS)]


@pytest.mark.parametrize("one", KINDS, ids=NAMES)
def test_quantile_undoes_cdf(one: Distribution) -> None:
    p = np.linspace(0.01, 0.99, 50)
    assert np.allclose(one.cdf(one.quantile(p)), p, atol=2e-3)
    assert (np.diff(one.quantile(p)) >= 0).all()


@pytest.mark.parametrize("one", KINDS, ids=NAMES)
def test_draws_follow_the_distribution(one: Distribution) -> None:
    drawn = one.sample(np.random.default_rng(1), 40_000)
    below = np.array([(drawn <= one.quantile(p)).mean() for p in (0.1, 0.5, 0.9, 0.99)])
    assert np.allclose(below, [0.1, 0.5, 0.9, 0.99], atol=0.012)
    assert drawn.mean() == pytest.approx(one.mean, abs=5 * one.sd / 200)
    assert drawn.std() == pytest.approx(one.sd, rel=0.05)


@given(st.integers(2, 5000), st.floats(0.001, 0.2))
def test_the_largest_of_many_is_a_power(n: int, sd: float) -> None:
    one = LogNormal(1.0, sd)
    assert float(one.largest(n).cdf(one.quantile(0.5 ** (1 / n)))) == pytest.approx(0.5)


def test_the_largest_of_65536_normals_is_as_published() -> None:
    """Median of the largest of n ranks with 2% spread: 1.028, 1.046, 1.060, 1.072, 1.085."""
    found = [float(Normal(1.0, 0.02).largest(n).quantile(0.5)) for n in (8, 64, 512, 4096, 65536)]
    assert np.allclose(found, [1.028, 1.046, 1.060, 1.072, 1.085], atol=6e-4)


def test_means_and_variances_of_sums_add() -> None:
    both = Sum((Normal(1.0, 0.3), Gamma(2.0, 0.5)))
    assert both.mean == 3.0
    assert both.sd == pytest.approx(np.hypot(0.3, 1.0))
    assert float(both.quantile(0.5)) == pytest.approx(2.83, abs=0.03)  # from 10 million draws


def test_a_fitted_tail_reaches_beyond_the_draws() -> None:
    drawn = np.random.default_rng(3).exponential(1.0, 4_000)
    one = smooth_distribution(drawn)
    assert float(one.quantile(1 - 1e-5)) == pytest.approx(-np.log(1e-5), rel=0.2)
    assert drawn.max() < float(one.quantile(1 - 1e-5))
    assert fit_pareto(drawn, 0.0).scale == pytest.approx(1.0, rel=0.1)


def test_equal_draws_have_no_spread() -> None:
    assert smooth_distribution(np.full(1_000, 2.5)) == Fixed(2.5)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Normal(1.0, -0.1),
        lambda: LogNormal(0.0, 0.1),
        lambda: Gamma(1.0, 0.0),
        lambda: Empirical(np.array([])),
        lambda: Empirical(np.array([1.0, np.nan])),
        lambda: Mixture((Fixed(1.0),), (0.5,)),
        lambda: Normal(1.0, 0.1).largest(0),
    ],
)
def test_what_cannot_be_is_refused(bad) -> None:
    with pytest.raises(PresageError):
        bad()
