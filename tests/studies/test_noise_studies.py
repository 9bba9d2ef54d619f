"""Studies of noise: plans on the same GPUs, a slow node, a hot rack; collectives held steady one kind at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.noise.files import format_noise
from presage.noise.model import Belief, CommonNoise, NetworkRegimes, NoiseModel, WorkSpread
from presage.prediction.draws import step_model
from presage.prediction.draws.sensitivity import collectives, sensitivity
from presage.report.sensitivity_answer import sensitivity_answer
from presage.report.study_answer import lesson, plot_study, study_table
from presage.studies import StudySetup, hot_rack_study, noise_study, slow_node_study

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
QUIET = NoiseModel(common=CommonNoise(sd=1e-9))  # a noise file has to have something
CONGESTED = NetworkRegimes((1.0, 4.0), ((0.9, 0.1), (0.9, 0.1)))


@pytest.fixture(scope="module")
def fsdp() -> Job:
    """All of it over the network: 64 GPUs share each layer."""
    job = read_transformer_job(JOBS / "own_model.toml")
    return replace(job, parallel=replace(job.parallel, shard=0))


@pytest.fixture(scope="module")
def pipeline() -> Job:
    return read_transformer_job(JOBS / "hugging_face.toml")


def setup(noise: NoiseModel, folder: Path) -> StudySetup:
    (folder / "noise.toml").write_text(format_noise(Belief(noise)))
    return StudySetup(str(folder / "noise.toml"), 0, 500)


# ---- collectives apart


def test_collectives_are_told_apart(fsdp: Job) -> None:
    found = collectives(step_model(fsdp))
    assert {"all_gather", "reduce_scatter"} <= set(found)
    assert "all_to_all" not in found
    both = sum(c.seconds for c in found.values())
    assert both == pytest.approx(step_seconds(fsdp, 200.0), rel=0.02)


def step_seconds(job: Job, times: float) -> float:
    """Seconds of all transfers: what the step takes more where they are all that counts."""
    from presage.prediction.jobs.job_step import job_step
    from presage.prediction.jobs.work_pace import WorkPaces

    far = [job_step(job, None, WorkPaces(sharding=t, dp=t, send=t)).seconds for t in (times, 2 * times)]
    return (far[1] - far[0]) / times


def test_a_held_collective_takes_its_usual_time(fsdp: Job) -> None:
    shape = step_model(fsdp)
    with_one = {
        op: replace(shape, held=frozenset([op])).curves["sharding"][-1] for op in ("all_gather", "reduce_scatter")
    }
    all_held = replace(shape, held=frozenset(with_one)).curves["sharding"]
    assert abs(all_held).max() < 1e-9
    assert all(0 < late < shape.curves["sharding"][-1] for late in with_one.values())


def test_each_answer_under_its_noise(fsdp: Job) -> None:
    """GPUs that differ make GEMM first; a network with a tail makes AllGather and ReduceScatter first."""
    differ = NoiseModel(spread={"products": WorkSpread(rank=0.02)})
    found = sensitivity(step_model(fsdp), differ, 0, 1_000)
    assert (
        min(found.rows, key=lambda r: r.steady.p95.value if r.group in ("class", "collective") else 0).name
        == "products"
    )
    congested = NoiseModel(spread={"products": WorkSpread(own=0.02)}, network=CONGESTED)
    found = sensitivity(step_model(fsdp), congested, 0, 1_000)
    both = (*found.of("class"), *found.of("collective"))
    gains = {r.name: -r.steady.p95.value for r in both}
    assert min(gains["all_gather"], gains["reduce_scatter"]) > 5 * max(gains["products"], 1e-6)
    assert "AllGather" in str(sensitivity_answer(found).sections)


# ---- plans


def test_plans_without_noise_have_no_tail(fsdp: Job, tmp_path: Path) -> None:
    quiet = noise_study(fsdp, 8, setup(QUIET, tmp_path))
    assert [p.name for p in quiet.points] == ["DP", "TP 8", "PP 8", "CP 8"]
    assert all(p.excess == pytest.approx(0.0, abs=1e-6) for p in quiet.points)


def test_pipelines_mind_gpus_that_differ_less_than_sharded_replicas(fsdp: Job, tmp_path: Path) -> None:
    found = noise_study(fsdp, 8, setup(NoiseModel(spread={"products": WorkSpread(rank=0.02)}), tmp_path))
    by = {p.name: p for p in found.points}
    assert by["PP 8"].excess < by["DP"].excess
    assert by["DP"].more["gpus"] == pytest.approx(by["DP"].excess, rel=0.1)
    assert by["DP"].more["network"] == pytest.approx(0.0, abs=1e-9)
    assert lesson(found).startswith("DP minds noise most")
    plot_study(found, tmp_path / "noise.svg")
    with pytest.raises(PresageError, match="2 ranks"):
        noise_study(fsdp, 1)


def test_experts_get_a_row_and_impossible_plans_a_reason(pipeline: Job, tmp_path: Path) -> None:
    found = noise_study(pipeline, 8, setup(QUIET, tmp_path))
    names = {p.name for p in found.points} | {s.name for s in found.skipped}
    assert {"DP", "TP 8", "PP 8", "CP 8"} <= names
    assert ("EP 8" in names) == (pipeline.model.experts is not None)


# ---- nodes and racks


def test_a_slow_node_costs_more_the_slower_it_is(pipeline: Job, tmp_path: Path) -> None:
    found = slow_node_study(pipeline, (1.05, 1.2, 1.5), setup(QUIET, tmp_path))
    costs = [p.more["most"] for p in found.points]
    assert costs[0] == 0
    assert all(a < b for a, b in pairwise(costs))
    assert all(p.more["least"] <= p.more["most"] <= p.more["factor"] - 1 + 1e-6 for p in found.points)
    assert len(study_table(found).rows) == 4
    plot_study(found, tmp_path / "slow.svg")


def test_a_hot_rack_by_its_layout_and_its_uplink(pipeline: Job, tmp_path: Path) -> None:
    found = hot_rack_study(pipeline, 1.2, 16, 2.0, setup(QUIET, tmp_path))
    cost = {p.name: p.more["cost"] for p in found.points}
    assert cost["no hot rack"] == 0
    assert all(0 < c <= 0.2 + 1e-6 for name, c in cost.items() if name not in ("no hot rack", "uplink x2 alone"))
    assert cost["uplink x2 alone"] > 0
    plot_study(found, tmp_path / "rack.svg")
    with pytest.raises(PresageError, match="GPUs"):
        hot_rack_study(pipeline, 1.2, 10**6)
    with pytest.raises(PresageError, match="1 to 100"):
        slow_node_study(pipeline, (0.5,))
