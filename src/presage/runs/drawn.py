"""Step times of a run from draws of the job's step: the slowest of all GPUs, what they share, and what is known of it.

Stalls are left to the run, which counts them over its days. So is a network that is slow for a while, where the run
has slow episodes of its own, and a slow GPU where less than one is expected in the job: in a run of weeks it is found
and replaced, which is a slow episode too. GPUs of a fleet that nobody screened stay slow.
"""

from __future__ import annotations

from dataclasses import replace

from presage.noise.model import NetworkRegimes, NoiseModel, SlowGpus, Stalls
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import without_fitted_stragglers
from presage.prediction.draws.draw_request import draw
from presage.prediction.draws.step_model import step_model
from presage.prediction.jobs.job_prediction import JobResult
from presage.runs.steps import MODEL_SD, StepTimes

__all__ = ["step_times"]

COUNT = 4_000  # steps that are drawn


def step_times(
    job: JobResult, noise: str | None = None, episodes: bool = True, seed: int = 0, pool: Pool = THREADS_2
) -> tuple[StepTimes, str]:
    """And where the noise is from: a file, or what is assumed of such GPUs. `episodes`: the run has slow ones."""
    belief, source = belief_of(job.job, job.seconds, noise)
    lasting = _lasting(belief.noise, job.job.gpus, episodes)
    found = draw(without_fitted_stragglers(step_model(job.job, job.job_step), lasting), lasting, seed, COUNT, pool=pool)
    c = belief.noise.common
    times = StepTimes(
        seconds=float(found.seconds.mean()),
        run_sd=found.run_sd,
        drift=c.drift,
        drift_sd=c.drift_sd,
        sd=found.step_sd,
        correlation=max(0.0, c.correlation),
        stalls=belief.noise.stalls,
        model_sd=MODEL_SD,
    )
    return times, source


def _lasting(noise: NoiseModel, gpus: int, episodes: bool) -> NoiseModel:
    """What is there in every hour of a run."""
    slow = noise.slow if noise.slow.share * gpus >= 1 else SlowGpus()
    return replace(noise, stalls=Stalls(), slow=slow, network=NetworkRegimes() if episodes else noise.network)
