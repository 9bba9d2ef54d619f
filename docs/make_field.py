"""Write docs/library_models.md: training steps of public libraries' models, predicted and measured, before and after.

    python docs/make_field.py

Takes about five minutes, and needs torchvision, transformers, torch_geometric and torchaudio beside torch: cases whose
library is not installed are named as skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from presage.pool.pool import SERIAL
from presage.text import percent
from presage_validation.score import AccuracyResult, Row
from presage_validation.workloads import score_workloads

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
families' held-out shapes alone. The second list is what to expect of a model that nobody looked at.

GPU time is the sum of the durations of all kernels of a step. A step is the GPU's where that is more than 93% of it.
"""


def main() -> None:
    first, second = (
        score_workloads(ROOT / "workloads" / steps, FOLDER / measured, pool=SERIAL, tell=_tell)
        for steps, measured in (("field.py", "measured.json"), ("field2.py", "second.json"))
    )
    PAGE.write_text("\n".join(page(first, second)) + "\n")
    print(f"wrote {PAGE}")


def _tell(name: str) -> None:
    print(name, file=sys.stderr)


def page(first: AccuracyResult, second: AccuracyResult) -> Iterable[str]:
    before, earlier = (json.loads((FOLDER / n).read_text()) for n in ("before.json", "second_before.json"))
    yield HEAD.format(cases=len(before), others=len(earlier))
    yield "## The first list\n"
    yield from table(first, before)
    yield "\n## The second list\n"
    yield from table(second, earlier)
    yield "\nWith the hosts they were measured on: [hosts](hosts.md). Peak memory: [will it fit](will_it_fit.md)."
    yield "\n## Every model of the first list, the largest error of GPU time first\n"
    yield from models(first, before)
    yield "\n## Every model of the second list\n"
    yield from models(second, earlier)
    left = [f"- {s.row}: {s.reason}" for s in (*first.skipped, *second.skipped)]
    known = json.loads((FOLDER / "second.json").read_text())["platform"].get("left_out", {})
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
