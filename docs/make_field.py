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
models was fitted, but which sweeps and laws to add was decided with their residuals in view: for models never looked
at, expect a figure between the two.

GPU time is the sum of the durations of all kernels of a step. A step is the GPU's where that is more than 93% of it.
"""


def main() -> None:
    result = score_workloads(ROOT / "workloads" / "field.py", FOLDER / "measured.json",
                             tell=lambda name: print(name, file=sys.stderr), pool=SERIAL)  # fmt: skip
    before = json.loads((FOLDER / "before.json").read_text())
    PAGE.write_text("\n".join(page(result, before)) + "\n")
    print(f"wrote {PAGE}")


def page(result: AccuracyResult, before: dict[str, Any]) -> Iterable[str]:
    rows = {(r.metric, r.group): r for r in result.rows}
    gpu = [r for (metric, _), r in rows.items() if metric == "gpu_active" and r.group in before]
    memory = [r for (metric, _), r in rows.items() if metric == "peak_memory" and r.group in before]
    host = [r for (metric, _), r in rows.items() if metric == "step_host_bound" and r.group in before]
    yield HEAD.format(cases=len(gpu))
    yield "| | n | median | MAPE | p90 | largest | bar |\n|---|---|---|---|---|---|---|"
    yield _line("GPU time, before", gpu, lambda r: 1e-3 * before[r.group]["gpu_active_ms"], "")
    yield _line("GPU time, after", gpu, lambda r: r.predicted, "MAPE 4%, largest 12%")
    yield _line("peak memory, before", memory, lambda r: before[r.group]["peak_alloc"], "")
    yield _line("peak memory, after", memory, lambda r: r.predicted, "MAPE 0.5%, largest 3%")
    yield _line("host-bound steps, no host given, before", host, lambda r: 1e-3 * before[r.group]["step_ms"][1], "")
    yield _line("host-bound steps, no host given, after", host, lambda r: r.predicted, "")
    hit = result.rates.get("interval_hit_rate", 0.0)
    yield f"\nOf the host-bound steps {percent(hit)} lie in their 90% interval with no host given (bar: 88%)."
    yield "With the hosts they were measured on: [hosts](hosts.md). Peak memory: [will it fit](will_it_fit.md)."
    yield "\n## Every model, the largest error of GPU time first\n"
    yield "| model | GPU time | before | after | measured | memory | before | after | step |"
    yield "|---|---|---|---|---|---|---|---|---|"
    steps = {r.group: r for (metric, _), r in rows.items() if metric in ("step_host_bound", "step_gpu_bound")}
    peaks = {r.group: r for r in memory}
    for r in sorted(gpu, key=lambda r: -abs(r.error)):
        old, peak, step = before[r.group], peaks[r.group], steps.get(r.group)
        was, peaked = 1e-3 * old["gpu_active_ms"] / r.measured - 1, old["peak_alloc"] / peak.measured - 1
        times = f"{1e3 * r.predicted:.2f} ms | {was:+.1%} | {r.error:+.1%} | {1e3 * r.measured:.2f} ms"
        sizes = f"{peak.predicted / 2**30:.3f} GiB | {peaked:+.2%} | {peak.error:+.2%}"
        yield f"| {r.group} | {times} | {sizes} | {f'{step.error:+.1%}' if step else ''} |"
    if result.skipped:
        yield "\n## Left out\n"
        yield from (f"- {s.row}: {s.reason}" for s in result.skipped)


def _line(name: str, rows: list[Row], value: Callable[[Row], float], bar: str) -> str:
    e = np.abs([value(r) / r.measured - 1 for r in rows])
    found = " | ".join(f"{100 * x:.2f}%" for x in (np.median(e), e.mean(), np.quantile(e, 0.9), e.max()))
    return f"| {name} | {len(rows)} | {found} | {bar} |"


if __name__ == "__main__":
    main()
