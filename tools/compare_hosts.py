"""How much hosts differ, and how well a trace tells a host's pace: the evidence behind data/host_spread.toml.

    python tools/compare_hosts.py DATA              # the shared data: h200/ and traces/
    python tools/compare_hosts.py DATA --reference src/presage/data/h200/overheads.toml   # writes the reference first

Three tables. `machines`: host time within matched ops of public traces against the H200's (44 of data/h200_varied), as
profiled on both sides; recorders of execution traces and profilers before PyTorch 1.10 slow a host much more than
today's, so those machines count for launch calls alone. `profiler`: what tells a host-bound step without the profiler
from its profiled one, each rule fitted on one set of steps (12 of DATA/h200, 33 of data/h200_varied) and scored on the
other. `steps`: steps of DATA/h200 told by their own trace's factor, against the same run without the profiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import profiler_cost as pc

from presage.capture import capture, load_cases
from presage.costs.host_factors import HostFactors
from presage.costs.host_model import HostModel, host_model
from presage.errors import PresageError
from presage.files.reading import read_toml
from presage.prediction.step import STEPS, step_program
from presage.traces import kineto
from presage.traces.overhead_factors import KINDS, overheads_of, reference_overheads
from presage.traces.overheads import Kind, Overheads, Role, extract, overheads, pool
from presage_validation.workloads import measured_times

ROOT = Path(__file__).resolve().parents[1]
VARIED = ROOT / "data" / "h200_varied"
HOST_BOUND, NOT_GPU_BOUND = 0.7, 0.93
LEAST = 20  # samples of an op in the reference's file
MACHINES = {
    "dlrm_8xv100": "dlrm_8xv100/kineto_*",
    "allreduce_v100": "hta/allreduce_heavy_v100_*",
    "dlrm_a100": "hta/dlrm_a100_*",
    "recsys_a100": "hta/recsys_a100_*",
    "tiny_h100": "tiny_transformer_h100/*",
    "tracelens_h100": "tracelens/h100/*",
    "sglang_b200": "sglang_gptoss120b_tp8_b200/extend_rank_[0-3]*",
    "vllm_b200": "tracelens/b200/*",
}
SLOWED = {
    "recsys_sampled": "hta/recsys_sampled_*",
    "resnet_ddp_a100": "hta/resnet50_ddp_a100_*",
    "resnet_v100": "kineto_resnet50_v100/*/*",
    "megatron_a100": "megatron_tp8_a100/kineto_*",
    "param_2080ti": "param_2080ti/*_kineto*",
    "torchrec_v100": "torchrec_dlrm_4xv100/*/rank_0*",
}
VIEWS = (
    "view",
    "transpose",
    "slice",
    "t",
    "permute",
    "reshape",
    "unsqueeze",
    "select",
    "expand",
    "as_strided",
    "detach",
)


def table_of(paths: Iterable[Path]) -> Overheads:
    """Overheads as profiled, all traces together, without the first step of each."""
    return overheads(pool([extract(kineto.read(p), skip_steps=1) for p in paths]))


def write_reference(out: Path) -> None:
    """The overheads of the reference's traces, of ops seen often enough."""
    found = table_of(sorted(VARIED.glob("*.json.gz"))).without_profiler()
    kept = {k: x for k, x in found.table.items() if x.n >= LEAST and k[0].name in ("T1", *KINDS) and k[2] != Role.OTHER}
    platform = replace(found.platform, traces=("data/h200_varied",))
    replace(found, table=kept, platform=platform).to_toml(out)
    lines = [_short(line) for line in out.read_text().splitlines()]
    out.write_text("\n".join(lines) + "\n")


def _short(line: str) -> str:
    """A row with its count and its mean alone."""
    key, found, values = line.rpartition(" = {")
    return f"{key} = {{{', '.join(values.split(', ')[:2])}}}" if found else line


def log_ratio(found: Overheads, kinds: Sequence[Kind], roles: Sequence[Role], views: bool | None = None) -> float:
    """Of matched ops against the reference, as profiled; `views`: of these alone, or of all others."""
    known, above, below = reference_overheads().rows, 0.0, 0.0
    for (kind, key, role), x in found.table.items():
        row = known.get((kind.name, role.name.lower(), key))
        is_view = key.removeprefix("aten::") in VIEWS
        if row is None or kind not in kinds or role not in roles or (views is not None and is_view != views):
            continue
        above, below = above + x.n * x.mean * 1e6, below + x.n * row.mean_us / reference_overheads().unprofiled
    return float(np.log(above / below)) if above and below else float("nan")


def machines(data: Path) -> None:
    every = [Kind[k] for k in KINDS]
    both = [Role.MAIN, Role.AUTOGRAD]
    rows: dict[str, list[float]] = {}
    for name, pattern in (MACHINES | SLOWED).items():
        found = table_of(sorted((data / "traces").glob(pattern)))
        rows[name] = [log_ratio(found, every, both), log_ratio(found, [Kind.T4], both)]
        print(f"{name:18} all host time {np.exp(rows[name][0]):6.2f}  launch calls {np.exp(rows[name][1]):5.2f}")
    level = [rows[n][0] for n in MACHINES]
    print(f"all host time, {len(level)} machines: root mean square of the logarithm {_rms(level):.2f}")
    calls = [r[1] for r in rows.values()]
    print(f"launch calls, {len(calls)} machines: {_rms(calls):.2f}")
    for name, folder in (("data/h200_varied", VARIED), ("h200", data / "h200" / "traces")):
        each = [table_of([p]) for p in sorted(folder.glob("*.json.gz"))]
        x = np.array([log_ratio(t, [Kind.ALONE], [Role.MAIN], views=True) for t in each])
        y = np.array([log_ratio(t, [k for k in every if k != Kind.T4], [Role.MAIN], views=False) for t in each])
        ok = np.isfinite(x) & np.isfinite(y)
        x, y = x[ok] - x[ok].mean(), y[ok] - y[ok].mean()
        slope = float((x * y).sum() / (x * x).sum())
        print(f"{name}: {ok.sum()} traces, main thread by views: slope {slope:.2f}, rest {np.std(y - slope * x):.2f}")


def _rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def profiler(data: Path) -> None:
    """Every rule fitted on one set and scored on the other."""
    sets = {"h200": profiled(data), "h200_varied": profiled_varied()}
    for fitted, scored in (("h200", "h200_varied"), ("h200_varied", "h200")):
        a, b = _columns(sets[fitted]), _columns(sets[scored])
        extra = a["profiled"] - a["unprofiled"]
        cost, share = np.median(extra / a["events"]), np.median(a["unprofiled"] / a["profiled"])
        multiple = np.median(extra / (a["events"] * a["pace"]))
        told = {
            "as profiled": b["profiled"],
            f"{cost * 1e6:.2f} us per event less": b["profiled"] - cost * b["events"],
            f"{multiple:.2f} times the pace per event less": b["profiled"] - multiple * b["events"] * b["pace"],
            f"times {share:.3f}": b["profiled"] * share,
        }
        for rule, seconds in told.items():
            off = np.abs(seconds / b["unprofiled"] - 1)
            print(
                f"{fitted} -> {scored} ({len(off)} steps) {rule:36} mean {off.mean():.1%}, median {np.median(off):.1%}"
            )


def _columns(steps: Sequence[pc.ProfiledStep]) -> dict[str, np.ndarray]:
    return {k: np.array([getattr(x, k) for x in steps]) for k in ("profiled", "unprofiled", "events", "pace")}


def profiled(data: Path) -> list[pc.ProfiledStep]:
    cases = json.loads((data / "h200" / "measured.json").read_text())["cases"]
    runs = {n: runs["b"] for n, runs in cases.items()}
    bound = [n for n, m in runs.items() if m["gpu_active_ms"] < NOT_GPU_BOUND * m["step_ms"]]
    return [_profiled(data / "h200" / "traces" / f"{n}.json.gz", runs[n]) for n in bound]


def profiled_varied() -> list[pc.ProfiledStep]:
    runs = json.loads((VARIED / "measured.json").read_text())["cases"]
    bound = [n for n, m in runs.items() if "step_ms" in m and m["gpu_active_ms"] < HOST_BOUND * m["step_ms"]]
    return [_profiled(VARIED / f"{n}.json.gz", runs[n]) for n in bound if (VARIED / f"{n}.json.gz").exists()]


def _profiled(path: Path, run: Mapping[str, float]) -> pc.ProfiledStep:
    return pc.profiled_step(kineto.read(path), 1e-3 * run["step_ms"])


def steps(data: Path) -> None:
    """Host-bound steps by the factor of their own trace: logarithm of measured over predicted."""
    cases = json.loads((data / "h200" / "measured.json").read_text())["cases"]
    builders, host = load_cases(data / "h200" / "workloads.py"), host_model("h200")
    errors: dict[str, list[float]] = {"reference": [], "trace": [], "trace, as profiled": []}
    for name, runs in cases.items():
        run = runs["b"]
        if run["gpu_active_ms"] > HOST_BOUND * run["step_ms"]:
            continue
        try:
            graph = capture(builders[name], source=name)
        except PresageError as e:
            print(f"{name} left out: {e}")
            continue
        path = data / "h200" / "traces" / f"{name}.json.gz"
        trace, share = kineto.read(path), _share(path)
        times = measured_times(graph, trace, trace.steps[-1])
        unprofiled = table_of([path]).platform.unprofiled
        for how, factor in (("reference", 1.0), ("trace", share), ("trace, as profiled", share / unprofiled)):
            seconds = step_program(graph, times, _slower(host, factor)).usual(STEPS)
            errors[how].append(float(np.log(1e-3 * run["step_ms"] / seconds)))
    for how, logs in errors.items():
        off = np.abs(np.expm1(-np.array(logs)))
        print(f"{how:20} {len(logs)} steps: mean {off.mean():.1%}, median {np.median(off):.1%}, sd {np.std(logs):.2f}")


def _slower(host: HostModel, factor: float) -> HostModel:
    return replace(host, factors=HostFactors(factor, factor, factor))


def _share(path: Path) -> float:
    """The measured factor of one trace."""
    from presage.traces.overhead_factors import traced_factors

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "host.toml"
        table_of([path]).without_profiler().to_toml(out)
        return traced_factors(out, overheads_of(out, read_toml(out))).measured.main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--reference", type=Path, help="write the reference's overheads to this file first")
    args = parser.parse_args()
    if args.reference is not None:
        write_reference(args.reference)
    machines(args.data)
    profiler(args.data)
    steps(args.data)


if __name__ == "__main__":
    main()
