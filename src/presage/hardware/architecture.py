"""Facts of GPU architectures: one table, so that a new architecture is data."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("architectures.toml")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a GPU's architecture decides; the defaults are those of one that is not in the table."""

    name: str
    closed_form: str = ""  # the GPU whose closed-form parameters and tables it gets
    link: str = "nvlink5"
    host_era: str = "h100"
    mxfp8: bool = False
    nvfp4: bool = False
    fp32_pJ: float = 8.75  # Hopper's; 0 where nothing is known of it
    fp32_matrix: float = 1.0
    fp32_corrected: bool = False
    shortest_us: float = 0.0
    carried: tuple[str, ...] = ("gemm", "conv", "attention", "rnn")


@cache
def architectures() -> dict[str, Architecture]:
    """All in the table, by name."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: Architecture(name, **_facts(found)) for name, found in table.items()}


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def architecture(name: str) -> Architecture:
    """An architecture by its name, as files of GPUs have it."""
    return architectures().get(name) or Architecture(name)
