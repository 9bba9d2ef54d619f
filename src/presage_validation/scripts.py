"""The claim on training scripts: each predicted as `presage predict SCRIPT -- ARGV` says, against what a GPU measured.

A step is the GPU's where its kernels are active for more than 93% of it, else the host's. The bars: the time of steps
of the GPU's within 5%, steps of the host's inside their interval, peak memory within 1%. Each script is predicted in a
process of its own, as its user would do it.
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
    """A script as measured and as predicted."""

    name: str
    group: str  # its framework, or that it is compiled
    measured: MeasuredScript
    predicted: Prediction

    @property
    def inside(self) -> bool:
        """Whether the median step lies in the predicted interval."""
        return self.predicted.step["p5"] <= self.measured.step_ms * MS <= self.predicted.step["p95"]

    def rows(self) -> Iterator[Row]:
        """Step, GPU time and peak memory."""
        m, p = self.measured, self.predicted
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
    failed = [Skipped(name, f"not measured: {m.error.splitlines()[-1]}") for name, m in found.items() if m.error]
    cases = [(name, m) for name, m in found.items() if not m.error]
    done, skipped = run_cases(partial(_scored, Path(folder)), cases, tell, lambda case: case[0], pool)
    return [scored for _, scored in done], [*failed, *skipped]


def rates(scored: Iterable[ScoredScript]) -> dict[str, float]:
    """Shares of the scripts that meet each bar."""
    rows = [row for s in scored for row in s.rows()]
    hits = {
        "gpu_bound_steps_within_5pct": [abs(r.error) <= STEP_BAR for r in rows if r.metric == "step_gpu_bound"],
        "gpu_bound_gpu_time_within_5pct": [
            abs(r.error) <= STEP_BAR for r in rows if r.metric == "gpu_active_gpu_bound"
        ],
        "host_bound_in_interval": [s.inside for s in scored if not s.measured.gpu_bound],
        "peak_memory_within_1pct": [abs(r.error) <= MEMORY_BAR for r in rows if r.metric == "peak_memory"],
    }
    return {name: float(np.mean(hit)) for name, hit in hits.items() if hit}


def measured_scripts(path: str | Path) -> dict[str, MeasuredScript]:
    """By name."""
    return read_checked(path, MeasuredScripts).cases


def _scored(folder: Path, case: tuple[str, MeasuredScript]) -> ScoredScript:
    name, measured = case
    script = folder / measured.file
    if not script.is_file():
        raise PresageError(f"{folder} has no {measured.file}")
    argv = shlex.split(measured.argv)
    return ScoredScript(name, framework(script.read_text(), argv), measured, predict([str(script)], argv, "h200"))


def framework(source: str, argv: Iterable[str]) -> str:
    """The group of a script: what runs its loop, or torch.compile."""
    if any(word.startswith("--compile") for word in argv):
        return "compiled"
    return next((group for word, group in FRAMEWORKS.items() if word in source), "plain loop")
