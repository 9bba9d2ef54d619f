"""Fused attention of chips: laws that hold everywhere, published figures, and our own measurements."""

import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.costs.closed_form import AttentionShape, ClosedFormKernels
from presage.costs.families.attention import ROWS, STYLES, tile_counts
from presage.hardware import Gpu, gpu, gpus

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import chip_rows  # noqa: E402

ALL = [pytest.param(g, id=g.key) for g in gpus()]
lengths = st.integers(1, 64).map(lambda n: 128 * n)


@pytest.mark.parametrize("g", ALL)
def test_every_gpu_and_style_has_a_time_within_its_peak(g: Gpu) -> None:
    chip, peak = ClosedFormKernels.of(g), max(g.peak.values())
    for style in STYLES:
        for dim, value in ((64, 64), (128, 128), (192, 128), (256, 256), (40, 40)):
            for length in (1, 128, 4096, 131_072):
                for backward in (False, True):
                    took = chip.attention(AttentionShape(1, 8, 2, length, length, dim, value, backward=backward), style)
                    flops = length * length * 8 * (dim + value) * (2.5 if backward else 1.0)
                    assert flops / peak < took < 1e4


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("backward", [False, True])
@given(length=lengths, more=lengths, heads=st.integers(1, 32), dim=st.sampled_from([64, 96, 128, 256]))
def test_more_work_never_takes_less_time(
    style: str, backward: bool, length: int, more: int, heads: int, dim: int
) -> None:
    chip = ClosedFormKernels.of(gpu("h200"))

    def took(length: int, heads: int, causal: bool = True, window: int = 0) -> float:
        return chip.attention(
            AttentionShape(1, heads, heads, length, length, dim, dim, causal, window, backward), style
        )

    assert took(length + more, heads) >= took(length, heads)
    assert took(length, heads + 1) >= took(length, heads)
    assert length <= 1024 or took(length, heads, window=512) <= took(length, heads, window=1024)
    assert took(length, heads, window=length) == took(length, heads)
    assert took(length, 8 * heads) <= 1.001 * took(length, 8 * heads, causal=False)


@given(blocks=st.integers(1, 40), more=st.integers(0, 40), window=st.sampled_from([0, 1, 128, 1000]))
def test_tiles_are_those_one_counts(blocks: int, more: int, window: int) -> None:
    """The closed form beside a count of every block's walk."""
    queries, keys = blocks * ROWS, (blocks + more) * ROWS
    most = blocks + more if not window else -(-window // ROWS) + 2
    counted = [min(more + i + 1, most) for i in range(blocks)]
    found, tiles, longest = tile_counts(queries, keys, True, window)
    assert (found, longest) == (blocks, max(counted))
    assert tiles == pytest.approx(sum(counted))


def test_keys_cost_less_where_they_are_shared() -> None:
    chip = ClosedFormKernels.of(gpu("h200"))
    assert chip.attention(AttentionShape(8, 32, 4, 512, 512, 128, 128)) < chip.attention(
        AttentionShape(8, 32, 32, 512, 512, 128, 128)
    )


def test_newer_styles_are_faster_on_newer_gpus() -> None:
    def took(key: str, style: str) -> float:
        return ClosedFormKernels.of(gpu(key)).attention(AttentionShape(2, 32, 8, 8192, 8192, 128, 128), style)

    for key in ("h100_sxm", "h200", "b200"):
        assert took(key, "flash1") > took(key, "flash2") > took(key, "flash3")
    assert took("a100_80gb", "flash3") == took("a100_80gb", "flash2")
    assert took("h200", "unheard of") == took("h200", "flash2")


# TFLOP/s at 16,384 tokens on an H100 (arXiv 2407.08608, figures 5 and 6): style, width, causal, backward.
PUBLISHED = {
    ("flash2", 128, True, False): 335, ("flash2", 64, False, False): 324, ("flash2", 128, False, True): 322,
    ("flash2", 64, False, True): 291, ("flash3", 128, True, False): 616, ("flash3", 128, False, False): 648,
    ("flash3", 64, False, False): 497, ("flash3", 128, False, True): 561, ("flash3", 64, False, True): 474,
}  # fmt: skip


@pytest.mark.parametrize("what", PUBLISHED, ids=str)
def test_published_figures_of_flash_attention(what: tuple[str, int, bool, bool]) -> None:
    style, dim, causal, backward = what
    heads, length = 2048 // dim, 16384
    shape = AttentionShape(1, heads, heads, length, length, dim, dim, causal, 0, backward)
    took = ClosedFormKernels.of(gpu("h100_sxm")).attention(shape, style)
    flops = 4.0 * heads * dim * length**2 * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    assert flops / took / 1e12 == pytest.approx(PUBLISHED[what], rel=0.12)


@pytest.mark.parametrize(("style", "backend"), [("flash2", "flash"), ("flash3", "cudnn")])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_held_out_rows_of_our_own(style: str, backend: str, way: str) -> None:
    rows = [r for r in chip_rows.jobs_attention(ROOT / "data" / "h200_jobs", backend, way) if r.held]
    chip = ClosedFormKernels.of(gpu("h200"))
    told = [
        chip.attention(
            AttentionShape(
                r.batch, r.heads, r.kv_heads, r.length, r.length, r.dim, r.value_dim, r.causal, 0, way == "backward"
            ),
            style,
        )
        for r in rows
    ]
    assert len(rows) > 40
    assert median(abs(t / r.seconds - 1) for t, r in zip(told, rows, strict=True)) < 0.05


@pytest.mark.parametrize(("key", "name", "most"), [("a100_80gb", "a100_sxm", 0.04), ("b200", "b200_sxm", 0.06)])
def test_held_out_rows_of_published_tables(shared: Path, key: str, name: str, most: float) -> None:
    """Long sequences with few heads of keys; engines write all keys to a cache, which training does not."""
    path = shared / "kernels" / "aiconfigurator" / f"{name}_context_attention.csv.gz"
    rows = [
        r
        for r in chip_rows.attention_table(path)
        if r.held and r.length >= 2048 and 4 * r.kv_heads <= r.heads and not r.window
    ]
    chip, style = ClosedFormKernels.of(gpu(key)), "flash2" if key == "a100_80gb" else "flash3"
    told = [
        chip.attention(AttentionShape(r.batch, r.heads, r.kv_heads, r.length, r.length, r.dim, r.dim), style)
        for r in rows
    ]
    assert len(rows) > 200
    assert median(abs(t / r.seconds - 1) for t, r in zip(told, rows, strict=True)) < most
