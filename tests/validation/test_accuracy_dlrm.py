"""MLPerf's recommendation runs."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

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


def test_published_steps_are_within_the_bars(shared: Path) -> None:
    """Nothing is fitted on these rows; PCIe machines are a metric of their own."""
    found = score_dlrm(shared / "runs" / "public_runs.csv")
    step = found.metrics()["step_time"]
    assert (step.n, found.metrics()["step_time_pcie"].n, len(found.skipped)) == (33, 4, 0)
    assert step.mape < 0.15
    assert step.max < 0.40


@pytest.mark.parametrize(("few", "many"), [(("H100-80GB-SXM", "64"), ("H100-80GB-SXM", "128"))])
def test_samples_per_second_scale_as_published(
    shared: Path, tmp_path: Path, few: tuple[str, str], many: tuple[str, str]
) -> None:
    """Medians over the runs of each size."""
    ratio = []
    for gpu, ranks in (few, many):
        rows = score_dlrm(_some(shared, tmp_path / f"{ranks}.csv", (gpu,), ranks)).rows
        same = [r for r in rows if "135168" in r.name]
        ratio.append((median(r.predicted for r in same), median(r.measured for r in same)))
    (few_predicted, few_measured), (many_predicted, many_measured) = ratio
    assert few_predicted / many_predicted == pytest.approx(few_measured / many_measured, rel=0.15)
    assert few_predicted > many_predicted


def test_a_table_without_such_rows_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{','.join(COLUMNS)}\nother,x,H100,8,8,1,,1,\n")
    with pytest.raises(InputError, match="has no rows of mlperf_dlrm"):
        score_dlrm(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no such column"):
        score_dlrm(path)
