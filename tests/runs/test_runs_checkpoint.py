"""Formulas of checkpoint intervals against published figures, against each other and against a search."""

from __future__ import annotations

from math import exp, inf, sqrt

import numpy as np
import pytest

from presage.runs.checkpoint import (
    Outage,
    best_interval,
    daly,
    daly_higher_order,
    exact_efficiency,
    first_order_efficiency,
    meta_ettr,
    meta_interval,
    rfo,
    young,
)

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
LLAMA3, RSC1 = 3.79e-3, 6.5e-3  # failures a node-day


def outage(gpus: float, rate: float, save: float, restart: float = 300.0) -> Outage:
    return Outage(DAY / (gpus / 8 * rate), save, 0.0, restart)


def test_metas_own_example() -> None:
    o = outage(16384, RSC1, 0.0)
    assert round(meta_ettr(o, HOUR), 3) == 0.676
    assert round(meta_ettr(o, 5 * MINUTE), 3) == 0.931


@pytest.mark.parametrize(
    ("gpus", "rate", "save", "hours", "ettr"),
    [
        (16384, LLAMA3, 300.0, 3.09, 0.768),
        (16384, LLAMA3, 10.0, 3.09, 0.932),
        (65536, LLAMA3, 300.0, 0.773, 0.536),
        (65536, LLAMA3, 10.0, 0.773, 0.815),
        (100_000, LLAMA3, 300.0, 0.507, 0.426),
        (100_000, LLAMA3, 10.0, 0.507, 0.744),
        (131_072, RSC1, 300.0, 0.225, 0.140),
        (131_072, RSC1, 10.0, 0.225, 0.512),
    ],
)
def test_reference_values(gpus: int, rate: float, save: float, hours: float, ettr: float) -> None:
    o = outage(gpus, rate, save)
    assert o.mttf / HOUR == pytest.approx(hours, rel=2e-3)
    assert round(meta_ettr(o, meta_interval(o)), 3) == ettr


def test_reference_intervals() -> None:
    assert round(meta_interval(outage(16384, LLAMA3, 300.0)) / MINUTE) == 43
    assert round(meta_interval(outage(16384, LLAMA3, 10.0)) / MINUTE, 1) == 7.9


GRID = [
    Outage(mttf, save, down, restart)
    for mttf in (300.0, 2800.0, 11000.0, 1e6)
    for save in (1.0, 10.0, 300.0)
    for down, restart in ((0.0, 300.0), (600.0, 900.0))
]


@pytest.mark.parametrize("o", GRID)
def test_no_interval_is_better_than_the_best(o: Outage) -> None:
    best = best_interval(o)
    most = exact_efficiency(o, best)
    around = best * np.geomspace(0.01, 100, 2001)
    assert most >= max(exact_efficiency(o, float(t)) for t in around) - 1e-12
    for law in (young, daly, daly_higher_order, rfo):
        assert exact_efficiency(o, law(o)) <= most + 1e-12
    x, c = (best + o.save) / o.mttf, o.save / o.mttf
    assert x == pytest.approx(1 + c - exp(-x), rel=1e-9)


def test_higher_orders_come_closer() -> None:
    for o in GRID:
        if o.save < o.mttf / 10:
            best = best_interval(o)
            assert daly_higher_order(o) == pytest.approx(best, rel=5e-3)
            assert abs(daly_higher_order(o) - best) <= abs(young(o) - best)


def test_formulas_as_published() -> None:
    o = Outage(10_000.0, 100.0, 60.0, 240.0)
    assert young(o) == sqrt(2 * 10_000 * 100)
    assert daly(o) + 100 == pytest.approx(sqrt(2 * (10_000 + 300) * 100) + 100)
    assert rfo(o) + 100 == pytest.approx(sqrt(2 * (10_000 - 300) * 100))
    period = 1500.0
    waste = 100 / period + (1 - 100 / period) * (300 + period / 2) / 10_000
    assert first_order_efficiency(o, period - 100) == pytest.approx(1 - waste)
    exact = (period - 100) / ((10_000 + 60) * exp(240 / 10_000) * (exp(period / 10_000) - 1))
    assert exact_efficiency(o, period - 100) == pytest.approx(exact)


def test_small_losses_are_told_alike_by_all() -> None:
    o = Outage(1e6, 10.0, 60.0, 240.0)
    t = best_interval(o)
    exact = exact_efficiency(o, t)
    assert first_order_efficiency(o, t) == pytest.approx(exact, abs=1e-4)
    assert meta_ettr(o, t) == pytest.approx(exact, abs=1e-4)


def test_ends() -> None:
    assert best_interval(Outage(inf, 10.0)) == inf
    assert exact_efficiency(Outage(inf, 10.0), 90.0) == 0.9
    assert exact_efficiency(Outage(inf, 10.0), inf) == 1.0
    assert best_interval(Outage(1000.0, 0.0)) == 0.0
    assert exact_efficiency(Outage(1000.0, 0.0, 500.0), 0.0) == pytest.approx(2 / 3)
    assert exact_efficiency(Outage(1.0, 10.0, 0.0, 1000.0), 5.0) == 0.0
    assert daly_higher_order(Outage(10.0, 50.0)) == 10.0
    assert rfo(Outage(100.0, 1.0, 90.0, 90.0)) == 0.0
