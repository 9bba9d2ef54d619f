"""How a host's pace changes, and how far one measurement of a step tells another: the evidence behind docs/hosts.md.

    python tools/compare_pace.py           # data/h200_field: paced*.json (tools/record_paced.py) against earlier days

`states`: views by probe, which a shared processor runs at full or at half speed. `processes`: how far the fastest tenth
of calls and the mean of small steps differ between processes, and what a small step takes (reference of
src/presage/hardware/hosts/h200_host.toml, times that machine's pace). `within`: stretches of half a second
of one process. `between`: host-bound steps measured twice, each pair of measurements brought to the same mean; `even`:
the later one divided by the pace of the small training step beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "data" / "h200_field"
HOST_BOUND = 0.93
VIEWS, SLOW_US = 150, 1.8  # views in a probe; above this a view is at the slow pace
CPU_BOUND = ("mpnet_b16_s256_amp", "wavlm_b4_amp")  # ops on large tensors of the host: 5 to 8 times as long on one day


def cases(name: str) -> dict[str, dict[str, Any]]:
    found = json.loads((FOLDER / name).read_text())["cases"]
    return {n: r for n, r in found.items() if "step_ms" in r}


def part_us(probe: Mapping[str, Any], part: str) -> float:
    """Microseconds elapsed in a part of a probe, the median of its passes."""
    return float(np.median([elapsed for elapsed, *_ in probe[part]]))


def pace(row: Mapping[str, Any], part: str = "dense_step") -> float:
    """Mean logarithm of a part over a case's probes."""
    return float(np.mean([np.log(part_us(p, part)) for p in row["probes"]]))


def states(rows: Iterable[Mapping[str, Any]]) -> None:
    us = np.array([part_us(p, "view") / VIEWS for r in rows for p in r["probes"]])
    slow = us > SLOW_US
    print(f"views: {len(us)} probes, {slow.mean():.0%} slow; medians {np.median(us[~slow]):.2f} and ", end="")
    print(f"{np.median(us[slow]):.2f} us; between 1.7 and 2.1 us {np.mean((us > 1.7) & (us < 2.1)):.0%}")


def processes(rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    for part in ("add", "linear"):
        fast = [np.log(np.quantile([passed[0] for p in r["probes"] for passed in p[part]], 0.1)) for r in rows]
        print(f"{part}: fastest tenth by process: standard deviation {np.std(fast):.3f}")
    for part in ("dense_step", "conv_step"):
        last = np.mean([p[part][-1][0] for r in rows for p in r["probes"]])
        print(f"{part}: last passes {last:.0f} us; by process {np.std([pace(r, part) for r in rows]):.3f}")


def within(rows: Iterable[Mapping[str, Any]]) -> None:
    logs = [np.log([s["step_ms"] for s in r["stretches"]]) for r in rows]
    print(f"stretches of half a second: standard deviation {np.sqrt(np.mean([x.var(ddof=1) for x in logs])):.3f}")


def between(name: str, a: Mapping[str, float], b: Mapping[str, float], even: Mapping[str, float] | None = None) -> None:
    """Steps that both have, of which `even` are the later at one pace."""
    both = [n for n in a if n in b]
    for how, later in (("as measured", b), ("at one pace", even)):
        if later is not None:
            x = np.array([np.log(a[n] / later[n]) for n in both])
            off, sd = np.abs(x - x.mean()).mean(), x.std()
            print(f"{name}, {how}: {len(x)} steps, {np.exp(x.mean()):.2f} times; beyond that {off:.1%}, sd {sd:.2f}")


def main() -> None:
    first, again, second = (cases(n) for n in ("measured.json", "again.json", "second.json"))
    paced = cases("paced_first.json") | cases("paced.json")
    active = {n: r["gpu_active_ms"] for n, r in (first | second).items()}
    bound = {n: r for n, r in paced.items() if active[n] < HOST_BOUND * r["step_ms"]}
    states(paced.values())
    processes(paced.values())
    within(bound.values())
    mean = np.mean([pace(r) for r in paced.values()])
    later = {n: r["step_ms"] for n, r in bound.items()}
    even = {n: s / np.exp(pace(bound[n]) - mean) for n, s in later.items()}
    between("first list, earlier over later", _steps(first, active), later, even)
    between("second list, earlier over later", _steps(second, active), later, even)
    between("first list, two machines of one day", _steps(first, active), _steps(again, active))


def _steps(rows: Mapping[str, Mapping[str, Any]], active: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of the host-bound ones."""
    ms = {n: float(r["step_ms"]) for n, r in rows.items() if n not in CPU_BOUND}
    return {n: step for n, step in ms.items() if active[n] < HOST_BOUND * step}


if __name__ == "__main__":
    main()
