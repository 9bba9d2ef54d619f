"""What is believed of a job's noise with no data of it: by GPU, by size, by how its nodes are kept.

Figures, ranges and sources are in `data/noise/priors.toml`; what all GPUs share in a step is `prior_steps`'s.
Production is what is assumed unless told otherwise: few clusters are kept as those of benchmark runs are, and a promise
should be wrong on the safe side. Of large jobs each has a slow GPU as often as small ones have, because they are
watched: the share of slow GPUs falls with the job's size, but for GPUs that nobody tested (`unscreened`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from presage.errors import PresageError
from presage.hardware import Gpu, gpu_named
from presage.hardware.facts import load
from presage.noise.belief import Belief, Interval
from presage.noise.files import noise_of
from presage.noise.join import joined
from presage.noise.noise import Noise, Regimes
from presage.noise.prior_steps import architecture_of, step_prior

__all__ = ["CONDITIONS", "DEFAULT", "about", "prior"]

CONDITIONS = ("screened", "production", "unscreened")
DEFAULT = "production"
USUAL_SECONDS = 10.0  # a step's, where nothing is said
PLACE = Path(str(files("presage").joinpath("data/noise/priors.toml")))
DAY = 86400.0


def prior(
    gpu: str | Gpu, gpus: int, gpus_per_node: int = 8, step_seconds: float | None = None, conditions: str = DEFAULT
) -> Belief:
    """What is believed of a job of so many GPUs."""
    if conditions not in CONDITIONS:
        raise PresageError(f"no conditions {conditions!r}: there are {', '.join(CONDITIONS)}")
    if gpus < 1 or gpus_per_node < 1:
        raise PresageError("a job has at least one GPU, and a node too")
    seconds, nodes = step_seconds or USUAL_SECONDS, max(1.0, gpus / gpus_per_node)
    generation = _generation(gpu)
    table = _table(conditions)
    said = noise_of(_merged(table["noise"], table.get("generations", {}).get(generation, {})), PLACE)
    found = joined(step_prior(generation, nodes, seconds), said)
    return _scaled(found, table.get("scale", {}), gpus, nodes, seconds)


def about(conditions: str) -> str:
    """What conditions mean, in a line."""
    return str(_file()[conditions]["about"])


def _scaled(belief: Belief, scale: Mapping[str, Any], gpus: int, nodes: float, seconds: float) -> Belief:
    """With what depends on the size of the job: slow GPUs, stalls, congestion between nodes."""
    if not scale:
        return belief
    if not belief.noise.slow.share:
        jobs = scale["jobs_with_slow_gpu"]
        share = {k: jobs[k] / gpus for k in ("value", "low", "high")} | {"source": jobs["source"]}
        belief = joined(belief, noise_of({"slow": {"share": share, "factor": scale["slow_factor"]}}, PLACE))
    belief = _more_stalls(belief, scale["stalls"])
    return joined(belief, _congestion(scale, seconds)) if nodes > 1 else belief


def _more_stalls(belief: Belief, times: Mapping[str, Any]) -> Belief:
    """So many times the stalls of screened nodes; the two ranges add up as those of independent factors do."""
    path = "stalls.per_node_hour"
    known, value = belief.intervals[path], belief.noise.numbers()[path] * times["value"]
    wide = float(np.exp(np.hypot(np.log(known.high / known.low), np.log(times["high"] / times["low"])) / 2))
    noise = belief.noise.changed({path: value})
    intervals = {**belief.intervals, path: Interval(value / wide, value * wide)}
    return Belief(noise, intervals, {**belief.sources, path: times["source"]})


def _congestion(scale: Mapping[str, Any], seconds: float) -> Belief:
    """Two states of the network between nodes, by what is usual in a day."""
    factor, minutes, times = (scale[f"congested_{k}"] for k in ("factor", "minutes", "per_day"))
    leave = min(1.0, seconds / (60 * minutes["value"]))
    enter = min(1.0, times["value"] * seconds / (DAY - 60 * minutes["value"] * times["value"]))
    noise = Noise(network=Regimes((1.0, factor["value"]), ((1 - enter, enter), (leave, 1 - leave))))
    sources = {"network.factors": factor["source"], "network.moves": f"{minutes['source']}; {times['source']}"}
    return Belief(noise, {"network.factors.1": Interval(factor["low"], factor["high"])}, sources)


def _generation(gpu: str | Gpu) -> str:
    """The architecture of a GPU."""
    return architecture_of((gpu if isinstance(gpu, Gpu) else gpu_named(gpu)).architecture)


@cache
def _file() -> dict[str, Any]:
    return load(PLACE)


@cache
def _table(conditions: str) -> dict[str, Any]:
    """A condition's tables, over those of the one it is like."""
    own = _file()[conditions]
    return _merged(_table(own["like"]), own) if "like" in own else dict(own)


def _merged(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Table by table; what is no table of tables (a number, a distribution) as a whole."""
    out = dict(first)
    for key, value in later.items():
        inner = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if inner and "value" not in value else value
    return out
