"""The claim on reinforcement-learning steps: published steps and phases, each from its settings alone.

Figures of data/post_training.toml were fitted on rows that say `seen`; the claim is on the others, `held`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from presage.configs.job_file import JobTable
from presage.configs.schema import parse_overrides
from presage.errors import PresageError
from presage.prediction.post_training.step import PostTrainingResult, predict_post_training
from presage_validation.public_table import number, read_table
from presage_validation.score import AccuracyResult, Row, Skipped

Tell = Callable[[str], None]
COLUMNS = ("use", "source", "model", "platform", "settings", "step_s")
BASE = {"framework": {"name": "megatron-core"}, "rl": {"response_max": 1_000_000}}
LOG_PROBS = ("old_log_probs", "reference")


def score_post_training(path: str | Path, tell: Tell = lambda _: None) -> AccuracyResult:
    """Every row of a table of published steps."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for line, row in read_table(Path(path), COLUMNS):
        tell(f"line {line}: {row['model']}")
        try:
            rows += _scored(row, predict_row(row, Path(path)))
        except PresageError as e:
            skipped.append(Skipped(f"line {line}: {row['model']}", str(e)))
    return AccuracyResult("rl", str(path), tuple(rows), tuple(skipped), counted="step (held)")


def predict_row(row: Mapping[str, str], path: Path) -> PostTrainingResult:
    """The step that a row describes."""
    base: dict[str, Any] = BASE | {"model": {"preset": row["model"]}, "cluster": {"platform": row["platform"]}}
    return predict_post_training(JobTable(path, base).parse(parse_overrides(row["settings"].split(), base)))


def _scored(row: Mapping[str, str], p: PostTrainingResult) -> Iterator[Row]:
    found = {
        "step": p.seconds,
        "rollout": p.breakdown["rollout"],
        "training": p.breakdown["training"],
        "log_probs": sum(p.breakdown.get(name, 0.0) for name in LOG_PROBS),
    }
    name = f"{row['model']} on {p.gpus} GPUs, {'one step off' if p.rl.staleness else 'on policy'}"
    version = row["source"].split()[-1] if "summary" in row["source"] else "v0.3"
    for metric, predicted in found.items():
        if measured := number(row, f"{metric}_s"):
            yield Row(
                f"{metric} ({row['use']})", f"{version} {row['platform']}", name, predicted, measured, (row["model"],)
            )
