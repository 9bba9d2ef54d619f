"""A sweep that was cut goes on where it stopped, and two runs on one folder do not mix their rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from presage.errors import InputError, PresageError
from presage_fit.calibrate import __main__ as calibrate
from presage_fit.calibrate.resume import check_same_machine, only_run
from presage_fit.calibrate.sweeps import draw

HEADER = {"gpu": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "cudnn": 91000}
NAME = "sort"


class _Here(Executor):
    """Reads traces at once."""

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        out: Future[Any] = Future()
        out.set_result(fn(*args))
        return out


class Killed(BaseException):
    """The end of the process, in the middle of a batch."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU that answers at once; `left` batches later the process is killed."""
    state = {"left": 10**9}

    def profile(
        _torch: Any, calls: list[tuple[str, Any]], _flush: Any, under_way: Any, _turn: Any
    ) -> tuple[list[str], dict[str, str]]:
        state["left"] -= 1
        under_way(calls[0][0])
        if state["left"] < 0:
            raise Killed
        return [name for name, _ in calls], {}

    monkeypatch.setattr(calibrate, "profile_batch", profile)
    monkeypatch.setattr(calibrate, "read_batch", lambda _trace, names: {n: [] for n in names})
    monkeypatch.setattr(calibrate, "Flush", lambda _: None)
    monkeypatch.setattr(calibrate, "GpuSensor", lambda: type("Sensor", (), {"mhz": lambda _: 1980})())
    return state


def sweep(folder: Path, seed: int = 0) -> bool:
    cuda = type("Cuda", (), {"empty_cache": staticmethod(lambda: None)})
    torch = type("Torch", (), {"cuda": cuda})
    return calibrate.sweep(torch, NAME, folder, time.monotonic() + 60, seed, _Here(), lambda _: None)  # type: ignore[arg-type]


def params(folder: Path) -> list[Any]:
    return [json.loads(line)["p"] for line in (folder / f"{NAME}.jsonl").read_text().splitlines()]


def test_a_sweep_that_was_cut_goes_on_without_a_gap_or_a_repeat(tmp_path: Path, gpu: dict[str, int]) -> None:
    gpu["left"] = 6
    with pytest.raises(Killed):
        sweep(tmp_path)
    held = params(tmp_path)
    assert 0 < len(held) < len(draw(NAME, 0))
    with (tmp_path / f"{NAME}.jsonl").open("a") as f:
        f.write('{"p": {"ro')  # cut in the middle of a line
    gpu["left"] = 10**9
    assert sweep(tmp_path)
    assert params(tmp_path) == json.loads(json.dumps(draw(NAME, 0)))


@pytest.mark.usefixtures("gpu")
def test_draws_of_another_seed_are_not_added(tmp_path: Path) -> None:
    assert sweep(tmp_path)
    before = params(tmp_path)[:30]
    (tmp_path / f"{NAME}.jsonl").write_text("".join(json.dumps({"p": p, "ops": []}) + "\n" for p in before))
    with pytest.raises(InputError, match=r"sort\.jsonl: line 1 is of another sweep \(--seed"):
        sweep(tmp_path, seed=1)
    assert params(tmp_path) == before
    (tmp_path / f"{NAME}.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="line 1 is damaged: remove the file"):
        sweep(tmp_path)


def test_a_pack_of_another_gpu_or_software_is_not_added_to(tmp_path: Path) -> None:
    check_same_machine(tmp_path, HEADER)  # a new folder
    (tmp_path / "header.json").write_text(json.dumps(HEADER))
    check_same_machine(tmp_path, {**HEADER, "date": "another day"})
    with pytest.raises(
        InputError, match=r"header\.json: gpu: is NVIDIA H200, and here it is NVIDIA A100: give another"
    ):
        check_same_machine(tmp_path, {**HEADER, "gpu": "NVIDIA A100"})
    with pytest.raises(InputError, match=r"torch: is 2\.11, and here it is 2\.12"):
        check_same_machine(tmp_path, {**HEADER, "torch": "2.12"})


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not held on Windows")
def test_one_run_at_a_time_measures_into_a_folder(tmp_path: Path) -> None:
    """A run that is killed holds nothing."""
    code = "import sys, time; from pathlib import Path; from presage_fit.calibrate.resume import only_run\n"
    code += "with only_run(Path(sys.argv[1])): print('holds', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "holds\n"
    with (
        pytest.raises(PresageError, match="another run measures into it: wait for it, or give another folder"),
        only_run(tmp_path),
    ):
        raise AssertionError("two runs at once")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    with only_run(tmp_path):
        assert not os.listdir(tmp_path)
