"""Fit what a collective and a kernel cost each other from measured pairs, and score it on pairs kept out.

    python tools/fit_overlap.py data/h200_overlap src/presage/data/h200/overlap.toml

The folder holds what `python tools/measure_overlap.py` wrote: overlap.jsonl.gz, and again.jsonl.gz of a second
run, which tells how far two runs lie apart and how long a collective waits to begin. Kept out of the fit: every third
load of a kind, and all pairs with 12 or 20 channels. Left out of both: 1 and 2 channels, which large collectives
between GPUs do not come with. Fitted is the logarithm of the slow-down, squared misses added up, by a search along the
axes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from presage.costs.overlap import TILE, Kind, OverlapLaw, kind_of, slowdowns
from presage.files import write_whole
from presage.hardware import gpu

HELD_OUT, LEAST = (12, 20), 4  # channels
SLOWEST = (16, 60.0)  # of the paced ones: where a collective has time to spare whatever runs beside
TENSOR = ("bfloat16", "tf32")
TRAFFIC = 3.0
ISSUE_US = 5.0  # between an event's record and the next kernel's first block, on an idle GPU
FIRST = OverlapLaw(1.7, 0.87, 0.75, 0.75, 0.75, 0.1, 0.2, 0.1, 0.8, 2.0, 2.0, 3.0, 3.0)


class Pair(NamedTuple):
    load: str
    family: str
    kind: Kind
    moves: bool
    channels: int
    set_rate: float  # GB/s; 0: as fast as it can
    drawn: float  # by the collective alone
    held: float
    waves: float
    compute: float
    collective: float | None
    kept_out: bool


def results(name: str) -> float:
    """Of a product or a convolution, from its name."""
    sizes = [int(s) for s in name.rsplit("_", 1)[-1].split("x")] if "x" in name else []
    if name.startswith("gemm"):
        return float(sizes[0] * sizes[1])
    return float(sizes[0] * sizes[2] * sizes[3] ** 2) if name.startswith("conv") else math.inf


def _setting(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["beside"], row.get("channels", 0), row.get("set_GBps", 0.0)


def pairs(rows: Sequence[dict[str, Any]]) -> list[Pair]:
    """Medians over the rounds."""
    h200 = gpu("h200")
    reached = h200.sustained_copy or h200.memory_bandwidth
    facts = {r["fact"]: r for r in rows if "fact" in r}
    alone = {_setting(r): r["bus_GBps"] for r in rows if r["part"] == "rates"}
    us, bus = defaultdict(list), defaultdict(list)
    for r in rows:
        if r["part"].startswith("burst"):
            us[r["load"], _setting(r)].append(r["us"])
            bus[r["load"], _setting(r)].append(r.get("bus_GBps", 0.0))
    kept_out = set(_every_third(facts))
    out = []
    for (load, setting), times in us.items():
        beside, n, rate = setting
        if n < LEAST:
            continue
        fact, usual = facts[load], statistics.median(us[load, ("none", 0, 0.0)])
        slower = alone[setting] / statistics.median(bus[load, setting]) if beside == "moves" else None
        if (
            slower and fact["number"] in TENSOR
        ):  # a pace counted in cycles falls with the clock, which tensor cores lower
            slowest = ("moves", *SLOWEST)
            slower /= alone[slowest] / statistics.median(bus[load, slowest])
        held = min(1.0, fact["bytes"] / (usual * 1e-6) / reached)
        drawn = alone.get(setting, 0.0) * 1e9 * TRAFFIC / reached
        w = max(1.0, math.ceil(results(load) / TILE / h200.sms)) if results(load) < math.inf else math.inf
        kind = kind_of(fact["family"])
        compute, apart = statistics.median(times) / usual, load in kept_out or n in HELD_OUT
        moves, family = beside == "moves", fact["family"]
        out.append(Pair(load, family, kind, moves, n, rate, drawn, held, w, compute, slower, apart))
    return out


def _every_third(facts: dict[str, dict[str, Any]]) -> Iterable[str]:
    by_kind = defaultdict(list)
    for name, fact in facts.items():
        by_kind[kind_of(fact["family"])].append(name)
    for names in by_kind.values():
        yield from names[2::3]


def told(law: OverlapLaw, p: Pair) -> tuple[float, float]:
    found = slowdowns(law, p.kind, 132, p.channels, p.drawn, p.held, p.waves)
    return found.compute, found.collective


def miss(law: OverlapLaw, some: Sequence[Pair]) -> float:
    """Squared misses of both slow-downs."""
    total = 0.0
    for p in some:
        compute, collective = told(law, p)
        total += math.log(compute / p.compute) ** 2
        if p.collective:
            total += math.log(collective / p.collective) ** 2
    return total


def search(start: OverlapLaw, cost: Callable[[OverlapLaw], float], rounds: int = 60) -> OverlapLaw:
    """Each constant in turn a step up or down, and smaller steps when none helps."""
    best, least, step = start, cost(start), 0.2
    for _ in range(rounds):
        before = least
        for name, value in asdict(best).items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(best, **{name: value * factor})
                if tried.full >= 0.98 or tried.most > 1.0:
                    continue
                now = cost(tried)
                if now < least:
                    best, least = tried, now
        if before - least < 1e-4 * before:
            step /= 2
        if step < 0.004:
            break
    return best


def score(law: OverlapLaw, some: Sequence[Pair]) -> dict[str, float]:
    """Relative errors of the slow-downs, beside those of saying that nothing slows."""
    told_, found = np.array([told(law, p)[0] for p in some]), np.array([p.compute for p in some])
    errors, none = np.abs(told_ / found - 1), np.abs(1 / found - 1)
    out = {"n": len(some), "mape": errors.mean(), "p90": np.quantile(errors, 0.9), "bias": (told_ / found - 1).mean()}
    paced = [p for p in some if p.collective and p.set_rate]
    if paced:
        misses = np.abs([told(law, p)[1] / (p.collective or 1) - 1 for p in paced])
        out |= {"collective_mape": misses.mean(), "collective_p90": np.quantile(misses, 0.9)}
    return {k: round(float(v), 4) for k, v in {**out, "mape_if_ignored": none.mean()}.items()}


def start_waits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By priority and kind: what a collective waits for its first block, as a share of the kernels' time; the mean over
    moments, channels and loads that run one kernel a call."""
    facts = {r["fact"]: r for r in rows if "fact" in r}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in rows:
        if r["part"].startswith("late") and r["late"] in ("low", "high") and len(facts[r["load"]]["kernels"]) < 2:
            waits = [max(0.0, a - b - ISSUE_US) for a, b in zip(r["us"], r["inside_us"], strict=True)]
            found[r["late"]][kind_of(facts[r["load"]]["family"])].append(statistics.mean(waits) / r["call_us"])
    return {p: {k: round(statistics.mean(v), 3) for k, v in kinds.items()} for p, kinds in found.items()}


def apart(found: Sequence[Pair], again: Sequence[Pair]) -> dict[str, float]:
    """How far the slow-downs of two runs lie apart."""
    first = {(p.load, p.moves, p.channels, p.set_rate): p.compute for p in found}
    misses = [abs(p.compute / first[p.load, p.moves, p.channels, p.set_rate] - 1) for p in again]
    return {
        "n": len(misses),
        "mean": round(statistics.mean(misses), 4),
        "p90": round(float(np.quantile(misses, 0.9)), 4),
    }


def page(law: OverlapLaw, kept: dict[str, Any], rows: Sequence[dict[str, Any]], more: Sequence[dict[str, Any]]) -> str:
    """The TOML file: constants, what they are from, how well they hold, and the channels as they were."""
    header, found, facts = rows[0], pairs(rows), [r for r in rows if "fact" in r]
    lines = ["# Made by tools/fit_overlap.py from data/h200_overlap; [channels] is written by hand.", "", "[law]"]
    lines += [f"{k} = {v:.4g}" for k, v in asdict(law).items()]
    lines += [
        "",
        "[fitted]",
        f'gpu = "{header["gpu"]}"',
        f'software = "torch {header["torch"]}, CUDA {header["cuda"]}"',
    ]
    lines += [f'date = "{header["date"]}"', f"pairs = {sum(not p.kept_out for p in found)}"]
    held = [p for p in found if p.kept_out]
    for name, some in {
        "all": held,
        **{k: [p for p in held if p.kind == k] for k in sorted({p.kind for p in held})},
    }.items():
        lines += ["", f"[kept_out.{name}]", *(f"{k} = {v}" for k, v in score(law, some).items())]
    lines += ["", "[two_runs]", *(f"{k} = {v}" for k, v in apart(found, pairs([*facts, *more])).items())]
    for name, shares in start_waits([*facts, *more]).items():
        lines += ["", f"[start.{name}]", *(f"{k} = {v}" for k, v in shares.items())]
    for name, table in kept.items():
        lines += ["", f"[channels.{json.dumps(name)}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as f:
        return [json.loads(line) for line in f]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows, more = read(args.folder / "overlap.jsonl.gz"), read(args.folder / "again.jsonl.gz")
    inside = [p for p in pairs(rows) if not p.kept_out]
    law = search(FIRST, lambda tried: miss(tried, inside))
    kept = tomllib.loads(args.out.read_text())["channels"] if args.out.exists() else {}
    write_whole(args.out, page(law, kept, rows, more).encode())
    print(args.out.read_text())


if __name__ == "__main__":
    main()
