"""The power limit of chips, their streams, and where their parameters come from."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.chip import Chip
from presage.costs.chip.store import FOLDER, parameters, read
from presage.costs.power import Power as StepPower
from presage.costs.power import slowdown
from presage.errors import InputError
from presage.hardware import Gpu, gpu, gpus

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import chip_rows  # noqa: E402

ALL = [pytest.param(g, id=g.key) for g in gpus()]
LARGE = 2.0 * 8192**3
# FLOP/s that large bf16 products keep up (MAMF's published best shapes are bursts: none may be exceeded by much).
MOST = {"a100_80gb": 271e12, "h100_sxm": 795e12, "b200": 1745e12, "gb200": 1822e12, "mi300x": 782e12}


def lasting(g: Gpu, kind: str = "bf16") -> float:
    """FLOP/s of large products for good."""
    chip = Chip.of(g)
    seconds = chip.product(8192, 8192, 8192, kind)
    return LARGE / (seconds * chip.slowdown(seconds, 0.0, {kind: LARGE}, 6.0 * 8192**2))


@pytest.mark.parametrize("g", ALL)
def test_work_within_the_limit_is_not_slowed(g: Gpu) -> None:
    chip = Chip.of(g)
    assert chip.slowdown(1e-3, 0.0, {"bf16": 1e9}, 1e6) == 1.0
    assert chip.slowdown(0.0, 1.0, {}, 1e13) == 1.0
    assert 1.0 <= chip.slowdown(1e-3, 0.0, {"fp16": 1e-3 * g.peak["fp16"]}, 0.0) < 3.0


@given(tensor=st.floats(0.1, 10), other=st.floats(0, 10), more=st.floats(0.01, 10), load=st.floats(0.1, 1.0))
def test_waiting_cools_and_work_heats(tensor: float, other: float, more: float, load: float) -> None:
    chip = Chip.of(gpu("h200"))
    flops = load * 8e14 * tensor
    now = chip.slowdown(tensor, other, {"bf16": flops}, 0.0)
    assert chip.slowdown(tensor, other + more, {"bf16": flops}, 0.0) <= now + 1e-12
    assert chip.slowdown(tensor, other, {"bf16": flops * (1 + more)}, 0.0) >= now - 1e-12


@given(tensor=st.floats(0.1, 10), other=st.floats(0, 10), watts=st.floats(300, 1500))
def test_the_law_is_that_of_single_steps(tensor: float, other: float, watts: float) -> None:
    """costs/power.py steps towards the point where slowdown and demand agree; here it is a root."""
    p = Chip.of(gpu("h200")).power
    step = StepPower(p.limit, p.base, p.per_byte, p.per_byte, {"float32": 0.0}, p.slope)
    demand, seconds = np.array([watts, p.base]), np.array([tensor, other])
    expected = slowdown(step, demand, seconds, np.array([True, False]), 0.0)
    assert p.slowdown((watts - p.base) * tensor, tensor, other) == pytest.approx(expected, rel=1e-3)


def test_sustained_products_are_what_we_measured() -> None:
    loads = chip_rows.jobs(ROOT / "data" / "h200_jobs", "sustained")["loads"]
    alone = {r["load"]: r["flops"] / r["ms"] * 1e3 for r in loads if not r["others"] and not r["pause"]}
    assert lasting(gpu("h200")) == pytest.approx(alone["gemm_bf16"], rel=0.03)
    assert alone["gemm_fp8_exact"] * 0.97 < lasting(gpu("h200"), "fp8") < alone["gemm_fp8"] * 1.03


@pytest.mark.parametrize("key", MOST)
def test_sustained_rates_stay_below_the_best_bursts_published(key: str) -> None:
    assert 0.75 * MOST[key] < lasting(gpu(key)) < MOST[key]


def test_a_lower_limit_is_slower() -> None:
    assert lasting(gpu("h100_sxm_96gb")) < 0.92 * lasting(gpu("h100_sxm"))


@pytest.mark.parametrize("g", ALL)
def test_streams_take_their_bytes(g: Gpu) -> None:
    chip = Chip.of(g)
    for kind in ("copy", "norm", "optimizer", "unheard of"):
        assert 1e9 / g.memory_bandwidth < chip.stream(1e9, kind=kind) < 4e9 / g.memory_bandwidth
    assert chip.stream(0.0, 3) == pytest.approx(3 * chip.stream(0.0))


def test_a_gpu_without_parameters_says_whose_it_has(tmp_path: Path) -> None:
    assert Chip.of(gpu("h200")).transferred == ""
    assert Chip.of(gpu("gb300")).transferred == "b200"
    mine = tmp_path / "mine.toml"
    text = (ROOT / "src/presage/hardware/gpus/h200.toml").read_text().replace('"Hopper"', '"Nothing yet"')
    mine.write_text(text)
    chip = Chip.of(gpu(str(mine)))
    assert chip.transferred == "h100_sxm"
    assert chip.product(4096, 4096, 4096) > 0


def test_shipped_files_are_whole() -> None:
    for path in FOLDER.glob("*.json"):
        assert read(path).key == path.stem
        assert json.loads(path.read_text())["source"]


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"gpu": "x"}')
    with pytest.raises(InputError, match="not a chip's parameters"):
        read(path)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.json")
    assert parameters("h200").key == "h200"
