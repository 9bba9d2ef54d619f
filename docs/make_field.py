"""Write docs/library_models.md: training steps of public libraries' models, predicted and measured, before and after.

    python docs/make_field.py

Takes about five minutes, and needs torchvision, transformers, torch_geometric and torchaudio beside torch: cases whose
library is not installed are named as skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from presage.errors import PresageError
from presage.text import percent
from presage_validation.score import AccuracyResult, Captured, Row, Skipped
from presage_validation.workloads import WorkloadCase, measured_cases, score_cases

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PAGE = ROOT / "data" / "h200_field", ROOT / "docs" / "library_models.md"
HEAD = """# Library models: predicted and measured

This page is written by `python docs/make_field.py` (`presage accuracy workloads workloads/field.py
data/h200_field/measured.json` prints the same). {cases} training steps of models from torchvision, transformers,
torch_geometric and torchaudio ([workloads/field.py](../workloads/field.py)) on one NVIDIA H200 (torch 2.11, CUDA 13.0,
cuDNN 9.19, 2026-11-17, `python tools/record.py workloads/field.py OUT`). The list was written before anything was
measured; all were scored with the models of that day (`before`). Then sweeps of single calls were drawn for what was
missing (convolutions as nets have them, scans, resampling, norms over few groups, broadcasts of many dimensions, ...),
kernel and workspace models fitted to those sweeps, and all were scored again (`after`). No kernel time or size of these
models was fitted, but which sweeps and laws to add was decided with their residuals in view. So a second list of
{others} other models ([workloads/field2.py](../workloads/field2.py)) was written and measured on another day
(2026-11-18): `before` are the models as they stood before it was measured, and what was changed afterwards (sweeps of
grouped convolutions, scatters, resampling, recurrent nets, ...) was decided by the first list's kernels and the
families' held-out shapes alone. With that the second list was 7.8% off in the mean (63% at worst). The last sweep
(`conv_library`: layers of torchvision, transformers and torchaudio at drawn batches, sizes and types of number) and the
second fit of grouped convolutions were decided with the residuals of both lists in view; no call of a list was copied
into it, but its layers are in it, as those of other models of these libraries are. So a third list of {blind}
([workloads/field3.py](../workloads/field3.py): more models of the libraries, and nine common nets written by hand) was
written, measured and scored blind on the same day. Since then pools, scans, scatters and resampling were fitted once
more, to a sweep decided by their held-out shapes.

Then presage began to ask cuDNN which engines it takes ([kernels](kernels.md#convolutions-cudnn-is-asked)), and
convolutions were fitted anew with what it says, to 27,600 more draws, timed one process at a time. A fourth list of
{last} ([workloads/field4.py](../workloads/field4.py), half of it convolutional, eleven nets written by hand) was
written and measured meanwhile: `before` are the models from before all this. Those with the engines had not seen it
either, and were 3.62% off on average, 17.48% at worst; `after` has later fits. Which sweep tells of workspaces of
pointwise weight gradients (all but `conv_volumes`) was chosen with a net of the first list in view.

A fifth list of {newest} ([workloads/field5.py](../workloads/field5.py), 13 of them nets written by hand) was written
before its models were predicted, and measured on 2026-11-19 on a machine whose host is a third faster: `before` are the
models as they stood. It found one thing plainly wrong, LSTMs over packed sequences, each row of which counted as a step
(tacotron2 +274%), and one unknown, cuDNN's batch norms with a block for each channel (wgan_gp -33%); both were mended
with it in view. What else is new was decided by the lists before it and by held-out shapes: 26,400 GEMMs, 8,900
convolutions of first and last layers, 3,000 norms of few channels, 1,200 large tensors, and laws of pools, resampling,
norms and reductions by the blocks and threads of their kernels. Workspaces of convolutions were fitted last, with the
first and last layers added to their sweeps; the three peaks that were more than 3% off stayed so.

GPU time is the sum of the durations of all kernels of a step. A step is the GPU's where that is more than 93% of it.
"""
HOSTS = """
## Host-bound steps with the hosts they were measured on

Every measurement is of one machine, all of the same kind, whose host was measured with it (`presage calibrate --host`).
Those named `later` have the pace of their host beside each step ([hosts](hosts.md#with-the-pace-beside-the-steps));
only steps that are host-bound there count. Error of the step as answered (p50), and the share within the 90% interval.
"""
LISTS = {
    "first": ("field.py", "measured.json"),
    "second": ("field2.py", "second.json"),
    "third": ("field3.py", "third.json"),
    "fourth": ("field4.py", "fourth.json"),
    "fifth": ("field5.py", "fifth.json"),
}


class Lease(NamedTuple):
    """One measurement of a list's steps, with its host."""

    steps: str  # which list
    day: str
    measured: str
    host: str


LEASES = (
    Lease("first", "2026-11-17", "measured.json", "host_before.toml"),
    Lease("first", "2026-11-17, another machine", "again.json", "again_host_before.toml"),
    Lease("first", "2026-11-18, later", "paced_first.json", "paced_host.toml"),
    Lease("second", "2026-11-18", "second.json", "second_host.toml"),
    Lease("second", "2026-11-18, later", "paced.json", "paced_host.toml"),
    Lease("third", "2026-11-18, third machine", "third.json", "third_host.toml"),
    Lease("fourth", "2026-11-18, fourth machine", "fourth.json", "fourth_host_before.toml"),
    Lease("fifth", "2026-11-19, fifth machine", "fifth.json", "fifth_host_before.toml"),
    Lease("fifth", "2026-11-19, later", "fifth_paced.json", "fifth_host_before.toml"),
)


def main() -> None:
    found = {name: captured(*files) for name, files in LISTS.items()}
    cases = {name: kept for name, (kept, _) in found.items()}
    lists = [replace(score_cases(kept), skipped=tuple(left)) for kept, left in found.values()]
    PAGE.write_text("\n".join(page(lists, cases)) + "\n")
    print(f"wrote {PAGE}")


def captured(workloads: str, measured: str) -> tuple[list[WorkloadCase], list[Skipped]]:
    """The measured cases of a list, and those left out."""
    build, kept, left = Captured(str(ROOT / "workloads" / workloads)), list[WorkloadCase](), list[Skipped]()
    for name, runs in measured_cases(FOLDER / measured).items():
        print(name, file=sys.stderr)
        try:
            if not runs:
                raise PresageError("no run of it was measured")
            kept.append(WorkloadCase(name, build.graph(name), runs))
        except (PresageError, ImportError) as e:
            left.append(Skipped(name, str(e)))
    return kept, left


def hosts(cases: dict[str, list[WorkloadCase]]) -> Iterable[str]:
    """Host-bound steps of every measurement, without a host and with its own."""
    yield HOSTS
    yield "| list | measured | steps | no host given | in the interval | its host | in the interval |"
    yield "|---|---|---|---|---|---|---|"
    for lease in LEASES:
        runs, known = measured_cases(FOLDER / lease.measured), {c.name: c for c in cases[lease.steps]}
        own = [
            replace(known[n], runs=[_active(known[n], r) for r in rs]) for n, rs in runs.items() if n in known and rs
        ]
        own = [c for c in own if c.bound == "step_host_bound"]
        scores = [score_cases(own, host=host) for host in (None, str(FOLDER / lease.host))]
        yield f"| {lease.steps} | {lease.day} | {len(own)} | {' | '.join(map(_score, scores))} |"


def _active(case: WorkloadCase, run: dict[str, Any]) -> dict[str, Any]:
    """A run with the GPU time of the step, which some measurements do not have."""
    return {"gpu_active_ms": case.median("gpu_active_ms")} | run


def _score(result: AccuracyResult) -> str:
    errors = [abs(r.error) for r in result.rows if r.metric == "step_host_bound"]
    return f"{100 * np.mean(errors):.1f}% | {percent(result.rates['interval_hit_rate'])}"


def page(lists: list[AccuracyResult], cases: dict[str, list[WorkloadCase]]) -> Iterable[str]:
    files = ("before.json", *(f"{n}_before.json" for n in LISTS if n != "first"))
    before = [json.loads((FOLDER / n).read_text()) for n in files]
    cases_of, others, blind, last, newest = map(len, before)
    yield HEAD.format(cases=cases_of, others=others, blind=blind, last=last, newest=newest)
    for name, result, earlier in zip(LISTS, lists, before, strict=True):
        yield f"\n## The {name} list\n"
        yield from table(result, earlier)
    yield from hosts(cases)
    yield "\nPeak memory: [will it fit](will_it_fit.md)."
    for name, result, earlier in zip(LISTS, lists, before, strict=True):
        yield f"\n## Every model of the {name} list, the largest error of GPU time first\n"
        yield from models(result, earlier)
    left = [f"- {s.row}: {s.reason}" for result in lists for s in result.skipped]
    for _, measured in LISTS.values():
        known = json.loads((FOLDER / measured).read_text())["platform"].get("left_out", {})
        left += [f"- {name}: {why}" for name, why in known.items()]
    if left:
        yield "\n## Left out\n"
        yield from left


def metric(result: AccuracyResult, before: dict[str, Any], name: str) -> list[Row]:
    return [r for r in result.rows if r.metric == name and r.group in before]


def step_of(old: dict[str, Any]) -> float:
    """Seconds of a step as it was predicted before."""
    step = old["step_ms"]
    return 1e-3 * float(step[1] if isinstance(step, list) else step)


def table(result: AccuracyResult, before: dict[str, Any]) -> Iterable[str]:
    gpu, memory, host = (metric(result, before, m) for m in ("gpu_active", "peak_memory", "step_host_bound"))
    yield "| | n | median | MAPE | p90 | largest | bar |\n|---|---|---|---|---|---|---|"
    yield _line("GPU time, before", gpu, lambda r: 1e-3 * before[r.group]["gpu_active_ms"], "")
    yield _line("GPU time, after", gpu, lambda r: r.predicted, "MAPE 4%, largest 12%")
    yield _line("peak memory, before", memory, lambda r: before[r.group]["peak_alloc"], "")
    yield _line("peak memory, after", memory, lambda r: r.predicted, "MAPE 0.5%, largest 3%")
    yield _line("host-bound steps, no host given, before", host, lambda r: step_of(before[r.group]), "")
    yield _line("host-bound steps, no host given, after", host, lambda r: r.predicted, "")
    hit = result.rates.get("interval_hit_rate", 0.0)
    yield f"\nOf the host-bound steps {percent(hit)} lie in their 90% interval with no host given (bar: 88%)."


def models(result: AccuracyResult, before: dict[str, Any]) -> Iterable[str]:
    yield "| model | GPU time | before | after | measured | memory | before | after | step |"
    yield "|---|---|---|---|---|---|---|---|---|"
    steps = {r.group: r for r in result.rows if r.metric in ("step_host_bound", "step_gpu_bound")}
    peaks = {r.group: r for r in metric(result, before, "peak_memory")}
    for r in sorted(metric(result, before, "gpu_active"), key=lambda r: -abs(r.error)):
        old, peak, step = before[r.group], peaks[r.group], steps.get(r.group)
        was, peaked = 1e-3 * old["gpu_active_ms"] / r.measured - 1, old["peak_alloc"] / peak.measured - 1
        times = f"{1e3 * r.predicted:.2f} ms | {was:+.1%} | {r.error:+.1%} | {1e3 * r.measured:.2f} ms"
        sizes = f"{peak.predicted / 2**30:.3f} GiB | {peaked:+.2%} | {peak.error:+.2%}"
        yield f"| {r.group} | {times} | {sizes} | {f'{step.error:+.1%}' if step else ''} |"


def _line(name: str, rows: list[Row], value: Callable[[Row], float], bar: str) -> str:
    e = np.abs([value(r) / r.measured - 1 for r in rows])
    found = " | ".join(f"{100 * x:.2f}%" for x in (np.median(e), e.mean(), np.quantile(e, 0.9), e.max()))
    return f"| {name} | {len(rows)} | {found} | {bar} |"


if __name__ == "__main__":
    main()
