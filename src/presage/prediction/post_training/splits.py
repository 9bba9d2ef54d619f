"""Which split of the GPUs is fastest: engine and trainer on the same GPUs, or so many for each, and the engine's tp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from presage.configs.check import problems
from presage.configs.job import Job
from presage.configs.post_training import UTILIZATION, Engine, PostTraining
from presage.errors import PresageError
from presage.prediction.post_training.step import PostTrainingResult, post_training_step

DRAWS = 8  # steps of each split
SHARES = 16  # of all GPUs, as an engine may have them
RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, eq=False)
class GpuSplit:
    """One way to spread the GPUs over trainer and engine, with its step."""

    result: PostTrainingResult

    @property
    def name(self) -> str:
        p = self.result
        where = "same GPUs" if p.rl.colocated else f"{p.job.gpus} + {p.rl.engine.gpus}"
        return f"{where}, engine tp {p.rl.engine.tp}, {policy_text(p.rl.staleness)}"

    @property
    def fits(self) -> bool:
        return self.result.fits


def policy_text(staleness: int) -> str:
    """on policy, one step off, 4 steps off."""
    return "on policy" if not staleness else "one step off" if staleness == 1 else f"{staleness} steps off"


def search_splits(job: Job, rl: PostTraining, seed: int = 0) -> list[GpuSplit]:
    """All splits of the job's GPUs that its plan allows, those that fit first, the fastest of them first."""
    found = [GpuSplit(post_training_step(j, r, DRAWS, seed)) for j, r in _candidates(job, rl)]
    if not found:
        raise PresageError(f"no split: {job.gpus} GPUs hold no replica of the trainer's plan beside an engine")
    return sorted(found, key=lambda s: (not s.fits, s.result.seconds))


def _candidates(job: Job, rl: PostTraining) -> Iterator[tuple[Job, PostTraining]]:
    total = job.gpus + (0 if rl.colocated else rl.engine.gpus)
    ranks = [n for n in RANKS if _legal(job, n, total)]
    whole = _trainer(job, total)
    if whole is not None:
        for tp in ranks:
            engine = _engine(rl, tp, total, "colocated")
            yield whole, replace(rl, engine=engine, placement="colocated", staleness=0, in_flight=False)
    unit = max(1, total // SHARES)
    for apart in range(unit, total, unit):
        trainer = _trainer(job, total - apart)
        for tp in ranks if trainer is not None else ():
            if apart % tp == 0:
                assert trainer is not None
                engine = _engine(rl, tp, apart, "disaggregated")
                for stale in sorted({0, max(1, rl.staleness)}):
                    flight = rl.in_flight and stale > 0
                    yield (
                        trainer,
                        replace(rl, engine=engine, placement="disaggregated", staleness=stale, in_flight=flight),
                    )


def _legal(job: Job, tp: int, total: int) -> bool:
    """Ranks of a replica: no more than a domain has, unless the job's own engine does so."""
    m = job.model
    keys = m.latent is not None or m.kv_heads % tp == 0 or tp % m.kv_heads == 0
    return tp <= min(total, job.platform.domain) and m.heads % tp == 0 and keys


def _trainer(job: Job, gpus: int) -> Job | None:
    """The trainer's plan on so many GPUs; None where it does not go up."""
    p = job.parallel
    if gpus % p.replica_gpus:
        return None
    shard = p.shard if p.shard and (gpus // (p.tp * p.pp)) % p.shard == 0 else 0
    plan = replace(p, shard=shard)
    made = replace(job, gpus=gpus, parallel=plan, global_batch=job.micro_batch * plan.dp(gpus))
    return None if problems(made) else made


def _engine(rl: PostTraining, tp: int, gpus: int, placement: str) -> Engine:
    used = rl.engine.gpu_memory_utilization if rl.placement == placement else UTILIZATION[placement]
    ep = tp if rl.engine.ep > 1 else 1
    return replace(rl.engine, tp=tp, ep=ep, gpus=gpus, gpu_memory_utilization=used)
