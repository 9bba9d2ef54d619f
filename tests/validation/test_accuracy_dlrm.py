"""MLPerf's recommendation runs."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import median

import numpy as np
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


@pytest.mark.slow
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


def test_samples_per_second_grow_from_4_to_128_gpus_as_published(shared: Path) -> None:
    """Of H100s and H200s with NVLink, by sizes of the job: it grows with the GPUs, and as fast."""
    by_size: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for r in score_dlrm(shared / "runs" / "public_runs.csv").rows:
        size, batch = r.name.split(": ", 1)[1].split(", batch ")
        if r.metric == "step_time" and re.search(r"H[12]00-", size):
            pair = int(batch) / r.predicted, int(batch) / r.measured
            by_size.setdefault((int(size.split(" ")[0]), int(batch)), []).append(pair)
    sizes = sorted(by_size)
    assert {gpus for gpus, _ in sizes} == {4, 8, 32, 64, 128}
    predicted, measured = ([median(p[k] for p in by_size[s]) for s in sizes] for k in (0, 1))
    rate = [np.polyfit(np.log([gpus for gpus, _ in sizes]), np.log(x), 1)[0] for x in (predicted, measured)]
    assert rate[0] == pytest.approx(rate[1], abs=0.15)  # the power of the GPUs that throughput goes with: 0.54, 0.65
    for rates in (predicted, measured):
        by_gpus = [
            median(x for x, (n, _) in zip(rates, sizes, strict=True) if n == gpus) for gpus in (4, 8, 32, 64, 128)
        ]
        assert by_gpus == sorted(by_gpus)
