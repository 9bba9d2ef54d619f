"""What a table says about other jobs: its effects as a Belief, by class of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from presage.noise.distribution import Distribution, Empirical, Fixed, LogNormal
from presage.noise.model import Belief, CommonNoise, CredibleInterval, NoiseModel, SlowGpus, WorkSpread
from presage_fit.ops.pool import ENOUGH
from presage_fit.ops.sizes import Sizes, sizes_of

if TYPE_CHECKING:
    from presage_fit.ops.effects import OpEffects

__all__ = ["belief_of"]

COMPUTATION = ("products", "attention", "streams")  # a table does not tell them apart: one spread for all
KEPT = 101  # quantiles that stand for measured loads


def belief_of(effects: OpEffects) -> Belief:
    """Spreads of computation, transfers, collectives, optimizer and host; loads; slow ranks; what steps share."""
    sizes = sizes_of(effects)
    spread, paths = _spreads(sizes)
    load, load_paths = _load(effects, sizes)
    step = sizes.by_name["step"]
    noise = NoiseModel(
        spread=spread,
        slow=_slow(sizes),
        load=load,
        common=CommonNoise(sd=step.value, correlation=sizes.step_correlation),
    )
    intervals = paths | load_paths | {"common.sd": step.interval, "slow.share": _share_interval(sizes)}
    known = {path: i for path, i in intervals.items() if i is not None and path in noise.numbers()}
    source = f"{effects.job}, {len(effects.ids)} steps, {sizes.workers} workers"
    return Belief(noise, known, dict.fromkeys(("spread", "slow", "load", "common"), source))


def _spreads(sizes: Sizes) -> tuple[dict[str, WorkSpread], dict[str, CredibleInterval | None]]:
    size = sizes.by_name
    compute = WorkSpread(rank=size["rank"].value, own=size["own"].value)
    spread = {
        **dict.fromkeys(COMPUTATION, compute),
        "send": WorkSpread(own=size["transfers"].value),
        "dp": WorkSpread(step=size["collectives"].value),
        "optimizer": WorkSpread(rank=size["rank"].value, step=size["optimizer"].value),
        "host": WorkSpread(step=size["host"].value),
    }
    of = {"send": ("own", "transfers"), "dp": ("step", "collectives"), "host": ("step", "host")}
    paths = {f"spread.{k}.{part}": size[name].interval for k, (part, name) in of.items()}
    paths["spread.optimizer.step"] = size["optimizer"].interval
    for k in (*COMPUTATION, "optimizer"):
        paths[f"spread.{k}.rank"] = size["rank"].interval
    return spread, paths | {f"spread.{k}.own": size["own"].interval for k in COMPUTATION}


def _load(effects: OpEffects, sizes: Sizes) -> tuple[Distribution, dict[str, CredibleInterval | None]]:
    """Of a microbatch's work, with mean 1: as measured where there is enough, else a LogNormal."""
    size = sizes.by_name["load"]
    if size.value == 0:
        return Fixed(1.0), {}
    logs = effects.channels.split(effects.parts.own)[0]
    factors = np.exp(logs[np.isfinite(logs)])
    if len(factors) >= ENOUGH:
        some = np.quantile(factors, (np.arange(KEPT) + 0.5) / KEPT)
        return Empirical(some / some.mean()), {}
    return LogNormal(float(np.exp(-(size.value**2) / 2)), size.value), {"load.log_sd": size.interval}


def _slow(sizes: Sizes) -> SlowGpus:
    if not sizes.slow:
        return SlowGpus()
    factors = np.array(list(sizes.slow.values()))
    same = len(factors) == 1
    return SlowGpus(len(factors) / sizes.workers, Fixed(float(factors[0])) if same else Empirical(factors))


def _share_interval(sizes: Sizes) -> CredibleInterval | None:
    """Jeffreys' 90% for so many slow among so many."""
    from scipy.special import betaincinv

    if not sizes.workers:
        return None
    slow, other = len(sizes.slow) + 0.5, sizes.workers - len(sizes.slow) + 0.5
    low, high = (float(betaincinv(slow, other, p)) for p in (0.05, 0.95))
    return CredibleInterval(low if sizes.slow else 0.0, high)
