"""Steps from execution traces beside the same from code and beside a GPU: one of those `presage accuracy et` scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from presage.errors import InputError
from presage_validation.execution_traces import score_execution_traces

ROOT = Path(__file__).resolve().parents[2]
CASE = "resnet_b64_amp"


def test_a_recorded_step_is_predicted_from_its_trace_as_from_its_code(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    measured = json.loads((ROOT / "data" / "h200_traces" / "measured.json").read_text())
    (tmp_path / "measured.json").write_text(json.dumps({**measured, "cases": {CASE: measured["cases"][CASE]}}))
    folder = ROOT / "data" / "h200_traces"
    found = score_execution_traces(ROOT / "workloads" / "library.py", folder, tmp_path / "measured.json")
    errors = {row.metric: abs(row.error) for row in found.rows}
    assert not found.skipped
    assert errors["gpu_time_against_code"] < 0.01 and errors["peak_memory_against_code"] < 0.03
    assert errors["gpu_time"] < 0.05 and errors["peak_memory"] < 0.01


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no execution trace of a case of measured\.json"):
        folder = ROOT / "data" / "h200_traces"
        score_execution_traces(ROOT / "workloads" / "library.py", tmp_path, folder / "measured.json")
