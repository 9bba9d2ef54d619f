"""`presage accuracy workloads`: with the host that steps were measured on, and cases that cannot be scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from presage.errors import PresageError
from presage_validation.command import CLAIMS
from presage_validation.score import Captured
from presage_validation.workloads import WorkloadCase, measured_cases, score_cases, score_workloads

FIELD = Path(__file__).resolve().parents[2] / "data" / "h200_field"
HOST = FIELD / "host.toml"
WORKLOADS = """
import torch

def small(device):
    layer = torch.nn.Linear(8, 8, device=device)
    x = torch.randn(4, 8, device=device)
    return lambda: layer(x).sum().backward()

def absent(device):
    import no_such_library

CASES = {"small": (small, {}), "absent": (absent, {}), "failed": (small, {})}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    workloads, measured = tmp_path / "steps.py", tmp_path / "measured.json"
    workloads.write_text(WORKLOADS)
    run = {"step_ms": 0.5, "gpu_active_ms": 0.02}
    measured.write_text(json.dumps({"cases": {"small": run, "absent": run, "failed": {"error": "out of memory"}}}))
    return workloads, measured


def test_steps_are_scored_with_the_host_they_were_measured_on(files: tuple[Path, Path]) -> None:
    usual, mine = score_workloads(*files), score_workloads(*files, host=str(HOST))
    step = [next(r for r in x.rows if r.metric == "step_host_bound").predicted for x in (usual, mine)]
    assert step[0] < step[1] < 1.1 * step[0]
    assert usual.notes is not None and mine.notes is not None
    assert usual.notes[0].startswith("host unknown: taken as 16 vCPUs") and str(HOST) in mine.notes[0]
    assert "interval_hit_rate" in mine.rates


def test_captured_cases_are_scored_with_a_host_too(files: tuple[Path, Path]) -> None:
    run = {"step_ms": 0.5, "gpu_active_ms": 0.02}
    case = WorkloadCase("small", Captured(str(files[0])).graph("small"), [run])
    usual, faster = (score_cases([case], host=host) for host in (None, str(FIELD / "paced_host.toml")))
    step = [next(r for r in x.rows if r.metric == "step_host_bound").predicted for x in (usual, faster)]
    assert 0.75 * step[0] < step[1] < 0.9 * step[0]


@pytest.mark.parametrize(("name", "earlier", "count"), [("paced", "second", 24), ("paced_first", "measured", 10)])
def test_steps_measured_with_their_pace_are_of_the_list(name: str, earlier: str, count: int) -> None:
    found, known = (measured_cases(FIELD / f"{x}.json") for x in (name, earlier))
    assert len(found) == count and set(found) < set(known)
    for case, (run,) in found.items():
        assert run["gpu_active_ms"] == pytest.approx(known[case][0]["gpu_active_ms"], rel=1e-4)
        stretches = [s["step_ms"] for s in run["stretches"]]
        assert run["step_ms"] == pytest.approx(sum(stretches) / len(stretches), rel=1e-3)
        assert len(run["probes"]) == len(stretches) + 1


def test_cases_that_cannot_be_scored_say_why(files: tuple[Path, Path]) -> None:
    why = {s.row: s.reason for s in score_workloads(*files).skipped}
    assert set(why) == {"absent", "failed"}
    assert "no_such_library is not installed" in why["absent"] and why["failed"] == "no run of it was measured"


def test_only_some_kinds_take_a_host() -> None:
    with pytest.raises(PresageError, match="accuracy traces takes no --host: only workloads does"):
        CLAIMS["traces"].score("traces", [], print, None, "h200_host")
