"""Packs of what was profiled, by `presage measure` and in watched loops; a recorded trace stands for the profiler's."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import presage
from presage.errors import PresageError
from presage.files.reading import DATA
from presage.measure import __main__ as measure
from presage.measure import monitor, saved_pack
from presage.measure.activity import profiled
from presage.measure.saved_pack import PackRecorder
from presage.prediction.machine import machine

torch = pytest.importorskip("torch", reason="the profiler is torch's")

TRACE = gzip.decompress((DATA / "dlrm_mlperf_b2048.json.gz").read_bytes())


class _Event:
    """A CUDA event that is done at once, a millisecond after the one before."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.made += 1
        self.at = _Event.made

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return float(other.at - self.at)


class _Profile:
    """The profiler of an H200, as recorded."""

    trace = TRACE
    shapes: Any = None

    def __init__(self, *, record_shapes: bool, **_: Any) -> None:
        _Profile.shapes = record_shapes

    def __enter__(self) -> _Profile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    start = stop = __enter__

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(_Profile.trace)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch with a GPU to all appearance."""
    nothing = lambda: None  # noqa: E731
    names = ("synchronize", "reset_peak_memory_stats")
    seen = {
        "max_memory_allocated": lambda: 7,
        "max_memory_reserved": lambda: 9,
        "get_device_name": lambda: "NVIDIA H200",
    }
    cuda = SimpleNamespace(Event=_Event, is_available=lambda: True, **dict.fromkeys(names, nothing), **seen)
    found = SimpleNamespace(cuda=cuda, __version__="2", version=torch.version, backends=torch.backends)
    monkeypatch.setattr("torch.profiler.profile", _Profile)
    monkeypatch.setattr(_Profile, "trace", TRACE)
    monkeypatch.setattr(monitor, "_cuda", lambda: found)
    monkeypatch.setattr(measure, "cuda_torch", lambda *_: found)
    return found


def watched(folder: Path, steps: int = 12, **options: Any) -> None:
    with presage.watch(1e-3, quiet=True, save_pack=folder, **options) as watch:
        for _ in watch(range(steps)):
            pass


@pytest.mark.usefixtures("gpu")
def test_a_watched_loop_leaves_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(tmp_path / "pack")
    assert _Profile.shapes is True
    assert "presage: pack saved: 127 calls of NVIDIA H200; presage predict TRAIN.py --pack" in capsys.readouterr().err
    assert machine(tmp_path / "pack").kernels.gpu.key == "h200"
    assert [p.name for p in tmp_path.iterdir()] == ["pack"]


@pytest.mark.usefixtures("gpu")
def test_a_loop_without_a_pack_records_no_shapes() -> None:
    with presage.watch(1e-3, quiet=True) as watch:
        for _ in watch(range(12)):
            pass
    assert _Profile.shapes is False


@pytest.mark.usefixtures("gpu")
def test_the_callbacks_take_it_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    callback = presage.trainer_callback(1e-3, quiet=True, save_pack=tmp_path / "pack")
    for _ in range(12):
        callback.on_step_begin()
        callback.on_step_end()
    callback.on_train_end()
    assert (tmp_path / "pack" / "learned.npz").is_file()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_not_listed_keeps_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Profile, "trace", TRACE.replace(b"NVIDIA H200", b"Someone's GPU"))
    watched(tmp_path / "pack")
    text, kept = capsys.readouterr().err, tmp_path / "pack_trace.json"
    assert 'no pack saved: the trace names "Someone\'s GPU", which is not listed' in text
    assert f"presage calibrate --from {kept} --out" in text
    assert kept.read_bytes() == _Profile.trace and not (tmp_path / "pack").exists()


@pytest.mark.usefixtures("gpu")
def test_a_part_of_presage_keeps_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_pack, "can_predict", lambda: False)
    recorder = PackRecorder(tmp_path / "pack")
    recorder.export(_Profile(record_shapes=True))
    saved = recorder.save()
    assert "only partly installed" in saved.line and saved.trace is not None and saved.trace.is_file()


def test_a_loop_that_is_too_short_or_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(tmp_path / "pack")
    assert "no pack saved: no step was profiled on a GPU" in capsys.readouterr().err


def test_what_cannot_be_saved_is_refused_before_the_loop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PresageError, match="is there already; name a new folder"):
        presage.watch(1e-3, save_pack=tmp_path)
    with pytest.raises(PresageError, match="leave out profile=False"):
        presage.watch(1e-3, save_pack=tmp_path / "pack", profile=False)
    with pytest.raises(PresageError, match="--like goes with --save-pack DIR"):
        measure.main(["train.py:build", "--like", "h100"])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("like", [(), ("--like", "h100_sxm")])
def test_measure_saves_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str], like: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("def build(device):\n    return lambda: None\n")
    words = [f"{tmp_path}/train.py:build", "--steps", "3", "--no-predict", "--save-pack", f"{tmp_path}/pack"]
    measure.main([*words, *like, "--json", f"{tmp_path}/measured.json"])
    assert (
        f"pack saved: 127 calls of NVIDIA H200; presage predict TRAIN.py --pack {tmp_path}/pack"
        in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "measured.json").read_text())["pack"]["calls"] == 127
    with pytest.raises(PresageError, match="is there already"):
        measure.main(words)


def test_a_profile_without_a_pack_leaves_no_file(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert profiled(gpu, lambda: None).total.seconds > 0
    assert not os.listdir(tmp_path)


def test_measure_predicts_with_a_pack_of_this_gpu(tmp_path: Path) -> None:
    from presage_fit.learn import learn_pack

    pack = learn_pack([DATA / "dlrm_mlperf_b2048.json.gz"], tmp_path / "pack").out
    assert measure._place(pack, "NVIDIA H200") == str(pack)
    with pytest.raises(PresageError, match="is of NVIDIA H200, not of NVIDIA T4"):
        measure._place(pack, "Tesla T4")
