"""Training scripts against what was measured of them: bars, groups, what is left out, and one predicted for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from presage.errors import InputError, PresageError
from presage.measure.prediction import Prediction
from presage_validation import scripts
from presage_validation.scripts import MeasuredScript, ScoredScript, framework, rates, score_scripts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from measure_scripts import RUNS, SCRIPTS  # noqa: E402

STEP = {"mean": 0.010, "p5": 0.009, "p50": 0.010, "p95": 0.012}
RUN = {"file": "a.py", "step_ms": 10.0, "gpu_active_ms": 9.9, "peak_alloc": 1000}
SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
model = torch.nn.Linear(parser.parse_args().width, 4096).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    loss = model(torch.randn(64, model.in_features).cuda()).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def scored(**changes: Any) -> ScoredScript:
    measured = MeasuredScript(**(RUN | changes))
    return ScoredScript("a", "plain loop", (measured,), Prediction(STEP, 0.0099, 1000))


def written(folder: Path, **cases: Any) -> Path:
    path = folder / "measured.json"
    path.write_text(json.dumps({"machine": {}, "cases": cases}))
    return path


def test_each_bar_counts_the_scripts_it_is_for() -> None:
    near, far = scored(), scored(step_ms=11.0, gpu_active_ms=10.9, peak_alloc=1020)
    host, slow = scored(gpu_active_ms=5.0), scored(step_ms=13.0, gpu_active_ms=5.0)
    found = rates([near, far, host, slow])
    assert found["gpu_bound_steps_within_5pct"] == found["gpu_bound_gpu_time_within_5pct"] == 0.5
    assert found["host_bound_in_interval"] == 0.5 and found["peak_memory_within_1pct"] == 0.75
    assert [row.metric for row in host.rows()] == ["step_host_bound", "gpu_active_host_bound", "peak_memory"]


def test_what_was_not_measured_or_cannot_be_predicted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("")
    monkeypatch.setattr(scripts, "predict", lambda *_: Prediction(STEP, 0.0099, 1000))
    path = written(
        tmp_path, good=RUN, gone=RUN | {"file": "b.py"}, broken={"file": "a.py", "error": "one\nout of memory"}
    )
    found = score_scripts(tmp_path, path)
    assert {row.name for row in found.rows} == {"good"}
    assert {s.row: s.reason.rpartition(" ")[2] for s in found.skipped} == {"broken": "memory", "gone": "b.py"}
    (tmp_path / "measured.json").write_text('{"cases": {"a": 3}}')
    with pytest.raises(InputError, match="cases"):
        score_scripts(tmp_path, path)


def test_every_machine_of_a_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("")
    monkeypatch.setattr(scripts, "predict", lambda *_: Prediction(STEP, 0.0099, 1000))
    folder = tmp_path / "measured"
    folder.mkdir()
    with pytest.raises(PresageError, match="has no file"):
        score_scripts(tmp_path, folder)
    for k, ms in enumerate((10.0, 20.0)):
        run = RUN | {"gpu_active_ms": 5.0, "step_ms": ms}
        (folder / f"{k}.json").write_text(json.dumps({"machine": {}, "cases": {"one": run}}))
    found = score_scripts(tmp_path, folder)
    assert len(found.rows) == 6 and found.rates["host_bound_in_interval"] == 0.5


@pytest.mark.slow
def test_a_script_is_predicted_with_the_arguments_it_was_measured_with(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT)
    found = score_scripts(tmp_path, written(tmp_path, wide=RUN | {"argv": "--width 16384"}, narrow=RUN))
    peak = {row.name: row.predicted for row in found.rows if row.metric == "peak_memory"}
    assert not found.skipped and peak["wide"] > 2 * 4 * 4096 * 16384 > 4 * peak["narrow"]


def test_the_scripts_cover_five_frameworks_and_need_nothing_of_presage() -> None:
    groups = [framework((SCRIPTS / run.file).read_text(), run.argv.split()) for run in RUNS]
    assert len(RUNS) >= 22 and len({run.name for run in RUNS}) == len(RUNS)
    assert {"plain loop", "Hugging Face Trainer", "accelerate", "Lightning", "torch_geometric", "compiled"} == set(
        groups
    )
    assert {run.file for run in RUNS} == {path.name for path in SCRIPTS.glob("*.py")}
    assert not any("presage" in path.read_text() for path in SCRIPTS.glob("*.py"))
