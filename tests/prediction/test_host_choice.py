"""--host: known hosts, measured ones, overheads of traces, packs; what each does to a step, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from graph_sketches import training_step
from presage.cli.app import app
from presage.costs.host_factors import (
    SAME,
    HostFactors,
    factors_of_costs,
    factors_of_host,
    host_spread,
    pack_host,
    shrunk,
)
from presage.costs.host_model import host_model
from presage.errors import InputError, PresageError
from presage.files.reading import read_toml
from presage.hardware import host
from presage.prediction.host_choice import chosen_host
from presage.prediction.machine import machine
from presage.traces.overhead_factors import overheads_of, reference_overheads, traced_factors

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "src" / "presage"
PACK = ROOT / "data" / "h200_pack"
USUAL = host_model()
STEP = ("predict", "examples/gpt.py:build", "--arg", "batch=1", "--arg", "layers=2", "--draws", "20")


def run_text(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def run_json(*words: str) -> Any:
    return json.loads(run_text(*words, "--json", "-"))


def written(path: Path, times: float, names: tuple[str, ...] = ("view_us", "transpose_us", "slice_us")) -> Path:
    """A host whose calls take so many times as long as the reference's."""
    costs = host("h200_host").costs
    lines = [f"{name} = {1e6 * times * costs[name]}" for name in names]
    head = ["version = 1", 'name = "a host"', 'processor = "p"', "[[figures]]", 'source = "s"', 'date = "2026"']
    path.write_text("\n".join([*head, "cpus = 4", *lines]) + "\n")
    return path


# ---- factors


def test_a_measured_ratio_counts_by_its_weight_and_the_rest_stays_unknown() -> None:
    found = shrunk(HostFactors(4.0, 4.0, 4.0), host_spread().unknown_sd, 3)
    assert found.taken.main == pytest.approx(2.0)  # as likely to be an error as a difference: half of it, in logarithms
    assert found.machine_sd == pytest.approx(host_spread().unknown_sd * math.sqrt(0.5))
    exact = shrunk(HostFactors(4.0, 3.0, 2.0), 1e-9, 3)
    assert (exact.taken.main, exact.taken.autograd) == pytest.approx((4.0, 3.0)) and exact.machine_sd < 1e-6


def test_more_evidence_leaves_less_unknown(tmp_path: Path) -> None:
    views = chosen_host(str(written(tmp_path / "views.toml", 2.0)), USUAL)
    names = tuple(n for n in host("h200_host").costs)
    launching = chosen_host(str(written(tmp_path / "launching.toml", 2.0, names)), USUAL)
    unknown = chosen_host("unknown", USUAL)
    assert unknown.pace.machine_sd > views.pace.machine_sd > launching.pace.machine_sd
    assert 1 < views.factors.main < launching.factors.main < 2


def test_other_work_during_some_of_the_calls_is_not_a_slower_host() -> None:
    launching = [n for n in host("h200_host").costs if n.startswith("gpu_") and not n.startswith("gpu_step")]
    reference = host("h200_host").costs
    disturbed = {n: reference[n] * (1.2 if k % 3 else 2.0) for k, n in enumerate(launching)}
    found = factors_of_costs(disturbed, "x")
    assert found.calls == len(launching)
    assert (found.measured.main, found.measured.autograd, found.measured.launch) == pytest.approx((1.2, 1.2, 1.2))


def test_calls_on_the_cpu_count_where_no_kernels_were_launched() -> None:
    costs = {n: 1.3 * s for n, s in host("h200_host").costs.items() if not n.startswith("gpu_")}
    found = factors_of_costs(costs, "x")
    assert found.calls == len(costs) > 30 and found.measured.main == pytest.approx(1.3)
    beside = factors_of_costs({**costs, "gpu_mm_us": host("h200_host").costs["gpu_mm_us"]}, "x")
    assert beside.calls == 1 and beside.measured.main == pytest.approx(1.0)


def test_two_leases_of_one_kind_of_machine_have_one_pace() -> None:
    """Measured while other work came and went: calls differ by up to 1.9 times, the host by less than a tenth."""
    files = sorted((ROOT / "data" / "h200_field").glob("*host*.toml"))
    found = [host(str(path)) for path in files]
    earlier = [h for h in found if not h.in_rounds]  # the later leases are others
    assert len(earlier) == 4 and len(found) == 12
    for h in earlier:
        assert factors_of_host(h).measured.main == pytest.approx(1.0, abs=0.08)


def test_of_calls_in_rounds_the_median_counts(tmp_path: Path) -> None:
    """Two leases measured in rounds; host-bound steps of both took 1.01 and 0.84 times as long as on the reference."""
    for name, steps in (("second_host", 1.01), ("paced_host", 0.84)):
        path = ROOT / "data" / "h200_field" / f"{name}.toml"
        assert factors_of_host(host(str(path))).taken.main == pytest.approx(steps, abs=0.03)
        before = tmp_path / path.name
        before.write_text(path.read_text().replace("version = 2", "version = 1"))
        assert factors_of_host(host(str(before))).taken.main < steps - 0.03


def test_small_steps_tell_more_than_calls(tmp_path: Path) -> None:
    """They count alone: calls are the fastest tenth in one place, where steps meet slow processors and fast ones."""
    costs = {n: 0.7 * s for n, s in host("h200_host").costs.items()} | {
        n: 0.9 * host("h200_host").costs[n] for n in ("gpu_step_dense_us", "gpu_step_conv_us")
    }
    found, calls = (
        factors_of_costs(costs, "x"),
        factors_of_costs({k: v for k, v in costs.items() if "step" not in k}, "x"),
    )
    assert found.calls == 2 and found.measured.main == pytest.approx(0.9)
    assert found.machine_sd < calls.machine_sd and abs(found.taken.main - 0.9) < 0.02
    path = written(tmp_path / "steps.toml", 0.9, ("view_us", "gpu_step_dense_us", "gpu_step_conv_us"))
    path.write_text(path.read_text().replace("version = 1", "version = 3"))
    assert chosen_host(str(path), USUAL).factors.main == pytest.approx(found.taken.main)


def test_one_odd_call_does_not_decide() -> None:
    costs = dict(host("h200_host").costs)
    views = {n: costs[n] * f for n, f in (("view_us", 1.5), ("transpose_us", 1.6), ("slice_us", 20.0))}
    assert factors_of_costs(views, "x").measured.main == pytest.approx(1.6)


# ---- what factors do to host times


def test_factors_scale_threads_and_launch_calls_by_their_own() -> None:
    graph = training_step()
    launches = [int(op.kernels) for op in graph.ops]
    before = USUAL.costs(graph, launches)
    after = replace(USUAL, factors=HostFactors(2.0, 3.0, 5.0)).costs(graph, launches)
    autograd = np.array([op.thread == "autograd" for op in graph.ops])
    assert autograd.any() and not autograd.all()
    assert after.t2 == pytest.approx(before.t2 * np.where(autograd, 3.0, 2.0))
    assert after.t4 == pytest.approx(5.0 * before.t4) and after.end == pytest.approx(2.0 * before.end)


def test_the_reference_is_what_it_was() -> None:
    graph = training_step()
    launches = [int(op.kernels) for op in graph.ops]
    for name in (None, "h200_host"):
        where = machine("h200", name)
        assert where.host.factors == SAME
        assert where.host.costs(graph, launches).total == USUAL.costs(graph, launches).total
    assert machine("h200", "h200_host").host.pace == USUAL.pace
    assert machine("h200").host.assumed and not machine("h200", "h200_host").host.assumed


# ---- packs and traces


def test_a_pack_brings_its_own_host(tmp_path: Path) -> None:
    rows = json.loads((PACK / "host.json").read_text())
    found = pack_host(PACK)
    assert found is not None and found.measured.main == pytest.approx(1.0)
    slow = [{**row, "us": [2 * x for x in row["us"]]} for row in rows]
    (tmp_path / "host.json").write_text(json.dumps(slow))
    scaled = pack_host(tmp_path)
    assert scaled is not None and scaled.measured.main == pytest.approx(2.0)
    assert chosen_host(str(tmp_path / "host.json"), USUAL).factors.main == pytest.approx(scaled.taken.main)
    assert "taken as" in chosen_host(str(tmp_path), USUAL).note


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '[{"op": "aten::view", "us": [-1]}]', '[{"op": "aten::view", "us": "x"}]']
)
def test_a_damaged_pack_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "host.json").write_text(text)
    with pytest.raises(InputError, match=r"host\.json"):
        pack_host(tmp_path)


def test_overheads_of_a_trace_are_a_host() -> None:
    path = SHIPPED / "data" / "h200" / "overheads.toml"
    table = read_toml(path)
    assert traced_factors(path, overheads_of(path, table)).measured.main == pytest.approx(1.0)
    profiled = {k: v for k, v in table.items() if k != "unprofiled"}  # as written before the profiler's cost came off
    assert traced_factors(path, overheads_of(path, profiled)).measured.main == pytest.approx(0.70)
    assert reference_overheads().unprofiled == 0.70


def test_too_few_ops_of_a_trace_are_no_host(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text('version = 1\nper_event_cost_us = 0.0\n[T2.main]\n"aten::add" = {n = 3, mean_us = 9.0}\n')
    with pytest.raises(InputError, match="has 3 samples of ops that the reference has too, 50 are needed"):
        chosen_host(str(path), USUAL)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("version = 1", "version = 7"), r"version: is 7, and this presage reads 1"),
        (("view_us", "viw_us"), r"viw_us: is unknown: did you mean view_us\?"),
        (("cpus = 4", "cpus = 0"), r"cpus: 0 is out of range \[1, 4096\]"),
        (("cpus = 4", "cpus = 4\ngpu_mm_us = 1e9"), r"gpu_mm_us: 1e\+09 is out of range"),
        (("cpus = 4", "cpus = nan"), "nan"),
        (("[[figures]]", "[[figures"), "is not valid TOML"),
    ],
)
def test_a_wrong_file_of_a_host(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    path = written(tmp_path / "host.toml", 1.0)
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(InputError, match=match):
        chosen_host(str(path), USUAL)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (str(SHIPPED / "hardware" / "gpus" / "t4.toml"), "is the file of a GPU, which --gpu takes"),
        (str(SHIPPED / "hardware" / "platforms" / "p5.toml"), "is the file of a platform, which --platform takes"),
        (str(ROOT / "examples" / "jobs" / "own_model.toml"), "is a job file"),
        (str(ROOT / "pyproject.toml"), "is no file of a host: presage calibrate --host"),
        (str(ROOT / "examples"), r"has no host\.json"),
        ("h200_hots", "did you mean h200_host"),
    ],
)
def test_something_else_than_a_host(name: str, match: str) -> None:
    with pytest.raises(PresageError, match=match):
        chosen_host(name, USUAL)


def test_a_host_without_calls_has_no_pace(tmp_path: Path) -> None:
    path = written(tmp_path / "bare.toml", 1.0, ())
    with pytest.raises(InputError, match="has no call that the reference has: measure it"):
        chosen_host(str(path), USUAL)


# ---- commands


def test_predict_for_a_slower_host(tmp_path: Path) -> None:
    slow = str(written(tmp_path / "slow.toml", 3.0))
    usual, other = run_json(*STEP), run_json(*STEP, "--host", slow)
    assert usual["host_machine"] == {
        "name": "h200_host", "assumed": True, "factors": {"main": 1.0, "autograd": 1.0, "launch": 1.0},
        "machine_sd": 0.3,
    }  # fmt: skip
    factor = other["host_machine"]["factors"]["main"]
    assert other["host_ms"] == pytest.approx(usual["host_ms"] * factor) and 1.5 < factor < 3
    assert any(n.startswith("host unknown: taken as 16 vCPUs") for n in usual["notes"])
    assert any("measured at 3.00 times" in n for n in other["notes"]) and not other["host_machine"]["assumed"]


def test_an_unknown_host_has_a_wider_interval() -> None:
    hosts = ([], ["--host", "unknown"], ["--host", "h200_host"])
    width = [x["step_ms"]["p95"] / x["step_ms"]["p5"] for x in (run_json(*STEP[:-2], *host) for host in hosts)]
    assert width[0] == width[1] > 1.1 * width[2]


def test_a_job_on_a_slower_host(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "llama3-8b"\n[training]\nsequence = 256\nglobal_batch = 8\n[parallel]\ngpus = 8\ntp = 8\n'
        '[cluster]\nplatform = "dgx-h100"\n'
    )
    written(tmp_path / "slow.toml", 3.0)
    usual = run_json("job", str(job))
    given = run_json("job", str(job), "--host", str(tmp_path / "slow.toml"))
    assert given["step_ms"]["p50"] > 1.2 * usual["step_ms"]["p50"]
    assert any("measured at 3.00 times" in n for n in given["notes"])
    job.write_text(job.read_text() + 'host = "slow.toml"\n')  # beside the job's file
    assert run_json("job", str(job))["notes"] == given["notes"]


def test_known_hosts_are_listed() -> None:
    assert "h200_host" in run_text("hosts")
    found = run_json("hosts", "h200_host")["hosts"][0]
    assert found["figures"]["view_us"]["value"] == 1.177 and found["pace"] is None
