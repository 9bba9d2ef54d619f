"""How large each random effect of a table is: standard deviations of logarithms with 90% intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import CredibleInterval
from presage_fit.ops.parts import averaged
from presage_fit.optable import BACKWARD, FORWARD

if TYPE_CHECKING:
    from presage_fit.ops.effects import OpEffects
from presage.noise.distribution import Distribution, Empirical, Fixed, LogNormal
from presage.noise.model import Belief, CommonNoise, NoiseModel, SlowGpus, WorkSpread
from presage_fit.ops.pool import ENOUGH
from presage_fit.random_effects import EffectEstimate, sd_estimate

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
FAR_SIZE = 4.0  # robust standard deviations from the others, from which on a worker counts as slow,
SLOW = 0.05  # if it is slower by more than this
COLLECTIVES = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")


@dataclass(frozen=True, eq=False)
class Sizes:
    """`by_name`: rank, step, replica, load, own, transfers, collectives, optimizer, host."""

    by_name: Mapping[str, EffectEstimate]
    slow: Mapping[tuple[int, int], float]  # (replica, stage): how many times as long as the others
    workers: int
    step_correlation: float  # of a step with the one before
    pass_correlation: float  # forward with backward, of the same microbatch on the same stage
    stage_correlation: float  # of a microbatch's computation on different stages


def sizes_of(effects: OpEffects) -> Sizes:
    """How large each effect is, from how many values."""
    ranks, slow = _workers(effects)
    own = effects.parts.own
    load, rest = effects.channels.split(own)
    computes = effects.cells.computes
    steps, replicas = len(effects.ids), effects.cells.shape[0]
    groups = max(replicas // effects.parts.together, 1)
    common = effects.channels.split(effects.parts.step)[0]
    replica = effects.channels.split(effects.parts.replica)[0]
    found = {
        "rank": _sd(ranks, int(np.isfinite(ranks).sum()) - ranks.shape[-1]),
        "step": _sd(common, steps - 1),
        "replica": _sd(replica, (groups - 1) * steps),
        "load": _sd(load, groups * max(own.shape[1] - 1, 0) * steps),
        "own": _sd(rest[:, :, computes], int(np.isfinite(rest[:, :, computes]).sum())),
        "transfers": _sd(own[:, :, ~computes], int(np.isfinite(own[:, :, ~computes]).sum())),
        **{name: _once(effects, which) for name, which in _once_a_step(effects).items()},
    }
    return Sizes(
        by_name=MappingProxyType(found),
        slow=MappingProxyType(slow),
        workers=ranks.size,
        step_correlation=_correlation(common.ravel(), effects.ids),
        pass_correlation=_between(effects, own, FORWARD, BACKWARD),
        stage_correlation=_across_stages(effects, own),
    )


def _sd(values: Floats, freedom: int) -> EffectEstimate:
    there = values[np.isfinite(values)]
    square = float((there**2).mean()) if len(there) else 0.0
    return _estimate(square if np.isfinite(square) else 0.0, len(there), freedom)


def _estimate(square: float, n: int, freedom: int) -> EffectEstimate:
    """A standard deviation from n values, `freedom` of which are free; of no interval where none is."""
    sd = float(np.sqrt(square))
    return replace(sd_estimate(square, freedom), n=n) if freedom > 0 else EffectEstimate(sd, math.nan, math.nan, n)


def _workers(effects: OpEffects) -> tuple[Floats, dict[tuple[int, int], float]]:
    """Logarithms by (replica, stage) of what a worker's computation takes over the others', NaN where it is slow."""
    computes = np.flatnonzero(effects.cells.computes)
    stage = np.array([effects.cells.columns[j].stage for j in computes], np.int64)
    level = effects.level.sum(axis=1)[:, computes]
    stages = int(stage.max(initial=-1)) + 1
    seconds = np.stack([level[:, stage == s].sum(axis=1) for s in range(stages)], axis=1) if stages else level[:, :0]
    logs = np.log(np.maximum(seconds, 1e-300))
    logs = logs - np.median(logs, axis=0) if logs.size else logs
    wide = 1.4826 * np.median(np.abs(logs)) if logs.size else 0.0
    slow = logs > max(FAR_SIZE * wide, SLOW)
    bulk = np.where(slow, np.nan, logs)
    return bulk - averaged(bulk, 0), {(int(d), int(s)): float(np.exp(logs[d, s])) for d, s in np.argwhere(slow)}


def _once_a_step(effects: OpEffects) -> dict[str, Bools]:
    """Tasks that no microbatch causes, by what they are."""
    names = np.array(effects.program.names)[effects.program.name]
    mine = effects.row == -1
    return {
        "collectives": mine & np.isin(names, COLLECTIVES),
        "optimizer": mine & (names == "optimizer"),
        "host": mine & np.char.endswith(names.astype(str), ": host"),
    }


def _interval(e: EffectEstimate) -> CredibleInterval | None:
    return None if math.isnan(e.low) else e.interval


def _once(effects: OpEffects, which: Bools) -> EffectEstimate:
    """Spread of the sum in a step, from the middle of the distribution: a first call's set-up is not its spread."""
    steps = len(effects.ids)
    total = effects.rest[which].sum(axis=0)
    if not np.median(total) > 0:
        return _estimate(0.0, 0, 0)
    logs = np.log(np.maximum(total, 1e-300) / np.median(total))
    return _estimate(float(1.4826 * np.median(np.abs(logs))) ** 2, steps, steps - 1)


def _correlation(common: Floats, ids: NDArray[np.int64]) -> float:
    """With the step before, from products of all pairs of steps: those k steps apart have its k-th power."""
    if len(common) < 4 or not common.any():
        return 0.0
    a, b = np.triu_indices(len(common), 1)
    apart = np.abs(ids[b] - ids[a])
    product = common[a] * common[b] / (common**2).mean()
    grid = np.append(np.linspace(0.0, 0.95, 20), 1 - np.geomspace(0.04, 0.001, 12))
    return float(min(grid, key=lambda r: float(((product - r**apart) ** 2).sum())))


def _between(effects: OpEffects, own: Floats, one: str, other: str) -> float:
    """The mean correlation of two kinds of work on the same stage and chunk."""
    columns = effects.cells.columns
    place = {(c.op, c.stage, c.chunk, c.turn): k for k, c in enumerate(columns)}
    pairs = [(k, place.get((other, *key[1:]), -1)) for key, k in place.items() if key[0] == one]
    return _mean_correlation(own, [(a, b) for a, b in pairs if b >= 0])


def _across_stages(effects: OpEffects, own: Floats) -> float:
    columns = effects.cells.columns
    pairs = [
        (a, b)
        for a, x in enumerate(columns)
        for b, y in enumerate(columns)
        if x.computes and x.op == y.op and x.stage < y.stage and x.chunk == y.chunk
    ]
    return _mean_correlation(own, pairs)


def _mean_correlation(own: Floats, pairs: list[tuple[int, int]]) -> float:
    """NaN where there is nothing to correlate."""
    each = []
    for a, b in pairs:
        x, y = own[:, :, a].ravel(), own[:, :, b].ravel()
        both = np.isfinite(x) & np.isfinite(y)
        if both.sum() > 2 and x[both].std() > 0 and y[both].std() > 0:
            each.append(float(np.corrcoef(x[both], y[both])[0, 1]))
    return float(np.mean(each)) if each else float("nan")


# What a table says about other jobs: its effects as a Belief, by class of work.

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
    intervals = paths | load_paths | {"common.sd": _interval(step), "slow.share": _share_interval(sizes)}
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
    paths = {f"spread.{k}.{part}": _interval(size[name]) for k, (part, name) in of.items()}
    paths["spread.optimizer.step"] = _interval(size["optimizer"])
    for k in (*COMPUTATION, "optimizer"):
        paths[f"spread.{k}.rank"] = _interval(size["rank"])
    return spread, paths | {f"spread.{k}.own": _interval(size["own"]) for k in COMPUTATION}


def _load(effects: OpEffects, sizes: Sizes) -> tuple[Distribution, dict[str, CredibleInterval | None]]:
    """Distribution of a microbatch's work, with mean 1: as measured where there is enough, else a LogNormal."""
    size = sizes.by_name["load"]
    if size.value == 0:
        return Fixed(1.0), {}
    logs = effects.channels.split(effects.parts.own)[0]
    factors = np.exp(logs[np.isfinite(logs)])
    if len(factors) >= ENOUGH:
        some = np.quantile(factors, (np.arange(KEPT) + 0.5) / KEPT)
        return Empirical(some / some.mean()), {}
    return LogNormal(float(np.exp(-(size.value**2) / 2)), size.value), {"load.log_sd": _interval(size)}


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
