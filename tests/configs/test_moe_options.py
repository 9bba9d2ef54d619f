"""Options of mixtures of experts in other software's configs: taken over, or refused with what to use instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.errors import InputError
from presage.prediction.jobs.chunk_time import paired_share
from presage.prediction.jobs.job_step import job_step

SCRIPT = (
    "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 "
    "--swiglu --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 512 "
    "--vocab-size 65536 "
    "--num-experts 64 --moe-router-topk 3 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048 "
    "--expert-model-parallel-size 32 --bf16 --use-distributed-optimizer --moe-token-dispatcher-type alltoall "
)
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 16
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_microbatch_size = 1
pipeline_parallel_schedule = "{schedule}"
{more}
"""


def megatron(folder: Path, *flags: str) -> Job:
    (folder / "train.sh").write_text(SCRIPT + " ".join(flags) + "\n")
    job = folder / "job.toml"
    job.write_text('arguments = "train.sh"\n[parallel]\ngpus = 64\n[cluster]\nplatform = "dgx-h100"\n')
    return read_transformer_job(job)


def titan(folder: Path, schedule: str, more: str = "") -> Job:
    (folder / "titan.toml").write_text(TITAN.format(schedule=schedule, more=more))
    job = folder / "job.toml"
    job.write_text('titan = "titan.toml"\n[parallel]\ngpus = 32\n[cluster]\nplatform = "dgx-h100"\n')
    return read_transformer_job(job)


def test_each_overlap_hides_more_of_the_exchanges(tmp_path: Path) -> None:
    bare = job_step(megatron(tmp_path)).parts["ep"]
    shared = job_step(megatron(tmp_path, "--moe-shared-expert-overlap")).parts["ep"]
    beside = job_step(megatron(tmp_path, "--overlap-moe-expert-parallel-comm")).parts["ep"]
    late = job_step(megatron(tmp_path, "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")).parts["ep"]
    assert late < beside < shared < bare


def test_recomputed_experts_are_read(tmp_path: Path) -> None:
    assert megatron(tmp_path, "--moe-layer-recompute").recompute.modules == ("moe",)


def test_what_is_not_modelled_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--moe-extended-tp: is not modelled: use --expert-tensor-parallel-size"):
        megatron(tmp_path, "--moe-extended-tp")


@pytest.mark.parametrize(("theirs", "ours"), [("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipev")])
def test_schedules_of_torchtitan(tmp_path: Path, theirs: str, ours: str) -> None:
    p = titan(tmp_path, theirs).parallel
    assert (p.schedule, p.virtual) == (ours, 2)


def test_torchtitan_without_its_overlap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use ZBVZeroBubble"):
        titan(tmp_path, "DualPipeV", "pipeline_parallel_expert_parallel_overlap = false")
    with pytest.raises(InputError, match="choose from standard, deepep, hybridep"):
        titan(tmp_path, "1F1B", 'expert_parallel_comm_backend = "mori"')


def test_first_forwards_have_no_backward_beside_them(tmp_path: Path) -> None:
    """Of 16 microbatches on one stage all but one; in a pipeline of 4 of 2.5 microbatches each less; in gpipe none."""
    job = megatron(tmp_path)
    assert paired_share(replace(job, global_batch=2048)) == 1 - 1 / 16
    piped = replace(job, global_batch=512, parallel=replace(job.parallel, pp=4, ep=16))
    assert paired_share(piped) == 1 - 2.5 / 16
    assert paired_share(replace(piped, parallel=replace(piped.parallel, schedule="gpipe"))) == 0.0
