"""The claims on many ranks: training runs that others have published, predicted from code alone.

Each run's model is built and captured as one rank runs it, a strategy spreads it over the ranks, and the step is
predicted. A step of many microbatches is that of one, and so often what the second adds to it.

`step_time` and `peak_memory` are against what was published. Beside them two that know less, to show where errors come
from: `compute_only`, the kernels alone, and `no_overlap`, kernels and transfers one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.pool import SERIAL, Pool
from presage_validation.public_table import Setup, read_setups
from presage_validation.score import AccuracyResult, Row, Skipped, Turn

Tell = Callable[[str], None]
Capture = Callable[[int], Graph]  # a step of so many microbatches
BUILD = "build"
# Attention of the software that a source's runs had, against that of today: llm-foundry's of 2023 had flash-attn 1.0.3.
# FlashAttention-2's paper (Dao, 2023) has it at twice the speed of the first on an A100, as fast as presage takes
# attention to be there, and at 335 TFLOP/s on an H100, where today's kernels reach 500.
ATTENTION_PACE = {"llm_foundry": {"a100": 0.5, "h100": 0.5 * 335 / 500}}


@dataclass(frozen=True)
class RanksForecast:
    """What is predicted for a run: seconds a step, and bytes."""

    step: float
    compute: float
    communication: float
    exposed: float
    memory: float

    def extended(self, more: RanksForecast, times: int) -> RanksForecast:
        """`times` more microbatches, of which `more` has the first."""

        def at(one: float, two: float) -> float:
            return one + times * (two - one)

        return RanksForecast(
            step=at(self.step, more.step),
            compute=at(self.compute, more.compute),
            communication=at(self.communication, more.communication),
            exposed=at(self.exposed, more.exposed),
            memory=max(self.memory, more.memory),
        )


def score_ranks(
    workloads: str | Path, table: str | Path, tell: Tell = lambda _: None, pool: Pool = SERIAL
) -> AccuracyResult:
    """Predict every run of a table that one of the file's models fits."""
    setups, skipped = read_setups(table)
    by_key: dict[object, list[Setup]] = {}
    for s in setups:
        by_key.setdefault(s.key, []).append(s)
    found: dict[int, RanksForecast | str] = {}
    longest_first = sorted(by_key.values(), key=lambda setups: -setups[0].arguments["layers"])
    for answers in pool.map(partial(_predict, str(workloads)), longest_first):
        found |= answers
        tell(Turn("runs", len(found), len(setups)))
    skipped += [Skipped(s.name, reason) for s in setups if isinstance(reason := found[s.line], str)]
    rows = tuple(row for s in setups if isinstance(f := found[s.line], RanksForecast) for row in _score_rows(s, f))
    return AccuracyResult("ranks", f"{workloads} {table}", rows, tuple(skipped), counted="step_time")


def _score_rows(s: Setup, found: RanksForecast) -> Iterator[Row]:
    """Rows of a run, which count in its source's errors, and there in its GPU's and its model's."""
    pairs = [("step_time", found.step, s.seconds)]
    pairs += [("peak_memory", found.memory, s.memory)] if s.memory else []
    pairs += [("compute_only", found.compute, s.seconds)]
    pairs += [("no_overlap", found.compute + found.communication, s.seconds)]
    for metric, predicted, measured in pairs:
        yield Row(metric, s.source, s.name, predicted, measured, (f"{s.source} {s.gpu}", f"{s.source} {s.model}"))


def _predict(workloads: str, setups: Sequence[Setup]) -> dict[int, RanksForecast | str]:
    """Predictions for runs that share a capture; a reason where there is none."""
    from presage.capture import capture, load

    target, seen = f"{workloads}:{BUILD}", dict[int, Graph]()
    build = load(target)
    warm_up = getattr(build, "warm_up", 1)

    def captured(accumulate: int) -> Graph:
        if accumulate not in seen:
            arguments = {**setups[0].arguments, "accumulate": accumulate}
            seen[accumulate] = capture(build, arguments, source=target, warm_up=warm_up)
        return seen[accumulate]

    return {s.line: _found(s, captured) for s in setups}


def _found(s: Setup, captured: Capture) -> RanksForecast | str:
    try:
        one = _of_graph(s, captured(1))
        return one if s.accumulate == 1 else one.extended(_of_graph(s, captured(2)), s.accumulate - 1)
    except PresageError as e:
        return str(e)


def _of_graph(s: Setup, graph: Graph) -> RanksForecast:
    from presage.prediction.api import predict_ranks

    found = predict_ranks(with_kernels_of(s, graph), s.ranks, s.strategy, s.platform, draws=1)
    many = found.many
    if many is None:
        raise PresageError("a prediction without ranks")
    return RanksForecast(found.step.p50, found.gpu_active, many.communication, many.exposed, float(found.peak_memory))


def with_kernels_of(s: Setup, graph: Graph) -> Graph:
    """The step with attention as fast as the kernels that the run had."""
    pace = next((p for gpu, p in ATTENTION_PACE.get(s.source, {}).items() if s.gpu.lower().startswith(gpu)), 1.0)
    ops = (replace(op, speed=op.speed * pace) if "attention" in op.name else op for op in graph.ops)
    return graph if pace == 1.0 else replace(graph, ops=tuple(ops))
