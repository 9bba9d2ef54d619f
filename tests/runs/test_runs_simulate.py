"""Draws of whole runs: against the exact formula, against a run told second by second, and their laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from presage.errors import PresageError
from presage.noise.distribution import LogNormal
from presage.noise.model import Stalls
from presage.prediction.result import model_error
from presage.runs.checkpoint import best_interval
from presage.runs.failures import DAY, ByScale, Failure, Reliability, Repair, SlowEpisode
from presage.runs.outcome import CAUSES, RunOutcome
from presage.runs.run import CheckpointPlan, TrainingRun
from presage.runs.sets import reliability
from presage.runs.simulate import simulate
from presage.runs.steps import StepTimes
from presage.runs.study import changes, grown, intervals, with_spares
from run_times import USUAL

LLAMA3 = 3.79e-3


def simple(
    rate: float,
    save: float = 10.0,
    detect: float = 0.0,
    restart: float = 300.0,
    steps: int = 400_000,
    gpus: int = 65536,
) -> TrainingRun:
    kind = Reliability("x", (Failure("x", rate, detect),), restart=ByScale(((1.0, restart),)))
    return TrainingRun(steps, gpus, StepTimes(5.0), kind, CheckpointPlan(save))


@pytest.mark.parametrize("rate", [2.34e-3, 6.5e-3])
@pytest.mark.parametrize("save", [10.0, 300.0])
@pytest.mark.parametrize(("detect", "restart"), [(0.0, 300.0), (600.0, 900.0)])
def test_formula_and_draws_agree_on_65536_gpus(rate: float, save: float, detect: float, restart: float) -> None:
    run = simple(rate, save, detect, restart, steps=100_000)
    for times in (0.5, 1.0, 2.0):
        every = max(1, round(best_interval(run.outage) * times / 5.0))
        tried = replace(run, checkpoints=CheckpointPlan(save, every=every))
        found = tried.steps * 5.0 / simulate(tried, 600, seed=1).wall.mean()
        assert found == pytest.approx(tried.efficiency, abs=0.005)


@pytest.mark.parametrize("save", [10.0, 300.0])
def test_formula_and_draws_agree_at_llama3s_size(save: float) -> None:
    run = simple(LLAMA3, save, gpus=16384, steps=900_000)
    assert simulate(run, 200).ettr.mean() == pytest.approx(run.efficiency, abs=0.005)


def by_hand(run: TrainingRun, rng: np.random.Generator) -> tuple[float, int]:
    """One draw, step by step and event by event."""
    risk, k, clock, kept, failures, first = run.risk, run.checkpoints, 0.0, 0, 0, True
    back: list[float] = []
    while True:
        fails = clock + rng.exponential(1 / risk.rate)
        clock += 0.0 if first else risk.restart
        first, at = False, kept
        saved = [(clock, kept)]  # when each checkpoint can be relied on
        while at < run.steps and clock <= fails:
            clock, at = clock + run.times.seconds, at + 1
            if at % run.every == 0 or at == run.steps:
                clock += k.save
                saved.append((clock + (0.0 if at == run.steps else k.delay), at))
        if clock <= fails:
            return clock, failures
        kept = max(n for t, n in saved if t <= fails or n == kept)
        failures += 1
        f = run.reliability.failures[rng.choice(len(risk.rates), p=risk.rates / risk.rate)]
        clock = fails + f.detect
        if run.spares is not None and rng.random() < f.node:
            back = [t for t in back if t > clock] + [clock + rng.exponential(run.reliability.repair.mean)]
            clock = max(clock, min(back)) if len(back) > run.spares else clock


@pytest.mark.parametrize(("spares", "delay"), [(None, 0.0), (0, 0.0), (2, 0.0), (None, 150.0)])
def test_draws_are_as_a_run_told_event_by_event(spares: int | None, delay: float) -> None:
    classes = (Failure("a", 1.5, 30.0, node=1.0), Failure("b", 0.7, 200.0))
    kind = Reliability("x", classes, restart=ByScale(((1.0, 120.0),)), repair=Repair(60_000.0))
    run = TrainingRun(300, 80, StepTimes(50.0), kind, CheckpointPlan(20.0, delay, every=4), spares)
    rng = np.random.default_rng(2)
    hand = np.array([by_hand(run, rng) for _ in range(1500)])
    drawn = simulate(run, 20_000)
    for one, many in ((hand[:, 0], drawn.wall), (hand[:, 1], drawn.failures)):
        error = 4 * one.std() / len(one) ** 0.5
        assert many.mean() == pytest.approx(one.mean(), abs=error)
        assert many.std() == pytest.approx(one.std(), rel=0.1)
    assert np.quantile(drawn.wall, 0.9) == pytest.approx(np.quantile(hand[:, 0], 0.9), rel=0.05)


@pytest.fixture(scope="module")
def llama() -> RunOutcome:
    """The published case: 54 days on 16,384 GPUs, checkpoints of 10 s."""
    times = replace(USUAL, seconds=6.45)
    return simulate(TrainingRun(660_000, 16384, times, reliability("llama3"), CheckpointPlan(10.0)).exact(), 1000)


def test_llama3s_run(llama: RunOutcome) -> None:
    """More than 90% effective, and 419 failures in 54 days are no surprise. (The rate is theirs: it is the spread and
    the time lost that are predicted.)"""
    assert llama.quantile(0.05) < 54 * DAY < llama.quantile(0.99)
    assert llama.goodput.mean() > 0.90
    assert llama.ettr.mean() == pytest.approx(0.93, abs=0.01)
    per_54_days = llama.failures / llama.wall * 54 * DAY
    low, high = np.quantile(per_54_days, [0.05, 0.95])
    assert low < 419 < high
    assert high / low < 1.25
    low, high = np.quantile(llama.planned, [0.05, 0.95])
    assert low < 47 < high


def test_parts_add_up(llama: RunOutcome) -> None:
    assert set(llama.parts) == set(CAUSES)
    assert min(part.min() for part in llama.parts.values()) >= 0
    np.testing.assert_allclose(llama.wall, sum(llama.parts.values()))
    assert llama.failures.sum() + llama.planned.sum() == llama.counts.sum()
    lost = sum(llama.parts[c].mean() for c in ("lost", "detection", "spares", "restart"))
    assert llama.costs.sum() / llama.draws == pytest.approx(lost, rel=0.02)
    assert sum(s.count for s in llama.stops()) == pytest.approx(llama.counts.sum() / llama.draws)


def test_the_same_seed_gives_the_same() -> None:
    run = simple(LLAMA3, steps=20_000)
    one, same, other = (simulate(run, 50, seed).wall for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_without_failures_or_noise_a_run_is_its_steps_and_checkpoints() -> None:
    kind = Reliability("none")
    run = TrainingRun(1000, 8, StepTimes(2.0), kind, CheckpointPlan(3.0, every=300))
    assert np.array_equal(simulate(run, 3).wall, np.full(3, 2000.0 + 4 * 3.0))
    auto = replace(run, checkpoints=CheckpointPlan(3.0))
    assert auto.every == 1000
    assert intervals(run) == ()
    assert with_spares(run) == ()


def test_planned_stops_lose_no_work() -> None:
    kind = Reliability("x", (Failure("x", 5.0, 0.0, planned=True),), restart=ByScale(((1.0, 0.001),)))
    o = simulate(TrainingRun(20_000, 80, StepTimes(5.0), kind, CheckpointPlan(20.0, every=500)), 200)
    each = o.parts["lost"].sum() / o.counts.sum()
    assert each == pytest.approx(2.5, abs=0.3)  # half a step
    assert o.failures.sum() == 0
    assert o.planned.mean() > 50


def test_noise_of_steps_gives_the_spread_of_the_run() -> None:
    times = StepTimes(5.0, run_sd=0.01, sd=0.2, correlation=0.9)
    run = TrainingRun(100_000, 8, times, Reliability("none"), CheckpointPlan(0.0, every=1000))
    wall = simulate(run, 20_000).wall / (100_000 * 5.0)
    steps = 0.2 * np.sqrt((1 + 0.9) / (1 - 0.9) / 100_000)
    assert wall.std() == pytest.approx(np.hypot(0.01, steps), rel=0.03)
    often = Reliability("x", (Failure("x", 2.0, 0.0),), restart=ByScale(((1.0, 0.001),)))
    cut = simulate(replace(run, reliability=often, checkpoints=CheckpointPlan(0.0, every=1)), 4000)
    assert cut.failures.mean() > 5
    assert (cut.parts["steps"] / 500_000).std() == pytest.approx(wall.std(), rel=0.1)


def test_a_drift_takes_nothing_and_gives_nothing() -> None:
    base = simple(LLAMA3, steps=100_000)
    drifting = replace(base, times=replace(base.times, drift=0.02))
    steps = [simulate(r, 100).parts["steps"].mean() for r in (base, drifting)]
    assert steps[1] == pytest.approx(steps[0], rel=1e-3)


@pytest.mark.parametrize("per_hour", [0.5, 50.0])
def test_stalls_have_their_mean_and_variance(per_hour: float) -> None:
    """Few are drawn one by one, many by their moments."""
    size = LogNormal(10.0, 0.8)
    times = StepTimes(5.0, stalls=Stalls(per_hour, size))
    o = simulate(TrainingRun(3600, 8, times, Reliability("none"), CheckpointPlan(0.0)), 20_000)
    stalls = o.parts["stalls"]
    many = per_hour * 5
    assert stalls.mean() == pytest.approx(many * size.mean, rel=0.03)
    assert stalls.var() == pytest.approx(many * (size.sd**2 + size.mean**2), rel=0.1)


def test_slow_episodes_take_what_their_factor_says() -> None:
    episode = SlowEpisode("hot", 2.0, LogNormal(30.0, 0.5), 1.5)
    run = TrainingRun(50_000, 8, StepTimes(5.0), Reliability("x", slow=(episode,)), CheckpointPlan(0.0))
    slow = simulate(run, 4000).parts["slow"] / 250_000
    assert slow.mean() == pytest.approx(run.risk.episodes(episode) * episode.lost.mean, rel=0.03)
    hour_long = SlowEpisode("hot", 1e4, LogNormal(1e5, 0.0), 1.5)
    short = replace(run, steps=100, reliability=Reliability("x", slow=(hour_long,)))
    assert simulate(short, 100).parts["slow"].max() <= 0.5 * 500 + 1e-9


def test_single_steps_and_runs_have_the_same_mean() -> None:
    run = TrainingRun(
        100_000, 16384, replace(USUAL, seconds=5.0, drift=0.0), reliability("llama3"), CheckpointPlan(10.0)
    ).exact()
    single = run.single_steps(np.random.default_rng(0), 400_000)
    assert single.mean() == pytest.approx(simulate(run, 400).step.mean(), rel=2e-3)
    assert single.mean() == pytest.approx(run.step, rel=2e-3)
    assert np.quantile(single, 0.99) > 1.05 * np.median(single)


def test_weibull_times_keep_their_mean() -> None:
    base = simple(LLAMA3, steps=200_000)
    bursts = replace(base, reliability=replace(base.reliability, shape=0.7))
    even, uneven = (simulate(r, 200) for r in (base, bursts))
    assert uneven.wall.sum() / uneven.failures.sum() == pytest.approx(even.wall.sum() / even.failures.sum(), rel=0.05)
    assert uneven.failures.std() > 1.2 * even.failures.std()


def test_worse_things_never_make_a_run_shorter() -> None:
    base = TrainingRun(
        200_000, 16384, replace(USUAL, seconds=5.0), reliability("llama3"), CheckpointPlan(10.0, every=90)
    )
    wall = simulate(base, 200).wall.mean()
    r = base.reliability
    worse = [
        base.changed(seconds=1.02), base.changed(save=2.0), replace(base, reliability=r.scaled(rates=1.3)),
        replace(base, reliability=r.scaled(detect=2.0)), replace(base, reliability=r.scaled(restart=2.0)),
        replace(base, spares=4),
    ]  # fmt: skip
    for run in worse:
        assert simulate(run, 200).wall.mean() > wall


def test_presages_own_error_is_apart() -> None:
    sd = model_error("dense").sd
    run = TrainingRun(50_000, 1024, StepTimes(5.0, model_sd=sd), reliability("llama3"), CheckpointPlan(10.0))
    sure, unsure = simulate(run.exact(), 2000), simulate(run, 2000)
    assert np.median(unsure.wall) == pytest.approx(np.median(sure.wall), rel=0.02)
    assert np.log(sure.wall).std() < 0.01
    assert np.log(unsure.wall).std() == pytest.approx(sd, rel=0.1)


def test_draws_that_hardly_move_have_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.runs.simulate.MOST_ATTEMPTS", 2000)
    run = simple(60e-3, restart=900.0, steps=2000)
    with pytest.raises(PresageError, match="hardly move"):
        simulate(replace(run, steps=400_000_000), 10)
    unsure = replace(run, reliability=replace(run.reliability, rate_sd=0.7), steps=60)
    o = simulate(unsure, 40)
    assert o.never.any()
    assert np.isinf(o.wall[o.never]).all()
    assert o.done_by(1e12) == (~o.never).mean()
    assert np.isfinite(o.quantile(0.05))
    assert np.isinf(o.quantile(1.0))


def test_intervals_and_what_ifs() -> None:
    run = TrainingRun(100_000, 16384, replace(USUAL, seconds=5.0), reliability("llama3"), CheckpointPlan(10.0))
    found = {i.name: i for i in intervals(run)}
    best = found["exact optimum"]
    assert max(i.exact for i in found.values()) == best.exact
    assert found["this run"].exact == pytest.approx(best.exact, abs=1e-5)
    table = {c.name: c for c in changes(run, 100)}
    for name, sign in (("half as many failures", -1), ("twice as many failures", 1), ("steps 10% quicker", -1)):
        assert np.sign(table[name].middle) == sign
    assert table["steps 10% quicker"].middle < table["checkpoints in half the time"].middle < 0
    assert "failures that grow with scale" not in table
    assert grown(replace(run, gpus=98304)).risk.unplanned > 2.8 * replace(run, gpus=98304).risk.unplanned


def test_spares_until_there_is_no_wait() -> None:
    run = TrainingRun(100_000, 16384, replace(USUAL, seconds=5.0), reliability("llama3"), CheckpointPlan(10.0))
    found = with_spares(run, 100)
    assert [s.spares for s in found] == [0, 1, 2, 4, 8, 16]
    assert all(a.middle >= b.middle and a.waits > b.waits for a, b in pairwise(found))
    assert found[-1].middle == pytest.approx(simulate(run, 100).quantile(0.5), rel=2e-3)


def test_long_what_ifs_are_drawn_of_a_part() -> None:
    """And come to what the whole run gives."""
    run = simple(LLAMA3, steps=400_000)
    half = replace(run, reliability=run.reliability.scaled(rates=0.5))
    whole = simulate(half, 100).quantile(0.5) - simulate(run, 100).quantile(0.5)
    table = {c.name: c for c in changes(run, 100)}
    assert table["half as many failures"].middle == pytest.approx(whole, rel=0.05)


def test_money_and_energy() -> None:
    kind = Reliability("x", (Failure("x", 1.0, 100.0),), node_gpus=8)
    o = simulate(TrainingRun(10_000, 80, StepTimes(5.0), kind, CheckpointPlan(10.0), spares=2), 50)
    np.testing.assert_allclose(o.cost(2.0), o.wall / 3600 * (80 + 16) * 2.0)
    down = o.parts["detection"] + o.parts["restart"] + o.parts["spares"] + o.parts["checkpoints"]
    np.testing.assert_allclose(o.energy(100.0, 10.0), (o.wall - down) * 100 + down * 10)


@pytest.mark.parametrize("draws", [0, -3])
def test_there_has_to_be_a_draw(draws: int) -> None:
    with pytest.raises(PresageError, match="draws"):
        simulate(simple(LLAMA3), draws)


def test_bad_values() -> None:
    run = simple(LLAMA3)
    with pytest.raises(PresageError, match="needs a step"):
        replace(run, steps=0)
    with pytest.raises(PresageError, match="0 seconds or more"):
        CheckpointPlan(-1.0)
