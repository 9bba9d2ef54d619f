"""How fast a pipeline's step is, beside the same step with every microbatch a task of the engine's Builder.

    python bench/pipeline.py

Durations are those of most jobs: equal stages but for the first and the last. `near ties` is the hard case, stages
within 1% of each other: it takes many rounds until the slowest sets the pace. Exits 1 if any two disagree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from presage.engine import Builder, Program, simulate
from presage.parallel.pipeline import Schedule, _tasks
from presage.parallel.pipeline_run import run_pipeline

SEND = 0.02
CASES = [("1f1b", 16, m, 1) for m in (32, 128, 512, 2048)]
CASES += [("interleaved", 16, m, 8) for m in (32, 128, 512, 2048)]
CASES += [("zero-bubble", 16, 128, 1), ("gpipe", 16, 128, 1), ("interleaved", 8, 64, 4)]


def best(call: Callable[[], object], seconds: float = 0.2) -> float:
    """The shortest of as many calls as fit."""
    took, began = [], time.perf_counter()
    while not took or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return min(took)


def unrolled(schedule: Schedule, forward: np.ndarray) -> tuple[Program, np.ndarray]:
    """Every F, B and W one by one, each with its message: the naive way."""
    builder, task = Builder(), dict[tuple[int, int, int, int], int]()
    stages, chunks = schedule.stages, schedule.virtual
    took = (forward, 2 * forward, forward)
    for s, order in enumerate(schedule.order):
        lane = builder.lane(f"stage {s}", s)
        for what, c, m in zip(order.what.tolist(), order.chunk.tolist(), order.microbatch.tolist(), strict=True):
            task[s, what, c, m] = builder.task(lane, float(took[what][s, c]))
    for (s, what, c, m), t in task.items():
        place = c * stages + s + (1 if what else -1)
        if what < 2 and 0 <= place < stages * chunks:
            builder.edge(task[place % stages, what, place // stages, m], t, SEND)
    return builder.build(), builder.durations


def forwards(kind: str, stages: int, virtual: int) -> np.ndarray:
    if kind == "near ties":
        return 1 + 0.01 * np.random.default_rng(0).random((stages, virtual))
    forward = np.ones((stages, virtual))
    forward[0, 0], forward[-1, -1] = 1.05, 1.4
    return forward


def compared(kind: str, stages: int, microbatches: int, virtual: int, durations: str = "usual") -> bool:
    schedule, forward = Schedule.of(kind, stages, microbatches, virtual), forwards(durations, stages, virtual)
    weight = forward if kind == "zero-bubble" else None
    found = run_pipeline(schedule, forward, 2 * forward, weight, SEND)
    fast = best(lambda: run_pipeline(schedule, forward, 2 * forward, weight, SEND))
    schedule.order  # noqa: B018  not what is measured
    program, seconds = unrolled(schedule, forward)
    engine = best(lambda: simulate(program, seconds), 0.05)
    naive = best(lambda: unrolled(schedule, forward)) + engine
    built = best(lambda: _tasks.__wrapped__(schedule.few(found.simulated), False), 0.05)
    apart = abs(found.total / float(np.max(simulate(program, seconds).finish)) - 1)
    name = f"{kind} {stages} x {virtual} x {microbatches}" + ", near ties" * (durations != "usual")
    print(
        f"{name:<36} {1e6 * fast:5.0f} us ({found.simulated} run), structure {1e3 * built:.2f} ms once; naive "
        f"{1e3 * naive:7.1f} ms, {naive / fast:6,.0f} x (its engine pass {engine / fast:4.0f} x); apart {apart:.0e}"
    )
    return apart < 1e-9


def main() -> int:
    print("schedule, stages x chunks x microbatches")
    run_pipeline(Schedule.of("1f1b", 2, 50), 1.0, 1.0)  # compiles
    unrolled(Schedule.of("1f1b", 2, 4), np.ones((2, 1)))
    equal = [compared(*case) for case in CASES]
    equal += [compared("1f1b", 16, 2048, 1, "near ties"), compared("interleaved", 16, 2048, 8, "near ties")]
    if not all(equal):
        print("folded and unrolled steps disagree", file=sys.stderr)
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
