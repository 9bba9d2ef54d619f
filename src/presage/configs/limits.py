"""What no job has: sizes beyond which a figure is a slip of the pen, with room for ten times what anyone has built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from presage.configs.job import Job
from presage.configs.transformer import Transformer

__all__ = ["batch_limits", "model_limits"]

# The least and the most of each, by its name in a job file.
MODEL = {
    "hidden": (1, 1_000_000), "layers": (1, 10_000), "heads": (1, 100_000), "vocab": (1, 100_000_000),
    "ffn": (0, 10_000_000), "kv_heads": (1, 100_000), "head_dim": (1, 100_000), "max_positions": (0, 10**9),
    "window": (0, 10**9), "window_every": (1, 10_000), "predicted": (0, 100),
}  # fmt: skip
EXPERTS = {
    "experts": (1, 100_000), "top_k": (1, 100_000), "ffn": (1, 10_000_000), "shared_ffn": (0, 10_000_000),
    "dense_layers": (0, 10_000), "every": (1, 10_000), "capacity": (0.0, 1000.0), "imbalance": (1.0, 10_000.0),
}  # fmt: skip
LATENT = {
    "query_rank": (0, 1_000_000), "key_rank": (1, 1_000_000), "rope": (0, 100_000), "nope": (0, 100_000),
    "value": (1, 100_000),
}  # fmt: skip
TRAINING = {"sequence": 10**8, "micro_batch": 10**6, "global_batch": 10**9}


@lru_cache(256)
def model_limits(model: Transformer) -> tuple[str, ...]:
    """What of a model cannot be, in words."""
    out = [*_beyond(model, MODEL, "")]
    if model.experts:
        out += _beyond(model.experts, EXPERTS, "experts.")
    if model.latent:
        out += _beyond(model.latent, LATENT, "latent.")
        if model.latent.rope + model.latent.nope < 1:
            out.append("latent.rope + latent.nope >= 1: a head has no width")
    if model.ffn < 1 and not _all_experts(model):
        out.append(f"ffn >= 1: it is {model.ffn}")
    return tuple(out)


def batch_limits(job: Job) -> list[str]:
    """Sizes of a job's samples that cannot be, in words."""
    sizes = (job.sequence, job.micro_batch, job.global_batch)
    if min(sizes) >= 1 and max(sizes) <= TRAINING["micro_batch"]:
        return []  # nearly all of the many that a search asks about
    pairs = zip(TRAINING.items(), sizes, strict=True)
    return [_range(name, value, 1, most) for (name, most), value in pairs if not 1 <= value <= most]


def _beyond(part: object, limits: Mapping[str, tuple[float, float]], prefix: str) -> list[str]:
    values = {name: getattr(part, name) for name in limits}
    return [
        _range(prefix + name, value, *limits[name])
        for name, value in values.items()
        if not limits[name][0] <= value <= limits[name][1]
    ]


def _range(name: str, value: float, least: float, most: float) -> str:
    if value < least:
        return f"{name} >= {least:g}: it is {value}"
    return f"{name} <= {most:,.0f}: it is {value}"


def _all_experts(m: Transformer) -> bool:
    """No layer has a feed-forward block of its own."""
    return m.experts is not None and m.experts.dense_layers == 0 and m.experts.every == 1
