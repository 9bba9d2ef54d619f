"""Which figures behind a job's step were not measured on its machines, in words."""

from __future__ import annotations

from presage.configs.job import Job
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.collectives import Collectives
from presage.parallel.plan import Axis
from presage.prediction.jobs.block_cost import communicators


def provenance_notes(job: Job) -> tuple[str, ...]:
    return (*_chip(job), *_collectives(job))


def _chip(job: Job) -> list[str]:
    gpu = job.platform.gpu
    of = ClosedFormKernels.of(gpu).transferred
    return [f"no kernels of {gpu.name} were measured: how near they come to its peaks is taken from {of}"] if of else []


def _collectives(job: Job) -> list[str]:
    """Groups whose communication is modelled from link specs alone."""
    model, found = Collectives.of(job.platform), communicators(job)
    ops = {Axis.TP: _tensor(job), Axis.CP: "all_gather", Axis.EP: "all_to_all", Axis.PP: "send_recv"}
    ops[Axis.DP] = _replicas(job)
    names = [name for name, op in ops.items() if found[name].ranks > 1 and model.origin(op, found[name]) == "composed"]
    told = ", ".join(names)
    return (
        [f"{told} communication is modelled from link specs (no measurements for {job.platform.key})"] if told else []
    )


def _tensor(job: Job) -> str:
    return "all_gather" if job.parallel.sequence_parallel else "all_reduce"


def _replicas(job: Job) -> str:
    return "reduce_scatter" if job.parallel.zero else "all_reduce"
