"""Every equation between a job's degrees is checked, and said with its numbers."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.configs.check import check, job_notes, problems
from presage.configs.job import Job, Recompute
from presage.configs.models import preset
from presage.errors import PresageError
from presage.hardware import platform
from presage.parallel.plan import ParallelPlan
from presage_validation.run_jobs import job_of_run

DENSE = Job(
    preset("llama3-70b"), platform("dgx-h100"), 256, 8192, 1, 512, ParallelPlan(tp=4, sequence_parallel=True, pp=4)
)
SPARSE = Job(preset("mixtral-8x7b"), platform("dgx-h100"), 64, 4096, 1, 256, ParallelPlan(tp=2, ep=8, zero=1))


def job(base: Job = DENSE, **changes: Any) -> Job:
    """A job with fields of it, of its degrees or of its model changed."""
    p = {k: v for k, v in changes.items() if k in ParallelPlan.__slots__}
    m = {k: v for k, v in changes.items() if hasattr(base.model, k) and k != "name"}
    own = {k: v for k, v in changes.items() if hasattr(base, k)}
    return replace(base, **own, parallel=replace(base.parallel, **p), model=replace(base.model, **m))


def test_jobs_that_can_be_run_have_no_problems() -> None:
    assert problems(DENSE) == [] and problems(SPARSE) == []
    check(DENSE)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (job(gpus=100, tp=8), "gpus = tp x pp x cp x dp: 100 is no multiple of 8 x 4 x 1 = 32; try 96 or 128"),
        (job(gpus=8), "gpus = tp x pp x cp x dp: 8 is no multiple of 4 x 4 x 1 = 16; try 16"),
        (
            job(global_batch=500),
            "global_batch = micro_batch x dp x microbatches: 500 is no multiple of 1 x 16 = 16; try 496 or 512",
        ),
        (
            job(gpus=2**25, global_batch=2**25),
            "gpus <= those of the platform: 33554432 is more than the 1048576 of dgx-h100",
        ),
        (job(heads=60, kv_heads=6, tp=8), "heads = tp x n: 60 is no multiple of 8; tp may be 6 or 10"),
        (
            job(kv_heads=6, heads=96, tp=4),
            "kv_heads = tp x n, or tp = kv_heads x copies: 6 and 4 do not divide each other",
        ),
        (job(kv_heads=12), "heads = kv_heads x n: 64 is no multiple of 12"),
        (job(ffn=28670), "ffn = tp x n: 28670 is no multiple of 4"),
        (job(tp=1), "sequence_parallel needs tp > 1: tp is 1"),
        (job(pp=1, virtual=2), "virtual > 1 needs pp > 1: virtual is 2, pp is 1"),
        (job(schedule="interleaved"), "schedule interleaved needs virtual > 1: virtual is 1"),
        (job(schedule="2f2b"), "no pipeline schedule '2f2b': choose from 1f1b, interleaved, gpipe, zero-bubble"),
        (job(virtual=2, global_batch=480), "microbatches = pp x n (interleaved): 30 is no multiple of 4; try 28 or 32"),
        (job(pp=4, virtual=32), "pp x virtual <= layers: 4 x 32 = 128 is more than 80"),
        (job(layers_as=(20, 20, 40)), "layers_as has pp x virtual entries: 3 is not 4 x 1 = 4"),
        (job(layers_as=(20, 20, 20, 19)), "layers = sum of layers_as: 80 is not 20 + 20 + 20 + 19 = 79"),
        (job(cp=2, sequence=8190), "sequence = 2 x cp x n: 8190 is no multiple of 2 x 2 = 4; try 8188 or 8192"),
        (
            job(sequence=8190),
            "sequence = tp x cp x n (sequence parallel): 8190 is no multiple of 4 x 1 = 4; try 8188 or 8192",
        ),
        (
            job(positions="learned", max_positions=2048),
            "sequence <= max_positions: 8192 is more than 2048 learned positions",
        ),
        (job(ep=2), "ep > 1 needs a model with experts: ep is 2"),
        (job(SPARSE, ep=3), "experts = ep x n: 8 is no multiple of 3; ep may be 2 or 4"),
        (job(SPARSE, expert_tp=3), "width of an expert = expert_tp x n: 14336 is no multiple of 3"),
        (
            job(SPARSE, gpus=16, ep=8, expert_tp=4),
            "dp x cp x tp = ep x expert_tp x n: 8 x 1 x 2 = 16 is no multiple of 8 x 4 = 32",
        ),
        (job(zero=4), "zero is 0, 1, 2 or 3: it is 4"),
        (job(fsdp=True), "fsdp shards gradients and parameters, so zero is 2 or 3: it is 0"),
        (job(zero=1, shard=3), "dp x cp = shard x n: 16 x 1 = 16 is no multiple of 3"),
        (job(precision="int8"), "precision is 'int8': choose from fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4"),
        (job(precision="mxfp8"), "NVIDIA H100 SXM 80 GB has no mxfp8 (Blackwell or CDNA 4 has)"),
        (job(platform=platform("dgx-a100"), precision="fp8"), "has no fp8: it has fp32, tf32, fp16, bf16"),
        (job(platform=platform("dgx-1-v100")), "has no bf16: it has fp32, fp16"),
        (job(recompute=Recompute("some")), "recompute is 'some': choose from none, selective, full"),
        (job(recompute=Recompute("selective", ("mpl",))), "recompute knows no module 'mpl'"),
        (job(optimizer="adm"), "optimizer is 'adm'"),
        (job(tp=0), "tp >= 1: it is 0"),
        (job(layers=0), "layers >= 1: it is 0"),
    ],
)
def test_an_equation_that_does_not_hold_is_said(changed: Job, says: str) -> None:
    found = problems(changed)
    assert any(p.startswith(says) or says in p for p in found), found
    with pytest.raises(PresageError) as e:
        check(changed)
    assert says in str(e.value)


def test_the_first_problem_comes_with_the_others() -> None:
    with pytest.raises(PresageError, match=r"^gpus = .*; try 96 or 112 \(and heads = .*; optimizer is 'x'.*\)$"):
        check(job(gpus=100, heads=65, kv_heads=1, optimizer="x"))


def test_what_is_odd_but_legal_is_no_problem() -> None:
    copied = job(tp=16, kv_heads=8, heads=64, pp=1, virtual=1)  # keys on two ranks each, over two nodes
    assert problems(copied) == []
    assert any("beyond the 8 GPUs" in n for n in job_notes(copied)) and any(
        "on 2 ranks" in n for n in job_notes(copied)
    )
    sharded = job(zero=3, fsdp=True, shard=8)  # with a pipeline: HSDP of FSDP2
    assert problems(sharded) == []
    both_ends = job(layers=126, heads=128, pp=16, virtual=8, ends_as_layers=True, gpus=1024, global_batch=256)
    assert problems(both_ends) == []
    chunks = job(virtual=2, schedule="1f1b")
    assert problems(chunks) == []


def test_nvfp4_needs_a_gpu_that_has_it() -> None:
    assert problems(job(platform=platform("dgx-b200"), precision="nvfp4")) == []
    assert "nvfp4" in problems(job(precision="nvfp4"))[0]


DEGREE = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 16])


@given(st.fixed_dictionaries({}, optional=dict.fromkeys((
    "tp", "pp", "virtual", "cp", "ep", "expert_tp", "zero", "shard", "micro_batch", "heads", "kv_heads", "layers",
), DEGREE)), st.sampled_from([0, 1, 7, 24, 64, 96, 480]), st.sampled_from([0, 1, 60, 256]), st.booleans())  # fmt: skip
def test_whatever_it_is_given_it_answers(changes: dict[str, int], gpus: int, batch: int, ends: bool) -> None:
    found = job(SPARSE, **changes, gpus=gpus, global_batch=batch, ends_as_layers=ends)
    if problems(found):
        return
    p = found.parallel
    assert p.tp * p.pp * p.cp * found.dp == gpus and found.micro_batch * found.dp * found.microbatches == batch
    split = found.stage_layers()
    assert sum(map(sum, split)) == found.model.layers and min(map(min, split)) >= 0
    assert found.expert_dp * p.ep * p.expert_tp == found.dp * p.cp * p.tp
    job_notes(found)


def test_it_is_fast_enough_for_a_search() -> None:
    def once() -> float:
        start = time.process_time()
        for _ in range(500):
            problems(DENSE)
        return (time.process_time() - start) / 500

    assert min(once() for _ in range(10)) < 20e-6


def test_runs_that_were_measured_have_no_problems(shared: Path) -> None:
    wrong, count = [], 0
    with (shared / "runs" / "public_runs.csv").open(newline="") as f:
        for row in csv.DictReader(f):
            try:
                found = job_of_run(row)
            except PresageError:
                continue
            count += 1
            wrong += [(row["source_key"], row["model"], p) for p in problems(found)]
    assert count > 1200 and wrong == []
