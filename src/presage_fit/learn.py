"""Kernel corrections and host overheads from profiler (Kineto) traces that people have: `presage calibrate --from`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.families import FAMILIES
from presage.costs.learned_files import HOST_FILE, fingerprint, models_like, write_learned
from presage.costs.learned_kernels import CALIBRATED_SCALE, Floats, LearnedCorrection, StepCalls, joined, step_calls
from presage.errors import InputError, PresageError
from presage.files import check_new_folder, write_whole
from presage.files.reading import read_toml
from presage.files.writing import PART
from presage.graph.graph import Graph
from presage.hardware import gpu
from presage.prediction.machine import Machine, kernel_times, machine
from presage.text import percent
from presage.traces import kineto
from presage.traces.overhead_factors import overheads_of, traced_factors
from presage.traces.overheads import extract, overheads, pool
from presage.traces.trace_graph import trace_graphs
from presage.traces.trace_set import files_of, kind

MOST = 2000  # calls that are kept: those with the most GPU time
Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class TracedCalls:
    """The calls of a traced step: what was predicted and what each took, on average, and how often it ran."""

    path: str
    gpu: str  # as the trace names it; empty where it does not
    calls: StepCalls
    measured: Floats  # seconds, by call
    counts: Floats  # by call
    left_out: float  # seconds of kernels that no model prices: of extensions and compilers

    @property
    def seconds(self) -> float:
        """All calls together."""
        return float(self.measured @ self.counts)

    @property
    def predicted(self) -> float:
        return float(self.calls.table.seconds @ self.counts)

    def corrected(self, found: LearnedCorrection) -> float:
        """The step's seconds with corrections learned elsewhere."""
        table = self.calls.table
        return float((table.seconds * np.exp(found.mean(table))) @ self.counts)

    def error(self, found: LearnedCorrection) -> float:
        """Standard deviation of the logarithm of these."""
        table = self.calls.table
        each = table.seconds * np.exp(found.mean(table)) * self.counts
        return found.error(table, each / each.sum())


def traced_gpu(path: str | Path) -> str:
    """What a trace calls its GPU; empty where it does not."""
    trace = kineto.read(path, ignore=["*"])
    used = max(0, next((s.device for s in trace.streams), 0))
    return trace.gpus[min(used, len(trace.gpus) - 1)] if trace.gpus else ""


def traced_calls(path: str | Path, models: CalibratedKernels, name: str = "") -> TracedCalls:
    """The calls of a trace, priced by the models of a GPU."""
    if kind(Path(path)) != "kineto":
        raise InputError(path, "is no trace of PyTorch's profiler (Kineto), which alone has kernel times")
    return graph_calls(trace_graphs(path)[0], models, str(path), name or traced_gpu(path))


def graph_calls(graph: Graph, models: CalibratedKernels, path: str, name: str) -> TracedCalls:
    """The same of a step that was read."""
    times = kernel_times(graph, Machine(models, machine().host))
    found = step_calls(models, graph, times)
    used = [i for i, op in enumerate(graph.ops) if op.recorded is not None and op.recorded.seconds > 0 and not op.group]
    priced = np.array([i for i in used if found.place[i] >= 0], np.int64)
    if not len(priced):
        raise InputError(path, "has no kernel of an op that presage knows: it cannot be learned from")
    place = found.place[priced]
    seconds = np.array([_recorded(graph, i) for i in priced.tolist()])
    counts = np.bincount(place, minlength=len(found.table)).astype(np.float64)
    sums = np.bincount(place, seconds, len(found.table))
    keep = np.flatnonzero(counts)
    left = sum(_recorded(graph, i) for i in used if found.place[i] < 0)
    table = StepCalls(found.table.part(keep), found.place)
    return TracedCalls(path, name, table, sums[keep] / counts[keep], counts[keep], left)


def _recorded(graph: Graph, place: int) -> float:
    cost = graph.ops[place].recorded
    return cost.seconds if cost is not None else 0.0


def learn(traces: Sequence[TracedCalls], scale: float = 1.0) -> LearnedCorrection:
    """Corrections from the calls of some traces; `scale` is of the effects."""
    table = joined([t.calls.table for t in traces])
    measured = np.concatenate([t.measured for t in traces])
    total = measured * np.concatenate([t.counts for t in traces])
    keep = np.sort(np.argsort(-total, kind="stable")[:MOST])
    return LearnedCorrection(table.part(keep), measured[keep], scale)


# ---- the command


def common_gpu(paths: Sequence[Path], wanted: str | None, like: str | None) -> tuple[str, str]:
    """The GPU of some traces, as they name it, and the GPU whose models are corrected."""
    names = {path: traced_gpu(path) for path in paths}
    known = {path: _key(name) for path, name in names.items()}
    first = paths[0]
    for path in paths[1:]:
        if (known[path] or names[path]) != (known[first] or names[first]):
            raise InputError(
                path, f"is of {names[path] or 'a GPU that it does not name'}, and {first} of {names[first]}"
            )
    if wanted is not None and known[first] not in ("", gpu(wanted).key):
        raise InputError(first, f"is a trace of {names[first]}, not of {gpu(wanted).name}: leave out --gpu")
    found = like or wanted or known[first]
    if not found:
        what = f"{names[first]!r}, which is not listed" if names[first] else "no GPU"
        raise InputError(first, f"names {what}: say which it is (--gpu) or which is most like it (--like h100_sxm)")
    return names[first] or gpu(found).name, gpu(found).key if _key(found) else found


def _key(name: str) -> str:
    """The short name of a listed GPU; empty for one that is not."""
    try:
        return gpu(name).key if name else ""
    except PresageError:
        return ""


@dataclass(frozen=True)
class LearnedPack:
    """A pack that was learned from traces."""

    out: Path
    gpu: str
    like: str
    traces: tuple[TracedCalls, ...]
    correction: LearnedCorrection

    def families(self) -> list[dict[str, Any]]:
        """Families of kernels: calls, measured over predicted seconds, and how far calls are apart in that."""
        out = []
        for name in FAMILIES:
            rows = [(t, np.array([f == name for f in t.calls.table.family])) for t in self.traces]
            calls = sum(int(at.sum()) for _, at in rows)
            measured = sum(float((t.measured * t.counts)[at].sum()) for t, at in rows)
            before = sum(float((t.calls.table.seconds * t.counts)[at].sum()) for t, at in rows)
            out.append({
                "family": name, "calls": calls, "gpu_ms": measured * 1e3,
                "factor": measured / before if before else None, "spread": self._spread(name),
            })  # fmt: skip
        return sorted(out, key=lambda row: -row["gpu_ms"])

    def _spread(self, family: str) -> float | None:
        """Standard deviation of ln(measured / corrected) of its calls, by time; None without a call."""
        table, logs = self.correction.calls, np.log(self.correction.measured / self.correction.calls.seconds)
        at = np.array([f == family for f in table.family])
        return float(np.std(logs[at])) if at.any() else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "learn",
            "out": os.fspath(self.out),
            "gpu": self.gpu,
            "like": self.like,
            "calls": len(self.correction.calls),
            "traces": [
                {"path": t.path, "gpu_ms": t.seconds * 1e3, "predicted_ms": t.predicted * 1e3,
                 "left_out_ms": t.left_out * 1e3} for t in self.traces
            ],
            "families": self.families(),
        }  # fmt: skip

    def page(self) -> str:
        """What was learned, as text."""
        rows = [f"{self.out}: {len(self.correction.calls):,} calls of {self.gpu}, over the models of {self.like}"]
        for t in self.traces:
            off, left = percent(t.predicted / t.seconds - 1, 1), t.left_out / (t.seconds + t.left_out)
            more = (
                f"; {percent(left, 0)} of its GPU time is of extensions, which are not learned" if left > 0.01 else ""
            )
            rows.append(f"  {Path(t.path).name}: predicted {off} off before{more}")
        rows += ["", f"{'family':<10} {'calls':>6} {'GPU ms':>8} {'factor':>7} {'spread':>7}"]
        known = [f for f in self.families() if f["calls"]]
        rows += [f"{f['family']:<10} {f['calls']:>6} {f['gpu_ms']:>8.2f} {f['factor']:>7.2f} {f['spread']:>7.0%}"
                 for f in known]  # fmt: skip
        without = ", ".join(self.correction.unknown_families)
        rows += [f"no call measured, wider range: {without}"] if without else []
        return "\n".join([*rows, "", f"next: presage predict TRAIN.py --pack {self.out}"])


def learn_pack(
    paths: Sequence[Path], out: Path, wanted: str | None = None, like: str | None = None, tell: Tell = lambda _: None
) -> LearnedPack:
    """Learn from traces, or folders of them, and write the pack, whole or not at all. A pack is not added to."""
    check_new_folder(out)
    paths = files_of(paths)
    if len({p.resolve() for p in paths}) < len(paths):
        raise PresageError("one trace is given twice: its calls would count twice")
    name, base = common_gpu(paths, wanted, like)
    models = models_like(base)
    traces = []
    for path in paths:
        tell(f"reading {path}")
        traces.append(traced_calls(path, models, name))
    scale = CALIBRATED_SCALE if not models.transferred and _key(name) == models.gpu.key else 1.0
    pack = LearnedPack(out, name, base, tuple(traces), learn(traces, scale))
    _write(pack, paths, models)
    return pack


def _write(pack: LearnedPack, paths: Sequence[Path], models: CalibratedKernels) -> None:
    header = {
        "gpu": pack.gpu, "like": pack.like, "base": fingerprint(models), "date": time.strftime("%Y-%m-%d"),
        "traces": [p.name for p in paths],
    }  # fmt: skip
    part = pack.out.with_name(f".{pack.out.name}.{os.getpid()}{PART}")
    try:
        part.mkdir(parents=True)
        write_learned(part, pack.correction, header)
        _write_host(part / HOST_FILE, paths)
        os.replace(part, pack.out)
    except OSError as e:
        raise PresageError(f"{pack.out}: cannot be made: {e.strerror or e}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_host(path: Path, traces: Sequence[Path]) -> None:
    """Host overheads, where the traces have enough of them to tell the host's pace."""
    overheads(pool([extract(kineto.read(t, ignore=["*"]), 1) for t in traces])).to_toml(path)
    try:
        traced_factors(path, overheads_of(path, read_toml(path)))
    except InputError:
        path.unlink()


def command(paths: Sequence[Path], args: Any, tell: Tell) -> None:
    """`presage calibrate --from`."""
    pack = learn_pack(paths, args.out, args.gpu, args.like, tell)
    if args.json is not None:
        data = json.dumps(pack.to_json(), indent=2) + "\n"
        if args.json == "-":
            print(data, end="")
            return
        write_whole(args.json, data.encode())
    print(f"{pack.out}: {len(pack.correction.calls):,} calls" if args.quiet else pack.page())
