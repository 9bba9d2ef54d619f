"""MLPerf's recommendation runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from presage.errors import InputError
from presage_validation.dlrm import COLUMNS, score_dlrm


def _some(shared: Path, path: Path, gpus: tuple[str, ...], ranks: str = "8") -> Path:
    """The table's rows of some GPUs."""
    with (shared / "runs" / "public_runs.csv").open(newline="", encoding="utf-8") as f:
        table = csv.DictReader(f)
        rows = [r for r in table if r["source_key"] != "mlperf_dlrm" or (r["gpu"] in gpus and r["n_gpus"] == ranks)]
    with path.open("w", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, table.fieldnames or ())
        out.writeheader()
        out.writerows(rows)
    return path


def test_steps_on_a_node_of_h200_are_within_a_third(shared: Path, tmp_path: Path) -> None:
    found = score_dlrm(_some(shared, tmp_path / "runs.csv", ("H200-141GB-SXM", "L40")))
    step = found.metrics()["step_time"]
    assert step.n == 5
    assert step.max < 0.35
    assert found.metrics()["with_host"].bias > step.bias  # CUDA graphs have next to no host time
    assert found.metrics()["embeddings"].bias < 0  # a part of the step
    assert len(found.skipped) == 1
    assert "L40" in found.skipped[0].reason


def test_a_table_without_such_rows_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{','.join(COLUMNS)}\nother,H100,8,8,1,1,\n")
    with pytest.raises(InputError, match="has no rows of mlperf_dlrm"):
        score_dlrm(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no such column"):
        score_dlrm(path)
