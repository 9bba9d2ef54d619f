"""Score predictions for ranks: one rank's step as measured, collectives, public runs; write docs/ranks_accuracy.md.

python docs/make_ranks.py ../shared
"""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from presage.capture import Variant, capture, load, load_cases
from presage.costs.kernel_model import OpTime
from presage.graph.graph import Graph
from presage.graph.work import collective
from presage.hardware import gpu
from presage.memory.step_memory import memory_profile
from presage.parallel.strategy import strategy
from presage.pool import processes
from presage.prediction.machine import kernel_times, machine
from presage.prediction.step import step_program
from presage.text import size
from presage_validation.collectives import score_collectives
from presage_validation.ranks import score_ranks
from presage_validation.score import AccuracyResult, Score

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("ranks_accuracy.md")
DATA = ROOT / "data" / "h200_ranks"
RANKS = 8
TRACED_STEPS = 2
GPU = ("kernel", "gpu_memcpy", "gpu_memset")

PLAIN = {"gpt": {}, "gpt_b1": {"batch": 1}, "gpt_bf16": {"autocast": False, "bf16": True}, "resnet": {},
         "stacks_2": {"layers": 2}, "stacks_20": {"layers": 20}}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A case's step, GPU time and peak memory: predicted, then measured. Seconds and bytes."""

    name: str
    step: tuple[float, float]
    active: tuple[float, float]
    memory: tuple[float, float]


def rows() -> Iterator[Row]:
    measured = json.loads((DATA / "measured.json").read_text())["cases"]
    where = machine("h200")
    for name in sorted(measured, key=lambda n: (n.split("_")[0], "_ddp" in n or "_fsdp" in n, n)):
        graph = of_case(name)
        times = [
            OpTime(0.0, 1, "communication", "model") if collective(op) else t
            for op, t in zip(graph.ops, kernel_times(graph, where), strict=True)
        ]
        real = measured[name]
        sent = copies(DATA / f"{name}.json.gz") if "fsdp" in name else 0.0
        yield Row(
            name,
            (step_program(graph, times, where.host).usual(8), real["step_ms"] / 1e3),
            (sum(t.seconds for t in times), real["gpu_active_ms"] / 1e3 - sent),
            (memory_profile(graph).peak_allocated, real["peak_alloc"]),
        )


def of_case(name: str) -> Graph:
    """The step of a case: captured, or made by a strategy of its twin without ranks."""
    if name in PLAIN:
        return capture(load(f"{ROOT}/workloads/ranks.py:{name.split('_')[0]}"), dict(PLAIN[name]))
    twin, arguments, kind, options = runpy.run_path(str(ROOT / "workloads" / "ranks.py"))["TWINS"][name]
    graph = capture(load(f"{ROOT}/workloads/ranks.py:{twin}"), dict(arguments))
    return strategy(kind, options).step(graph, RANKS)


def copies(trace: Path) -> float:
    """Seconds a step of the copies with which the fake process group stands in for all-gathers."""
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "c10d::_allgather_base_"]
    calls = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") == "cuda_runtime" and any(t == e["tid"] and a <= e["ts"] < b for t, a, b in spans)
    }
    took = [e["dur"] for e in events if e.get("cat") in GPU and e["args"].get("correlation") in calls]
    return sum(took) / TRACED_STEPS / 1e6


def own_rows() -> Iterator[str]:
    """Peak memory of one rank of steps that call torch.distributed themselves (workloads/own_ranks.py)."""
    measured = json.loads((DATA / "own_ranks.json").read_text())["cases"]
    cases = load_cases(ROOT / "workloads" / "own_ranks.py")
    yield "| code | predicted | measured | error |"
    yield "|---|---|---|---|"
    for name, real in measured.items():
        graph = capture(cases[name], variant=Variant(ranks=real["ranks"]))
        peak = memory_profile(graph, chip=gpu("h200")).peak_allocated
        off = 100 * (peak / real["peak_alloc"] - 1)
        yield f"| {name} | {size(peak)} | {size(real['peak_alloc'])} | {off:+.3f}% |"


def table(found: list[Row]) -> Iterator[str]:
    yield "| case | step, predicted | measured | error | GPU time, predicted | measured | error | peak memory error |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in found:
        cells = [f"{1e3 * x:.2f} ms" for x in r.step] + [error(r.step)]
        cells += [f"{1e3 * x:.2f} ms" for x in r.active] + [
            error(r.active),
            f"{100 * (r.memory[0] / r.memory[1] - 1):+.2f}%",
        ]
        yield f"| {r.name} | {' | '.join(cells)} |"


def error(pair: tuple[float, float]) -> str:
    return f"{100 * (pair[0] / pair[1] - 1):+.1f}%"


def summary(found: list[Row]) -> Iterator[str]:
    ranks = [r for r in found if "ddp" in r.name or "fsdp" in r.name]
    for what, pairs in (
        ("GPU time", [r.active for r in ranks]),
        ("step", [r.step for r in ranks]),
        ("peak memory", [r.memory for r in ranks]),
    ):
        off = np.abs(np.array([p / m - 1 for p, m in pairs]))
        mean, middle, most = (100 * x for x in (off.mean(), np.median(off), off.max()))
        yield f"- {what}: n {len(off)}, MAPE {mean:.2f}%, median {middle:.2f}%, max {most:.1f}%"


def scores(metrics: dict[str, Score]) -> Iterator[str]:
    yield "| metric | n | MAPE | geomean | median | p90 | max | bias |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, s in metrics.items():
        cells = (s.mape, s.geomean, s.median, s.p90, s.max, s.bias)
        yield f"| {name} | {s.n} | {' | '.join(f'{100 * x:.1f}%' for x in cells)} |"


def by_group(found: AccuracyResult, metric: str) -> dict[str, Score]:
    some = {group: found.metrics(group).get(metric) for group in found.groups()}
    return {group: s for group, s in some.items() if s is not None and s.n}


def page(shared: Path) -> Iterator[str]:
    found = list(rows())
    yield from (INTRO, "## One rank's step, on an H200", "", ONE, "", *summary(found), "", *table(found), "")
    yield from ("## Code that spreads itself over ranks: peak memory of one rank", "", OWN, "", *own_rows(), "")
    sent = score_collectives(shared / "runs" / "nccl_busbw.csv")
    yield from ("## Collectives", "", SENT, "", *scores(sent.metrics()), "", "A GPU left out of the fit, by GPU:", "")
    yield from (*scores(by_group(sent, "gpu_left_out")), "")
    with processes(2, fresh=True) as pool:
        runs = score_ranks(ROOT / "workloads" / "public.py", shared / "runs" / "public_runs.csv", pool=pool)
    yield from ("## Public runs", "", RUNS, "", *scores(runs.metrics()), "", *scores(by_group(runs, "step_time")))


INTRO = """# How right predictions for ranks are

Written by `make accuracy` (docs/make_ranks.py), on the data named below.
"""
OWN = """`presage predict --ranks 8` of workloads/own_ranks.py (a GPT of 12 layers of 1024 with DDP, FSDP2, FSDP1,
hybrid sharding, DTensor's tensor parallelism, both, and a ZeRO optimizer, as their libraries write them) against
PyTorch's allocator on an H200, one rank of a fake group of 8, DDP as the only rank of a real one
(tools/measure_own_ranks.py). No constant was set on them, but the capture was completed on these steps: they are no
blind test."""
ONE = """PyTorch 2.11's own DDP and FSDP2 as one of several ranks (workloads/ranks.py, data/h200_ranks): FSDP2 with a
fake process group whose collectives move nothing, DDP as the only rank of a real one. So all is measured but
the transfers, which are 0 in the predictions too; the copies by which the fake group stands in for all-
gathers are taken off. presage sees only the twin without ranks. The constants of the hooks
(presage.costs.host_model) were set on these steps, so the steps are no blind test; GPU time and memory have no
constant set on them, but for what DDP keeps of its first step's buckets."""
SENT = """Of `nccl_busbw.csv`: `time`, every third size of each curve left out of the fit; `gpu_left_out`, a whole GPU
type; `links_left_out`, a generation of links; `ranks_left_out`, a group size of a GPU; `nodes_left_out`, all that was
measured across nodes; `shipped`, the model as it ships; `interpolated`, a straight line between neighbours for
comparison; `repeated`, one measurement against another. Further figures across nodes are in
[collectives](collectives.md#across-nodes)."""
RUNS = """Rows of `public_runs.csv` of one node with up to 8 GPUs that a captured PyTorch model can stand for
(workloads/public.py): nothing was tuned on them. The GPUs are A100 and H100, which were never calibrated
here."""


def main() -> None:
    PAGE.write_text("\n".join(page(Path(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
