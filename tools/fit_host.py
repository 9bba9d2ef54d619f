"""Fit the host model of a machine from traced steps and the same steps measured without a profiler.

    python tools/fit_host.py workloads/varied.py data/h200_varied src/presage/data/h200/host.toml

The folder holds one trace a case (NAME.json.gz) and measured.json, as tools/record.py leaves them. Every case is
captured; its last traced step is set beside the captured graph. Takes some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from presage.capture import capture, load_cases
from presage.costs.host_model import Calls, HostFit, HostModel, Pace
from presage.errors import PresageError
from presage.files import write_whole
from presage.graph.graph import Graph
from presage.traces import kineto
from presage.traces.links import latencies
from presage.traces.trace import Trace
from presage_fit.host import (
    Fit,
    HostRow,
    TracedUnit,
    fit,
    host_model_toml,
    host_us,
    profiler_cost,
    rows,
    share_found,
    traced_units,
)
from presage_validation.workloads import measured_cases

# Launches the host may be ahead of the GPU: where launch calls begin to wait in traces of GPU-bound steps.
QUEUE_DEPTH = 1021
# The GPU waits for the host below this share of active time; above the other, it is the GPU that sets the step.
HOST_BOUND, GPU_BOUND = 0.7, 0.93
# A trace with less of the graph's ops than this (one that nests them otherwise) teaches nothing.
LEAST_FOUND = 0.6


def read_cases(workloads: Path, folder: Path) -> dict[str, tuple[Graph, Trace]]:
    """Each case's captured graph and its trace."""
    out = {}
    for name, build in load_cases(workloads).items():
        path = folder / f"{name}.json.gz"
        if not path.exists():
            continue
        print(name, flush=True)
        try:
            out[name] = capture(build, source=name), kineto.read(path)
        except PresageError as e:
            print(f"  left out: {e}")
    return out


def left_out(steps: Mapping[str, Sequence[HostRow]], unprofiled: Mapping[str, float], per_event: float) -> np.ndarray:
    """Logarithm of measured over predicted host time of each step, told from all other traces; and the sum of squares
    of its threads' shares."""
    out = []
    for name, us in unprofiled.items():
        others = fit({k: v for k, v in steps.items() if k != name}, per_event)
        host = host_us(steps[name], others.us)
        total = sum(host.values())
        out.append((np.log(us / total), sum((h / total) ** 2 for h in host.values())))
    return np.array(out)


def pace_of(errors: np.ndarray, measured: Mapping[str, dict], host_bound: Sequence[str]) -> Pace:
    """Both threads vary alike and by themselves, so a step of two equal halves varies less than each."""
    share = float(np.sqrt(errors[:, 1].mean()))
    each = [np.log(measured[n]["per_step_ms"][1:]) for n in host_bound]
    each = [x - x.mean() for x in each]
    together = [float((x[1:] * x[:-1]).mean() / x.var()) for x in each]
    step_sd = float(np.median([x.std() for x in each]))
    return Pace(float(errors[:, 0].std()) / share, step_sd / share, float(np.median(together)))


def launch_calls(found: Sequence[TracedUnit]) -> tuple[list[float], list[float]]:
    """Launch calls of units with one launch that did not wait: microseconds, and the share of the rest before it."""
    alone = [u for u in found if u.launches == 1 and not u.waited]
    calls = [(u.last_launch - u.first_launch) * 1e-3 for u in alone]
    rest = [(u.first_launch - u.start) / max(1, u.end - u.start - u.last_launch + u.first_launch) for u in alone]
    return calls, rest


def calls_of(cases: Mapping[str, tuple[Graph, Trace]], found: Fit, measured: Mapping[str, dict]) -> Calls:
    """Launch calls at pace 1 without the profiler, latencies as traced, and the gap that GPU-bound steps show."""
    calls: list[float] = []
    before: list[float] = []
    for name, (_, trace) in cases.items():
        units = traced_units(trace, trace.steps[-1])
        for thread in ("main", "autograd"):
            took, share = launch_calls([u for u in units if u.thread == thread])
            calls += [t / getattr(found.paces[name], thread) - found.per_event for t in took]
            before += share
    bound = [m for m in measured.values() if GPU_BOUND * m["step_ms"] < m["gpu_active_ms"] < m["step_ms"]]
    gap = np.median([1e3 * (m["step_ms"] - m["gpu_active_ms"]) / m["kernels"] for m in bound])
    latency = np.median([latencies(t.host, t.gpu).launch[0] for _, t in cases.values()]) * 1e-3
    return Calls(float(np.median(calls)), float(np.median(before)), float(latency), float(gap), QUEUE_DEPTH)


def model_of(
    cases: Mapping[str, tuple[Graph, Trace]], measured: Mapping[str, dict], platform: Mapping[str, str]
) -> HostModel:
    poor = {n for n, (graph, trace) in cases.items() if share_found(graph, trace, trace.steps[-1]) < LEAST_FOUND}
    cases = {n: case for n, case in cases.items() if n not in poor}
    print(f"left out, as too few of their ops are in the trace: {', '.join(sorted(poor)) or 'none'}")
    steps = {name: rows(graph, trace, trace.steps[-1]) for name, (graph, trace) in cases.items()}
    host_bound = [n for n in steps if measured[n]["gpu_active_ms"] < HOST_BOUND * measured[n]["step_ms"]]
    unprofiled = {n: 1e3 * measured[n]["step_ms"] for n in host_bound}
    per_event = profiler_cost(steps, unprofiled)
    found, errors = fit(steps, per_event), left_out(steps, unprofiled, per_event)
    about = HostFit(
        gpu=platform["gpu"],
        software=f"torch {platform['torch']}, CUDA {platform['cuda']}",
        date=platform["date"],
        traces=len(steps),
        steps=len(host_bound),
        profiler_us_per_event=per_event,
        left_out_error=float(np.abs(np.expm1(-errors[:, 0])).mean()),
        left_out_sd=float(errors[:, 0].std()),
    )
    return HostModel(about, pace_of(errors, measured, host_bound), calls_of(cases, found, measured), found.us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path)
    parser.add_argument("folder", type=Path, help="traces and measured.json")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    listing = args.folder / "measured.json"
    measured = {name: runs[0] for name, runs in measured_cases(listing).items() if runs}
    platform = msgspec.json.decode(listing.read_bytes())["platform"]
    found = model_of(read_cases(args.workloads, args.folder), measured, platform)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, host_model_toml(found).encode())
    print(msgspec.json.encode([found.fitted, found.pace, found.calls]).decode())


if __name__ == "__main__":
    main()
