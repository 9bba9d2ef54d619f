"""The claim on training scripts: each predicted as `presage predict SCRIPT -- ARGV` says, against what a GPU measured.

A step is the GPU's where its kernels are active for more than 93% of it, else the host's. The bars: the time of steps
of the GPU's within 5%, steps of the host's inside their interval, peak memory within 1%. A folder of measurements has a
file for each machine, and each counts. Each script is predicted in a process of its own, as its user would do it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from presage.errors import PresageError
from presage.files.decoding import read_checked
from presage.measure.prediction import Prediction, predict
from presage.pool.pool import SERIAL, Pool
from presage.prediction.step import GPU_BOUND
from presage_validation.score import AccuracyResult, Row, Skipped, run_cases

STEP_BAR, MEMORY_BAR = 0.05, 0.01
FRAMEWORKS = {  # by what the script says
    "torch_geometric": "torch_geometric",
    "LightningModule": "Lightning",
    "Accelerator(": "accelerate",
    "TrainingArguments": "Hugging Face Trainer",
}
MS = 1e-3


class MeasuredScript(msgspec.Struct, frozen=True):
    """One run of a script on a GPU, as tools/measure_scripts.py writes it; `error` where it failed there."""

    file: str
    argv: str = ""
    error: str = ""
    step_ms: float = 0.0  # the median step
    step_ms_p5: float = 0.0
    step_ms_p95: float = 0.0
    gpu_active_ms: float = 0.0
    peak_alloc: float = 0.0

    @property
    def gpu_bound(self) -> bool:
        return self.gpu_active_ms > GPU_BOUND * self.step_ms


class MeasuredScripts(msgspec.Struct, frozen=True):
    """What tools/measure_scripts.py writes."""

    cases: dict[str, MeasuredScript]


@dataclass(frozen=True)
class ScoredScript:
    """A script as measured, on each machine, and as predicted."""

    name: str
    group: str  # its framework, or that it is compiled
    runs: tuple[MeasuredScript, ...]
    predicted: Prediction

    @property
    def measured(self) -> MeasuredScript:
        """On the first machine."""
        return self.runs[0]

    @property
    def inside(self) -> tuple[bool, ...]:
        """Whether the median step lies in the predicted interval, by run that its host limits."""
        step, host = self.predicted.step, (m for m in self.runs if not m.gpu_bound)
        return tuple(step["p5"] <= m.step_ms * MS <= step["p95"] for m in host)

    def rows(self) -> Iterator[Row]:
        """Step, GPU time and peak memory, of every run."""
        return (row for m in self.runs for row in self._rows(m))

    def _rows(self, m: MeasuredScript) -> Iterator[Row]:
        p = self.predicted
        pairs = {
            "step_gpu_bound" if m.gpu_bound else "step_host_bound": (p.step["p50"], m.step_ms * MS),
            "gpu_active_gpu_bound" if m.gpu_bound else "gpu_active_host_bound": (p.gpu_active, m.gpu_active_ms * MS),
            "peak_memory": (p.peak_memory, m.peak_alloc),
        }
        for metric, (predicted, measured) in pairs.items():
            if predicted is not None and measured:
                yield Row(metric, self.group, self.name, float(predicted), measured)


def score_scripts(
    folder: str | Path, measured: str | Path, tell: Callable[[str], None] = lambda _: None, pool: Pool = SERIAL
) -> AccuracyResult:
    """Predict every measured script of a folder."""
    scored, skipped = scored_scripts(folder, measured, tell, pool)
    rows = tuple(row for s in scored for row in s.rows())
    return AccuracyResult("scripts", f"{folder} {measured}", rows, tuple(skipped), rates(scored))


def scored_scripts(
    folder: str | Path, measured: str | Path, tell: Callable[[str], None] = lambda _: None, pool: Pool = SERIAL
) -> tuple[list[ScoredScript], list[Skipped]]:
    """Every measured script with its prediction, and those that failed on the GPU or could not be predicted."""
    found = measured_scripts(measured)
    failed = [
        Skipped(name, f"not measured: {runs[0].error.splitlines()[-1]}")
        for name, runs in found.items()
        if all(m.error for m in runs)
    ]
    cases = [(name, good) for name, runs in found.items() if (good := tuple(m for m in runs if not m.error))]
    done, skipped = run_cases(partial(_scored, Path(folder)), cases, tell, lambda case: case[0], pool)
    return [scored for _, scored in done], [*failed, *skipped]


def rates(scored: Iterable[ScoredScript]) -> dict[str, float]:
    """Shares of the runs that meet each bar."""
    rows = [row for s in scored for row in s.rows()]
    hits = {
        "gpu_bound_steps_within_5pct": [abs(r.error) <= STEP_BAR for r in rows if r.metric == "step_gpu_bound"],
        "gpu_bound_gpu_time_within_5pct": [
            abs(r.error) <= STEP_BAR for r in rows if r.metric == "gpu_active_gpu_bound"
        ],
        "host_bound_in_interval": [hit for s in scored for hit in s.inside],
        "peak_memory_within_1pct": [abs(r.error) <= MEMORY_BAR for r in rows if r.metric == "peak_memory"],
    }
    return {name: float(np.mean(hit)) for name, hit in hits.items() if hit}


def measured_scripts(path: str | Path) -> dict[str, tuple[MeasuredScript, ...]]:
    """The runs of each, from a file or from all files of a folder."""
    files = sorted(Path(path).glob("*.json")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise PresageError(f"{path} has no file that tools/measure_scripts.py wrote (*.json)")
    out: dict[str, tuple[MeasuredScript, ...]] = {}
    for cases in (read_checked(file, MeasuredScripts).cases for file in files):
        out |= {name: (*out.get(name, ()), m) for name, m in cases.items()}
    return out


def _scored(folder: Path, case: tuple[str, tuple[MeasuredScript, ...]]) -> ScoredScript:
    name, runs = case
    measured = runs[0]
    script = folder / measured.file
    if not script.is_file():
        raise PresageError(f"{folder} has no {measured.file}")
    argv = shlex.split(measured.argv)
    return ScoredScript(name, framework(script.read_text(), argv), runs, predict([str(script)], argv, "h200"))


def framework(source: str, argv: Iterable[str]) -> str:
    """The group of a script: what runs its loop, or torch.compile."""
    if any(word.startswith("--compile") for word in argv):
        return "compiled"
    return next((group for word, group in FRAMEWORKS.items() if word in source), "plain loop")
