"""What results of all kinds share, and that none is computed twice."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import presage
from presage.cli.predict import command
from presage.costs.calibrated_kernels import CalibratedKernels
from presage.graph import save
from presage.graph.graph import Graph

ROOT = Path(__file__).parents[2]
SHARED = (
    "kind title hardware step memory_bytes gpu_memory memory_left_bytes fits breakdown notes draws memory timeline "
    "program to_json"
)


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return presage.step_graph(ROOT / "examples/gpt.py:build", {"layers": 2})


@pytest.fixture(scope="module")
def results(gpt: Graph) -> dict[str, presage.Result]:
    job = presage.predict_job(ROOT / "examples/jobs/own_model.toml")
    return {
        "step": presage.predict(gpt, draws=3),
        "ranks": presage.predict_ranks(gpt, 2, draws=3),
        "job": job,
        "run": presage.predict_run(job, 1000, draws=20),
    }


@pytest.mark.parametrize("kind", ["step", "ranks", "job", "run"])
def test_every_result_has_the_shared_attributes(results: dict[str, presage.Result], kind: str) -> None:
    result = results[kind]
    assert isinstance(result, presage.Result) and result.kind == kind
    assert all(hasattr(result, name) for name in SHARED.split())
    assert result.step.p5 <= result.step.p50 <= result.step.p95
    assert result.fits == (result.memory_bytes <= result.gpu_memory)
    assert all(seconds >= 0 for seconds in result.breakdown.values())
    assert np.isfinite(result.draws).all() and len(result.program) > 0


@pytest.mark.parametrize("kind", ["step", "ranks", "job", "run"])
def test_a_timeline_is_simulated_once(results: dict[str, presage.Result], kind: str) -> None:
    assert results[kind].timeline is results[kind].timeline


def test_the_trace_and_report_of_a_prediction_time_the_kernels_once(
    gpt: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("presage.whatif.suggest"), "next_edits", lambda _: ())
    calls, op_times = [], CalibratedKernels.op_times
    monkeypatch.setattr(CalibratedKernels, "op_times", lambda self, graph: calls.append(1) or op_times(self, graph))
    save.write(gpt, tmp_path / "step.presage")
    command(str(tmp_path / "step.presage"), draws=3, trace=tmp_path / "trace.json", report=tmp_path / "page.html")
    assert len(calls) == 1 and (tmp_path / "trace.json").stat().st_size and (tmp_path / "page.html").stat().st_size
