"""RunComparison: step time and memory of a running loop beside a prediction, and the largest difference by cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from presage.measure.prediction import Prediction
from presage.measure.timing import quantile
from presage.text import percent, seconds, size

KIND = "comparison"
CAUSES = {
    "gpu": "GPU time: kernels take longer or shorter than predicted",
    "host": "host: launching and Python between kernels",
    "data": "waiting for data: the loader is slower than the step",
    "rank": "a slow rank: the others wait for it",
    "step": "the step itself: without a GPU it is not split further",
}
ADVICE = {
    "gpu": "see `presage measure` for the kernels; its --save-pack learns them",
    "host": "a busy or slower CPU; `presage whatif --suggest` lists edits that save host time",
    "data": "more loader workers, or faster storage",
    "rank": "look at that rank's GPU clocks and node",
    "step": "compare on the GPU for the cause",
}


@dataclass
class LoopTiming:
    """Timed steps of one process, in seconds and bytes."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # for the batch, before each step
    gpu_active: float | None = None  # of a step, profiled
    peak_memory: int | None = None

    @property
    def step(self) -> float:
        return median(self.steps) if self.steps else float("nan")

    @property
    def wait(self) -> float:
        return median(self.waits) if self.waits else 0.0

    def latest(self, count: int) -> LoopTiming:
        """The last `count` steps."""
        return replace(self, steps=self.steps[-count:], waits=self.waits[-count:])


@dataclass(frozen=True)
class RankTiming:
    """One rank's median step, its wait for data and its GPU time."""

    rank: int
    step: float
    wait: float
    gpu_active: float | None

    @property
    def own(self) -> float:
        """What the rank itself needs, as far as it can be told from the time it waits for others."""
        return self.wait + (self.gpu_active if self.gpu_active is not None else self.step)


@dataclass(frozen=True)
class RunComparison:
    """A measured loop and its prediction. Differences are measured less predicted."""

    predicted: Prediction
    measured: LoopTiming
    ranks: tuple[RankTiming, ...] = ()

    @property
    def predicted_step(self) -> float | None:
        return self.predicted.step.get("p50", self.predicted.step.get("mean"))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90% interval that was predicted."""
        low, high = self.predicted.step.get("p5"), self.predicted.step.get("p95")
        return None if low is None or high is None else (low, high)

    @property
    def error(self) -> float | None:
        """Measured over predicted step time, less one."""
        return None if not self.predicted_step else self.measured.step / self.predicted_step - 1

    @property
    def within(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        return None if self.interval is None else self.interval[0] <= self.measured.step <= self.interval[1]

    @property
    def slowest(self) -> RankTiming | None:
        return max(self.ranks, key=lambda r: r.own) if self.ranks else None

    @property
    def differences(self) -> dict[str, float]:
        """Seconds per step by cause; they add up to the difference of the step times."""
        if self.predicted_step is None or not self.measured.steps:
            return {}
        total = self.measured.step - self.predicted_step
        active, planned = self.measured.gpu_active, self.predicted.gpu_active
        late = self.slowest.own - median(r.own for r in self.ranks) if self.slowest else 0.0
        late = min(max(late, 0.0), max(self.measured.step, 0.0))
        if active is None or planned is None:
            data = min(self.measured.wait, self.measured.step)
            parts = {"data": data, "rank": late, "step": total - data - late}
        else:
            idle = max(self.measured.step - active, 0.0)
            data = min(self.measured.wait, idle)
            parts = {"gpu": active - planned, "data": data, "rank": late}
            parts["host"] = total - sum(parts.values())
        return {cause: value for cause, value in parts.items() if value or cause != "rank"}

    @property
    def largest(self) -> tuple[str, float] | None:
        """The cause of the largest difference, and its seconds."""
        parts = self.differences
        if not parts:
            return None
        cause = max(parts, key=lambda c: abs(parts[c]))
        return cause, parts[cause]

    @property
    def headline(self) -> str:
        out = f"{seconds(self.measured.step)}/step measured"
        if self.error is not None and self.predicted_step is not None:
            out += f", {seconds(self.predicted_step)} predicted ({100 * self.error:+.1f}%{self._interval_text()})"
        if self.measured.peak_memory is not None:
            out += f"; peak memory {size(self.measured.peak_memory)}"
            out += f", {size(self.predicted.peak_memory)} predicted" if self.predicted.peak_memory else ""
        if self.largest is not None and self.error is not None and abs(self.error) > 0.01:
            out += f"; largest difference: {self._cause_text()}"
        return out

    def _interval_text(self) -> str:
        if self.interval is None:
            return ""
        return f", {'within' if self.within else 'outside'} the 90% interval"

    def _cause_text(self) -> str:
        assert self.largest is not None
        cause, value = self.largest
        who = f" {self.slowest.rank}" if cause == "rank" and self.slowest else ""
        sign = "+" if value > 0 else "-"
        return f"{CAUSES[cause].split(':')[0]}{who} ({sign}{seconds(abs(value))})"

    @property
    def advice(self) -> str:
        if self.largest is None:
            return ""
        return f"largest difference: {self._cause_text()}; {ADVICE[self.largest[0]]}"

    @property
    def metrics(self) -> dict[str, float]:
        """Figures for a logger, by name."""
        out = {"presage/step_ms": 1e3 * self.measured.step, "presage/data_wait_ms": 1e3 * self.measured.wait}
        if self.predicted_step is not None and self.error is not None:
            out |= {"presage/predicted_step_ms": 1e3 * self.predicted_step, "presage/slower": self.error}
        if self.measured.peak_memory is not None:
            out["presage/peak_memory_bytes"] = float(self.measured.peak_memory)
        return {name: value for name, value in out.items() if value == value}

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys; `read_comparison` reads them."""
        m, p = self.measured, self.predicted
        return {
            "kind": KIND,
            "steps": len(m.steps),
            "step_ms": {name: _ms(quantile(tuple(m.steps), q)) for name, q in QUANTILES.items()} if m.steps else {},
            "data_wait_ms": _ms(m.wait),
            "gpu_active_ms": _ms(m.gpu_active),
            "peak_memory_bytes": m.peak_memory,
            "predicted": {
                "step_ms": {name: _ms(x) for name, x in p.step.items()},
                "gpu_active_ms": _ms(p.gpu_active),
                "peak_memory_bytes": p.peak_memory,
            },
            "slower": self.error,
            "within_interval": self.within,
            "difference_ms": {cause: _ms(x) for cause, x in self.differences.items()},
            "largest_difference": self.largest[0] if self.largest else None,
            "ranks": [asdict(r) for r in self.ranks],
            "per_step_ms": [round(1e3 * x, 4) for x in m.steps[-KEPT:]],
        }


QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
KEPT = 10_000  # single steps in the file


def _ms(value: float | None) -> float | None:
    return None if value is None else 1e3 * value


def comparison_from_json(value: Mapping[str, Any]) -> RunComparison:
    """From what `RunComparison.to_json` gives; ValueError where it is something else."""
    from presage.measure.prediction import from_json

    if value.get("kind") != KIND or not isinstance(value.get("per_step_ms"), list):
        raise ValueError("no steps of a watched loop in it")
    steps = [1e-3 * float(x) for x in value["per_step_ms"]]
    if not steps:
        raise ValueError("no step was timed: the loop was shorter than the warm-up")
    active, wait = value.get("gpu_active_ms"), value.get("data_wait_ms") or 0.0
    timing = LoopTiming(steps, [1e-3 * wait], None if active is None else 1e-3 * active, value.get("peak_memory_bytes"))
    ranks = tuple(RankTiming(**r) for r in value.get("ranks", ()))
    return RunComparison(from_json(value.get("predicted") or {"step_ms": {}}), timing, ranks)


def table_rows(c: RunComparison) -> list[tuple[str, str, str, str]]:
    """What was measured beside what was predicted: name, measured, predicted, error."""
    m, p = c.measured, c.predicted
    steps = tuple(m.steps)
    rows = [_row(f"step {name}", quantile(steps, q), p.step.get(name), seconds) for name, q in QUANTILES.items()]
    rows.append(_row("GPU active", m.gpu_active, p.gpu_active, seconds))
    rows.append(_row("peak memory", m.peak_memory, p.peak_memory, size))
    rows.append(("waiting for data", seconds(m.wait), "-", "-"))
    return rows


def _row(
    name: str, measured: float | None, predicted: float | None, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    error = percent(measured / predicted - 1) if measured is not None and predicted else "-"
    return name, "-" if measured is None else text(measured), "-" if predicted is None else text(predicted), error
