"""A measured step, and what it looks like beside a predicted one: as JSON, as a page of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from presage.measure.activity import STEPS, Activity
from presage.measure.prediction import Prediction
from presage.measure.saved_pack import SavedPack
from presage.measure.timing import WARM_UP, Timing, quantile
from presage.text import percent, seconds, size

Line = Sequence[str]
FAR_OFF = 0.1  # of the GPU time


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """What was run, where, what it took, and what had been predicted."""

    source: str
    arguments: dict[str, Any]
    machine: dict[str, Any]  # gpu, torch, cuda, cudnn
    timing: Timing
    activity: Activity
    prediction: Prediction | None = None
    no_prediction: str = ""  # why there is none
    pack: SavedPack | None = None  # learned from the profiled steps

    def steps(self, q: float) -> float:
        """A quantile of the step times, without the first, which includes the restart."""
        return quantile(self.timing.each[1:] or self.timing.each, q)


def to_json(r: MeasureResult) -> dict[str, Any]:
    """Keys as `presage predict --json` has them, in milliseconds and bytes; errors as fractions."""
    total = r.activity.total
    step = {"mean": r.timing.seconds, "p5": r.steps(0.05), "p50": r.steps(0.5), "p95": r.steps(0.95)}
    value: dict[str, Any] = {
        "kind": "measure",
        "source": r.source,
        "arguments": r.arguments,
        **r.machine,
        "steps": len(r.timing.each),
        "step_ms": {name: 1e3 * x for name, x in step.items()},
        "issue_ms": 1e3 * r.timing.issued,
        "per_step_ms": [round(1e3 * x, 4) for x in r.timing.each],
        "gpu_active_ms": 1e3 * total.seconds,
        "kernels": total.kernels,
        "peak_memory_bytes": r.timing.peak_allocated,
        "peak_reserved_bytes": r.timing.peak_reserved,
        "breakdown": {
            name: {"ms": 1e3 * w.seconds, "share": _ratio(w.seconds, total.seconds), "kernels": w.kernels}
            for name, w in r.activity.families.items()
        },
    }
    value |= {"pack": r.pack.to_json()} if r.pack else {}
    return value | ({"prediction": _compared(r, r.prediction)} if r.prediction else {"no_prediction": r.no_prediction})


def _compared(r: MeasureResult, p: Prediction) -> dict[str, Any]:
    pairs = {
        "step": (p.step.get("mean"), r.timing.seconds),
        "gpu_active": (p.gpu_active, r.activity.total.seconds),
        "peak_memory": (p.peak_memory, r.timing.peak_allocated),
    }
    return {
        "step_ms": {name: 1e3 * x for name, x in p.step.items()},
        "gpu_active_ms": None if p.gpu_active is None else 1e3 * p.gpu_active,
        "peak_memory_bytes": p.peak_memory,
        "breakdown": {name: {"ms": 1e3 * s} for name, s in p.families.items()},
        "error": {name: None if x is None else _ratio(x, y) - 1 for name, (x, y) in pairs.items()},
    }


def page(r: MeasureResult) -> str:
    """Measured beside predicted, as text."""
    given = ", ".join(f"{k}={v}" for k, v in r.arguments.items())
    gpu, torch = r.machine.get("gpu", "GPU"), r.machine.get("torch", "?")
    lines = [f"{r.source}{f' ({given})' if given else ''} on {gpu}, torch {torch}", ""]
    lines += _aligned([("Step", "measured", "predicted", "error"), *_summary(r)])
    head = ("GPU time by family", "kernels", "measured", "share", "predicted", "error")
    lines += ["", *_aligned([head, *_families(r)])]
    counts = f"{len(r.timing.each)} steps timed after {WARM_UP} to warm up; GPU times from {STEPS} profiled steps"
    return "\n".join([*lines, "", counts, *([r.no_prediction] if r.no_prediction else []), *_advice(r)])


def _advice(r: MeasureResult) -> Iterator[str]:
    """How to teach presage this GPU, where its kernels were predicted badly; or what was learned of it."""
    if r.pack is not None:
        yield r.pack.line
        return
    predicted = r.prediction.gpu_active if r.prediction else None
    if predicted is not None and abs(_ratio(predicted, r.activity.total.seconds) - 1) > FAR_OFF:
        yield (
            "Kernels are predicted badly here: the same command with --save-pack DIR learns them, then presage predict "
            "--pack DIR"
        )


def brief(r: MeasureResult) -> str:
    """The step time, measured and predicted."""
    told = r.prediction.step.get("mean") if r.prediction else None
    measured = f"{r.source}: {seconds(r.timing.seconds)} a step"
    return measured + (f", predicted {seconds(told)}" if told is not None else "")


def _summary(r: MeasureResult) -> Iterator[Line]:
    p = r.prediction or Prediction()
    yield "step", *_cells(r.timing.seconds, p.step.get("mean"))
    for name, q in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
        yield f"  {name}", *_cells(r.steps(q), p.step.get(name))
    yield "GPU active", *_cells(r.activity.total.seconds, p.gpu_active)
    yield "  of the step", percent(_ratio(r.activity.total.seconds, r.timing.seconds)), "", ""
    yield "host, to issue", seconds(r.timing.issued), "", ""
    yield "kernels", f"{r.activity.total.kernels:g}", "", ""
    yield "peak allocated", *_cells(r.timing.peak_allocated, p.peak_memory, size)
    yield "peak reserved", size(r.timing.peak_reserved), "", ""


def _families(r: MeasureResult) -> Iterator[Line]:
    told = r.prediction.families if r.prediction else {}
    total = r.activity.total.seconds
    for name, w in r.activity.families.items():
        share, guess = percent(_ratio(w.seconds, total)), told.get(name, 0.0 if told else None)
        yield name, f"{w.kernels:g}", seconds(w.seconds), share, *_cells(w.seconds, guess)[1:]
    for name, guess in told.items():
        if name not in r.activity.families and guess:
            yield name, "0", "0", percent(0.0), seconds(guess), "-"


def _cells(measured: float, predicted: float | None, told: Callable[[float], str] = seconds) -> tuple[str, str, str]:
    if predicted is None:
        return told(measured), "-", "-"
    return told(measured), told(predicted), f"{100 * (_ratio(predicted, measured) - 1):+.1f}%"


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _aligned(rows: Sequence[Line]) -> list[str]:
    """Columns side by side: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = (
        [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]
