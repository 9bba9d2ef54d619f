"""Files of failure rates: those that come with presage, by name, and a user's own.

name = "our cluster"
node_gpus = 8
node_days = 50000            # that the counts below are of; or per_1000_node_days, which shares below divide
restart_s = 300              # or by GPUs: [[16384, 200], [65536, 600]]
repair_hours = 24            # mean; repair_shape below 1 makes its tail heavy (Weibull)
frailty = 1.5                # variance of nodes' own failure rates: repeat offenders
relapse = 0.3                # share of repairs that did not help: the node fails again after relapse_hours

[[failures]]
name = "GPU"
count = 90                   # or per_1000_node_days, or share
detect_s = 60
node = 1.0                   # share of them that cost a node
repair_hours = 200           # of this class
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from math import exp, isfinite
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError, near
from presage.hardware.facts import load_toml
from presage.noise.distribution import LogNormal
from presage.runs.failures import ByScale, Failure, Reliability, Repair, SlowEpisode

DEFAULT = "llama3"  # the only set read in its own paper, by class, on H100s; its rate is amid those of the others
GROWTH = "ft-hsdp"  # whose growth with scale goes for all, where asked for
TOP = {
    "name", "node_gpus", "node_days", "per_1000_node_days", "restart_s", "load_s", "growth", "shape", "repair_hours",
    "repair_shape", "frailty", "relapse", "relapse_hours", "rate_sd", "failures", "slow", "sources",
}  # fmt: skip
FAILURE = {
    "name", "count", "per_1000_node_days", "share", "detect_s", "node", "planned", "repair_hours", "repair_shape",
}  # fmt: skip
SLOW = {"name", "count", "per_1000_node_days", "share", "minutes", "log_sd", "factor", "replaced"}
HOUR, PER_1000 = 3600.0, 1e-3


def names() -> list[str]:
    """Names of the included failure-rate sets."""
    return sorted(f.name.removesuffix(".toml") for f in files("presage").joinpath("data/runs").iterdir())


def reliability(name: str) -> Reliability:
    """A set by its name, or from a .toml file."""
    if name.endswith(".toml"):
        return read_reliability(Path(name))
    if name.lower() not in names():
        there = f"choose from {', '.join(names())}, or the path of a .toml file"
        raise PresageError(f"no failure rates {name!r}: {there}{near(name, names())}")
    return read_reliability(Path(str(files("presage").joinpath(f"data/runs/{name.lower()}.toml"))))


def chosen_reliability(
    name: str | None = None, rate: float | None = None, restart: float | None = None, superlinear: bool = False
) -> Reliability:
    """A set with another rate (per 1,000 node-days) or restart time (s), or with a rate that grows with the job."""
    kind = reliability(name or DEFAULT)
    if rate is not None:
        kind = kind.at_rate(rate)
    if restart is not None:
        kind = kind.with_restart(restart)
    return replace(kind, growth=reliability(GROWTH).growth) if superlinear else kind


def read_reliability(path: Path) -> Reliability:
    """A set from a file: see docs/whole_runs.md."""
    table = load_toml(path)
    if not table:
        raise InputError(path, "is empty: write one [[failures]] for each class, with its rate")
    reader = _Reader(path, table)
    reader.keys("", table, TOP)
    try:
        return reader.parse()
    except InputError:
        raise
    except PresageError as e:
        raise InputError(path, str(e)) from e


class _Reader:
    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self.path, self.table = path, table

    def parse(self) -> Reliability:
        t = self.table
        slow = [(f"slow.{i}", e) for i, e in enumerate(self.rows("slow"))]
        failures = [self.failure(f"failures.{i}", f) for i, f in enumerate(self.rows("failures"))]
        return Reliability(
            name=self.text("name", t.get("name", self.path.stem)),
            failures=(*failures, *(self.found(at, e) for at, e in slow if self.flag("replaced", e, at))),
            slow=tuple(self.episode(at, e) for at, e in slow),
            node_gpus=int(self.number("node_gpus", t, 8, least=1)),
            restart=self.by_scale("restart_s", 300.0),
            load=self.number("load_s", t, 0.0),
            growth=self.by_scale("growth", 1.0),
            shape=self.number("shape", t, 1.0, least=0.2),
            repair=self.repair("", t, Repair(24.0 * HOUR)),
            frailty=self.number("frailty", t, 0.0, most=1e3),
            relapse=self.number("relapse", t, 0.0, most=1.0),
            relapse_after=self.number("relapse_hours", t, 24.0, least=1e-3) * HOUR,
            rate_sd=self.number("rate_sd", t, 0.0),
            sources=self.sources(t.get("sources", {})),
        )

    def failure(self, at: str, given: Mapping[str, Any]) -> Failure:
        self.keys(at, given, FAILURE)
        planned = self.flag("planned", given, at)
        node = self.number("node", given, 0.0, at, most=1.0)
        detect = self.number("detect_s", given, 0.0 if planned else 60.0, at)
        own = "repair_hours" in given or "repair_shape" in given
        repair = self.repair(at, given, self.repair("", self.table, Repair(24.0 * HOUR))) if own else None
        return Failure(self.name(at, given), self.rate(at, given), detect, node, planned, repair)

    def found(self, at: str, given: Mapping[str, Any]) -> Failure:
        """The stop in which a slow node that was found is replaced: a checkpoint is written first."""
        return Failure(f"{self.name(at, given)}, replaced", self.rate(at, given), 0.0, 1.0, planned=True)

    def repair(self, at: str, given: Mapping[str, Any], default: Repair) -> Repair:
        """Mean hours and Weibull shape; what is not given is the default's."""
        hours = self.number("repair_hours", given, default.mean / HOUR, at)
        return Repair(hours * HOUR, self.number("repair_shape", given, default.shape, at, least=0.1, most=20.0))

    def flag(self, key: str, given: Mapping[str, Any], at: str) -> bool:
        value = given.get(key, False)
        if not isinstance(value, bool):
            raise InputError(self.path, f"is {value!r}: true or false", f"{at}.{key}")
        return value

    def episode(self, at: str, given: Mapping[str, Any]) -> SlowEpisode:
        """`minutes` are the mean of an episode, `log_sd` how far they spread."""
        self.keys(at, given, SLOW)
        wide = self.number("log_sd", given, 1.5, at, most=4.0)
        middle = self.number("minutes", given, 20.0, at, least=1e-6) / exp(wide**2 / 2)
        factor = self.number("factor", given, 1.3, at, least=1.0)
        return SlowEpisode(self.name(at, given), self.rate(at, given), LogNormal(middle, wide), max(factor, 1 + 1e-9))

    def rate(self, at: str, given: Mapping[str, Any]) -> float:
        """Failures per node-day, from a count, a share of the total, or a rate."""
        said = [k for k in ("count", "share", "per_1000_node_days") if k in given]
        if len(said) != 1:
            raise InputError(self.path, "needs one of count, share and per_1000_node_days", at)
        value, whole = self.number(said[0], given, 0.0, at), {"count": "node_days", "share": "per_1000_node_days"}
        if said[0] in whole and whole[said[0]] not in self.table:
            raise InputError(self.path, f"needs {whole[said[0]]} at the top of the file", f"{at}.{said[0]}")
        if said[0] == "count":
            return value / self.number("node_days", self.table, 1.0, least=1e-9)
        return value * PER_1000 * (self.number("per_1000_node_days", self.table, 0.0) if said[0] == "share" else 1.0)

    def by_scale(self, key: str, default: float) -> ByScale:
        given = self.table.get(key, default)
        pairs = given if isinstance(given, list) else [[1, given]]
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(_is_number(x) for x in pair):
                raise InputError(self.path, "should be a number, or a list of [GPUs, number]", key)
        return ByScale(tuple((float(g), float(v)) for g, v in pairs))

    def rows(self, key: str) -> list[dict[str, Any]]:
        given = self.table.get(key, [])
        if not isinstance(given, list) or not all(isinstance(x, dict) for x in given):
            raise InputError(self.path, f"write one [[{key}]] for each class", key)
        return given

    def number(
        self,
        key: str,
        table: Mapping[str, Any],
        default: float,
        at: str = "",
        least: float = 0.0,
        most: float = 1e12,
    ) -> float:
        value, where = table.get(key, default), f"{at}.{key}" if at else key
        if not _is_number(value):
            raise InputError(self.path, f"is {value!r}, not a number", where)
        if not least <= value <= most:
            raise InputError(self.path, f"is {value:g}: it should be {least:g} to {most:g}", where)
        return float(value)

    def name(self, at: str, given: Mapping[str, Any]) -> str:
        if "name" not in given:
            raise InputError(self.path, "is missing", f"{at}.name")
        return self.text(f"{at}.name", given["name"])

    def text(self, at: str, given: Any) -> str:
        if not isinstance(given, str) or not given.strip():
            raise InputError(self.path, f"is {given!r}: it should be text", at)
        return given

    def sources(self, given: Any) -> dict[str, str]:
        if not isinstance(given, dict):
            raise InputError(self.path, "should be a table of texts", "sources")
        return {k: self.text(f"sources.{k}", v) for k, v in given.items()}

    def keys(self, at: str, given: Mapping[str, Any], known: set[str]) -> None:
        for key in given:
            if key not in known:
                there = ", ".join(sorted(known))
                raise InputError(self.path, f"is unknown: choose from {there}", f"{at}.{key}" if at else key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
