"""Optimizer steps over lists of tensors, fused and foreach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage.calibrate.sweeps.common import log_int, pick

KINDS = ("adamw_fused", "adam_fused", "sgd_fused", "adamw", "adam", "sgd", "sgdm", "adagrad", "rmsprop", "clip")


def sample_optimizer(rng: np.random.Generator) -> dict[str, Any]:
    what = pick(rng, KINDS, [0.3, 0.06, 0.08, 0.16, 0.06, 0.08, 0.08, 0.06, 0.04, 0.08])
    count, total = log_int(rng, 1, 600), log_int(rng, 1e3, 1.5e9)
    shares = np.exp(rng.normal(0, 1.8, count))
    sizes = [max(1, int(s)) for s in total * shares / shares.sum()]
    return {"what": what, "dtype": pick(rng, ("float32", "bfloat16"), [0.8, 0.2]), "sizes": sizes}


def build_optimizer(torch: Any, p: dict[str, Any]) -> Callable[[], Any]:
    kind = getattr(torch, p["dtype"])
    ps = [torch.randn(n, device="cuda", dtype=kind, requires_grad=True) for n in p["sizes"]]
    for x in ps:
        x.grad = torch.randn_like(x)
    o, what = torch.optim, p["what"]
    if what == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(ps, 1.0)
    made = {
        "adamw_fused": lambda: o.AdamW(ps, fused=True),
        "adam_fused": lambda: o.Adam(ps, fused=True),
        "sgd_fused": lambda: o.SGD(ps, lr=1e-3, momentum=0.9, fused=True),
        "adamw": lambda: o.AdamW(ps),
        "adam": lambda: o.Adam(ps),
        "sgd": lambda: o.SGD(ps, lr=1e-3),
        "sgdm": lambda: o.SGD(ps, lr=1e-3, momentum=0.9),
        "adagrad": lambda: o.Adagrad(ps),
        "rmsprop": lambda: o.RMSprop(ps),
    }[what]()
    return made.step  # type: ignore[no-any-return]


FAMILIES = {"optimizer": (sample_optimizer, build_optimizer, 220)}
