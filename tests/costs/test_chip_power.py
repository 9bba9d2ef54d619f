"""The power limit of chips, their streams, and where their parameters come from."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.costs.closed_form.parameters import FOLDER, parameters, read
from presage.costs.kernel_model import OpTime
from presage.costs.kernel_model import slowdown as step_slowdown
from presage.errors import InputError
from presage.hardware import Gpu, gpu, gpus

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import chip_rows  # noqa: E402

ALL = [pytest.param(g, id=g.key) for g in gpus()]
LARGE = 2.0 * 8192**3
# FLOP/s of large bf16 products: MAMF's published best shapes, which are bursts, and the share of them that is kept at
# least. Blackwell keeps less: on a B200 a training simulator's measured file has 0.45 to 0.51 of the peak (SimuMax).
MOST = {
    "a100_80gb": (271e12, 0.75), "h100_sxm": (795e12, 0.75), "b200": (1745e12, 0.58), "gb200": (1822e12, 0.58),
    "mi300x": (782e12, 0.75),
}  # fmt: skip
KINDS = {
    "copy", "pointwise", "norm", "norm_backward", "softmax", "loss", "optimizer", "dropout", "cast", "embedding",
    "reduce", "permute", "other",
}  # fmt: skip


def slowdown(chip: ClosedFormKernels, tensor: float, other: float, flops: dict[str, float], nbytes: float) -> float:
    """Of a step with so many seconds of tensor-core kernels and of all else."""
    return chip.power.slowdown(chip.power.energy(flops, nbytes), tensor, other)


def lasting(g: Gpu, kind: str = "bf16") -> float:
    """FLOP/s of large products for good."""
    chip = ClosedFormKernels.of(g)
    seconds = chip.gemm(GemmShape(8192, 8192, 8192), kind)
    return LARGE / (seconds * slowdown(chip, seconds, 0.0, {kind: LARGE}, 6.0 * 8192**2))


@pytest.mark.parametrize("g", ALL)
def test_work_within_the_limit_is_not_slowed(g: Gpu) -> None:
    chip = ClosedFormKernels.of(g)
    assert slowdown(chip, 1e-3, 0.0, {"bf16": 1e9}, 1e6) == 1.0
    assert slowdown(chip, 0.0, 1.0, {}, 1e13) == 1.0
    assert 1.0 <= slowdown(chip, 1e-3, 0.0, {"fp16": 1e-3 * g.peak["fp16"]}, 0.0) < 3.0


@given(tensor=st.floats(0.1, 10), other=st.floats(0, 10), more=st.floats(0.01, 10), load=st.floats(0.1, 1.0))
def test_waiting_cools_and_work_heats(tensor: float, other: float, more: float, load: float) -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    flops = load * 8e14 * tensor
    now = slowdown(chip, tensor, other, {"bf16": flops}, 0.0)
    assert slowdown(chip, tensor, other + more, {"bf16": flops}, 0.0) <= now + 1e-12
    assert slowdown(chip, tensor, other, {"bf16": flops * (1 + more)}, 0.0) >= now - 1e-12


@given(tensor=st.floats(0.1, 10), other=st.floats(0, 10), watts=st.floats(300, 1500))
def test_the_law_is_that_of_single_steps(tensor: float, other: float, watts: float) -> None:
    """Over the ops of a step the point where slowdown and demand agree is stepped towards; here it is a root."""
    p = ClosedFormKernels.of(gpu("h200")).power
    hot = OpTime(tensor, 1, "matrix multiply", "model", watts=watts, tensor_cores=True)
    expected = step_slowdown(p, [hot, OpTime(other, 1, "elementwise", "model", watts=p.base)])
    assert p.slowdown((watts - p.base) * tensor, tensor, other) == pytest.approx(expected, rel=1e-3)


def test_sustained_products_are_what_we_measured() -> None:
    loads = chip_rows.jobs(ROOT / "data" / "h200_jobs", "sustained")["loads"]
    alone = {r["load"]: r["flops"] / r["ms"] * 1e3 for r in loads if not r["others"] and not r["pause"]}
    assert lasting(gpu("h200")) == pytest.approx(alone["gemm_bf16"], rel=0.03)
    assert alone["gemm_fp8_exact"] * 0.97 < lasting(gpu("h200"), "fp8") < alone["gemm_fp8"] * 1.03


@pytest.mark.parametrize("key", MOST)
def test_sustained_rates_stay_below_the_best_bursts_published(key: str) -> None:
    most, share = MOST[key]
    assert share * most < lasting(gpu(key)) < most


def test_large_products_on_a_b200_last_as_measured_for_a_simulator() -> None:
    g = gpu("b200")
    assert 0.45 * g.peak["bf16"] < lasting(g) < 0.51 * g.peak["bf16"]


def test_a_lower_limit_is_slower() -> None:
    assert lasting(gpu("h100_sxm_96gb")) < 0.92 * lasting(gpu("h100_sxm"))


# ---- energies


def energies(key: str) -> dict[str, float]:
    return dict(ClosedFormKernels.of(gpu(key)).power.per_flop)


def test_an_h100_takes_the_energy_of_an_h200() -> None:
    """The same die."""
    assert energies("h100_sxm") == energies("h200")


def test_an_a100_takes_more_by_its_process() -> None:
    """30% less power at one speed from TSMC's 7 nm to its 5 nm: 1 / 0.7, for every type of number."""
    ours = energies("h200")
    for kind, energy in energies("a100_80gb").items():
        assert energy == pytest.approx(ours[kind] / 0.7, rel=2e-3)
    assert ClosedFormKernels.of(gpu("a100_80gb")).power.per_byte == ClosedFormKernels.of(gpu("h200")).power.per_byte


def test_a_b200_takes_more_in_16_bits_only() -> None:
    ours, found = energies("h200"), energies("b200")
    more = {kind: found[kind] / ours[kind] for kind in ours}
    assert {kind for kind, times in more.items() if times > 1.01} == {"bf16", "fp16"}
    assert more["bf16"] == pytest.approx(1.2, rel=1e-3)


def test_the_base_is_the_chips_and_not_the_limits() -> None:
    """A card of 500 W has the same idle watts as one of 700 W, as long as they are no more than 0.4 of its limit."""
    usual, low, least = (ClosedFormKernels.of(gpu(key)).power for key in ("h100_sxm", "h100_sxm_96gb", "h100_pcie"))
    assert usual.base == low.base == pytest.approx(0.285 * 700)
    assert least.base == pytest.approx(0.4 * 350)


@pytest.mark.parametrize("g", ALL)
def test_power_is_within_reason(g: Gpu) -> None:
    p = ClosedFormKernels.of(g).power
    assert 0.05 * p.limit < p.base <= 0.4 * p.limit
    assert p.per_flop["fp8"] < p.per_flop["bf16"] < p.per_flop["tf32"] < p.per_flop["fp32"]


# ---- streams


@pytest.mark.parametrize("g", ALL)
def test_streams_take_their_bytes(g: Gpu) -> None:
    chip = ClosedFormKernels.of(g)
    for kind in ("copy", "norm", "optimizer", "unheard of"):
        assert 1e9 / g.memory_bandwidth < chip.memory_bound(1e9, kind=kind) < 4e9 / g.memory_bandwidth
    assert chip.memory_bound(0.0, 3) == pytest.approx(3 * chip.memory_bound(0.0))


def test_every_file_has_every_kind_of_stream() -> None:
    for path in FOLDER.glob("*.json"):
        found = read(path).stream
        assert found.keys() == KINDS
        assert all(0.2 < share < 0.95 for share in found.values())


def test_kernels_reach_less_of_a_memory_that_is_fast_beside_its_sms() -> None:
    """But copies: a B200 has 1.67 times an H200's bandwidth and 1.11 times its instructions, an A100 0.42 and 0.58."""
    shares = [parameters(key).stream for key in ("b200", "h200", "a100_80gb")]
    for kind in KINDS - {"copy", "permute", "pointwise", "other"}:
        least, middle, most = (s[kind] for s in shares)
        assert least < middle <= most
    assert shares[0]["copy"] == shares[1]["copy"]


def test_a_gpu_without_parameters_says_whose_it_has(tmp_path: Path) -> None:
    assert ClosedFormKernels.of(gpu("h200")).transferred == ""
    assert ClosedFormKernels.of(gpu("gb300")).transferred == "b200"
    mine = tmp_path / "mine.toml"
    text = (ROOT / "src/presage/hardware/gpus/h200.toml").read_text().replace('"Hopper"', '"Nothing yet"')
    mine.write_text(text)
    chip = ClosedFormKernels.of(gpu(str(mine)))
    assert chip.transferred == "h100_sxm"
    assert chip.gemm(GemmShape(4096, 4096, 4096)) > 0


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
