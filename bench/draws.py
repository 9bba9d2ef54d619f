"""How fast step times of a 65,536-GPU job are drawn, beside drawing every replica of every step.

    python bench/draws.py

Llama 3.1 405B, 16 stages, plain and with 8 chunks each; every source of noise on. Brute force runs some steps of a few
runs, each of its replicas through the engine, and is told per step. Exits 1 if the two disagree.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from presage.engine import finish_times
from presage.noise.model import CLASSES, NoiseModel
from presage.noise.priors import prior
from presage.noise.sampling import estimate
from presage.prediction.draws import StepModel, draw, step_model
from presage.prediction.draws.replica_pools import Gpus, Replica, ratios
from presage.prediction.jobs.job_prediction import predict_job

ROOT = Path(__file__).resolve().parent.parent
DRAWS = 10_000


def shape(virtual: int, batch: int) -> StepModel:
    over = {"parallel": {"gpus": 65536, "pp": 16, "virtual": virtual, "dp": None}, "training": {"global_batch": batch}}
    found = predict_job(ROOT / "examples/jobs/llama3.1-405b.toml", over)
    return step_model(found.job, found.job_step)


def brute_force(s: StepModel, noise: NoiseModel, runs: int, steps: int) -> np.ndarray:
    """Steps' pipelines, every replica drawn by itself."""
    rng, replica = np.random.default_rng(1), Replica.of(s, 10**9)
    program, row = replica.tasks
    sd = np.sqrt(sum((replica.shares[k] * noise.of(c).own) ** 2 for k, c in enumerate(CLASSES)))
    out = np.empty((runs, steps))
    for r in range(runs):
        size = s.together, s.stages, s.replicas
        slow = np.where(rng.random(size) < noise.slow.share, noise.slow.factor.sample(rng, size), 1.0)
        gpus = Gpus(rng.standard_normal(size).max(axis=0), slow.max(axis=0))
        usual = (replica.base[:, None] * ratios(replica, noise, gpus))[row]
        for k in range(steps):
            draws = np.exp(sd[row][:, None] * rng.standard_normal((len(row), s.replicas)))
            out[r, k] = finish_times(program, usual * draws).max()
    return out + s.seconds - s.pipeline.total


def main() -> int:
    bad = 0
    for virtual, batch in ((1, 8192), (8, 8192)):
        s = shape(virtual, batch)
        noise = prior("h100_sxm", 65536, 8, s.seconds, "unscreened").noise
        draw(s, noise, 0, 100)  # compiled, programs made
        began = time.perf_counter()
        draw(s, noise, 0, DRAWS)
        all_on = time.perf_counter() - began
        alone = NoiseModel({k: replace(v, step=0.0) for k, v in noise.spread.items() if k != "dp"}, noise.slow)
        runs, steps = (16, 2) if virtual == 1 else (8, 1)
        began = time.perf_counter()
        slow = brute_force(s, alone, runs, steps)
        each = (time.perf_counter() - began) / slow.size
        fast = draw(s, alone, 0, DRAWS, 2)
        a, b = estimate(slow, lambda x: float(np.mean(x))), fast.mean
        z = (a.value - b.value) / np.hypot(a.error, b.error)
        bad += abs(z) > 4
        print(
            f"65,536 GPUs, 16 stages x {virtual} chunks, {s.replicas} replicas: {DRAWS:,} draws in {all_on:.2f} s; "
            f"every replica drawn: {each:.2f} s a step, {each * DRAWS / all_on:,.0f} times as long; "
            f"means differ by {z:+.1f} standard errors"
        )
    print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
