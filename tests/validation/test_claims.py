"""Whole predictions beside what an H200 measured: some of the cases that `presage accuracy workloads` scores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'presage[torch]'")
pytest.importorskip("transformers", reason="the workloads need transformers")

from presage.capture import capture, load_cases
from presage.prediction.api import predict

ROOT = Path(__file__).resolve().parents[2]
MEASURED = msgspec.json.decode((ROOT / "data" / "h200_varied" / "measured.json").read_bytes())["cases"]
CASES = load_cases(ROOT / "workloads" / "varied.py")


@pytest.mark.parametrize(
    ("name", "gpu", "step"),
    [
        ("gqa_amp", 0.04, 0.3),
        ("gqa_fp32", 0.04, 0.06),
        ("gqa_fp32_tf32", 0.04, 0.35),
        ("encoder_fp32", 0.04, 0.3),
        ("two_tower_sparse", 0.08, 0.4),
        ("unet_fp16", 0.1, 0.4),
    ],
)
def test_a_step_takes_what_was_measured(name: str, gpu: float, step: float) -> None:
    """GPU time to a few per cent; the step as closely where the GPU sets it, and within the host's luck elsewhere."""
    found, seen = predict(capture(CASES[name], source=name)), MEASURED[name]
    assert found.gpu_active * 1e3 == pytest.approx(seen["gpu_active_ms"], rel=gpu)
    assert found.step.p50 * 1e3 == pytest.approx(seen["step_ms"], rel=step)
    assert found.coverage.modelled_fraction > 0.99
    assert sum(p.share for p in found.families) == pytest.approx(1.0)
