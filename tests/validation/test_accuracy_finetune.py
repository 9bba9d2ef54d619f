"""Fine-tuning runs that nothing was fitted on."""

from __future__ import annotations

from pathlib import Path

from presage_validation.finetune import score_finetune
from presage_validation.score import score


def test_adapters_are_predicted_with_nothing_fitted(shared: Path) -> None:
    found = score_finetune([shared / "runs" / "fms_finetune" / "fms_finetune.csv"])
    rows = [r for r in found.rows if r.metric == "step_time"]
    packed = score(r for r in rows if "packed to full length" in r.also)
    assert packed.n >= 140 and packed.mape < 0.07
    assert all(s.reason for s in found.skipped)


def test_mlperfs_lora_is_predicted_with_nothing_fitted(shared: Path) -> None:
    found = score_finetune([shared / "steps" / "mlperf_v5.0.json.gz"])
    assert score(found.rows).n == 20 and score(found.rows).mape < 0.12
    assert len(found.skipped) == 5  # whose parallel configuration is not known
