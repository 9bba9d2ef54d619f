"""Layers with experts: how tokens reach them, who is busiest, what the host has to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from presage.configs.check import problems
from presage.configs.job import Job, Recompute
from presage.configs.job_file import job_from_sections
from presage.configs.models import preset, transformer_from_fields
from presage.configs.transformer import Experts
from presage.costs.collectives import Collectives
from presage.costs.collectives.group import RankGroup
from presage.costs.exchange import TokenExchange, fused_seconds, nccl_seconds, reached
from presage.errors import InputError, PresageError
from presage.hardware import platform
from presage.parallel.dispatchers import dispatcher, dispatcher_name, dispatchers
from presage.parallel.plan import ParallelPlan
from presage.prediction.jobs.efficiency import efficiency_without
from presage.prediction.jobs.job_step import job_step
from presage_validation.public_table import read_table, run_seconds
from presage_validation.run_jobs import COLUMNS, job_of_run

SPARSE = Job(
    preset("qwen3-30b-a3b"), platform("p5"), 64, 4096, 1, 256,
    ParallelPlan(tp=8, sequence_parallel=True, pp=2, ep=32, zero=1),
)  # fmt: skip


def sparse(base: Job = SPARSE, experts: dict[str, Any] | None = None, **plan: Any) -> Job:
    e = replace(base.model.experts or Experts(1, 1, 1), **(experts or {}))
    return replace(base, model=replace(base.model, experts=e), parallel=replace(base.parallel, **plan))


def seconds(job: Job) -> float:
    return float(job_step(job).seconds)


def test_names_of_dispatchers() -> None:
    assert {"alltoall", "allgather", "deepep", "hybridep"} <= set(dispatchers())
    assert dispatcher_name("flex") == "deepep" and dispatcher("flex").fused
    with pytest.raises(PresageError, match=r"no token dispatcher 'deepp': choose from alltoall, .*did you mean deepep"):
        dispatcher_name("deepp")
    assert all(d.source and d.date for d in dispatchers().values())
    assert all(d.networks["any"].source for d in dispatchers().values() if d.fused)


def test_a_job_file_names_its_dispatcher() -> None:
    table = {
        "model": {"preset": "qwen3-30b-a3b"}, "training": {"sequence": 4096}, "cluster": {"platform": "p5"},
        "parallel": {"gpus": 16, "ep": 16, "dispatcher": "flex"},
    }  # fmt: skip
    job = job_from_sections(table)[0]
    assert job.parallel.dispatcher == job.dispatcher == "deepep"
    assert replace(job, parallel=replace(job.parallel, dispatcher="")).dispatcher == "alltoall"


def test_places_that_have_an_expert_of_a_token() -> None:
    assert reached(1, 8) == 1 and reached(8, 1) == pytest.approx(1)
    assert reached(4, 8) == pytest.approx(4 * (1 - 0.75**8))
    assert reached(8, 8, limit=4) <= 4 < reached(8, 8)


@pytest.mark.parametrize("name", ["deepep", "uccl-ep", "hybridep"])
@pytest.mark.parametrize("where", ["p5", "dgx-h100", "gb200-nvl72"])
def test_exchanges_take_longer_with_more_of_everything(name: str, where: str) -> None:
    links, d = Collectives.of(platform(where)), dispatcher(name)
    ranks = links.platform.domain * 2

    def took(tokens: float = 2048, chosen: int = 8, width: float = 4096, n: int = ranks, limit: int = 0) -> float:
        group = RankGroup(n, min(n, links.platform.domain))
        return fused_seconds(d, TokenExchange(tokens, chosen, width, limit), group, links)

    assert took(1024) < took() < took(8192) and took(chosen=2) < took() <= took(width=16384)
    assert took(n=ranks) <= took(n=2 * ranks) and took(n=8 * ranks, limit=2) <= took(n=8 * ranks)
    assert took(1) < 1e-3


@pytest.mark.parametrize(("where", "width"), [("dgx-h100", 8192.0), ("p5", 14336.0)])
def test_a_fused_dispatcher_is_behind_with_few_tokens_and_ahead_with_many(where: str, width: float) -> None:
    """Over InfiniBand, and with wide tokens between two nodes over EFA too."""
    links, group, d = Collectives.of(platform(where)), RankGroup(16, 8), dispatcher("deepep")

    def ahead(tokens: int) -> bool:
        fused = fused_seconds(d, TokenExchange(tokens, 8, width), group, links)
        return fused < nccl_seconds("all_to_all", tokens * 8 * width, group, RankGroup(1, 1), links)

    assert not ahead(64) and ahead(16384)


def test_experts_that_are_cut_gather_their_tokens() -> None:
    links, one = Collectives.of(platform("dgx-h100")), RankGroup(1, 1)
    whole = nccl_seconds("all_to_all", 1e7, RankGroup(8, 8), one, links)
    assert nccl_seconds("all_to_all", 1e7, RankGroup(8, 8), RankGroup(4, 4), links) > whole
    assert nccl_seconds("all_to_all", 1e7, one, RankGroup(4, 4), links) > 0


def test_loads_say_who_is_busiest() -> None:
    e = Experts(8, 2, 128, loads=(4, 1, 1, 1, 1, 1, 1, 2))
    assert e.busiest(8) == pytest.approx(4 * 8 / 12) and e.busiest(4) == pytest.approx(5 / 12 * 4)
    assert e.busiest(1) == pytest.approx(1) and Experts(8, 2, 128, imbalance=1.3).busiest(8) == 1.3
    cut = replace(e, capacity=1.0)
    assert cut.busiest(8) == 1.0 and cut.dropped == pytest.approx((4 - 1.5 + 2 - 1.5) / 12)
    assert e.dropped == 0
    skewed = seconds(sparse(experts={"loads": tuple(float(i % 8 == 0) + 0.5 for i in range(128))}))
    assert skewed >= seconds(SPARSE)


def test_loads_from_a_file_and_by_a_law(tmp_path: Path) -> None:
    (tmp_path / "counts.txt").write_text("5, 1\n1 1\n")
    sizes = {"hidden": 64, "layers": 1, "heads": 2, "vocab": 10}
    job = tmp_path / "job.toml"

    def loads(given: Any, experts: int = 4) -> tuple[float, ...]:
        table = {**sizes, "experts": {"experts": experts, "top_k": 1, "loads": given}}
        e = transformer_from_fields(table, job).experts
        assert e is not None
        return e.loads

    assert loads("counts.txt") == loads([5, 1, 1, 1]) == (5, 1, 1, 1)
    assert sorted(loads("zipf 1", 8), reverse=True) == pytest.approx([1 / k for k in range(1, 9)])
    for wrong in ([1, 2], "zipf x", [1, 1, 1, -1]):
        with pytest.raises(InputError, match="loads"):
            loads(wrong)


def test_what_a_dispatcher_cannot_do_is_refused() -> None:
    padded = sparse(experts={"capacity": 1.25}, dispatcher="deepep")
    assert problems(padded) == ["deepep pads and drops no tokens: with a capacity use dispatcher alltoall or allgather"]
    assert "group_top_k needs groups" in problems(sparse(experts={"group_top_k": 2}))[0]
    assert "needs a model with experts" in problems(replace(SPARSE, model=preset("llama3-8b")))[0]
    assert "choose from alltoall" in problems(sparse(dispatcher="nccl"))[0]
    assert "needs virtual = 2" in problems(sparse(schedule="dualpipe"))[0]
    said = problems(sparse(schedule="V-Half"))[0]
    assert "is not modelled" in said and "zb-v" in said


def test_small_microbatches_wait_for_the_host() -> None:
    """Four times as many tokens a microbatch take less than twice as long; graphs of parts, and of all, are faster."""
    large = replace(SPARSE, micro_batch=4)
    assert job_step(SPARSE).parts["host"] > 0.4 * seconds(SPARSE) and seconds(large) < 0.5 * seconds(SPARSE)
    parts = replace(SPARSE, framework=replace(SPARSE.framework, graphs=("attn", "moe_router", "moe_preprocess")))
    whole = replace(SPARSE, framework=replace(SPARSE.framework, host="graph"))
    assert seconds(whole) < seconds(parts) < seconds(SPARSE)


def test_overlap_hides_exchanges_and_costs_the_host() -> None:
    far = replace(sparse(), micro_batch=16, global_batch=1024, recompute=Recompute())
    beside = replace(far, overlap=replace(far.overlap, experts=True))
    assert seconds(beside) < seconds(far)
    near = replace(beside, micro_batch=1), replace(far, micro_batch=1)
    assert job_step(near[0]).parts["host"] > 0 < job_step(near[1]).parts["host"]


def test_steps_by_dispatcher_on_a_cluster_with_efa(shared: Path) -> None:
    """17 steps that had no part in the factors used here: every comparison of dispatchers has the measured sign."""
    path = shared / "runs/aws_moe/aws_moe_runs.csv"
    if not path.is_file():
        pytest.skip("no aws_moe_runs.csv")
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    errors = []
    for _, row in read_table(path, COLUMNS):
        predicted = float(job_step(job_of_run(row), efficiency_without("aws_moe_ep")).seconds)
        errors.append(abs(predicted / run_seconds(row) - 1))
        key = row["ep"], row["micro_batch"], row["a2a_overlap"]
        found.setdefault(key, []).append((predicted, run_seconds(row)))
    assert sum(errors) / len(errors) < 0.20
    pairs = [(a, b) for some in found.values() for i, a in enumerate(some) for b in some[i + 1 :]]
    assert len(pairs) == 16 and all((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
