"""Placements: equal to brute force where that can be run, never below the bound, and what slow GPUs cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_ndtr
from slow_stage import operation_noise, toy_step_model

from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.noise.model import NO_NOISE
from presage.parallel.pipeline import Schedule
from presage.placement import GpuFleet, hot_node_cost, place, random_fleet, spare_gpus, suggest_evictions
from presage.placement.gpu_groups import GroupSizes, best_groups, random_groups, worst_groups
from presage.placement.placement_score import PlacementScore, ReplicaTimes, draw_placement
from presage.placement.placement_search import assign_groups, assign_groups_worst, p95_bound
from presage.prediction.draws import step_model

Floats = NDArray[np.float64]
JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
KINDS = (("1f1b", 1), ("interleaved", 2), ("gpipe", 1), ("zero-bubble", 1))
SIZES = ((2, 4), (4, 2), (1, 6), (3, 2), (2, 3), (8, 1), (1, 7))


def case(number: int) -> tuple[PlacementScore, Floats]:
    """A small pipeline, and groups of random speeds, some of them slow."""
    rng = np.random.default_rng(number)
    (replicas, stages), (kind, virtual) = SIZES[number % 7], KINDS[number % 4]
    weights = np.ones(stages)
    weights[-1] = (1.0, 1.3, 1.1)[number % 3]
    schedule = Schedule.of(kind, stages, stages * int(rng.choice([1, 2, 4])), virtual)
    noise = operation_noise(0.02 * (number % 2))
    values = np.exp(rng.normal(0, 0.03, replicas * stages))
    values[rng.random(len(values)) < 0.2] *= 1.2
    return PlacementScore(ReplicaTimes(toy_step_model(schedule, weights, replicas), noise), replicas, draws=24), values


def partitions(left: list[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to deal groups to replicas; which replica is which does not matter."""
    if not left:
        yield []
        return
    for some in itertools.combinations(left[1:], size - 1):
        rest = [x for x in left[1:] if x not in some]
        yield from ([(left[0], *some), *more] for more in partitions(rest, size))


def brute_force(judge: PlacementScore, values: Floats) -> tuple[float, float]:
    """The least and the largest p95 of all assignments."""
    stages = judge.pipeline.shape.stages
    rows = np.array(list(itertools.permutations(range(len(values)), stages)))
    index, m = {tuple(r): i for i, r in enumerate(rows.tolist())}, judge.moments(values[rows])
    least, most = np.inf, 0.0
    for part in partitions(list(range(len(values))), stages):
        each = [[index[p] for p in itertools.permutations(some)] for some in part]
        grid = np.array(list(itertools.product(*each)))
        p95 = levels(m.mean[grid], m.sd[grid])
        least, most = min(least, float(p95.min())), max(most, float(p95.max()))
    return least, most


def levels(mean: Floats, sd: Floats) -> Floats:
    """[assignment]: p95 of the slowest of its replicas, by bisection: written anew, not the judge's."""
    low, high = mean.min(axis=1) - 1, mean.max(axis=1) + 1
    for _ in range(50):
        middle = (low + high) / 2
        short = log_ndtr((middle[:, None] - mean) / sd).sum(axis=1) < np.log(0.95)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.exp(high)


@pytest.mark.parametrize("number", range(28))
def test_it_equals_brute_force_and_no_placement_is_below_the_bound(number: int) -> None:
    judge, values = case(number)
    found, (least, most) = assign_groups(judge, values), brute_force(judge, values)
    assert sorted(found.groups.ravel().tolist()) == list(range(len(values)))
    assert judge.p95(values[found.groups]) == pytest.approx(found.p95)
    assert found.p95 == pytest.approx(least, rel=1e-9)
    assert p95_bound(judge, values, values[found.groups]) <= least * (1 + 1e-9)
    worst = judge.p95(values[assign_groups_worst(judge, values)])
    assert least * (1 - 1e-9) <= worst <= most * (1 + 1e-9) and worst > most * 0.985


def test_the_bound_is_near_where_brute_force_cannot_be_run() -> None:
    for kind, microbatches in (("1f1b", 16), ("interleaved", 32)):
        shape = toy_step_model(Schedule.of(kind, 8, microbatches, 2 if kind == "interleaved" else 1), 1.0, 16)
        judge = PlacementScore(ReplicaTimes(shape, operation_noise(0.02)), 16)
        values = random_fleet(128, 8, 0.02, np.random.default_rng(3), 0.05, 1.15).factors
        found = assign_groups(judge, values)
        least = p95_bound(judge, values, values[found.groups])
        assert least <= found.p95 < least * 1.012
        others = [judge.p95(values[np.random.default_rng(k).permutation(128).reshape(16, 8)]) for k in range(5)]
        assert min(others) > found.p95 * 1.01


# ---- groups


@pytest.mark.parametrize("keep_nodes", [True, False])
def test_the_kth_slowest_group_is_as_quick_as_can_be_for_every_k(keep_nodes: bool) -> None:
    rng = np.random.default_rng(5)
    shape = step_model(read_transformer_job(JOBS / "hugging_face.toml", {}))  # groups of 8 with tp 2
    fleet = random_fleet(144, 4, 0.03, rng)
    sizes = GroupSizes.of(shape, fleet, keep_nodes)
    assert (sizes.groups, sizes.together, sizes.part) == (16, 8, 2 if keep_nodes else 1)

    def slowest(groups: NDArray[np.int64]) -> Floats:
        assert groups.shape == (16, 8) and len(np.unique(groups)) == 128
        nodes = np.array(fleet.nodes)[groups.reshape(-1, sizes.part)]
        assert (nodes == nodes[:, :1]).all()
        return np.sort(fleet.factors[groups].max(axis=1))

    best, worst = slowest(best_groups(fleet, sizes)), slowest(worst_groups(fleet, sizes))
    for _ in range(50):
        other = slowest(random_groups(fleet, sizes, rng))
        assert (best <= other).all() and (other <= worst).all()


def test_a_group_larger_than_a_node_takes_whole_nodes_and_too_few_are_an_error() -> None:
    shape = step_model(read_transformer_job(JOBS / "llama3.1-405b.toml", {"parallel": {"gpus": 256}}))
    fleet = random_fleet(256, 4, 0.02, np.random.default_rng(0))
    assert GroupSizes.of(shape, fleet).part == 4
    with pytest.raises(PresageError, match="256 speeds, but the job has 512 GPUs"):
        GroupSizes.of(step_model(read_transformer_job(JOBS / "llama3.1-405b.toml", {"parallel": {"gpus": 512}})), fleet)
    odd = GpuFleet.of(np.ones(256), nodes=[f"n{i // 7}" for i in range(256)])  # no 4 GPUs to spare in nodes of 7
    with pytest.raises(PresageError, match="--any-node"):
        best_groups(odd, GroupSizes(16, 16, 4))


# ---- what steps a placement has


def test_drawn_steps_are_those_of_all_replicas_simulated() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 4, 8), [1, 1, 1, 1.2], 12)
    pipeline = ReplicaTimes(shape, operation_noise(0.03))
    factors = np.exp(np.random.default_rng(1).normal(0, 0.03, (12, 4)))
    found = draw_placement(pipeline, factors, count=20_000)
    noises = [pipeline.noises(np.random.default_rng(r), 5_000) for r in range(12)]
    each = [pipeline.quiet(f[None]) * pipeline.ratios(f[None], n)[0] for f, n in zip(factors, noises, strict=True)]
    step = np.max(each, axis=0)
    for p in (0.05, 0.5, 0.95):
        assert found.quantile(p).value == pytest.approx(np.quantile(step, p), rel=1e-3)
    assert PlacementScore(pipeline, 12).p95(factors) == pytest.approx(np.quantile(step, 0.95), rel=2e-3)


def test_without_noise_a_step_is_its_slowest_replica_and_what_comes_after() -> None:
    job = read_transformer_job(JOBS / "hugging_face.toml", {})
    shape = step_model(job)
    factors = np.ones((shape.replicas, shape.stages))
    pipeline = ReplicaTimes(shape, NO_NOISE)
    assert draw_placement(pipeline, factors, count=100).seconds == pytest.approx(shape.seconds)
    factors[1, 2] = 1.3
    slow = draw_placement(pipeline, factors, count=100).seconds
    assert slow == pytest.approx(float(pipeline.quiet(factors[1:2])[0]) + shape.seconds - shape.pipeline.total)
    assert shape.seconds * 1.1 < slow.mean() < shape.seconds * 1.3


# ---- the whole


def test_slow_gpus_share_a_group_and_leave_the_heavy_stage_alone() -> None:
    job = read_transformer_job(JOBS / "hugging_face.toml", {})
    fleet = GpuFleet.of([1.2 if i % 16 == 3 else 1.0 for i in range(128)], nodes=[f"n{i // 8}" for i in range(128)])
    found = place(step_model(job), fleet, operation_noise(0.02), draws=1_000, randoms=5)
    best = found.best.placement
    assert (best.factors > 1.1).sum() == 2  # 8 slow GPUs with a healthy neighbour each: two groups of 8
    assert (found.given.placement.factors > 1.1).sum() == 8
    assert not (best.factors[:, -1] > 1.1).any()  # the last stage has the head
    assert found.best.p95.value < found.randoms.p95 < found.worst.p95.value
    assert found.bound <= found.best.p95.value and found.gap < 0.01


def test_the_best_placement_does_not_depend_on_the_order_given() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 4, 8), [1, 1, 1, 1.3], 4)
    factors = random_fleet(16, 4, 0.03, np.random.default_rng(2), 0.1, 1.2).factors
    one, other = (
        place(shape, GpuFleet.of(f), operation_noise(0.02), draws=500, randoms=2)
        for f in (factors, np.random.default_rng(9).permutation(factors))
    )
    assert one.best.p95.value == pytest.approx(other.best.p95.value)
    alike = place(shape, GpuFleet.of(np.ones(16)), operation_noise(0.02), draws=500, randoms=2)
    assert alike.given.p95.value == alike.best.p95.value == alike.worst.p95.value


def test_the_slowest_are_left_out_and_each_would_cost_what_it_does() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 4, 16), 1.0, 4)
    fleet = GpuFleet.of([1.0] * 8 + [1.3, 1.15] + [1.0] * 8)
    found = place(shape, fleet, operation_noise(0.02), draws=2_000, randoms=2)
    assert sorted(found.best.placement.spares.tolist()) == [8, 9]
    slowest, next_ = spare_gpus(found)
    assert (slowest.gpu, next_.gpu) == ("gpu8", "gpu9")
    assert slowest.p95 > next_.p95 > found.best.p95.value
    assert found.given.p95.value > found.best.p95.value * 1.1  # the order given has both at work


def test_evicting_the_one_slow_node_gives_the_healthy_step_back() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 4, 16), 1.0, 4)
    healthy = place(shape, GpuFleet.of(np.ones(16)), operation_noise(0.02), draws=4_000, randoms=2).given.p95.value
    one = place(
        shape, GpuFleet.of([1.3 if i == 6 else 1.0 for i in range(16)]), operation_noise(0.02), draws=4_000, randoms=2
    )
    (row,) = suggest_evictions(one, one.given)
    assert row.name == "gpu6" and (row.stage, row.replica) == (1, 2)
    assert row.p95 == pytest.approx(healthy, rel=1e-3)
    assert row.gain == row.alone == pytest.approx(1 - healthy / one.given.p95.value, abs=2e-3)
    assert row.gpu_hours == pytest.approx(row.gain * 16 * 24)


def test_two_slow_nodes_are_worth_evicting_together_only() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 4, 16), 1.0, 4)
    two = place(shape, GpuFleet.of([1.3 if i in (5, 6) else 1.0 for i in range(16)]), operation_noise(0.02), randoms=2)
    first, second = suggest_evictions(two, two.given)
    assert {first.name, second.name} == {"gpu5", "gpu6"}
    assert first.alone < 0.01 and second.alone < 0.01 and second.gain > 0.15
    assert suggest_evictions(two, two.given, most=0) == []
    alike = place(shape, GpuFleet.of(np.ones(16)), operation_noise(0.02), draws=500, randoms=2)
    assert suggest_evictions(alike, alike.given) == []


def test_a_hot_node_costs_more_the_hotter_it_is_and_most_where_the_pipeline_has_no_slack() -> None:
    shape = toy_step_model(Schedule.of("1f1b", 8, 8), 1.0, 4)
    judge = PlacementScore(ReplicaTimes(shape, operation_noise(0.02)), 4)
    warm, hot = (hot_node_cost(judge, np.ones((4, 8)), f, 1) for f in (1.2, 1.5))
    assert max(hot.costs) > max(warm.costs) > 0.08 and min(warm.costs) < 0.02
    assert int(np.argmax(hot.costs)) == 7 and int(np.argmin(hot.costs)) == 0


@pytest.mark.slow
def test_16384_gpus_can_be_placed() -> None:
    shape = step_model(read_transformer_job(JOBS / "llama3.1-405b.toml", {}))
    fleet = random_fleet(16384, 8, 0.02, np.random.default_rng(0), 0.002, 1.15)
    found = place(shape, fleet, operation_noise(0.02), draws=2_000, randoms=4)
    assert found.gap < 2e-3
    assert found.best.p95.value < found.randoms.p95 * 0.98 < found.worst.p95.value
