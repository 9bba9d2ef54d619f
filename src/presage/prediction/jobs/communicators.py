"""Which ranks talk to each other: a job's communicators. Tensor-parallel ranks are neighbours, stages are far apart."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from presage.configs.job import Job
from presage.costs.collectives.group import Group

__all__ = ["Groups", "groups"]


class Groups(NamedTuple):
    """By what their ranks share or split."""

    tp: Group
    cp: Group
    ep: Group
    dp: Group  # all that hold the same weights: data- and context-parallel ranks
    shard: Group  # of these, the ones that share a copy of what is sharded
    replicas: Group  # one of each such copy
    expert_dp: Group
    neighbour: Group  # two stages


def groups(job: Job) -> Groups:
    """Of a job on its platform."""
    p = job.parallel
    return _groups(
        job.platform.domain, job.gpus, p.tp, p.cp, p.pp, p.ep, p.expert_tp, job.dp, job.sharding, job.expert_dp
    )


@lru_cache(4096)
def _groups(
    domain: int, gpus: int, tp: int, cp: int, pp: int, ep: int, expert_tp: int, dp: int, shard: int, expert_dp: int
) -> Groups:
    holders = dp * cp
    return Groups(
        tp=_strided(tp, 1, domain),
        cp=_strided(cp, tp, domain),
        ep=_strided(ep, expert_tp, domain),
        dp=_strided(holders, tp, domain),
        shard=_strided(min(shard, holders), tp, domain),
        replicas=_strided(max(1, holders // shard), tp * shard, domain),
        expert_dp=_strided(max(1, expert_dp), expert_tp * ep, domain),
        neighbour=_strided(min(pp, 2), gpus // pp, domain),
    )


def _strided(ranks: int, stride: int, domain: int) -> Group:
    """So many ranks, each `stride` after the last."""
    return Group(ranks, max(1, min(ranks, domain // stride)))
