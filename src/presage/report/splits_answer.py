"""The answer of `presage plan` for a reinforcement-learning step: how to split the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from presage.report.answer import Answer, Section, data_table, limit_rows
from presage.report.terms import signed, step_text
from presage.text import seconds, size

if TYPE_CHECKING:
    from presage.configs.job_file import ParsedJob
    from presage.prediction.post_training.splits import GpuSplit


KEPT = "the trainer's plan is the file's: presage plan without [rl] searches plans"


def splits_answer(parsed: ParsedJob, found: Sequence[GpuSplit], top: int) -> Answer:
    """All splits that were tried, the best of them in the headline."""
    best, name = found[0], parsed.job.name or parsed.job.model.name
    fit = sum(s.fits for s in found)
    on_policy = next((s for s in found if s.fits and not s.result.rl.staleness), None)
    if best.fits:
        said = f"Fastest: {best.name}: {step_text(best.result.step)}."
        if on_policy is not None and on_policy is not best:
            said += f" On policy: {on_policy.name}: {seconds(on_policy.result.seconds)}/step."
    else:
        said = "No split fits in memory."
    return Answer(
        title=name,
        question="How should the GPUs be split?",
        subject=f"{name}: {best.result.gpus} x {parsed.job.platform.gpu.name} ({parsed.job.platform.key})",
        headline=said,
        verdict=f"{len(found)} splits tried, {fit} fit.",
        verdict_tone="good" if best.fits else "bad",
        sections=(Section("Splits", (_table(found, top),), None, ""),),
        notes=(best.result.model_error.note, *parsed.notes, KEPT),
        to_data=lambda: {"kind": "splits", "splits": [_row(s) for s in found[:top]], "tried": len(found)},
    )  # fmt: skip


def _table(found: Sequence[GpuSplit], top: int) -> Any:
    rows = []
    for s in found:
        p = s.result
        busy = float(p.trainer_busy.mean())
        left = min(p.trainer_margin, p.engine_margin)
        margin = size(left) if left >= 0 else f"-{size(-left)}"
        slower = signed(p.seconds / found[0].result.seconds - 1)
        rows.append(
            (
                s.name,
                seconds(p.seconds),
                slower,
                seconds(p.breakdown["rollout"]),
                seconds(busy),
                margin,
                "yes" if s.fits else "no",
            )
        )
    columns = ("trainer + engine", "step", "slower", "rollout", "trainer", "memory left", "fits")
    return data_table("Splits", columns, limit_rows(rows, top))


def _row(s: GpuSplit) -> dict[str, Any]:
    p = s.result
    return {
        "name": s.name, "placement": p.rl.placement, "trainer_gpus": p.job.gpus, "engine_gpus": p.rl.engine.gpus,
        "engine_tp": p.rl.engine.tp, "staleness": p.rl.staleness, "step_ms": p.seconds * 1e3,
        "rollout_ms": p.breakdown["rollout"] * 1e3, "trainer_ms": float(p.trainer_busy.mean()) * 1e3, "fits": s.fits,
    }  # fmt: skip


def split_options(s: GpuSplit) -> list[str]:
    """--set options that turn the file's job into this split."""
    p = s.result
    keys: dict[str, Any] = {"parallel.gpus": p.job.gpus, "rl.placement": p.rl.placement, "rl.engine.tp": p.rl.engine.tp}
    keys |= {"rl.staleness": p.rl.staleness}
    if not p.rl.colocated:
        keys["rl.engine.gpus"] = p.rl.engine.gpus
    return [word for k, v in keys.items() for word in ("--set", f"{k}={v}")]
