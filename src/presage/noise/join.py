"""Two beliefs as one: what the later says goes over the earlier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from presage.noise.belief import Belief, Interval
from presage.noise.noise import CLASSES, Noise

__all__ = ["joined", "rounded", "said"]

EXACT = {"shares", "moves"}  # numbers that must add up to 1
WHOLE = {
    "spread": 3,
    "slow": 2,
    "common": 2,
    "stalls": 2,
}  # words of a path that one belief or the other says as a whole


def joined(first: Belief, later: Belief) -> Belief:
    """Both: what the later one says goes over the first, number by number; distributions and lists as wholes."""
    a, b, told = first.noise, later.noise, said(later)
    spread = {k: _over(a.of(k), b.of(k), f"spread.{k}", told) for k in CLASSES if k in a.spread or k in b.spread}
    parts = {n: _over(getattr(a, n), getattr(b, n), n, told) for n in ("slow", "common", "stalls")}
    noise = Noise(
        spread=spread,
        load=b.load if "load" in told else a.load,
        network=b.network if "network" in told else a.network,
        scheduled=b.scheduled or a.scheduled,
        **parts,
    )
    intervals = {p: i for p, i in first.intervals.items() if not _under(p, told)} | dict(later.intervals)
    intervals = {p: i for p, i in intervals.items() if p in noise.numbers()}
    return Belief(
        noise, intervals, {p: s for p, s in first.sources.items() if not _under(p, told)} | dict(later.sources)
    )


def said(belief: Belief) -> set[str]:
    """Paths that a belief says something of: fields that are not as usual, or that have an interval."""
    noise, empty, out = belief.noise, Noise(), set()
    for kind, spread in noise.spread.items():
        out |= {f"spread.{kind}.{n}" for n, sd in vars(spread).items() if sd}
    for name in ("slow", "common", "stalls"):
        mine, usual = getattr(noise, name), getattr(empty, name)
        out |= {f"{name}.{n}" for n in vars(mine) if getattr(mine, n) != getattr(usual, n)}
    out |= {n for n in ("load", "network", "scheduled") if getattr(noise, n) != getattr(empty, n)}
    for path in belief.intervals:
        words = path.split(".")
        out.add(".".join(words[: WHOLE.get(words[0], 1)]))
    return out


def rounded(belief: Belief, digits: int = 4) -> Belief:
    """To so many digits: more than is known of it."""

    def short(value: float) -> float:
        return float(f"{value:.{digits}g}")

    numbers = {p: short(v) for p, v in belief.noise.numbers().items() if not EXACT & set(p.split("."))}
    whole = {p for p in numbers if p.endswith(".n")}
    noise = belief.noise.changed({p: v for p, v in numbers.items() if p not in whole})
    return replace(
        belief, noise=noise, intervals={p: Interval(short(i.low), short(i.high)) for p, i in belief.intervals.items()}
    )


def _under(path: str, told: set[str]) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in told)


def _over(first: Any, later: Any, path: str, told: set[str]) -> Any:
    return replace(first, **{n: getattr(later, n) for n in vars(first) if f"{path}.{n}" in told})
