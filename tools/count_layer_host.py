"""What a transformer's layer costs the host: the figures of src/presage/data/layer_host.toml, made again.

    python tools/count_layer_host.py ../shared/traces

[captured]: layers of workloads/layers.py, captured and priced by the host model of data/h200, six of them less two.
[traced]: undisturbed layers of the trace megatron_tp8_a100, whose recorders and slower host are told by ops that
data/h200_varied has too. [eras]: matched ops of A100 traces against the H200's. It prints; the file is kept by hand.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from presage.costs.host_model import host_model
from presage.costs.host_units import role
from presage.traces import kineto
from presage.traces.trace import HostKind, Trace

ROOT = Path(__file__).resolve().parent.parent
NORM = "FusedLayerNormAffineFunction"  # two of them begin the two halves of a Megatron layer
PROFILER = 1.5  # us an op that Kineto's own recording takes on the H200's host (tools/profiler_cost.py)
UNDISTURBED = 3560.0  # us of a traced layer: longer ones have a stall of the recorders in them
LEAST_SEEN = 20
MODULES = 12  # of a Megatron layer: itself, two norms, attention and its core, softmax, dropout, MLP, four products

Selves = Mapping[str, tuple[float, int]]  # microseconds of an op by itself (median), and how often it was seen


def captured(layer: str) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of a layer's forward and backward."""
    sys.path.insert(0, str(ROOT))
    from workloads.layers import build

    from presage.capture import capture
    from presage.prediction.machine import kernel_times, machine

    here, found = machine("h200"), []
    for layers in (2, 6):
        graph = capture(build, {"layer": layer, "layers": layers})
        launches = [t.launches for t in kernel_times(graph, here)]
        seconds, roles = here.host.costs(graph, launches).seconds, [role(op) for op in graph.ops]
        found.append({r: _sums(r, roles, seconds * 1e6, launches) for r in ("forward", "backward")})
    few, many = found
    return {r: ((many[r][0] - few[r][0]) / 4, (many[r][1] - few[r][1]) / 4) for r in few}


def _sums(wanted: str, roles: list[str], us: Iterable[float], launches: list[int]) -> tuple[float, float]:
    mine = [(u, n) for r, u, n in zip(roles, us, launches, strict=True) if r == wanted]
    return float(sum(u for u, _ in mine)), float(sum(n for _, n in mine))


def selves(traces: Iterable[Trace]) -> Selves:
    """What ops and calls take by themselves, by name."""
    seen: dict[str, list[float]] = defaultdict(list)
    for trace in traces:
        own = _own(trace)
        for name, us in zip(trace.host.name.tolist(), own.tolist(), strict=True):
            seen[trace.names[name]].append(us)
    return {name: (statistics.median(us), len(us)) for name, us in seen.items()}


def _own(trace: Trace) -> np.ndarray:
    """Microseconds of each host event less those within it."""
    host = trace.host
    took = (host.end - host.start) / 1e3
    inside = host.parent >= 0
    return took - np.bincount(host.parent[inside], took[inside], len(host))


def pace(theirs: Selves, ours: Selves) -> tuple[float, float, int]:
    """How much slower matched ops are: the median of names, and by time."""
    both = [(a, ours[n][0], k) for n, (a, k) in theirs.items() if n in ours and k >= LEAST_SEEN <= ours[n][1]]
    both = [(a, b, k) for a, b, k in both if a >= 4 and b > 1]
    by_time = sum(a * k for a, _, k in both) / sum(b * k for _, b, k in both)
    return statistics.median(a / b for a, b, _ in both), by_time, len(both)


def megatron(traces: list[Trace], ours: Selves) -> None:
    """Undisturbed layers, and what is left of their parts without recorders, at the H200's pace."""
    theirs = selves(traces)
    slower = theirs["cudaLaunchKernel"][0] / ours["cudaLaunchKernel"][0]
    plain = ("aten::view", "aten::as_strided", "aten::transpose", "aten::empty", "aten::reshape", "aten::expand")
    plain += ("aten::matmul", "aten::add", "aten::copy_", "aten::slice", "aten::clone", "aten::mm", "aten::t")
    cost = statistics.median(theirs[n][0] - slower * max(ours[n][0] - PROFILER, 0.0) for n in plain)
    net = {n: (theirs[n][0] - cost) / slower for n in ("Torch-Compiled Region", "triton_poi_fused_add_0")}
    linear = (theirs["LinearWithGradAccumulationAndAsyncCommunication"][0] - cost) / slower
    print(f"  slower {slower:.2f}, recorders {cost:.1f} us an op, function {linear:.1f}, regions {net}")
    layers = [x for t in traces for x in _layers(t)]
    took, units, gaps, ops = (statistics.median(c) for c in zip(*layers, strict=True))
    print(f"  {len(layers)} layers: {took:.0f} us, {ops:.0f} ops, {units:.0f} outermost, {gaps:.0f} us between them")
    us = host_model("h200").us
    counted = units * us["gap forward"] + 2 * MODULES * us["module border"]
    print(f"  between ops, net: {(gaps - 2 * units) / slower:.0f} us, of which the host model counts {counted:.0f}")


def _layers(trace: Trace) -> list[tuple[float, ...]]:
    """Microseconds, outermost ops, microseconds between these, and all ops of each undisturbed layer."""
    host = trace.host
    norms = [i for i in range(len(host)) if trace.host_name(i) == NORM][::2]
    out = []
    for a, b in pairwise(norms):
        took = float(host.start[b] - host.start[a]) / 1e3
        if took < UNDISTURBED:
            ops = [i for i in range(a, b) if host.kind[i] == HostKind.OP]
            top = [i for i in ops if host.parent[i] < 0 or host.kind[host.parent[i]] == HostKind.ANNOTATION]
            inside = sum(float(host.end[i] - host.start[i]) for i in top) / 1e3
            out.append((took, float(len(top)), took - inside, float(len(ops))))
    return out


def main(traces: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from workloads.layers import LAYERS

    for layer in LAYERS:
        print(layer, {r: f"{us:.1f} us, {n:.0f} launches" for r, (us, n) in captured(layer).items()})
    ours = selves(kineto.read(p) for p in sorted((ROOT / "data/h200_varied").glob("*.json.gz")))
    for name in ("dlrm_a100_rank3of8", "recsys_a100_rank0of16"):
        found = pace(selves([kineto.read(traces / "hta" / f"{name}.json.gz")]), ours)
        print(f"{name}: {found[0]:.2f} in the median, {found[1]:.2f} by time, {found[2]} names")
    print("megatron_tp8_a100")
    megatron([kineto.read(p) for p in sorted((traces / "megatron_tp8_a100").glob("kineto_*.json.gz"))], ours)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
