"""Optimizer steps over lists of tensors, fused and foreach."""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, log_int, near, one

KINDS = {
    "adamw_fused": 0.24, "adam_fused": 0.06, "sgd_fused": 0.06, "adamw": 0.16, "adam": 0.08, "sgd": 0.12, "sgdm": 0.08,
    "adagrad": 0.05, "rmsprop": 0.04, "clip": 0.08, "adamax": 0.03,
}  # fmt: skip


def sample_optimizer(rng: np.random.Generator) -> dict[str, Any]:
    count, total = log_int(rng, 1, 600), log_int(rng, 1e3, 1.2e9)
    if rng.random() < 0.3:  # a few large tables and the small layers of a recommender
        count, total = log_int(rng, 2, 80), log_int(rng, 1e7, 1.5e9)
    shares = np.exp(rng.normal(0, 1.8, count))
    sizes = [max(1, int(s)) for s in total * shares / shares.sum()]
    if rng.random() < 0.7:  # layers come in blocks of the same shapes
        block = sizes[: int(rng.integers(1, 17))]
        sizes = (block * (count // len(block) + 1))[:count]
    return {"what": near(rng, KINDS), "dtype": near(rng, {"float32": 0.8, "bfloat16": 0.2}), "sizes": _capped(sizes)}


def _capped(sizes: list[int], most: float = 1.5e9) -> list[int]:
    excess = max(1.0, sum(sizes) / most)
    return [max(1, int(n / excess)) for n in sizes]


def build_optimizer(torch: Any, p: dict[str, Any]) -> Parts:
    kind = getattr(torch, p["dtype"])
    ps = [torch.randn(n, device="cuda", dtype=kind, requires_grad=True) for n in p["sizes"]]
    for x in ps:
        x.grad = torch.randn_like(x)
    o, what = torch.optim, p["what"]
    if what == "clip":
        return one(lambda: torch.nn.utils.clip_grad_norm_(ps, 1.0))
    made = {
        "adamw_fused": lambda: o.AdamW(ps, fused=True),
        "adam_fused": lambda: o.Adam(ps, fused=True),
        "sgd_fused": lambda: o.SGD(ps, lr=1e-3, momentum=0.9, fused=True),
        "adamw": lambda: o.AdamW(ps),
        "adam": lambda: o.Adam(ps),
        "adamax": lambda: o.Adamax(ps),
        "sgd": lambda: o.SGD(ps, lr=1e-3),
        "sgdm": lambda: o.SGD(ps, lr=1e-3, momentum=0.9),
        "adagrad": lambda: o.Adagrad(ps),
        "rmsprop": lambda: o.RMSprop(ps),
    }[what]()
    return one(made.step)


FAMILIES = {"optimizer": (sample_optimizer, build_optimizer, 700)}
