"""Three factors between what presage's laws say and what whole training runs show.

Products on tensor cores take longer in training than by themselves: operands come from memory rather than from cache,
and other things run beside them. The host takes longer for experts' layers than their counted ops do. The factors are
fitted on public runs (`tools/fit_runs.py`), the same for every model, GPU, framework and source. The file also has what
the fit gives without each source in turn, so that errors on a source can be shown that it had no part in.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

FILE = "data/jobs/efficiency.toml"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Factors on seconds: 1 is what the laws say."""

    product: float = 1.0  # products on tensor cores
    backward: float = 1.0  # those of the backward pass, on top of that
    experts: float = 1.0  # the host's time of experts' layers, beside what their ops take by themselves


LAWS = Efficiency()


@cache
def shipped_efficiency() -> Efficiency:
    """The factors fitted on all development rows."""
    return _efficiency(_file()["fitted"])


@cache
def efficiency_without(source: str) -> Efficiency:
    """The factors fitted without a source; for one that the fit never saw, those that ship."""
    found = _file().get("left_out", {}).get(source)
    return _efficiency(found) if found else shipped_efficiency()


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("presage").joinpath(FILE).read_text(encoding="utf-8"))


def _efficiency(table: dict[str, float]) -> Efficiency:
    return Efficiency(**{f.name: float(table[f.name]) for f in fields(Efficiency) if f.name in table})
