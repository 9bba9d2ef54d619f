"""How often to write checkpoints: the formulas of Young, Daly and others, the exact one, and its best interval.

Failures come at random, on average every `mttf` seconds of work. Each costs `down` seconds in which nothing fails (it
is noticed, a node is replaced), then a `restart` that may fail too, then the work since the last checkpoint again. A
period is work and then a checkpoint of `save` seconds; `interval` is the work alone, without the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

ROUNDS = 60  # of Newton's method; it stops when it stands still, after five or so


@dataclass(frozen=True, slots=True)
class Outage:
    """Mean failure times that the formulas take, in seconds."""

    mttf: float  # of the job: work between failures, on average
    save: float  # that a checkpoint stops the job
    down: float = 0.0  # that nothing can fail in: detection, replacement
    restart: float = 0.0


# ---- intervals: work between checkpoints


def young(o: Outage) -> float:
    """Young's interval (1974): sqrt(2 mttf save)."""
    return sqrt(2 * o.mttf * o.save)


def daly(o: Outage) -> float:
    """Daly's first order: the period is sqrt(2 (mttf + down + restart) save) + save."""
    return sqrt(2 * (o.mttf + o.down + o.restart) * o.save)


def daly_higher_order(o: Outage) -> float:
    """Daly 2006: a perturbation series for checkpoints that take less than twice the time between failures."""
    if o.save >= 2 * o.mttf:
        return o.mttf
    x = o.save / (2 * o.mttf)
    return young(o) * (1 + sqrt(x) / 3 + x / 9) - o.save


def rfo(o: Outage) -> float:
    """Aupy, Robert, Vivien 2013: the period is sqrt(2 (mttf - down - restart) save); 0 where failures leave no time."""
    left = o.mttf - o.down - o.restart
    return max(0.0, sqrt(2 * left * o.save) - o.save) if left > 0 else 0.0


def meta_interval(o: Outage) -> float:
    """The interval of Kokolis et al. 2024, the same as Young's."""
    return young(o)


def best_interval(o: Outage) -> float:
    """The interval of the best exact efficiency: x = 1 + c - exp(-x) for x = period / mttf, c = save / mttf."""
    if o.mttf == inf:
        return inf
    c = o.save / o.mttf
    x = c + sqrt(2 * c)
    for _ in range(ROUNDS if c else 0):
        step = (x - 1 - c + exp(-x)) / -expm1(-x)
        x -= step
        if abs(step) <= 1e-12 * x:
            break
    return max(0.0, x - c) * o.mttf


# ---- the share of time that is useful work


def exact_efficiency(o: Outage, interval: float) -> float:
    """For failures at a constant rate: (T - C) / ((mttf + down) e^(restart / mttf) (e^(T / mttf) - 1))."""
    if o.mttf == inf:
        return interval / (interval + o.save) if interval < inf else 1.0
    period = (interval + o.save) / o.mttf
    if period + o.restart / o.mttf > 600:
        return 0.0
    if interval + o.save == 0:
        return o.mttf / ((o.mttf + o.down) * exp(o.restart / o.mttf))
    return interval / ((o.mttf + o.down) * exp(o.restart / o.mttf) * expm1(period))


def first_order_efficiency(o: Outage, interval: float) -> float:
    """1 - waste, with waste = C/T + (1 - C/T) (down + restart + T/2) / mttf (Aupy et al. 2013)."""
    period = interval + o.save
    saving = o.save / period if period else 0.0
    return max(0.0, (1 - saving) * (1 - (o.down + o.restart + period / 2) / o.mttf))


def meta_ettr(o: Outage, interval: float) -> float:
    """(1 - (u0 + dt/2) / mttf) / (1 + w/dt), u0 all that a restart takes (Kokolis et al. 2024); for small losses."""
    saving = o.save / interval if o.save else 0.0
    return max(0.0, (1 - (o.down + o.restart + interval / 2) / o.mttf) / (1 + saving))
