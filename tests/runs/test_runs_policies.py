"""Policies against failures: against runs told event by event, closed formulas, and their order."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.runs.failures import DAY, ByScale, Failure, Reliability, Repair
from presage.runs.nodes import RepeatOffenders, Standby
from presage.runs.outcome import RunOutcome
from presage.runs.policies import draw_policies, needed_spares, policy_runs
from presage.runs.policy import Policy
from presage.runs.run import CheckpointPlan, TrainingRun
from presage.runs.sets import reliability
from presage.runs.simulate import simulate
from presage.runs.steps import StepTimes

HOUR = 3600.0
JOB = Path(__file__).parents[2] / "examples/jobs/llama3.1-405b.toml"


def small(**changes: object) -> TrainingRun:
    kind = Reliability("x", (Failure("x", 0.4, 30.0, node=1.0),), restart=ByScale(((1.0, 120.0),)), repair=Repair(9e4))
    run = TrainingRun(600, 80, StepTimes(50.0), kind, CheckpointPlan(20.0, every=4))
    return replace(run, **changes)  # type: ignore[arg-type]


def agrees(hand: list[float], drawn: RunOutcome, wide: float = 4.0) -> None:
    one = np.array(hand)
    assert drawn.wall.mean() == pytest.approx(one.mean(), abs=wide * one.std() / len(one) ** 0.5)
    assert np.quantile(drawn.wall, 0.9) == pytest.approx(np.quantile(one, 0.9), rel=0.05)


# ---- known answers


@pytest.mark.parametrize("shape", [1.0, 0.45])
def test_a_machine_without_spares_is_available_for_mtbf_over_mtbf_and_mttr(shape: float) -> None:
    """Whatever the repair times' distribution is."""
    kind = Reliability(
        "x", (Failure("x", 1.0, 0.0, node=1.0),), restart=ByScale(((1.0, 1e-6),)), repair=Repair(DAY / 2, shape)
    )
    run = TrainingRun(40_000, 8, StepTimes(30.0), kind, CheckpointPlan(0.0, every=1), spares=0)
    found = run.steps * 30.0 / simulate(run, 2000).wall.mean()
    assert found == pytest.approx(1 / (1 + 0.5), rel=0.04)


def test_repair_times_keep_their_mean_and_median() -> None:
    even = np.random.default_rng(0).standard_exponential(400_000)
    for r in (Repair(100.0), Repair(100.0, 0.45)):
        assert r.of(even).mean() == pytest.approx(100.0, rel=0.03)
        assert np.median(r.of(even)) == pytest.approx(r.median, rel=0.02)
    assert Repair(133.0, 0.43).median < 25 < Repair(133.0).median
    with pytest.raises(PresageError, match="repair"):
        Repair(-1.0)


def test_needed_spares_are_poisson_whatever_repairs_take() -> None:
    kind = Reliability("x", (Failure("x", 1e-3, node=1.0),), repair=Repair(10 * DAY, 0.4))
    run = TrainingRun(1, 8 * 1000, StepTimes(1.0), kind, CheckpointPlan(1.0))
    assert needed_spares(run) == 15  # of a mean of 10
    assert needed_spares(replace(run, reliability=Reliability("none"))) == 0


def test_ft_hsdps_elastic_training() -> None:
    """Published: 44% of the time effective with stalls of 10 minutes of all GPUs, 80% with 3 and replicas."""
    kind = replace(reliability("ft-hsdp"), slow=())
    run = TrainingRun(8_000, 98304, StepTimes(10.0), kind.with_restart(433.0), CheckpointPlan(6.0)).exact()
    plain = simulate(run, 60).ettr.mean()
    stall = Policy("elastic", replicas=32, heal=kind.restart.at(98304 / 32), pause=13.0)
    elastic = simulate(replace(run, policy=stall, checkpoints=CheckpointPlan(6.0, every=360)), 60)
    assert plain == pytest.approx(0.44, abs=0.08)
    assert elastic.goodput.mean() == pytest.approx(0.80, abs=0.05)


# ---- event by event


def elastic_by_hand(run: TrainingRun, rng: np.random.Generator) -> float:
    """One elastic draw in continuous time: work is done by the replicas there are; failures of those only."""
    p, rate = run.policy, run.risk.rate
    clock, done, away = 0.0, 0.0, list[float]()
    repairs = list[float]()
    need = run.steps * run.times.seconds + np.ceil(run.steps / run.every) * run.checkpoints.save
    while True:
        live = p.replicas - len(away)
        fails = clock + rng.exponential(p.replicas / (rate * live))
        until = min(fails, away[0] if away else np.inf)
        ends = clock + (need - done) * p.replicas / live
        if ends <= until:
            return ends
        done, clock = done + (until - clock) * live / p.replicas, until
        if until < fails:
            heapq.heappop(away)
            continue
        clock += run.reliability.failures[0].detect
        wait = 0.0
        if run.spares is not None:
            back = clock + rng.exponential(run.reliability.repair.mean)
            heapq.heappush(repairs, back)
            wait = max(0.0, heapq.heappop(repairs) - clock) if len(repairs) > run.spares else 0.0
        heapq.heappush(away, clock + wait + p.heal)
        clock = max(clock, away[0]) if len(away) == p.replicas else clock
        away = [t for t in away if t > clock]
        heapq.heapify(away)
        clock += p.pause
        away = [t for t in away if t > clock]
        heapq.heapify(away)


@pytest.mark.parametrize(("spares", "heal"), [(None, 600.0), (None, 6000.0), (0, 600.0), (1, 600.0)])
def test_elastic_runs_are_as_told_event_by_event(spares: int | None, heal: float) -> None:
    run = small(spares=spares, policy=Policy("elastic", replicas=8, heal=heal, pause=15.0))
    run = replace(run, times=StepTimes(5.0), steps=6000, checkpoints=CheckpointPlan(2.0, every=100))
    rng = np.random.default_rng(3)
    hand = [elastic_by_hand(run, rng) for _ in range(1500)]
    drawn = simulate(run, 3000)
    assert drawn.wall.mean() == pytest.approx(np.mean(hand), rel=0.02)
    assert np.quantile(drawn.wall, 0.9) == pytest.approx(np.quantile(hand, 0.9), rel=0.03)


def stopped_by_hand(run: TrainingRun, rng: np.random.Generator) -> float:
    """One draw step by step, with hot standby and copies in memory."""
    risk, k, p = run.risk, run.checkpoints, run.policy
    clock, kept, restart = 0.0, 0, 0.0
    standby = [0.0] * p.hot
    while True:
        fails = clock + rng.exponential(1 / risk.rate)
        clock, at, saved = clock + restart, kept, kept
        while at < run.steps and clock <= fails:
            clock, at = clock + run.times.seconds, at + 1
            if at % run.every == kept % run.every or at == run.steps:
                clock += k.save
                saved = at if clock <= fails else saved
        if clock <= fails:
            return clock
        lost = p.stored is not None and rng.random() < p.memory_lost
        kept = saved // p.stored * p.stored if lost and p.stored else saved
        clock = fails + run.reliability.failures[0].detect
        ready = [i for i, t in enumerate(standby) if t <= clock]
        repair = rng.exponential(run.reliability.repair.mean)
        restart = p.hot_restart if ready else risk.restart
        if ready:
            standby[ready[0]] = clock + repair


@pytest.mark.parametrize(
    "policy", [Policy("hot", hot=1, hot_restart=20.0), Policy("memory", stored=60, memory_lost=0.4), Policy()]
)
def test_standby_and_copies_in_memory_are_as_told_event_by_event(policy: Policy) -> None:
    run = small(policy=policy, spares=40 if policy.hot else None)
    run = replace(run, reliability=replace(run.reliability, failures=(Failure("x", 1.5, 30.0, node=1.0),)))
    rng = np.random.default_rng(5)
    agrees([stopped_by_hand(run, rng) for _ in range(1500)], simulate(run, 4000))


# ---- repeat offenders and standby nodes by themselves


def test_repeat_offenders_are_a_polya_urn() -> None:
    """Without eviction the rate stays that of average nodes; with it, it falls as bad nodes leave."""
    rng, draws, nodes = np.random.default_rng(1), 4000, 50
    expect = {}
    for evict in (1, 50):
        urn = RepeatOffenders(nodes, 2.0, evict, draws)
        for _ in range(40):
            gap = rng.standard_exponential(draws) / (nodes * urn.factor)
            urn.fail(np.ones(draws, bool), rng.random(draws), gap)
        expect[evict] = urn.exposure.mean() * nodes  # expected failures of average nodes in the time of 40
    assert urn.counts.sum(axis=1) == pytest.approx(np.full(draws, nodes))
    assert expect[50] == pytest.approx(40, rel=0.25)
    assert expect[1] > 1.15 * expect[50]


def test_a_standby_node_is_ready_again_after_its_place_is_filled() -> None:
    s = Standby(1, 2)
    both, now = np.array([True, True]), np.array([0.0, 0.0])
    assert s.take(both, now, np.array([10.0, 1e9])).tolist() == [True, True]
    assert s.take(both, now + 20.0, np.array([1.0, 1.0])).tolist() == [True, False]


# ---- by name, on a job


@pytest.fixture(scope="module")
def frontier() -> TrainingRun:
    kind = replace(reliability("llama3"), frailty=1.5, relapse=0.3, relapse_after=8 * HOUR)
    return TrainingRun(30_000, 16384, StepTimes(5.0), kind, CheckpointPlan(60.0)).exact()


def test_policies_in_their_order(frontier: TrainingRun) -> None:
    job = read_transformer_job(JOB)
    names = (
        "restart,spares=0,spares=400,hot-spare=4,async-checkpoint,in-memory-checkpoint,evict=2,burn-in=24,elastic=16"
    )
    found = {o.policy.name: o for o in draw_policies(policy_runs(names, frontier, job), 40, 0)}
    good = {name: o.goodput for name, o in found.items()}
    assert good["spares=0"] < good["spares=400"] == pytest.approx(good["restart"], abs=0.002)
    for better in ("hot-spare=4", "async-checkpoint", "in-memory-checkpoint", "burn-in=24"):
        assert good["restart"] < good[better] < good["elastic=16"] < 1
    assert good["evict=2"] >= good["restart"] - 1e-3
    assert found["hot-spare=4"].policy.extra_nodes == 4
    parts = found["elastic=16"].outcome.parts
    assert parts["degraded"].mean() > 0
    np.testing.assert_allclose(found["elastic=16"].outcome.wall, sum(parts.values()))


def test_more_of_a_good_thing_is_never_worse(frontier: TrainingRun) -> None:
    job = read_transformer_job(JOB)
    for names in ("spares=2,spares=8,spares=32", "hot-spare=1,hot-spare=4,hot-spare=16", "watch=60,watch=10,watch=1"):
        good = [o.goodput for o in draw_policies(policy_runs(names, frontier, job), 40, 0)]
        assert all(b > a - 1e-3 for a, b in pairwise(good))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("elasti", "did you mean elastic"), ("spares=x", "number"), ("spares=1.5", "whole"), ("hot-spare=0", "number"),
        ("elastic=7", "do not split"), ("restart=3", "no value"), ("evict=2", "no repeat offenders"),
        ("burn-in=5", "no relapses"), ("watch=0", "number"), ("", "unknown"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be(text: str, why: str) -> None:
    run = TrainingRun(100, 16384, StepTimes(5.0), reliability("llama3"), CheckpointPlan(60.0))
    with pytest.raises(PresageError, match=why):
        policy_runs(text, run, read_transformer_job(JOB))


def test_compare_takes_what_goes_with_the_run() -> None:
    run = TrainingRun(100, 16384, StepTimes(5.0), reliability("llama3"), CheckpointPlan(60.0))
    names = [p.name for p in policy_runs("compare", run, read_transformer_job(JOB))]
    assert "evict=2" not in names
    assert {"restart", "in-memory-checkpoint", "watch=10"} <= set(names)
