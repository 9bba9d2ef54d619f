"""How many times as long as the reference a host takes: from a few calls measured on both.

The reference is the host that the terms of `host_model` were fitted on. A measurement errs, and hosts differ only so
much: the factor is the measured ratio to a power below 1, the less the more it may err, and the rest stays in the
interval (`Evidence`). The standard deviations are in `data/host_spread.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from presage.errors import InputError
from presage.files.decoding import convert_record
from presage.files.reading import read_json, shipped_toml
from presage.hardware.host import COSTS, STEPS, US, Host, cost_name, host

REFERENCE = "h200_host"
PACK_FILE = "host.json"
# Quantiles of the ratios of calls. A processor shared with others runs at full or at half speed, for seconds at a time.
# Where calls that launch kernels were measured one after the other, some fell into slow seconds: the lower quartile.
# In rounds, of which the fastest tenth counts, all calls had the same chance: the median.
LOW, MIDDLE = 0.25, 0.5


class HostSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard deviations of the logarithm of host times."""

    unknown_sd: float  # of hosts
    reference_sd: float  # of the reference, from time to time
    small_steps_sd: float  # of a step against small training steps
    launching_sd: float  # of a step against calls that launch kernels
    placement_sd: float  # of these calls, by where the process that measured them ran
    views_sd: float  # of a step against calls that launch nothing
    traced_sd: float  # of a step against the overheads of a trace


@dataclass(frozen=True, slots=True)
class HostFactors:
    """Times the reference's host time: of the main thread, of the autograd thread, of a launch call."""

    main: float = 1.0
    autograd: float = 1.0
    launch: float = 1.0

    def times(self, factor: float) -> HostFactors:
        return HostFactors(self.main * factor, self.autograd * factor, self.launch * factor)


SAME = HostFactors()


@dataclass(frozen=True, slots=True)
class MeasuredFactors:
    """Factors of a host, as measured and as taken, with what remains unknown."""

    measured: HostFactors
    taken: HostFactors
    machine_sd: float
    calls: int  # measured on both hosts


@cache
def host_spread() -> HostSpread:
    """How much hosts differ."""
    return convert_record(shipped_toml("host_spread.toml"), HostSpread)


def shrunk(measured: HostFactors, error_sd: float, calls: int) -> MeasuredFactors:
    """The likely factors, given what a measurement with such an error shows and how much hosts differ."""
    hosts = host_spread().unknown_sd
    weight = hosts**2 / (hosts**2 + error_sd**2)
    taken = HostFactors(*(x**weight for x in (measured.main, measured.autograd, measured.launch)))
    return MeasuredFactors(measured, taken, hosts * math.sqrt(1 - weight), calls)


def factors_of_host(found: Host, path: str | Path = "") -> MeasuredFactors:
    """Factors of a host by its measured calls."""
    return factors_of_costs(found.costs, path or found.key, MIDDLE if found.in_rounds else LOW)


def factors_of_costs(costs: Mapping[str, float], path: str | Path, quantile: float = LOW) -> MeasuredFactors:
    """Factors by seconds of small steps, else of calls that launch kernels (quantile of their ratios), else of all."""
    reference, spread = host(REFERENCE).costs, host_spread()
    common = [name for name in COSTS if name in costs and name in reference]
    if not common:
        raise InputError(path, "has no call that the reference has: measure it with presage calibrate --host FILE.toml")
    steps = [name for name in common if name.removesuffix("_us") in STEPS]
    launching = [] if steps else [name for name in common if name.startswith("gpu_")]
    ratios = [math.log(costs[name] / reference[name]) for name in steps or launching or common]
    factor = math.exp(float(np.quantile(ratios, quantile if launching else MIDDLE)))
    sds = (spread.launching_sd, spread.placement_sd) if launching else (spread.views_sd,)
    error = spread.small_steps_sd if steps else math.hypot(spread.reference_sd, *sds)
    return shrunk(HostFactors(factor, factor, factor), error, len(ratios))


# ---- the host of a calibration pack


def pack_host(pack: Path) -> MeasuredFactors | None:
    """Factors of the host that a pack was measured on; None where the pack has nothing of its host."""
    path = pack / PACK_FILE
    if not path.is_file():
        return None
    try:
        rows = convert_record(read_json(path), list[_PackRow])
    except msgspec.ValidationError as e:
        raise InputError(path, f"not the host's part of a calibration pack, or a damaged one ({e})") from e
    costs = {name: US * median(row.us) for row in rows if (name := cost_name(row.op)) in COSTS and row.us}
    if any(not 0 < seconds < 1 for seconds in costs.values()):
        raise InputError(path, "times of calls should be above 0 and below a second", "us")
    return factors_of_costs(costs, path)


class _PackRow(msgspec.Struct):
    op: str
    us: list[float]
    profiled_us: float | None = None
    thread: str = "main"
