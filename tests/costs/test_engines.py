"""Engines and a GPU's own corrections: what tables show is found again on shapes that were not fitted."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.costs.calibrated_kernels import call_times
from presage.costs.call import Call, Shape
from presage.costs.closed_form import AttentionShape, ClosedFormKernels, GemmShape
from presage.costs.kernel_files import FILE, SHIPPED, TABLES, load
from presage.hardware import gpu
from presage.prediction.machine import machine
from presage_fit.serving import (
    ServingOverhead,
    heated,
    medians,
    save_tables,
    serving_features,
    serving_overheads,
)
from presage_fit.table_split import held_out_widths, is_fitted
from presage_validation.kernel_tables import MeasuredKernel, attention, gemm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from fit_tables import Rows, engine, own_gemm, unheated  # noqa: E402

GPUS = ("a100_80gb", "h100_sxm", "b200", "l40s")


def products(key: str, factor: float, floor: float, count: int) -> list[MeasuredKernel]:
    """Products of random sizes as two engines would time them, were they `factor` times slower than on the H200."""
    rng = np.random.default_rng(0)
    sizes = [tuple(int(n) for n in row) for row in 64 * rng.integers(1, 64, (count, 3))]
    calls = [gemm(dict(zip("mnk", s, strict=True)), "bf16").call for s in sizes]
    models = replace(load(key), own={})
    out = []
    for s, c, t in zip(sizes, calls, call_times(models, calls), strict=True):
        seconds = factor * t.warm + floor
        by = (("first 1 x", seconds), ("second 1 x", 1.2 * seconds))
        out.append(MeasuredKernel(gpu(key), "gemm", str(s), c, 1.1 * seconds, 0.1, s, by))
    return out


# ---- the split


def test_the_split_is_of_the_shape_alone_and_keeps_whole_widths_out() -> None:
    shapes = [(m, n, k) for m in range(1, 30) for n in range(64, 2048, 64) for k in (512, 1024, 4096)]
    kept = np.array([is_fitted("gemm", s) for s in shapes])
    out = np.array([held_out_widths("gemm", s) for s in shapes])
    assert not (kept & out).any()
    assert 0.1 < out.mean() < 0.3 and 0.2 < kept[~out].mean() < 0.3
    widths = {s[1:] for s, o in zip(shapes, out, strict=True) if o}
    assert not widths & {s[1:] for s, k in zip(shapes, kept, strict=True) if k}
    attended = (4, 1024, 32, 8, 128, 0)
    assert held_out_widths("attention", attended) == held_out_widths(
        "attention", (4, 99, 32, 8, 64, 128)
    )  # by batch and heads alone


def test_the_split_does_not_move() -> None:
    """Shipped models were fitted by it: were it to change, shapes they know would count as unseen."""
    assert [held_out_widths("gemm", (1, n, k)) for n, k in ((1024, 4096), (4096, 1024), (768, 768), (4096, 4096))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert is_fitted("gemm", (1024, 1024, 1024)) and not is_fitted("gemm", (1024, 4096, 4096))


# ---- engines


def test_heat_is_taken_off_again_and_spares_short_kernels() -> None:
    seconds = np.geomspace(1e-6, 1.0, 50)
    assert np.allclose(unheated(heated(seconds, 0.15), 0.15), seconds, rtol=1e-9)
    assert heated(seconds, 0.15)[0] == pytest.approx(1e-6, rel=1e-6) and heated(seconds, 0.15)[-1] > 1.14


def test_medians_are_those_of_each_shape() -> None:
    of, values = np.array([1, 0, 1, 1, 0]), np.array([3.0, 1.0, 9.0, 4.0, 2.0])
    assert medians(values, of, 2).tolist() == [1.5, 4.0]


def test_an_engine_is_found_again_on_shapes_it_was_not_fitted_on() -> None:
    rows = products("h100_sxm", 1.0, 5e-6, 700)
    models = replace(load("h100_sxm"), own={})
    seen, unseen = rows[:500], rows[500:]
    found = engine(Rows("gemm", tuple(seen)), models, 0.0)
    assert found.floors[0] == pytest.approx(5e-6, rel=0.3) and found.floors[1] > found.floors[0]
    kernel = np.array([t.warm for t in call_times(models, [s.call for s in unseen])])
    sizes = np.array([s.sizes for s in unseen])
    both = [[who for who, _ in s.by] for s in unseen]
    wanted = np.array([s.seconds for s in unseen])
    assert np.median(np.abs(found.seconds(sizes, kernel, models.rates, both) / wanted - 1)) < 0.02
    first = found.seconds(sizes, kernel, models.rates, [["first 1 x"]] * len(unseen))
    assert np.median(np.abs(first / np.array([s.by[0][1] for s in unseen]) - 1)) < 0.02
    assert np.median(np.abs(kernel / wanted - 1)) > 0.1  # the kernel alone is not what the engine takes


def test_an_engine_that_is_not_known_is_the_middle_of_its_like() -> None:
    some = serving_overheads("h100_sxm")["gemm"]
    names = ("vllm 1 x", "vllm 2 x", "sglang 1 x")
    one = replace(some, collectors=names, floors=(0.0,) * 3)
    assert one.standing_for("vllm 2 x") == (1,)
    assert one.standing_for("vllm 2 y") == (1,) and one.standing_for("vllm 3 x") == (0, 1)
    assert one.standing_for("other") == one.standing_for("") == (0, 1, 2)


def test_what_tables_show_is_kept_as_it_was(tmp_path: Path) -> None:
    models = load("a100_80gb")
    save_tables(tmp_path / TABLES, models.own, serving_overheads("a100_80gb"), {})
    assert len((tmp_path / TABLES).read_bytes()) < 200_000
    again = dict(np.load(tmp_path / TABLES))
    before = dict(np.load(SHIPPED / "a100_80gb" / TABLES))
    assert all(np.array_equal(again[k], before[k]) for k in before if k != "about")


# ---- a GPU's own kernels


@pytest.mark.slow
def test_a_slower_gpu_is_found_again_whatever_engines_add() -> None:
    """Half as quick as the H200's corrections say, under a floor of 6 us: 2 of them are any short kernel's."""
    rows = products("a100_80gb", 2.0, 6e-6, 900)
    models = replace(load("a100_80gb"), own={})
    own = own_gemm(Rows("gemm", tuple(rows[:600])), models, 0.0)
    unseen = [s.call for s in rows[600:] if s.seconds > 1e-4]
    before, after = (call_times(m, unseen) for m in (models, replace(models, own={"gemm": own})))
    ratio = np.array([b.warm / a.warm for a, b in zip(before, after, strict=True)])
    assert len(unseen) > 50 and np.median(ratio) == pytest.approx(2.2, rel=0.05)  # the middle of both engines


def test_only_the_types_of_number_and_kernels_that_were_timed_are_corrected() -> None:
    own = load("h100_sxm").own
    half, whole = (Shape((512, 512), (512, 1), kind) for kind in ("bfloat16", "float32"))
    assert own["gemm"].knows(Call("aten::mm", (half, half))) and not own["gemm"].knows(Call("aten::mm", (whole, whole)))
    sizes = {"batch": 1, "seq_len": 4096, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "window_size": 0}
    assert own["attention"].knows(attention(sizes, "bf16").call)
    wide = attention(sizes | {"head_dim": 256}, "bf16").call  # PyTorch's flash kernel is not the quickest of a Hopper
    assert not own["attention"].knows(wide) and load("l40s").own["attention"].knows(wide)


@pytest.mark.parametrize("key", GPUS)
def test_own_kernels_are_near_the_chips_laws(key: str) -> None:
    """Both rest on the same tables; the L40S's chip takes more of its long times for a fallen clock."""
    models, chip = load(key), ClosedFormKernels.of(gpu(key))
    shapes = [(2048, 4096, 4096), (8192, 1024, 4096), (8192, 4096, 1024), (4096, 12288, 4096), (8192, 14336, 4096)]
    times = call_times(models, [gemm(dict(zip("mnk", s, strict=True)), "bf16").call for s in shapes])
    ratios = [t.warm / chip.gemm(GemmShape(*s, rhs_k_major=True)) for s, t in zip(shapes, times, strict=True)]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.08) and all(0.85 < r < 1.2 for r in ratios)
    style = "flash2" if key in ("a100_80gb", "l40s") else "flash3"
    sizes = {"batch": 2, "seq_len": 4096, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "window_size": 0}
    (t,) = call_times(models, [attention(sizes, "bf16").call])
    assert t.warm == pytest.approx(chip.attention(AttentionShape(2, 16, 16, 4096, 4096, 128, 128), style), rel=0.15)


def test_a_gpu_of_the_same_architecture_gets_its_relatives_corrections_and_no_engines() -> None:
    models = load("a100_pcie_80gb")
    assert models.own and "A100" in models.own_of and not serving_overheads("a100_pcie_80gb")
    assert serving_overheads("h200") and not load("h200").own and (SHIPPED / "h200" / FILE).exists()


def test_what_was_measured_where_is_told() -> None:
    assert machine("h200").notes == ()
    (note,) = machine("h100_sxm").notes
    assert "tables measured on it" in note and "NVIDIA H200" in note
    (note,) = machine("a100_pcie_80gb").notes
    assert "tables measured on NVIDIA A100 SXM" in note
    (note,) = machine("v100_pcie_32gb").notes
    assert "tables" not in note


def test_features_have_one_row_a_shape() -> None:
    sizes = np.array([[1, 1, 1, 1, 64, 0], [256, 16384, 96, 96, 256, 128]])
    x = serving_features("attention", sizes, np.array([1e-5, 1.0]), load("h200").rates)
    assert x.shape[0] == 2 and np.isfinite(x).all()
    assert isinstance(serving_overheads("h200")["attention"], ServingOverhead)
