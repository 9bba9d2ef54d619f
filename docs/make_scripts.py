"""Write docs/scripts_accuracy.md: training scripts as they are, predicted and measured.

    python docs/make_scripts.py

Takes about ten minutes. Scripts that need a package that is not installed here (torchvision, torch_geometric) are named
as skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from presage.text import percent, size
from presage_validation.score import Row, Skipped, score
from presage_validation.scripts import MEMORY_BAR, ScoredScript, rates, scored_scripts

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS, MEASURED = ROOT / "workloads" / "scripts", ROOT / "data" / "h200_scripts" / "scripts.json"
COPIES = "copy and cast"
PAGE = ROOT / "docs" / "scripts_accuracy.md"

TITLE = "# Training scripts as they are: predicted and measured"
HEAD = """{title}

This page is written by `make accuracy` (`presage accuracy scripts workloads/scripts data/h200_scripts/scripts.json`
prints the same). Each script of [workloads/scripts](../workloads/scripts) is written as public ones are, knows nothing
of presage, and runs on made-up data. It was run on one {gpu} (torch {torch}, {cores} cores of {cpu}) by
`python tools/measure_scripts.py OUT.json`, which watches its optimizers: 10 steps to warm up, 2 under the profiler for
the GPU's time, then about 2.5 s of steps, of which the median counts. The prediction is what
`presage predict SCRIPT -- ARGV` says on a machine with no GPU (torch {here}).

- A step is the GPU's where its kernels are active for more than 93% of it, else the host's.
- Bars: steps of the GPU's within 5%, steps of the host's inside their 90% interval, peak memory within 1%.
- Split: nothing is fitted on these scripts. No kernel time, host cost or memory rule was set with one of their
  measurements in view; models are fitted on the sweeps of `data/h200_pack` and the traces named in
  [accuracy](accuracy.md) alone. The scripts were written, and their sizes chosen, before any of them was measured.
- Compiled scripts are a group of their own: their kernels are made by a compiler at run time.
"""
SHORT = """
## What falls short

- **Host-bound steps: {inside} of {host} are inside their interval** (the compiled one counted). Outside: {outside}.
  The interval has no data loading, which a prediction reports beside the step, while a measured step waits for
  loaders that do not keep up. Scripts that load nothing are outside too (clip, mae, moe): the host model was measured
  on one machine, hosts differ, and the interval does not say by how much.
- **Copies from pageable host memory are predicted too cheap.** Copies and casts of a step, predicted and measured:
  {copies}.
- **cuDNN's LSTM is predicted too fast**: the step of lstm_lm is off by {lstm}.
- **Peak memory** is off by more than 1% for {memory}.
- Only {gpu} steps are GPU-bound: their mean says little.
"""


def main() -> None:
    if not MEASURED.is_file():
        PAGE.write_text(
            f"{TITLE}\n\nNot measured yet: `python tools/measure_scripts.py OUT.json` on a machine with the GPU.\n"
        )
        return
    scored, skipped = scored_scripts(SCRIPTS, MEASURED, lambda name: print(name, file=sys.stderr))
    PAGE.write_text("\n".join(page(scored, skipped, json.loads(MEASURED.read_text())["machine"])) + "\n")
    print(f"wrote {PAGE}")


def page(scored: Sequence[ScoredScript], skipped: Sequence[Skipped], machine: dict[str, object]) -> Iterator[str]:
    """Its lines."""
    yield HEAD.format_map(
        {"title": TITLE, "gpu": "GPU", "torch": "?", "cores": "?", "cpu": "?", "here": version("torch")} | machine
    )
    yield "## By group: mean errors\n"
    yield "| scripts | n | GPU-bound steps | GPU time | host-bound steps in range | peak memory | largest |"
    yield "|---|---|---|---|---|---|---|"
    groups = dict.fromkeys(s.group for s in scored)
    chosen: dict[str, Callable[[ScoredScript], bool]] = {
        "all but compiled": lambda s: s.group != "compiled",
        "GPU-bound": lambda s: s.measured.gpu_bound and s.group != "compiled",
        "host-bound": lambda s: not s.measured.gpu_bound and s.group != "compiled",
    }
    chosen |= {group: (lambda s, group=group: s.group == group) for group in groups}
    for name, belongs in chosen.items():
        yield _group(name, [s for s in scored if belongs(s)])
    yield ""
    yield f"Bars met: {', '.join(f'{name} {percent(share, 0)}' for name, share in rates(scored).items())}."
    yield _short(scored, json.loads(MEASURED.read_text())["cases"])
    yield "## Every script, the largest error of GPU time first\n"
    titles = (
        "script | argv | limit | GPU ms | measured | error | step ms | 90% interval | measured | "
        "memory | measured | error"
    )
    yield f"| {titles} |"
    yield f"|{'---|' * len(titles.split('|'))}"
    yield from map(_line, sorted(scored, key=lambda s: -abs(_error(s, "gpu_active"))))
    if skipped:
        yield "\n## Not scored\n"
        yield from (f"- `{s.row}`: {s.reason}" for s in skipped)


def _short(scored: Sequence[ScoredScript], cases: dict[str, dict[str, dict[str, float]]]) -> str:
    """What the figures do not reach, by script."""
    host = [s for s in scored if not s.measured.gpu_bound]
    outside = sorted((_error(s, "step"), s.name) for s in host if not s.inside)
    copies = {
        s.name: (1e3 * s.predicted.families.get(COPIES, 0.0), cases[s.name]["breakdown_ms"].get(COPIES, 0.0))
        for s in scored
        if s.group != "compiled"  # fused there
    }
    cheap = [f"{name} {p:.1f} and {m:.1f} ms" for name, (p, m) in copies.items() if p < 0.5 * m and m > 0.5]
    memory = [(_error(s, "peak_memory"), s.name) for s in scored if abs(_error(s, "peak_memory")) > MEMORY_BAR]
    return SHORT.format(
        inside=len(host) - len(outside),
        host=len(host),
        gpu=len(scored) - len(host),
        outside=", ".join(f"{name} {100 * error:+.0f}%" for error, name in outside),
        copies=", ".join(cheap),
        lstm=", ".join(f"{100 * _error(s, 'step'):+.0f}%" for s in scored if s.name == "lstm_lm"),
        memory=", ".join(f"{name} ({100 * error:+.0f}%)" for error, name in memory),
    )


def _group(name: str, scored: Sequence[ScoredScript]) -> str:
    rows = [row for s in scored for row in s.rows()]
    host = [s for s in scored if not s.measured.gpu_bound]
    memory = _of(rows, "peak_memory")
    cells = (
        name,
        str(len(scored)),
        _mean(_of(rows, "step_gpu_bound")),
        _mean(_of(rows, "gpu_active")),
        f"{sum(s.inside for s in host)} of {len(host)}" if host else "",
        _mean(memory),
        percent(score(memory).max, 2) if memory else "",
    )
    return f"| {' | '.join(cells)} |"


def _line(s: ScoredScript) -> str:
    m, p = s.measured, s.predicted
    step = {name: 1e3 * value for name, value in p.step.items()}
    cells = (
        f"[{s.name}](../workloads/scripts/{m.file})",
        f"`{m.argv}`" if m.argv else "",
        "GPU" if m.gpu_bound else "host",
        f"{1e3 * (p.gpu_active or 0):.2f}",
        f"{m.gpu_active_ms:.2f}",
        f"{100 * _error(s, 'gpu_active'):+.1f}%",
        f"{step['p50']:.2f}",
        f"{step['p5']:.2f} to {step['p95']:.2f}",
        f"{m.step_ms:.2f}",
        size(p.peak_memory or 0),
        size(int(m.peak_alloc)),
        f"{100 * _error(s, 'peak_memory'):+.2f}%",
    )
    return f"| {' | '.join(cells)} |"


def _of(rows: Iterable[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.metric.startswith(metric)]


def _mean(rows: Sequence[Row]) -> str:
    return percent(score(rows).mape, 2) if rows else ""


def _error(s: ScoredScript, metric: str) -> float:
    return next((row.error for row in _of(s.rows(), metric)), 0.0)


if __name__ == "__main__":
    main()
