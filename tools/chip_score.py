"""Errors of the chips that ship, on rows that were held out, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from chip_fits import Floats
from chip_rows import Attention, Product, jobs
from chip_sources import JOBS, NEUSIGHT, ROOT, TABLES, Sources

from presage.costs.closed_form import AttentionShape, ClosedFormKernels, GemmShape
from presage.hardware import gpu

TRAINING = 1024  # rows from which on
COOL = 1e-3  # seconds of a product under which collectors' clocks did not fall
LARGE = 8192
PAGE = ROOT / "docs" / "chips.md"
SHOWN = (
    "a100_80gb", "a100_pcie_80gb", "h100_sxm", "h100_sxm_96gb", "h100_pcie", "h200", "b200", "b300", "gb200", "gb300",
    "l40s", "l4", "mi250x", "mi300x", "mi325x",
)  # fmt: skip
HEAD = "| GPU | family | rows from | n | median | p90 | bias |\n|---|---|---|---|---|---|---|"


def line(key: str, family: str, source: str, told: Floats, seen: Floats) -> str:
    e = told / seen - 1
    a = np.abs(e)
    return (
        f"| {key} | {family} | {source} | {len(a)} | {np.median(a):.1%} | {np.quantile(a, 0.9):.1%} "
        f"| {np.median(e):+.1%} |"
    )


def products(sources: Sources, key: str) -> Iterator[str]:
    for kind, source in sources.products(key).items():
        chip = ClosedFormKernels(gpu(source.gpu))
        rows = [r for r in source.rows if r.held and r.m * r.batch >= TRAINING and min(r.n, r.k) >= 128]
        told = np.array([chip.gemm(GemmShape(r.m, r.n, r.k, r.batch, 1, r.left, r.right), kind) for r in rows])
        seen = np.array([r.seconds for r in rows])
        where = "own" if key == "h200" else "NeuSight" if kind == "fp32" else "table"
        yield from split(key, f"{kind} products", where, told, seen, source.heated)


def split(key: str, family: str, where: str, told: Floats, seen: Floats, heated: bool) -> Iterator[str]:
    yield line(key, family, where, told, seen)
    if heated:
        yield line(key, f"{family} under 1 ms", where, told[told < COOL], seen[told < COOL])


def attention(sources: Sources, key: str) -> Iterator[str]:
    chip = ClosedFormKernels(gpu(key))
    found = sources.attention(key)
    if key == "h100_sxm":
        found = {"flash3 forward": sources.context(key)}
    for name, every in found.items():
        style, way = name.split()
        rows = [r for r in every if r.held]
        told = [
            chip.attention(
                AttentionShape(
                    r.batch, r.heads, r.kv_heads, r.length, r.length, r.dim, r.value_dim, r.causal, r.window,
                    way == "backward",
                ), style,
            )
            for r in rows
        ]  # fmt: skip
        yield line(key, f"attention, {name}", "own" if key == "h200" else "table", np.array(told), seconds(rows))


def seconds(rows: Sequence[Product | Attention]) -> Floats:
    return np.array([r.seconds for r in rows])


def experts() -> Iterator[str]:
    chip = ClosedFormKernels(gpu("h200"))
    rows = [r for r in jobs(JOBS, "experts") if Product(r["m"], r["n"], r["k"], 1, 0.0).held]
    ways = {
        "bf16": ("forward", lambda r: chip.gemm(GemmShape(r["m"], r["n"], r["k"], groups=r["groups"]))),
        "weights": ("weight gradients", lambda r: chip.gemm(GemmShape(r["n"], r["k"], r["m"], groups=r["groups"]))),
    }
    for name, (text, law) in ways.items():
        found = [r for r in rows if isinstance(r[name], float) and r["m"] >= 128]
        told, seen = np.array([law(r) for r in found]), np.array([r[name] for r in found])
        yield line("h200", f"experts' products, {text}", "own", told, seen)


def tables(sources: Sources) -> Iterator[str]:
    """The published table of the H200, which its parameters have not seen."""
    chip, rows = ClosedFormKernels(gpu("h200")), [r for r in sources.gemm("h200") if r.m >= TRAINING]
    told = np.array([chip.gemm(GemmShape(r.m, r.n, r.k)) for r in rows])
    yield from split("h200", "bf16 products", "table, not fitted", told, seconds(rows), True)


def lasting() -> Iterator[str]:
    """Large products for a moment and for good."""
    yield "| GPU | limit | bf16 burst | bf16 | of the peak | fp8 burst | fp8 |\n|---|---|---|---|---|---|---|"
    for key in SHOWN:
        chip, cells = ClosedFormKernels(gpu(key)), []
        for kind in ("bf16", "fp8"):
            seconds = chip.gemm(GemmShape(LARGE, LARGE, LARGE), kind)
            slow = chip.power.slowdown(chip.power.energy({kind: 2.0 * LARGE**3}, 6.0 * LARGE**2), seconds, 0.0)
            rate = 2.0 * LARGE**3 / seconds / 1e12
            share = [f"{rate / slow * 1e12 / chip.gpu.peak[kind]:.0%}"] if kind == "bf16" else []
            cells += [f"{rate:.0f}", f"{rate / slow:.0f}", *share] if kind in chip.gpu.peak else ["-", "-"]
        of = f" ({chip.transferred}'s)" if chip.transferred else ""
        yield f"| {key}{of} | {chip.gpu.power_limit:.0f} W | {' | '.join(cells)} |"


def scores(sources: Sources) -> Iterator[str]:
    yield HEAD
    for key in dict.fromkeys([*TABLES, *NEUSIGHT]):
        yield from (*products(sources, key), *attention(sources, key))
    yield from (*experts(), *tables(sources))


def write_scores(sources: Sources) -> None:
    """Into the page, between its marks."""
    text = PAGE.read_text()
    for mark, lines in (("errors", list(scores(sources))), ("sustained", list(lasting()))):
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        text = f"{before}<!-- {mark} -->\n" + "\n".join(lines) + "\n<!-- end -->" + rest.split("<!-- end -->", 1)[1]
        print("\n".join(lines))
    PAGE.write_text(text)
