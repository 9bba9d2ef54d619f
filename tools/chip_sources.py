"""Which rows each chip is fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from chip_rows import (
    Attention,
    Product,
    attention_table,
    gemm_table,
    jobs_attention,
    jobs_products,
    neusight,
    pack_products,
)

ROOT = Path(__file__).resolve().parent.parent
PACK, JOBS = ROOT / "data" / "h200_pack", ROOT / "data" / "h200_jobs"
TABLES = {"a100_80gb": "a100_sxm", "h100_sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
MENU = {"a100_80gb": "ampere", "h100_sxm": "hopper", "h200": "hopper", "b200": "blackwell", "l40s": "ampere"}
NEUSIGHT = {  # whose float32 products were timed, under which name
    "a100_80gb": "NVIDIA A100-PCIE-40GB", "h100_sxm": "NVIDIA H100 80GB HBM3", "v100_pcie_32gb": "Tesla V100-PCIE-32GB",
    "l4": "NVIDIA L4", "t4": "Tesla T4", "p100_pcie": "Tesla P100-PCIE-16GB", "mi210": "AMD Instinct MI210",
}  # fmt: skip
MEASURED = {"a100_80gb": "a100_pcie_40gb"}  # the GPU that float32 figures are of, where it is another
STYLE = {"a100_80gb": "flash2", "h100_sxm": "flash3", "h200": "flash3", "b200": "flash3", "l40s": "flash2"}
FEW = 4  # heads of queries to one of keys
USUAL = 512  # rows from which on products count; those of training have more


@dataclass(frozen=True)
class Source:
    gpu: str
    menu: str
    rows: Sequence[Product]
    heated: bool  # the clock may have fallen in the longest


def usual(rows: Sequence[Product]) -> list[Product]:
    return [r for r in rows if r.m * r.batch >= USUAL and min(r.n, r.k) >= 128]


class Sources:
    def __init__(self, shared: Path) -> None:
        self.tables = shared / "kernels" / "aiconfigurator"
        self.neusight = shared / "kernels" / "neusight"
        self.gemm = cache(self._gemm)
        self.context = cache(self._context)

    def _gemm(self, key: str) -> list[Product]:
        """Products of a published table."""
        return usual(gemm_table(self.tables / f"{TABLES[key]}_gemm.csv.gz"))

    def _context(self, key: str) -> list[Attention]:
        """Attention of a published table, as training has it: long sequences; and few heads of keys, for writing them
        to the engines' cache is in these times."""
        rows = attention_table(self.tables / f"{TABLES[key]}_context_attention.csv.gz")
        return [r for r in rows if r.length >= 2048 and FEW * r.kv_heads <= r.heads and not r.window]

    def products(self, key: str) -> dict[str, Source]:
        out: dict[str, Source] = {}
        if key == "h200":
            for kind, name in (("bf16", "bfloat16"), ("tf32", "tf32"), ("fp32", "float32")):
                rows = usual(pack_products(PACK, name)) + (jobs_products(JOBS, "bf16") if kind == "bf16" else [])
                out[kind] = Source(key, MENU[key] if kind != "fp32" else "vector", rows, False)
            out["fp8"] = Source(key, MENU[key], jobs_products(JOBS, "fp8"), False)
        elif key in TABLES:
            out["bf16"] = Source(key, MENU[key], self.gemm(key), True)
        if key in NEUSIGHT:
            out["fp32"] = Source(MEASURED.get(key, key), "vector", neusight(self.neusight, NEUSIGHT[key]), False)
        return out

    def attention(self, key: str) -> dict[str, list[Attention]]:
        """By style and direction."""
        if key == "h200":
            return {
                f"{style} {way}": jobs_attention(JOBS, backend, way)
                for style, backend in (("flash3", "cudnn"), ("flash2", "flash"))
                for way in ("forward", "backward")
            }
        if key not in TABLES or key == "h100_sxm":
            return {}
        return {f"{STYLE[key]} forward": self.context(key)}
