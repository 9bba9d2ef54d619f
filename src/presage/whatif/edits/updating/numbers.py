"""An update's numbers: learning rate, betas and so on, as far as its ops tell them."""

from __future__ import annotations

from math import log

from presage.whatif.edits.updating.updates import Update

__all__ = ["betas", "decay_of", "eps", "rate_of"]


def betas(u: Update) -> tuple[float, float]:
    return round(1 - u.scalar("lerp(s,g)", 0.1), 12), u.scalar("mul(s)", 0.999)


def eps(u: Update, default: float = 1e-8) -> float:
    return u.scalar("add(t)", default)


def rate_of(u: Update) -> float:
    """Adam's learning rate, from the step's size and its corrections; torch's default where that cannot be told."""
    size, corrected = -u.scalar("addcdiv(p,s,t)", -1e-3), u.scalar("div(t)")
    beta1, beta2 = betas(u)
    if not 0 < corrected < 1 or not 0 < beta2 < 1 or size <= 0:
        return 1e-3
    steps = round(log(1 - corrected**2) / log(beta2))
    return round(size * (1 - beta1**steps), 12)


def decay_of(u: Update) -> float:
    if "decoupled" in u.flags:
        return round((1 - u.scalar("mul(p)", 1.0)) / rate_of(u), 9) if rate_of(u) else 0.0
    return u.scalar("add(g,p)") if "decay" in u.flags else 0.0
