"""`presage calibrate --host`: it measures here, without a GPU, and its file is one of a host."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from presage.costs.host_factors import factors_of_host
from presage.errors import PresageError
from presage.hardware.host import COSTS, STEPS, cost_name, host, read_host
from presage_fit.calibrate import __main__ as calibrate
from presage_fit.calibrate import host_file

PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack"
LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are moved on Linux alone")
PACK_ROWS = json.loads((PACK / "host.json").read_text())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 2), ("LOOPS", 2), ("SECONDS", 5e-5), ("CHAIN", 20), ("PLACES", 3)):
        monkeypatch.setattr(host_file, name, value)


@pytest.mark.usefixtures("quick")
def test_a_host_is_measured_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.toml"
    calibrate.main(["--host", str(out), "--json", "-", "--quiet"])
    said = json.loads(capsys.readouterr().out)
    found = read_host(out)
    assert set(found.costs) == set(said["us"]) and set(found.costs) < set(COSTS)
    assert {"view_us", "slice_us", "cpu_mm_us", "cpu_backward_mm_us", "cpu_step_us"} <= set(found.costs)
    assert all(seconds > 0 for seconds in found.costs.values())
    assert factors_of_host(found).calls == len(found.costs)  # the reference has them all
    source = found.facts.sources["view_us"].text
    assert source.startswith("presage calibrate --host: torch ") and "no GPU" in source


@pytest.mark.usefixtures("quick")
def test_calls_that_launch_kernels_take_turns_too() -> None:
    torch = pytest.importorskip("torch")
    waits: list[int] = []
    timers = host_file.launching_timers(torch, "cpu", lambda: waits.append(1))
    assert {f"{name}_us" for name in timers} == {cost_name(row["op"]) for row in PACK_ROWS}
    assert all(len(timer()) == host_file.LOOPS for timer in timers.values())
    assert len(waits) > len(timers) * host_file.LOOPS  # what is launched is waited for between loops


@LINUX
@pytest.mark.usefixtures("quick")
def test_small_steps_run_in_many_places() -> None:
    torch = pytest.importorskip("torch")
    threads, waits, allowed = torch.get_num_threads(), list[int](), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    try:
        places = host_file.small_steps(torch, "cpu", lambda: waits.append(1))
    finally:
        torch.set_num_threads(threads)
    assert len(places) == 3 and len(waits) == 3 * host_file.PASSES * len(STEPS)
    assert all(set(place) == set(STEPS) and min(place.values()) > 0 for place in places)
    assert os.sched_getaffinity(0) == allowed and {f"{name}_us" for name in STEPS} < set(host("h200_host").costs)


@LINUX
def test_a_call_runs_on_one_processor_and_may_then_leave_it() -> None:
    allowed, seen = os.sched_getaffinity(0), list[set[int]]()
    host_file.elsewhere([lambda: seen.append(os.sched_getaffinity(0))] * 40, random.Random(0))
    assert all(len(cpus) == 1 and cpus <= allowed for cpus in seen) and set.union(*seen) == allowed
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.usefixtures("quick")
def test_the_answer_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.toml"
    calibrate.main(["--host", str(out)])
    said = capsys.readouterr()
    assert f"see presage hosts {out}" in said.out and "calls measured without a GPU" in said.err


def test_a_machine_with_other_work_is_noticed() -> None:
    assert host_file._quantile([1.0, 1.0, 2.0, 9.0], 0.1) == 1.0 and host_file._quantile([1.0, 3.0], 0.75) == 1.0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "give --out PACK to measure the GPU, or --host FILE.toml"),
        (["--out", "pack", "--host", "h.toml"], "give --out PACK to measure the GPU, or --host"),
        (["--host", "host.json"], r"--host host\.json: the file of a host ends in \.toml"),
        (["--host", "no/such/folder/h.toml"], "no/such/folder"),
    ],
)
def test_mistakes(words: list[str], match: str) -> None:
    with pytest.raises(PresageError, match=match):
        calibrate.main(words)


def test_calls_of_a_pack_are_those_of_the_reference() -> None:
    reference = host("h200_host").costs
    assert {cost_name(row["op"]) for row in PACK_ROWS} < set(reference) <= set(COSTS)
    for row in PACK_ROWS:
        assert reference[cost_name(row["op"])] == pytest.approx(1e-6 * sorted(row["us"])[len(row["us"]) // 2])
