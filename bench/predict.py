"""How long a prediction takes, part by part, after everything is imported.

python bench/predict.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from presage.capture import capture, load
from presage.prediction.api import predict
from presage.prediction.machine import kernel_times, machine


def timed(what: str, call: Callable[[], Any], repeats: int = 5) -> Any:
    """Print the median time of a call, and return what it gave."""
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = call()
        spent.append(time.perf_counter() - start)
    print(f"{what:58s} {1e3 * sorted(spent)[len(spent) // 2]:8.0f} ms")
    return out


def main() -> None:
    where = timed("load the models of a GPU and its host (once)", lambda: machine("h200"), 1)
    arguments = {"layers": 48}
    build = load("examples/gpt.py:build")
    graph = timed("capture a GPT of 48 layers", lambda: capture(build, arguments), 1)
    predict(graph)  # compiles, or reads what was compiled
    times = timed("its kernel times", lambda: kernel_times(graph, where))
    found = timed("the whole prediction, 200 draws of 8 steps", lambda: predict(graph))
    print(f"launches: {sum(t.launches for t in times)}, ops: {len(graph.ops)}, step {1e3 * found.step.p50:.1f} ms")


if __name__ == "__main__":
    main()
