"""Prior noise of a job without measurements of it: by GPU, size, and how its nodes are screened.

Figures, ranges and sources are in `data/noise/priors.toml`; what all GPUs share in a step is from `step_prior`.
Production is the default: few clusters are maintained like those of benchmark runs, and a promise should be wrong on
the safe side. Of large jobs each has a slow GPU as often as small ones have, because they are
watched: the share of slow GPUs falls with the job's size, but for GPUs that nobody tested (`unscreened`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.files.reading import DATA
from presage.hardware import Gpu, gpu_by_name
from presage.hardware.facts import load_toml
from presage.noise.distribution import Empirical, LogNormal, Normal, Scaled, Spliced
from presage.noise.files import parse_noise
from presage.noise.model import (
    Belief,
    CommonNoise,
    CredibleInterval,
    NetworkRegimes,
    NoiseModel,
    ScheduledSlowdown,
    Stalls,
    join_beliefs,
)

CONDITIONS = ("screened", "production", "unscreened")
DEFAULT = "production"
USUAL_SECONDS = 10.0  # a step's, where nothing is said
PLACE = DATA / "noise/priors.toml"
DAY = 86400.0


def prior(
    gpu: str | Gpu,
    gpus: int,
    gpus_per_node: int = 8,
    step_seconds: float | None = None,
    conditions: str = DEFAULT,
    without: Collection[str] = (),
) -> Belief:
    """The prior noise of a job with this many GPUs; `without`: machines or submitters whose logs it must not use."""
    if conditions not in CONDITIONS:
        raise PresageError(f"unknown conditions {conditions!r}: choose from {', '.join(CONDITIONS)}")
    if gpus < 1 or gpus_per_node < 1:
        raise PresageError("a job has at least one GPU, and a node at least one")
    seconds, nodes = step_seconds or USUAL_SECONDS, max(1.0, gpus / gpus_per_node)
    generation = _generation(gpu)
    table = _table(conditions)
    figures = parse_noise(_merged(table["noise"], table.get("generations", {}).get(generation, {})), PLACE)
    belief = join_beliefs(step_prior(generation, nodes, seconds, without), figures)
    return _scaled(belief, table.get("scale", {}), gpus, nodes, seconds)


def _scaled(belief: Belief, scale: Mapping[str, Any], gpus: int, nodes: float, seconds: float) -> Belief:
    """With what depends on the size of the job: slow GPUs, stalls, congestion between nodes."""
    if not scale:
        return belief
    if not belief.noise.slow.share:
        jobs = scale["jobs_with_slow_gpu"]
        share = {k: jobs[k] / gpus for k in ("value", "low", "high")} | {"source": jobs["source"]}
        belief = join_beliefs(belief, parse_noise({"slow": {"share": share, "factor": scale["slow_factor"]}}, PLACE))
    belief = _more_stalls(belief, scale["stalls"])
    return join_beliefs(belief, _congestion(scale, seconds)) if nodes > 1 else belief


def _more_stalls(belief: Belief, times: Mapping[str, Any]) -> Belief:
    """More stalls than on screened nodes, by a factor; the two ranges combine as independent factors."""
    path = "stalls.per_node_hour"
    known, value = belief.intervals[path], belief.noise.numbers()[path] * times["value"]
    wide = float(np.exp(np.hypot(np.log(known.high / known.low), np.log(times["high"] / times["low"])) / 2))
    noise = belief.noise.changed({path: value})
    intervals = {**belief.intervals, path: CredibleInterval(value / wide, value * wide)}
    return Belief(noise, intervals, {**belief.sources, path: times["source"]})


def _congestion(scale: Mapping[str, Any], seconds: float) -> Belief:
    """Two states of the network between nodes, by what is usual in a day."""
    factor, minutes, times = (scale[f"congested_{k}"] for k in ("factor", "minutes", "per_day"))
    leave = min(1.0, seconds / (60 * minutes["value"]))
    enter = min(1.0, times["value"] * seconds / (DAY - 60 * minutes["value"] * times["value"]))
    noise = NoiseModel(network=NetworkRegimes((1.0, factor["value"]), ((1 - enter, enter), (leave, 1 - leave))))
    sources = {"network.factors": factor["source"], "network.moves": f"{minutes['source']}; {times['source']}"}
    return Belief(noise, {"network.factors.1": CredibleInterval(factor["low"], factor["high"])}, sources)


def _generation(gpu: str | Gpu) -> str:
    """The architecture of a GPU."""
    return architecture_of((gpu if isinstance(gpu, Gpu) else gpu_by_name(gpu)).architecture)


@cache
def _file() -> dict[str, Any]:
    return load_toml(PLACE)


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


# How steps differ when nothing is known of a job but its GPUs, its nodes and the seconds of a step: four laws with a
# constant each, from the systems of `data/noise/step_systems.toml` (medians, so that no single machine decides):
# - jitter is additive: its width grows with the step up to `jitter_seconds` (half of it at HALF_SECONDS);
# - steps drift over a run, by GPU architecture;
# - runs of one job differ, and some runs are slower as a whole;
# - small holdups (a few widths to STALL seconds) are the jitter's tail; longer ones are stalls, which take the same
#   share of the time whatever the job's size: of 64 to 1,024 nodes the rate per node-hour may fall with the nodes or
#   not (exponent of the rate per hour 0.9, from -0.3 to 1.6), the largest systems lost 0 to 0.1%, and large jobs are
#   better watched. Below the smallest known system they fall with the nodes.
# Ranges: 64 to 1,024 nodes of GB200, H100 and H200 (256 to 8,192 GPUs), steps of 5 to 55 s, runs of 20 minutes to 4
# hours, all pre-training of one model in MLPerf v5.0; HALF_SECONDS alone is from shorter steps (0.25 to 1.5 s, block
# means). Tuned runs on screened nodes: production is noisier. To score a system the constants are taken from the other
# machines' systems (`without`).
HALF_SECONDS = 5.0
STALL = 1.0  # seconds
SCORES = np.linspace(-3.2, 3.2, 65)  # normal scores at which the shape of residuals is kept
LIMIT = 6.0  # widths: what is longer was held up
SHARE, CORRELATION = 0.3, 0.6  # of the jitter that goes with the step before
LEAST_SHARE = 1e-4  # of the time: stalls there always are
USUAL_STALL = (3.0, 1.0)  # seconds, and the spread of their logarithm, where none was seen
SOURCE = "MLPerf Training v5.0 logs of Llama 3.1 405B"
SYSTEMS = DATA / "noise/step_systems.toml"
FAMILIES = (("Blackwell", r"G?B[23]00|Blackwell"), ("Hopper", r"G?H[128]00|H20|Hopper"), ("Ampere", r"A[18]00|Ampere"),
            ("CDNA", r"MI[0-9]{3}"))  # fmt: skip


@dataclass(frozen=True)
class StepSystem:
    """Parameters fitted to one system's runs."""

    name: str
    machine: str
    architecture: str
    nodes: int
    step_seconds: float
    jitter_seconds: float  # width of the residuals
    drift: float
    run_sd: float
    hours: float  # of all runs
    stalls: int  # longer than STALL
    lost_seconds: float  # by them
    stall_seconds: float  # their geometric mean; 0 where there was none
    holdups: float  # share of steps that something shorter held up
    holdup_seconds: float  # their median; 0 where there was none
    first_step: float
    second_step: float
    first_validation: float
    later_validation: float

    @property
    def submitter(self) -> str:
        """Who ran it, as named in the submission."""
        return self.machine.rpartition("/")[0]


@cache
def known_systems() -> tuple[StepSystem, ...]:
    return tuple(StepSystem(**row) for row in load_toml(SYSTEMS)["system"])


def architecture_of(accelerator: str) -> str:
    """The GPU architecture in a chip's name, or the name."""
    return next((name for name, words in FAMILIES if re.search(words, accelerator)), accelerator)


def machine_of(submitter: str, system: str) -> str:
    """The name of a machine from its submission: submitter, and the first word of the system."""
    word = re.match(r"[A-Za-z]{3,}", system)
    return f"{submitter}/{word[0].lower() if word else system}"


def step_prior(
    gpu_architecture: str,
    nodes: float,
    step_seconds: float,
    without: Collection[str] = (),
    systems: Sequence[StepSystem] | None = None,
) -> Belief:
    """The prior of a job's steps; `without` names machines or submitters to leave out."""
    every = known_systems() if systems is None else systems
    known = [s for s in every if s.machine not in without and s.submitter not in without]
    if not known or step_seconds <= 0 or nodes <= 0:
        raise PresageError("steps of a job need their seconds, the number of nodes and at least one known system")
    common, intervals = _common(known, gpu_architecture, step_seconds)
    stalls, more = _stalls(known, nodes)
    scheduled = tuple(ScheduledSlowdown(name, _factor([getattr(s, key) for s in known])) for name, key in EVENTS)
    sources = {p: f"{SOURCE}: {len(known)} systems" for p in ("common", "stalls", "scheduled")}
    return Belief(NoiseModel(common=common, stalls=stalls, scheduled=scheduled), intervals | more, sources)


EVENTS = (
    ("step 1 of a run", "first_step"),
    ("step 2 of a run", "second_step"),
    ("after the first validation", "first_validation"),
    ("after a later validation", "later_validation"),
)


def _common(
    known: Sequence[StepSystem], architecture: str, seconds: float
) -> tuple[CommonNoise, dict[str, CredibleInterval]]:
    grown = seconds / (seconds + HALF_SECONDS)
    widths = [s.jitter_seconds * (s.step_seconds + HALF_SECONDS) / s.step_seconds for s in known]
    width, low, high = (grown * w for w in _log_interval(widths))
    alike = [s for s in known if s.architecture == architecture] or list(known)
    drifts = np.array([s.drift for s in alike])
    off = 1.4826 * float(np.median(np.abs(drifts - np.median(drifts)))) + 0.002
    run, run_low, run_high = _log_interval([max(s.run_sd, 2e-4) for s in known])
    unit = _unit()
    jitter = _jitter(known, unit, float(np.sqrt(1 - SHARE)) * width)
    common = CommonNoise(
        sd=float(np.sqrt(SHARE)) * width * float(np.std(unit)) / seconds,
        correlation=CORRELATION,
        drift=float(np.median(drifts)),
        drift_sd=off,
        run_sd=run,
        jitter=jitter,
    )
    over, most = jitter.over, max(2 * jitter.over, *(s.holdups for s in known))
    return common, {
        "common.sd": CredibleInterval(common.sd * low / width, common.sd * high / width),
        "common.correlation": CredibleInterval(0.2, 0.9),
        "common.drift": CredibleInterval(common.drift - 1.645 * off, common.drift + 1.645 * off),
        "common.run_sd": CredibleInterval(run_low, run_high),
        "common.jitter.body.factor": CredibleInterval(*(float(np.sqrt(1 - SHARE)) * w for w in (low, high))),
        "common.jitter.over": CredibleInterval(over**2 / most, most),
    }


def _jitter(known: Sequence[StepSystem], unit: NDArray[np.float64], width: float) -> Spliced:
    """Jitter in seconds: a body, and holdups above it as often as in the median system."""
    body = Scaled(Empirical(unit), width, 0.0)
    seen = [s.holdup_seconds for s in known if s.holdups] or [0.3]
    above = LIMIT * width
    tail = LogNormal(max(float(np.median(seen)) - above, width), 0.8)
    return Spliced(body, Scaled(tail, 1.0, above), above, max(float(np.median([s.holdups for s in known])), 1e-3))


def skewed_shape() -> NDArray[np.float64]:
    """Residuals of steps at SCORES, in standard deviations: the longer tail is above."""
    return np.where(SCORES < 0, 1.3 * SCORES * (1 - 0.12 * np.abs(SCORES)), SCORES + 0.35 * SCORES**2)


def _unit() -> NDArray[np.float64]:
    from scipy.special import ndtri

    values = np.interp(ndtri((np.arange(32) + 0.5) / 32), SCORES, skewed_shape())
    return np.asarray(np.round(values - np.median(values), 3))


def _stalls(known: Sequence[StepSystem], nodes: float) -> tuple[Stalls, dict[str, CredibleInterval]]:
    """Stalls that take the share of time that they took in all known systems together, at most the largest of each."""
    lost = sum(s.lost_seconds for s in known)
    share = max(lost / (3600 * sum(s.hours for s in known)), LEAST_SHARE)
    most = max(*(s.lost_seconds / (3600 * s.hours) for s in known), 2 * share)
    count = np.array([s.stalls for s in known])
    if not count.any():
        seconds = LogNormal(*USUAL_STALL)
    else:
        middle = float(np.exp(np.average(np.log([max(s.stall_seconds, 1e-3) for s in known]), weights=count)))
        seconds = LogNormal(middle, float(np.sqrt(2 * np.log(max(lost / count.sum() / middle, 1.1)))))
    rate = share * 3600 / (seconds.mean * max(nodes, min(s.nodes for s in known)))
    return Stalls(rate, seconds), {"stalls.per_node_hour": CredibleInterval(rate * share / most, rate * most / share)}


def _factor(excess: Sequence[float]) -> Normal:
    off = 1.4826 * float(np.median(np.abs(np.array(excess) - np.median(excess))))
    return Normal(1 + float(np.median(excess)), off)


def _log_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the middle 90% of what another system may have."""
    logs = np.log(values)
    middle, sd = float(np.median(logs)), float(np.std(logs)) if len(logs) > 1 else 1.0
    return tuple(float(np.exp(middle + 1.645 * k * sd)) for k in (0, -1, 1))  # type: ignore[return-value]
