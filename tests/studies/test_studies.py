"""Jobs on machines that are not built yet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.errors import PresageError
from presage.hardware import cluster, gpu, platform
from presage.noise.distribution import Fixed
from presage.noise.files import format_noise
from presage.noise.model import Belief, CommonNoise, NoiseModel, SlowGpus, WorkSpread
from presage.report.study_answer import plot_study, study_answer, study_table
from presage.runs.checkpoint import best_interval, exact_efficiency
from presage.runs.run import checkpoints_of
from presage.runs.sets import DEFAULT, reliability
from presage.studies import (
    Study,
    StudySetup,
    compute_study,
    domain_study,
    power_study,
    scale_study,
)
from presage.studies.studies import goodput, scale_job, with_domain, with_faster_compute, with_wider_spread
from presage.studies.study_point import predict_point

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
NOISE = NoiseModel(
    spread={"products": WorkSpread(rank=0.02), "attention": WorkSpread(rank=0.02), "ep": WorkSpread(step=0.1)},
    slow=SlowGpus(0.0001, Fixed(1.2)),
    common=CommonNoise(sd=0.003),
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> StudySetup:
    path = tmp_path_factory.mktemp("noise") / "noise.toml"
    path.write_text(format_noise(Belief(NOISE)))
    return StudySetup(str(path), 0, 500)


@pytest.fixture(scope="module")
def job() -> Job:
    return read_transformer_job(JOBS / "hugging_face.toml")


def told(s: Study) -> str:
    """What would be printed; also: all numbers are fit for JSON."""
    json.dumps(s.to_json(), allow_nan=False)
    return "\n".join([study_answer(s).headline, *study_answer(s).notes])


# ---- scale


def test_more_replicas_have_more_stragglers_and_more_failures(job: Job, setup: StudySetup) -> None:
    s = scale_study(job, (128, 4_096, 65_536), setup)
    assert [p.job.microbatches for p in s.points] == [job.microbatches] * 3
    p50, good = [p.p50.value for p in s.points], [p.more["goodput"] for p in s.points]
    assert p50 == sorted(p50) and p50[-1] > 1.01 * p50[0]
    assert good == sorted(good, reverse=True) and good[0] > 0.99 > 0.9 > good[-1]
    assert s.points[0].more["useful_rate"] == pytest.approx(s.points[0].rate * good[0])
    assert "useful throughput per GPU falls to" in told(s)


def test_a_fixed_batch_ends_somewhere(job: Job, setup: StudySetup) -> None:
    s = scale_study(job, (256, 8_192), setup, strong=True)
    assert s.points[0].job.global_batch == job.global_batch
    assert [x.name for x in s.skipped] == ["8,192"] and "skipped 8,192" in told(s)


def test_goodput_is_the_exact_formula_at_its_best(job: Job) -> None:
    kind = reliability(DEFAULT)
    big = scale_job(job, 65_536)
    outage = kind.at(big.gpus).outage(checkpoints_of(big, kind).save)
    assert goodput(big, 5.0) == pytest.approx(exact_efficiency(outage, best_interval(outage)), abs=2e-3)


# ---- compute


def test_faster_gpus_leave_links_and_memory_alone() -> None:
    one = gpu("h100_sxm")
    two = with_faster_compute(one, 2.0)
    assert two.peak["bf16"] == 2 * one.peak["bf16"] and two.power_limit == 2 * one.power_limit
    assert (two.link, two.pcie, two.memory_bandwidth) == (one.link, one.pcie, one.memory_bandwidth)
    assert with_faster_compute(one, 2.0, memory=True).memory_bandwidth == 2 * one.memory_bandwidth
    assert with_faster_compute(one, 1.0) == one


def test_twice_the_compute_is_less_than_twice_the_speed(job: Job, setup: StudySetup) -> None:
    s = compute_study(job, (1, 2, 4), setup)
    speed = [p.more["speedup"] for p in s.points]
    assert speed[0] == 1 and 1.2 < speed[1] < 2 and speed[1] < speed[2] < 4
    shown = [p.prediction.exposed / p.prediction.seconds for p in s.points]
    assert shown == sorted(shown) and shown[-1] > 1.5 * shown[0]
    assert "x as fast" in told(s)
    wide = compute_study(job, (4,), setup, memory=True)
    assert wide.points[0].mean < s.points[-1].mean
    with pytest.raises(PresageError, match="above 0"):
        compute_study(job, (0,), setup)


# ---- domain


def test_a_larger_domain_changes_nothing_else() -> None:
    base = platform("dgx-h100")
    assert with_domain(base, 8) is base
    large = with_domain(base, 72)
    assert large.domain == 72 and large.links[0].bandwidth == base.links[0].bandwidth
    assert large.links[-1].bandwidth == base.links[-1].bandwidth and large.links[-1].ranks % 72 == 0
    with pytest.raises(PresageError, match="no links of their own"):
        with_domain(cluster("l4", 8), 72)
    with pytest.raises(PresageError, match="2 GPUs or more"):
        with_domain(base, 1)


def test_experts_gain_from_a_large_domain(job: Job, setup: StudySetup) -> None:
    s = domain_study(job, (4, 72), setup)
    assert s.points[1].more["speedup"] > 1.02
    assert s.points[1].prediction.breakdown["ep"] < s.points[0].prediction.breakdown["ep"]
    assert s.points[1].spread < s.points[0].spread  # the noise of `ep` has less to act on
    assert "ep8" in s.points[0].note and "NVL72 is" in told(s)


def test_the_best_plan_is_no_slower_than_the_jobs_own(setup: StudySetup) -> None:
    big = read_transformer_job(JOBS / "own_model.toml")
    small = replace(big, gpus=8, global_batch=8, parallel=replace(big.parallel, shard=0))
    s = domain_study(small, (8,), setup, best=True)
    assert s.points[1].prediction.seconds <= s.points[0].prediction.seconds * (1 + 1e-9)


# ---- power


def test_less_power_is_slower_and_a_wider_spread_costs_more(job: Job, setup: StudySetup) -> None:
    s = power_study(job, (1.0, 0.6), setup, 2.0, placing=False)
    usual, wide, low, both = s.points
    assert usual.p95.value == predict_point("", job, setup).p95.value
    assert wide.p95.value > 1.01 * usual.p95.value and wide.quiet == usual.quiet
    assert low.more["clock"] < usual.more["clock"] and low.mean > usual.mean
    assert both.mean > low.mean and both.stragglers > 1.5 * low.stragglers
    assert "of the power" in told(s)
    with pytest.raises(PresageError, match="shares of the power limit"):
        power_study(job, (1.2,), setup)


def test_a_wider_spread_is_that_of_gpus_alone() -> None:
    more = with_wider_spread(NOISE, 2.0)
    assert more.of("products").rank == 0.04 and more.slow.share == 0.0002
    assert more.of("ep") == NOISE.of("ep") and more.common == NOISE.common
    assert with_wider_spread(NOISE, 1.0).numbers() == NOISE.numbers()


def test_placing_gpus_by_their_speeds_gains_something(job: Job, setup: StudySetup) -> None:
    s = power_study(job, (0.8,), setup)
    gains = [p.more.get("placing") for p in s.points]
    assert all(g is not None and 0 < g < 0.2 for g in gains)
    assert "placing GPUs by speed takes" in told(s)


# ---- plots


def test_every_study_has_a_plot(job: Job, setup: StudySetup, tmp_path: Path) -> None:
    setup = replace(setup, draws=20)
    studies = [
        scale_study(job, (128, 256), setup),
        compute_study(job, (1, 2), setup),
        power_study(job, (1.0, 0.8), setup, placing=False),
    ]
    for s in studies:
        plot_study(s, tmp_path / f"{s.kind}.svg")
        assert (tmp_path / f"{s.kind}.svg").stat().st_size > 5_000
        assert len(study_table(s).rows) == len(s.points)
