"""A JobPrediction as plain values for JSON, with the units in their keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from presage.memory import JobMemory, StageMemory
from presage.prediction.jobs.cost import TrainingCost

if TYPE_CHECKING:
    from presage.prediction.jobs.job_prediction import JobResult, StageSummary

__all__ = ["job_to_json"]

MS = 1e3
HELPS = 8


def job_to_json(p: JobResult, tokens: float | None = None) -> dict[str, Any]:
    run = {} if tokens is None else {"run": _run(p.spent(tokens))}
    return {
        "kind": "job",
        "name": p.job.name,
        "model": _model(p),
        "platform": p.job.platform.key,
        "gpu": p.job.platform.gpu.key,
        "gpus": p.job.gpus,
        "parallel": _parallel(p),
        **_speed(p),
        "bound": p.bound,
        "breakdown": {name: {"ms": s * MS, "share": s / p.seconds} for name, s in p.breakdown.items()},
        "stages": [_stage(s, m) for s, m in zip(p.stages, p.memory.stages, strict=True)],
        "memory": _memory(p.memory) | {"helps": [_help(p, i) for i in range(min(HELPS, len(p.helps)))]},
        **_spending(p),
        **run,
        "notes": list(p.notes),
    }


def _model(p: JobResult) -> dict[str, Any]:
    m = p.job.model
    return {"name": m.name, "parameters": m.parameters, "active_parameters": m.active_parameters}


NAMES = {"sequence_parallel": "sequence"}  # keys that are called otherwise in answers


def _parallel(p: JobResult) -> dict[str, Any]:
    job = p.job
    return {
        **{NAMES.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in asdict(job.parallel).items()},
        "dp": job.dp,
        "microbatches": job.microbatches,
    }


def _speed(p: JobResult) -> dict[str, Any]:
    return {
        "step_ms": {"mean": p.seconds * MS},
        "tokens_per_step": p.job.tokens,
        "tokens_per_second": p.tokens_per_second,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "samples_per_second": p.samples_per_second,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "mfu_by_peak": p.mfu_by_peak,
        "peak": p.peak[0],
        "flop_convention": p.convention,
        "model_flops": p.flops.model,
        "hardware_flops": p.flops.hardware,
        "model_tflops_per_second_per_gpu": p.flops_per_gpu / 1e12,
    }


def _stage(s: StageSummary, m: StageMemory) -> dict[str, Any]:
    return {
        "stage": s.number,
        "layers": s.layers,
        "forward_ms": s.forward * MS,
        "backward_ms": s.backward * MS,
        "busy_ms": s.busy * MS,
        "bubble_ms": s.bubble * MS,
        "memory_bytes": s.memory,
        "memory": {(k if k == "microbatches" else f"{k}_bytes"): v for k, v in asdict(m).items()},
    }


def _memory(m: JobMemory) -> dict[str, Any]:
    return {
        "fits": m.fits,
        "needed_bytes": m.needed,
        "peak_bytes": m.peak,
        "peak_is": m.told,
        "gpu_bytes": m.memory,
        "margin_bytes": m.margin,
        "stage": m.stages.index(m.worst),
    }


def _help(p: JobResult, i: int) -> dict[str, Any]:
    h = p.helps[i]
    return {"change": h.change, "saved_bytes": h.saved, "margin_bytes": h.margin, "fits": h.fits}


def _spending(p: JobResult) -> dict[str, Any]:
    s, t = p.spent(), p.terms
    cost = None if s.cost is None else {"per_step": s.cost, "price_per_gpu_hour": t.price}
    energy = {
        "J_per_step": s.energy,
        "J_per_token": s.energy / s.tokens,
        "W_per_gpu": p.watts / p.job.gpus,
        "pue": t.pue,
    }
    return {"energy": energy, "cost": cost}


def _run(s: TrainingCost) -> dict[str, Any]:
    return {
        "tokens": s.tokens,
        "steps": s.steps,
        "days": s.days,
        "gpu_hours": s.gpu_hours,
        "kWh": s.kwh,
        "cost": s.cost,
    }
