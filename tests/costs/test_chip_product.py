"""Matrix products of chips: laws that hold everywhere, and figures on measured tables."""

import sys
from pathlib import Path
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.closed_form import ClosedFormKernels, GemmShape
from presage.hardware import Gpu, gpu, gpus

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import chip_rows  # noqa: E402

KINDS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
SHAPES = (
    (8192, 8192, 8192),
    (4096, 128, 5120),
    (2048, 50257, 4096),
    (1, 1, 1),
    (65536, 28672, 8192),
    (512, 512, 65536),
)
ALL = [pytest.param(g, id=g.key) for g in gpus()]
sizes = st.integers(1, 512).map(lambda n: 8 * n)
# A product of few tiles is split along its inner dimension, the more ways the longer that is, and may save so much as
# this begins: most on an L40S, where the start of a tile costs most.
BELOW = {"l40s": 0.85, "v100_32gb": 0.96}
ELSEWHERE = 0.98


def highest(g: Gpu) -> float:
    """What no product can exceed; AMD's matrix units do fp32 at up to twice the vectors' rate."""
    return max(*g.peak.values(), 2 * g.peak["fp8"] if "fp8" in g.peak else 0.0, 2 * g.peak["fp32"])


@pytest.mark.parametrize("g", ALL)
def test_every_gpu_and_kind_has_a_time_within_its_peak(g: Gpu) -> None:
    chip = ClosedFormKernels.of(g)
    for kind in KINDS:
        peak = g.peak.get(kind, highest(g)) * (2 if kind == "fp32" and g.architecture == "CDNA 2" else 1)
        for m, n, k in SHAPES:
            seconds = chip.gemm(GemmShape(m, n, k), kind)
            assert seconds >= 2.0 * m * n * k / peak
            assert 0 < seconds < 1e4


@pytest.mark.parametrize("key", ["a100_80gb", "h100_sxm", "h200", "b200", "l40s", "mi300x", "v100_32gb"])
@given(m=sizes, n=sizes, k=sizes, more=sizes, which=st.integers(0, 2), batch=st.integers(1, 8))
def test_more_work_never_takes_less_time(key: str, m: int, n: int, k: int, more: int, which: int, batch: int) -> None:
    chip = ClosedFormKernels.of(gpu(key))
    larger = [m, n, k]
    larger[which] += more
    below = BELOW.get(key, ELSEWHERE)
    assert chip.gemm(GemmShape(*larger, batch), "fp16") >= below * chip.gemm(GemmShape(m, n, k, batch), "fp16")
    assert chip.gemm(GemmShape(m, n, k, batch + 1), "fp16") >= chip.gemm(GemmShape(m, n, k, batch), "fp16")


@given(m=sizes, n=sizes, k=sizes)
def test_twice_the_rows_take_at_most_twice_the_time(m: int, n: int, k: int) -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    assert chip.gemm(GemmShape(2 * m, n, k)) <= 2.0 * chip.gemm(GemmShape(m, n, k))


def test_narrower_numbers_are_faster() -> None:
    h200, b200 = ClosedFormKernels.of(gpu("h200")), ClosedFormKernels.of(gpu("b200"))
    by_kind = [h200.gemm(GemmShape(8192, 8192, 8192), kind) for kind in ("fp32", "tf32", "bf16", "fp8")]
    assert by_kind == sorted(by_kind, reverse=True)
    assert b200.gemm(GemmShape(8192, 8192, 8192), "nvfp4") < b200.gemm(GemmShape(8192, 8192, 8192), "mxfp8")
    assert h200.gemm(GemmShape(4096, 4096, 4096), "fp16") == h200.gemm(GemmShape(4096, 4096, 4096), "bf16")


def test_waves_count() -> None:
    """A hidden width of 13,824 fills an A100's waves better than one of 14,400 (BLOOM's choice of shape)."""
    chip = ClosedFormKernels.of(gpu("a100_80gb"))

    def rate(hidden: int) -> float:
        return hidden * hidden / chip.gemm(GemmShape(2048, hidden, hidden))

    assert rate(13824) > 1.03 * rate(14400)


def test_rows_at_odd_places_are_slow() -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    assert chip.gemm(GemmShape(8192, 50257, 4096)) > 2 * chip.gemm(GemmShape(8192, 50304, 4096))
    assert chip.gemm(GemmShape(8190, 4096, 4096)) <= chip.gemm(
        GemmShape(8192, 4096, 4096)
    )  # rows lie along the inner dimension
    assert chip.gemm(GemmShape(8190, 4096, 4096, lhs_m_major=True)) > 2 * chip.gemm(
        GemmShape(8192, 4096, 4096, lhs_m_major=True)
    )


def test_a_sum_in_fp32_costs_its_bytes() -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    extra = chip.gemm(GemmShape(8192, 8192, 4096), accumulate=True) - chip.gemm(GemmShape(8192, 8192, 4096))
    assert 0.5 * chip.memory_bound(4.0 * 8192**2) < extra < 1.5 * chip.memory_bound(4.0 * 8192**2)


def test_grouped_products_are_near_one_of_all_rows() -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    one, many = chip.gemm(GemmShape(16 * 4096, 4096, 7168)), chip.gemm(GemmShape(4096, 4096, 7168, groups=16))
    assert one < many < 1.1 * one
    assert chip.gemm(GemmShape(512, 4096, 7168, groups=32)) > chip.gemm(GemmShape(512, 4096, 7168, groups=16))


def test_sums_of_groups_cost_what_sums_of_one_do() -> None:
    """Weight gradients of 16 experts, added up in fp32."""
    chip = ClosedFormKernels.of(gpu("h200"))
    extra = chip.gemm(GemmShape(4096, 7168, 2048, groups=16), accumulate=True) - chip.gemm(
        GemmShape(4096, 7168, 2048, groups=16)
    )
    alone = chip.gemm(GemmShape(16 * 4096, 7168, 2048), accumulate=True) - chip.gemm(GemmShape(16 * 4096, 7168, 2048))
    assert extra == pytest.approx(alone, rel=1e-9) and extra > 0


def test_chips_of_a_gpu_are_made_once() -> None:
    assert ClosedFormKernels.of(gpu("h100_sxm")) is ClosedFormKernels.of(gpu("h100_sxm"))


def errors(chip: ClosedFormKernels, rows: list[chip_rows.Product], kind: str = "bf16") -> list[float]:
    found = [(chip.gemm(GemmShape(r.m, r.n, r.k, r.batch, 1, r.left, r.right), kind), r.seconds) for r in rows]
    return [abs(told / seen - 1) for told, seen in found]


@pytest.mark.parametrize(
    ("key", "name"),
    [("a100_80gb", "a100_sxm"), ("h100_sxm", "h100_sxm"), ("h200", "h200_sxm"), ("b200", "b200_sxm")],
)
def test_held_out_rows_of_published_tables(shared: Path, key: str, name: str) -> None:
    """The H200's table is held out whole: its chip is fitted on our own measurements."""
    table = chip_rows.gemm_table(shared / "kernels" / "aiconfigurator" / f"{name}_gemm.csv.gz")
    rows = [r for r in table if r.m >= 1024 and min(r.n, r.k) >= 128 and (r.held or key == "h200")]
    found = errors(ClosedFormKernels.of(gpu(key)), rows[:: len(rows) // 1500 or 1])
    assert len(found) >= 1500
    assert median(found) < 0.06
    assert quantiles(found, n=10)[-1] < 0.20


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.04), ("fp8", 0.04)])
def test_held_out_rows_of_our_own(kind: str, most: float) -> None:
    rows = [r for r in chip_rows.jobs_products(ROOT / "data" / "h200_jobs", kind) if r.held]
    found = errors(ClosedFormKernels.of(gpu("h200")), rows, kind)
    assert len(found) > 100
    assert median(found) < most
