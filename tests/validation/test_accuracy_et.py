"""Steps from execution traces beside the same from code and beside a GPU: one of those `presage accuracy et` scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from presage.errors import InputError
from presage_validation.execution_traces import score_execution_traces

ROOT = Path(__file__).resolve().parents[2]
CASE = "resnet_b64_amp"


@pytest.mark.slow
def test_a_recorded_step_is_predicted_from_its_trace_as_from_its_code(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    measured = json.loads((ROOT / "data" / "h200_traces" / "measured.json").read_text())
    (tmp_path / "measured.json").write_text(json.dumps({**measured, "cases": {CASE: measured["cases"][CASE]}}))
    folder = ROOT / "data" / "h200_traces"
    found = score_execution_traces(ROOT / "workloads" / "library.py", folder, tmp_path / "measured.json")
    errors = {row.metric: abs(row.error) for row in found.rows}
    assert not found.skipped
    assert errors["gpu_active_from_code"] < 0.01 and errors["peak_memory_from_code"] < 0.03
    assert errors["gpu_active"] < 0.05 and errors["peak_memory"] < 0.01


def test_what_was_measured_need_not_be_given(tmp_path: Path) -> None:
    """The example that ships with its trace: from code and from the trace it is the same step."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\nimport dlrm\n"
    (tmp_path / "cases.py").write_text(code + "CASES = {'dlrm': (dlrm.build, {})}\n")
    (tmp_path / "dlrm.json.gz").write_bytes((ROOT / "examples" / "traces" / "dlrm_et.json.gz").read_bytes())
    found = score_execution_traces(tmp_path / "cases.py", tmp_path)
    errors = {row.metric: abs(row.error) for row in found.rows}
    assert not found.skipped and "gpu_active" not in errors
    assert errors["gpu_active_from_code"] < 0.03 and errors["peak_memory_from_code"] < 0.03


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no execution trace of a case of measured\.json"):
        folder = ROOT / "data" / "h200_traces"
        score_execution_traces(ROOT / "workloads" / "library.py", tmp_path, folder / "measured.json")
