"""Reinforcement-learning steps in `presage job` and `presage plan`: jobs whose file has [rl]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from presage.cli.output import show_answer, status
from presage.errors import PresageError

if TYPE_CHECKING:
    from presage.configs.job_file import ParsedJob

Where = tuple[str | None, Path | None, list[object]]  # --json, --report, the words of a command to try next


def show_post_training(parsed: ParsedJob, draws: int, seed: int, away: Mapping[str, object], where: Where) -> None:
    """Predict the step and show it."""
    from presage.prediction.post_training.step import predict_post_training
    from presage.report.post_training_answer import post_training_answer

    _refuse(away, "draws of a step with [rl] are of its response lengths (rl.response_lengths)")
    with status("drawing rollouts"):
        result = predict_post_training(parsed, draws=draws, seed=seed)
    json, report, then = where
    show_answer(post_training_answer(result), json, report, then=then)


def show_splits(parsed: ParsedJob, top: int, seed: int, away: Mapping[str, object], where: Where) -> None:
    """Search splits of the GPUs and show them."""
    from presage.configs.check import check
    from presage.prediction.post_training.splits import search_splits
    from presage.report.splits_answer import split_options, splits_answer

    _refuse(away, "with [rl] it is the split of the GPUs that is searched, for the trainer's plan of the file")
    assert parsed.rl is not None
    check(parsed.job)
    with status("trying splits"):
        found = search_splits(parsed.job, parsed.rl, seed)
    json, report, job = where
    then = ["job", *job, *split_options(found[0])] if found[0].fits else []
    show_answer(splits_answer(parsed, found, top), json, report, then=then)
    if not found[0].fits:
        raise typer.Exit(1)


def _refuse(away: Mapping[str, object], why: str) -> None:
    if given := [name for name, value in away.items() if value]:
        raise PresageError(f"{given[0]} does not go with a reinforcement-learning step: {why}")
