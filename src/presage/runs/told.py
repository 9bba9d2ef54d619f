"""A RunPrediction as plain values for JSON, with the units in their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from presage.runs.failures import DAY
from presage.runs.outcome import CAUSES, RunOutcome, quantiles

if TYPE_CHECKING:
    from presage.runs.whole import RunResult

__all__ = ["run_to_json"]

HOUR, MS = 3600.0, 1e3
QUANTILES = (0.05, 0.5, 0.8, 0.9, 0.95, 0.99)


def run_to_json(p: RunResult) -> dict[str, Any]:
    """Plain values with the units in their keys."""
    run = p.run
    return {
        "kind": "run",
        "name": p.job.job.name,
        "gpus": run.gpus,
        "steps": run.steps,
        "tokens": run.steps * p.job.job.tokens,
        "draws": p.draws,
        "seed": p.seed,
        "noise": p.noise,
        "step_ms": {"predicted": run.times.seconds * MS, **spread(p.steps * MS), "run_mean": spread(p.exact.step * MS)},
        "days": _days(p.outcome),
        "days_without_model_error": _days(p.exact),
        "ettr": spread(p.outcome.ettr),
        "goodput": spread(p.outcome.goodput),
        "failures": spread(p.outcome.failures),
        "failures_without_model_error": spread(p.exact.failures),
        "planned_stops": spread(p.outcome.planned),
        "deadline": _deadline(p),
        "hours_by_cause": {c: spread(p.outcome.parts[c] / HOUR) for c in CAUSES},
        "classes": _classes(p),
        "reliability": _reliability(p),
        "checkpoints": _checkpoints(p),
        "spares": [
            {"spares": s.spares, "p50_days": s.middle / DAY, "p95_days": s.late / DAY, "waiting_days": s.waits / DAY}
            for s in p.spares
        ],
        "changes": [
            {"change": c.name, "p50_days": c.middle / DAY, "p95_days": c.late / DAY, "ettr": c.ettr} for c in p.changes
        ],
        "energy": {"kwh": spread(p.kwh), "power_w": p.job.watts, "idle_power_w": p.idle},
        "cost": None if p.cost is None else spread(p.cost) | {"price_per_gpu_hour": p.job.terms.price},
        "notes": list(p.job.notes),
    }


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean and quantiles."""
    found = quantiles(values, QUANTILES)
    return {"mean": float(values.mean())} | {f"p{100 * q:.0f}": float(x) for q, x in zip(QUANTILES, found, strict=True)}


def _days(o: RunOutcome) -> dict[str, float]:
    errors = {f"p{100 * q:.0f}_standard_error": o.quantile_error(q) / DAY for q in (0.5, 0.95, 0.99)}
    return spread(o.wall / DAY) | errors


def _deadline(p: RunResult) -> dict[str, float] | None:
    if p.deadline is None:
        return None
    return {
        "days": p.deadline / DAY,
        "probability": p.outcome.done_by(p.deadline),
        "probability_without_model_error": p.exact.done_by(p.deadline),
    }


def _classes(p: RunResult) -> list[dict[str, Any]]:
    detect = [f.detect for f in p.run.reliability.failures]
    return [
        {
            "class": s.name,
            "planned": s.planned,
            "per_1000_node_days": 1e3 * s.per_node_day,
            "count": s.count,
            "count_p5": s.low,
            "count_p95": s.high,
            "hours": s.seconds / HOUR,
            "detect_s": seconds,
        }
        for s, seconds in zip(p.exact.stops(), detect, strict=True)
    ]


def _reliability(p: RunResult) -> dict[str, Any]:
    r, risk = p.run.reliability, p.run.risk
    return {
        "name": r.name,
        "nodes": risk.nodes,
        "mttf_hours": risk.mttf / HOUR if risk.unplanned else None,
        "detect_s": risk.detect,
        "restart_s": risk.restart,
        "repair_hours": r.repair / HOUR,
        "spares": p.run.spares,
        "growth": r.growth.at(p.run.gpus),
        "rate_sd": r.rate_sd,
        "model_sd": p.run.times.model_sd,
        "sources": dict(r.sources),
    }


def _checkpoints(p: RunResult) -> dict[str, Any]:
    k = p.run.checkpoints
    return {
        "save_s": k.save,
        "background_s": k.delay,
        "from": k.said,
        "steps": p.run.every,
        "minutes": p.run.every * p.run.step / 60,
        "ettr": p.run.efficiency,
        "choices": [
            {"name": i.name, "minutes": i.seconds / 60, "steps": i.steps, "ettr": i.exact, "ettr_meta": i.meta}
            for i in p.intervals
        ],
    }
