"""Speeds from CSV files, as users and as public fleets have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from slow_stage import operation_noise

from presage.configs.job import Job
from presage.configs.models import preset
from presage.errors import InputError
from presage.hardware import platform
from presage.parallel.plan import ParallelPlan
from presage.placement import place, random_fleet, read_speeds
from presage.prediction.draws import step_model


def written(path: Path, *lines: str) -> Path:
    out = path / "gpus.csv"
    out.write_text("\n".join(lines) + "\n")
    return out


def test_times_and_speeds_are_told_apart(tmp_path: Path) -> None:
    slow = read_speeds(written(tmp_path, "gpu,node,time_ms", "a,n0,10", "b,n0,12", "c,n1,10"))
    assert slow.gpus == ("n0-a", "n0-b", "n1-c") and slow.nodes == ("n0", "n0", "n1")
    assert slow.factors == pytest.approx([1.0, 1.2, 1.0])
    assert "column time_ms: larger is slower" in slow.notes[0] and "2 nodes" in slow.notes[0]
    fast = read_speeds(written(tmp_path, "uuid,tflops", "a,600", "b,500", "c,600"))
    assert fast.factors == pytest.approx([1.0, 1.2, 1.0]) and fast.gpus == ("a", "b", "c")
    assert "larger is faster" in fast.notes[0] and "no nodes known" in fast.notes[0]


def test_ranks_order_rows_and_medians_count(tmp_path: Path) -> None:
    lines = ["rank,host,perf", "1,h,2", "0,h,1", "1,h,2.2", "1,h,9", "2,h,1", "3,h,x"]
    fleet = read_speeds(written(tmp_path, *lines))
    assert fleet.gpus == ("0", "1", "2") and fleet.factors == pytest.approx([1, 2.2, 1])
    assert "medians of 1.67 rows each" in fleet.notes[0] and "1 rows skipped" in fleet.notes[1]


def test_kinds_of_work_are_taken_by_their_own_medians(tmp_path: Path) -> None:
    usual, slow = (("small", 1), ("big", 100)), {"a": 1.0, "b": 1.1, "c": 1.0}
    rows = [f"{gpu},{work},{time * slow[gpu]}" for gpu in slow for work, time in usual]
    fleet = read_speeds(written(tmp_path, "uuid,kern,perf", *rows))
    assert fleet.factors == pytest.approx([1.0, 1.1, 1.0])


@pytest.mark.parametrize(
    ("lines", "columns", "said"),
    [
        (["gpu,colour", "a,1"], {}, "--column time=NAME if larger is slower"),
        (["gpu,time_a,time_b", "a,1,1"], {}, "which of time_a, time_b counts"),
        (["gpu,time", "a,-1", "b,nan"], {}, "no row of it has a GPU and a number above 0"),
        (["gpu,time", "a,1"], {"time": "speed"}, "is not a column: choose from gpu, time"),
        (["gpu,time", "a,1"], {"colour": "time"}, "unknown column key colour"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, lines: list[str], columns: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_speeds(written(tmp_path, *lines), columns)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_speeds(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_speeds(tmp_path / "bytes.csv")


def test_a_drawn_fleet_has_the_spread_asked_for() -> None:
    fleet = random_fleet(20_000, 8, 0.02, np.random.default_rng(0), 0.01, 1.2)
    usual = fleet.factors[fleet.factors < 1.1]
    assert np.log(usual).std() == pytest.approx(0.02, rel=0.05)
    assert (fleet.factors > 1.1).mean() == pytest.approx(0.01, rel=0.3)
    assert len(fleet.members) == 2_500 and fleet.known_nodes


def test_every_public_fleet_can_be_read(shared: Path) -> None:
    for path in sorted((shared / "variability").glob("*-agg.csv")):
        fleet = read_speeds(path)
        assert len(fleet) > 100 and np.median(fleet.factors) == pytest.approx(1.0)
        assert fleet.known_nodes


@pytest.mark.slow
def test_longhorns_v100s_under_a_job_of_256_gpus(shared: Path) -> None:
    """392 GPUs of which one is 20% slow: nodes in any order are far worse than the best, which leaves it out."""
    path = shared / "variability" / "sgemm-longhorn-agg.csv"
    if not path.exists():
        pytest.skip("no per-GPU times of Longhorn")
    fleet = read_speeds(path)
    assert fleet.factors.max() == pytest.approx(1.203, abs=0.001)
    parallel = ParallelPlan(tp=4, sequence_parallel=True, pp=8, virtual=5, schedule="interleaved", zero=1)
    job = Job(preset("llama3.1-70b"), platform("dgx-h100"), 256, 8192, 1, 256, parallel)
    found = place(step_model(job), fleet, operation_noise(0.01), draws=500, randoms=10)
    assert int(fleet.factors.argmax()) in found.best.placement.spares
    assert found.best.p95.value < 0.95 * found.randoms.p95 and found.gap < 0.005
    assert found.worst.p95.value > 1.05 * found.randoms.p95
