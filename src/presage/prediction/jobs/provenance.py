"""Which figures behind a job's step were not measured on its machines, in words."""

from __future__ import annotations

from presage.configs.job import Job
from presage.costs.closed_form import Chip
from presage.costs.collectives import Collectives
from presage.prediction.jobs.communicators import groups

__all__ = ["provenance_notes"]


def provenance_notes(job: Job) -> tuple[str, ...]:
    return (*_chip(job), *_collectives(job))


def _chip(job: Job) -> list[str]:
    gpu = job.platform.gpu
    of = Chip.of(gpu).transferred
    return [f"no kernels of {gpu.name} were measured: how near they come to its peaks is taken from {of}"] if of else []


def _collectives(job: Job) -> list[str]:
    """Groups whose transfers follow from facts of the links alone."""
    model, found = Collectives.of(job.platform), groups(job)
    ops = {"tp": _tensor(job), "cp": "all_gather", "ep": "all_to_all", "neighbour": "send_recv", "dp": _replicas(job)}
    of = {name: getattr(found, name) for name in ops}
    names = [name for name, op in ops.items() if of[name].ranks > 1 and model.origin(op, of[name]) == "composed"]
    told = ", ".join("pp" if name == "neighbour" else name for name in names)
    return (
        [f"transfers of {told} follow from facts of the links: none were measured on {job.platform.key}"]
        if told
        else []
    )


def _tensor(job: Job) -> str:
    return "all_gather" if job.parallel.sequence_parallel else "all_reduce"


def _replicas(job: Job) -> str:
    return "reduce_scatter" if job.parallel.zero else "all_reduce"
