"""The JSON of a PostTrainingResult: plain values with the units in their keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from presage.prediction.post_training.step import PostTrainingResult

MS = 1e3
DRAWN = (0.05, 0.5, 0.95, 0.99)


def post_training_json(p: PostTrainingResult) -> dict[str, Any]:
    """What `presage job --json` writes of a reinforcement-learning step."""
    total = sum(p.breakdown.values())
    return {
        "kind": "post_training",
        "job": p.job.name,
        "model": p.job.model.name,
        "platform": p.job.platform.key,
        "gpus": p.gpus,
        "trainer_gpus": p.job.gpus,
        "engine_gpus": p.rl.engine.gpus,
        "placement": p.rl.placement,
        "staleness": p.rl.staleness,
        "step_ms": {name: value * MS for name, value in asdict(p.step).items()},
        "drawn_ms": {f"p{100 * q:g}": float(np.quantile(p.draws, q)) * MS for q in DRAWN},
        "step_p95_over_p50": 1 + p.jitter,
        "draws": len(p.draws),
        "tokens_per_step": p.tokens,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "decoded_tokens_per_second_per_gpu": p.decoded_per_second_per_gpu,
        "bound": p.bound,
        "phases": {k: {"ms": v * MS, "share": v / total} for k, v in p.breakdown.items()},
        "waits_ms": {k: v * MS for k, v in p.waits.items()},
        "rollout": _rollout(p),
        "transfer_ms": {k: v * MS for k, v in asdict(p.transfer).items()},
        "fits": p.fits,
        "memory_left_bytes": min(p.trainer_margin, p.engine_margin),
        "trainer_memory": {"needed_bytes": p.trainer_memory.needed, "margin_bytes": p.trainer_margin},
        "engine_memory": _engine(p),
        "notes": [p.model_error.note, *p.notes],
    }


def _rollout(p: PostTrainingResult) -> dict[str, Any]:
    r = p.rollouts
    return {
        "iterations": float(np.mean([x.iterations for x in r])),
        "mean_batch": float(np.mean([x.batch for x in r])),
        "prefill_ms": float(np.mean([x.prefill for x in r])) * MS,
        "tail_ms": float(np.mean([x.tail for x in r])) * MS,
        "preempted": float(np.mean([x.preempted for x in r])),
        "replicas": p.rl.engine.replicas,
    }


def _engine(p: PostTrainingResult) -> dict[str, Any]:
    m = p.engine_memory
    return {
        "weights_bytes": m.weights,
        "kv_cache_bytes": max(0.0, m.kv_cache),
        "kv_cache_tokens": m.kv_tokens,
        "concurrent_sequences": p.concurrent,
        "activations_bytes": m.activations,
        "allowed_bytes": m.allowed,
        "margin_bytes": p.engine_margin,
    }
