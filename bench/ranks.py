"""How fast predictions for many ranks are: 8 different ranks, and equal ones folded.

    python bench/ranks.py

Capturing is not counted. The step is a GPT's of about 2,500 kernels a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from presage.capture import capture, load
from presage.prediction.api import predict_ranks
from presage.prediction.rank_set import RankOverride
from presage.prediction.step import StepResult

LAYERS = 28


def best(call: Callable[[], StepResult], times: int = 3) -> tuple[float, StepResult]:
    """The shortest of a few calls, and what it gave."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        out = call()
        found.append((time.perf_counter() - start, out))
    return min(found, key=lambda f: f[0])


def main() -> None:
    graph = capture(load("examples/gpt.py:build"), {"layers": LAYERS, "batch": 4}, source="examples/gpt.py:build")
    predict_ranks(graph, 8, "ddp", "dgx-h100", draws=1)  # compiles the engine, reads the models
    apart = {r: RankOverride(speed=1 - r / 1000) for r in range(8)}
    rows = [("8 ranks, all different", 8, apart)] + [(f"{n:,} equal ranks", n, {}) for n in (8, 64, 1024, 16384)]
    base = 0.0
    for name, ranks, kinds in rows:
        seconds, found = best(lambda n=ranks, k=kinds: predict_ranks(graph, n, "ddp", "dgx-h100", kinds=k, draws=1))
        base = seconds if name == "8 equal ranks" else base
        ratio = f", {seconds / base:.2f} x 8 equal ranks" if base else ""
        print(f"{name}: {seconds:.2f} s{ratio}; {found.launches} launches a rank, step {1e3 * found.step.p50:.1f} ms")
    seconds, found = best(lambda: predict_ranks(graph, 8, "ddp", "dgx-h100"))
    print(f"8 equal ranks with {found.draw_count} draws: {seconds:.2f} s")


if __name__ == "__main__":
    main()
