"""Paces: how many times as long as usual each class of a job's work takes. What is slower goes through the same laws,
so transfers that hide behind compute cost nothing until they are long enough to show."""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.parallel.plan import LAYER_AXES, Axis


class WorkPaces(NamedTuple):
    """By class of work, in the words of a step's parts; `send`: activations between stages."""

    products: float = 1.0
    attention: float = 1.0
    streams: float = 1.0
    host: float = 1.0
    optimizer: float = 1.0
    tp: float = 1.0
    cp: float = 1.0
    ep: float = 1.0
    sharding: float = 1.0
    send: float = 1.0
    dp: float = 1.0
    held: frozenset[str] = frozenset()  # collectives (all_gather, ...) that take their usual time whatever their class


EVEN = WorkPaces()
PACED = tuple(name for name in WorkPaces._fields if name != "held")
ONE_CLASS = {Axis.PP: "send", Axis.REPLICAS: "dp"} | {axis: axis.value for axis in (*LAYER_AXES, Axis.DP)}


def class_of(job: Job, over: Axis) -> str:
    """The class of transfers over a group: those of shards go with each layer, or once a step between replicas."""
    by_layer = job.parallel.zero >= 2 or job.parallel.fsdp
    return ONE_CLASS.get(over) or ("sharding" if by_layer else "dp")


def pace_of(paces: WorkPaces, job: Job, over: Axis, op: str) -> float:
    """Pace of a job's collectives of a kind over such a group."""
    if op in paces.held:
        return 1.0
    pace: float = getattr(paces, class_of(job, over))
    return pace
