"""Fitted parameters of the closed-form laws, one file of plain numbers a measured GPU; others get a relative's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from presage.costs.families.attention import AttentionParameters
from presage.costs.families.gemm import GemmParameters
from presage.errors import InputError
from presage.files.reading import DATA
from presage.hardware.architecture import architecture
from presage.hardware.gpu import Gpu, gpu

FOLDER = DATA / "chips"
US, PICO = 1e-6, 1e-12
DEFAULT = "h100_sxm"  # of an architecture that is not known


@dataclass(frozen=True)
class ClosedFormParameters:
    """Fitted parameters of one GPU. Shares are of its data sheet's figures."""

    key: str
    clock: float  # Hz, of the GPU they were fitted on
    limit: float  # W, of that GPU
    products: dict[str, GemmParameters]  # by type of number
    grouped: dict[str, float]  # share of the rate of single products, seconds a group, seconds a launch
    attention: dict[str, AttentionParameters]  # by style and direction: "flash2 forward"
    stream: dict[str, float]  # shares of the memory bandwidth, by kind of kernel
    launch: float
    power: dict[str, float]


def parameter_source(gpu: Gpu) -> str:
    """The GPU whose parameters a GPU gets: its own, or one of its architecture."""
    if (FOLDER / f"{gpu.key}.json").is_file():
        return gpu.key
    return architecture(gpu.architecture).closed_form or DEFAULT


@cache
def parameters(key: str) -> ClosedFormParameters:
    """The parameters of a GPU that has a file of its own."""
    return read(FOLDER / f"{key}.json")


def read(path: Path) -> ClosedFormParameters:
    """Parameters from a file; missing ones come from the file it names as its base."""
    table = merge_base(path)
    try:
        return ClosedFormParameters(
            key=table["gpu"],
            clock=table["clock_MHz"] * 1e6,
            limit=gpu(table["gpu"]).power_limit,
            products={kind: _tiling(p) for kind, p in table["products"].items()},
            grouped={k: float(v) for k, v in table["grouped"].items()},
            attention={name: _kernel(p) for name, p in table["attention"].items()},
            stream={k: float(v) for k, v in table["stream"].items()},
            launch=table["launch_us"] * US,
            power={k: float(v) for k, v in table["power"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise InputError(path, f"not a chip's parameters: {e}") from e


def merge_base(path: Path) -> dict[str, Any]:
    """The contents of a file, over those of the file it names as its base."""
    try:
        own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(path, f"cannot be read: {e}") from e
    if not own.get("base"):
        return own
    out = merge_base(path.with_name(f"{own['base']}.json"))
    for name, value in own.items():
        out[name] = {**out[name], **value} if isinstance(value, dict) and isinstance(out.get(name), dict) else value
    return out


def _tiling(p: dict[str, Any]) -> GemmParameters:
    return GemmParameters(
        menu=tuple((int(a), int(b)) for a, b in p["menu"]), reach=p["reach"], small=p["small"], fixed=p["tile_us"] * US,
        fill=p["fill"], smooth=p["smooth"], overlap=p["overlap"], bandwidth=p["bandwidth"], store=p["store"],
        split=p["split_us"] * US, launch=p["launch_us"] * US, unaligned=tuple(p["unaligned"]),
        turned=p["turned"],
    )  # fmt: skip


def _kernel(p: dict[str, Any]) -> AttentionParameters:
    widths = sorted((float(w), float(r)) for w, r in p["reach"].items())
    return AttentionParameters(
        widths=tuple(w for w, _ in widths), reach=tuple(r for _, r in widths), block=p["block_us"] * US,
        tail=p["tail"], smooth=p["smooth"], moved=p["moved"], launch=p["launch_us"] * US,
    )  # fmt: skip
