"""Steps of our own on an H200, which no factor was fitted on."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from own_steps import score_own_steps  # noqa: E402

DATA = ROOT / "data" / "h200_jobs" / "steps.json"


def test_steps_that_wait_for_the_gpu_are_near_and_not_biased() -> None:
    score = score_own_steps(DATA).metrics("GPU-bound")["step_time"]
    assert score.n == 11
    assert score.mape < 0.06
    assert abs(score.bias) < 0.06


def test_memory_is_on_the_safe_side() -> None:
    """The allocator held less back than in the steps its allowance is from."""
    rows = [r for r in score_own_steps(DATA).rows if r.metric == "peak_memory"]
    assert all(-0.02 < r.error < 0.30 for r in rows)
