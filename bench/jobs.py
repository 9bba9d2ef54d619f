"""How fast jobs are predicted and plans searched: `python bench/jobs.py`.

One prediction, with what it takes from earlier ones at hand; 10,000 plans of a 405B model on 16,384 GPUs, each checked
for memory and priced in full by two processes that know nothing yet; the search of all legal plans of it and of
DeepSeek-V3, which proves most of them slower without a price, and some of these plans surveyed one by one. Beside them
the naive way: every layer of every microbatch a task of the engine's Builder, layers priced anew for each plan. Exits 1
above the bars, or where the naive way disagrees.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from presage.configs.job import Job
from presage.configs.job_file import read_transformer_job
from presage.engine import Builder, simulate
from presage.memory.job_memory import most_needed
from presage.prediction.jobs.job_prediction import predict_job
from presage.prediction.jobs.job_step import JobStep, job_step
from presage.prediction.jobs.plan_bounds import step_lower_bound
from presage.prediction.jobs.plan_cache import clear_plan_cache
from presage.search import JobPlan, PlanSpace, apply_plan, job_plan, plan_words, search

JOBS = Path(__file__).resolve().parents[1] / "examples" / "jobs"
LLAMA, DEEPSEEK = JOBS / "llama3.1-405b.toml", JOBS / "deepseek-v3.toml"
GPUS, PLANS, CORES = 16_384, 10_000, 2
NAIVE = 24  # plans simulated the naive way
ALONE = 1_000  # plans surveyed one by one
MS = 1e3
BARS = {"one prediction": 2e-3, "10,000 plans": 10.0, "405B search": 10.0, "DeepSeek-V3 search": 10.0}


def timed(call: Callable[[], object], times: int) -> float:
    """The median."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def priced(job: Job, x: JobPlan) -> tuple[float, float]:
    """Bytes and seconds of a plan."""
    made = apply_plan(job, x)
    return most_needed(made), float(job_step(made).seconds)


def _piece(job: Job, layouts: list[JobPlan]) -> list[tuple[float, float]]:
    return [priced(job, x) for x in layouts]


def one(job: Job) -> float:
    cold = timed(lambda: (clear_plan_cache(), job_step(job)), 5)
    warm, whole = timed(lambda: job_step(job), 300), timed(lambda: predict_job(job), 300)
    print(f"one prediction of a 405B model on {GPUS:,} GPUs ({plan_words(job_plan(job))})")
    print(f"  step, warm {warm * MS:.3f} ms; with memory of all stages {whole * MS:.3f} ms")
    print(f"  step with nothing known {cold * MS:.1f} ms")
    return whole


def sample(job: Job) -> list[JobPlan]:
    """Plans that fit, at random; in the order of the space."""
    space = PlanSpace(job, (GPUS,))
    every = [x for f in space.families() for x in space.layouts(f)]
    rng, found = random.Random(0), set[int]()
    for i in rng.sample(range(len(every)), len(every)):
        if len(found) < PLANS and most_needed(apply_plan(job, every[i])) <= job.platform.gpu.memory:
            found.add(i)
    return [every[i] for i in sorted(found)]


def many(job: Job, plans: list[JobPlan]) -> tuple[float, float]:
    """Seconds on all cores, and seconds a plan of one core's work."""
    clear_plan_cache()
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(CORES) as pool:
        size = len(plans) // (8 * CORES) + 1
        pieces = [(job, plans[i : i + size]) for i in range(0, len(plans), size)]
        found = [row for part in pool.starmap(_piece, pieces, chunksize=1) for row in part]
    took = time.perf_counter() - start
    assert len(found) == len(plans)
    clear_plan_cache()
    alone = time.process_time()
    _piece(job, plans)
    each = (time.process_time() - alone) / len(plans)
    print(f"{len(plans):,} plans, memory and step of each, from nothing known")
    print(f"  {took:.2f} s on {CORES} cores; {each * MS:.3f} ms of a core's time each, {1 / each:,.0f} plans/s a core")
    return took, each


def whole(job: Job) -> float:
    """Seconds of one core's work for a search; beside it, what memory and bounds of its plans take one by one."""
    clear_plan_cache()
    begun = time.process_time()
    found = search(job, GPUS)
    took = time.process_time() - begun
    c, best = found.counts, found.best[0]
    each = one_by_one(job)
    print(f"the whole space of {job.name}: {c.legal:,} legal plans in {took:.2f} s of one core")
    print(f"  one by one, memory and bound take {each * MS:.3f} ms a plan: {each * c.legal / took:.0f} times as long")
    print(f"  {c.too_large:,} too large, {c.set_aside:,} set aside by a bound, {c.priced:,} priced")
    print(f"  best {plan_words(job_plan(best.job))}: {best.seconds:.3f} s, MFU {best.mfu:.1%}")
    return took


def one_by_one(job: Job) -> float:
    """Seconds of one core for a plan's memory and, where it fits, its bound."""
    space, rng = PlanSpace(job, (GPUS,)), random.Random(2)
    families = list(space.families())
    took, count = 0.0, 0
    for f in rng.sample(families, len(families)):
        for x in (some := space.layouts(f))[:: max(1, len(some) // 50)]:
            made, start = apply_plan(job, x), time.process_time()
            if most_needed(made) <= job.platform.gpu.memory:
                step_lower_bound(made)
            took, count = took + time.process_time() - start, count + 1
        if count >= ALONE:
            break
    return took / count


def naive(job: Job, done: JobStep) -> float:
    """The pipeline of a step with every layer of every microbatch a task."""
    run, split, builder = done.pipeline, job.stage_layers(), Builder()
    stages, chunks, send = run.schedule.stages, run.schedule.virtual, run.durations.send
    seconds = (run.durations.forward, run.durations.backward, run.durations.weight)
    first, last = dict[tuple[int, int, int, int], int](), dict[tuple[int, int, int, int], int]()
    for s, order in enumerate(run.schedule.order):
        lane = builder.lane(f"stage {s}", s)
        for what, c, m in zip(order.what.tolist(), order.chunk.tolist(), order.microbatch.tolist(), strict=True):
            layers = max(1, split[s][c])
            tasks = [builder.task(lane, float(seconds[what][s, c]) / layers) for _ in range(layers)]
            first[s, what, c, m], last[s, what, c, m] = tasks[0], tasks[-1]
    for (s, what, c, m), t in first.items():
        place = c * stages + s + (1 if what else -1)
        if what < 2 and 0 <= place < stages * chunks:
            before = place % stages
            builder.edge(last[before, what, place // stages, m], t, float(send[s if what else before]))
    program = builder.build()
    return float(np.max(simulate(program, builder.durations).end))


def ratio(job: Job, plans: list[JobPlan], each: float) -> bool:
    """How much longer the naive way takes; whether both agree."""
    took, tasks, worst = 0.0, 0, 0.0
    for x in random.Random(1).sample(plans, NAIVE):
        made = apply_plan(job, x)
        clear_plan_cache()
        start = time.process_time()
        done = job_step(made)
        total = naive(made, done)
        took += time.process_time() - start
        tasks += 2 * made.model.layers * made.microbatches
        worst = max(worst, abs(total / done.pipeline.total - 1))
    print(f"the naive way, {NAIVE} of these plans: {took / NAIVE * MS:.0f} ms a plan, of {tasks // NAIVE:,} tasks")
    print(f"  {took / NAIVE / each:,.0f} times as long; pipelines differ by {worst:.1e} at most")
    return worst < 1e-9


def main() -> int:
    job = read_transformer_job(LLAMA)
    job_step(job)  # compiles
    plans = sample(job)
    single = one(job)
    took, each = many(job, plans)
    searched = [whole(job), whole(read_transformer_job(DEEPSEEK))]
    agree = ratio(job, plans, each)
    missed = [name for name, value in zip(BARS, (single, took, *searched), strict=True) if value > BARS[name]]
    for name in missed:
        print(f"above the bar of {BARS[name]:g} s: {name}")
    return int(bool(missed) or not agree)


if __name__ == "__main__":
    sys.exit(main())
