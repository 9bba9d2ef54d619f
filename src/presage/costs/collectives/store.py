"""The fitted parameters as a file."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.costs.collectives.correction import Correction, Corrections
from presage.costs.collectives.group import Group
from presage.costs.collectives.law import Coefficients, Laws
from presage.files import write_whole

__all__ = ["SHIPPED", "CollectiveParameters", "save_parameters", "shipped_parameters"]

SHIPPED = Path(str(files("presage").joinpath("data/collectives/nccl.json")))


@dataclass(frozen=True)
class CollectiveParameters:
    """Fitted parameters: laws by fabric, corrections by curve."""

    laws: Laws
    corrections: Corrections


def save_parameters(fitted: CollectiveParameters, path: Path) -> None:
    """Write it, a line a protocol and a line a curve."""
    laws = {f: {p: [round(v, 5) for v in astuple(c)] for p, c in law.items()} for f, law in fitted.laws.items()}
    curves = [
        {
            "platform": platform,
            "op": op,
            "ranks": group.ranks,
            "per_domain": group.per_domain,
            "first": c.first,
            "values": [round(v, 4) for v in c.values],
        }
        for (platform, op, group), c in fitted.corrections.curves.items()
    ]
    text = json.dumps({"laws": laws, "fabrics": fitted.corrections.fabrics, "curves": curves}, indent=1)
    write_whole(path, text.encode())


def load_parameters(path: Path) -> CollectiveParameters:
    """Read what `save` wrote."""
    found: dict[str, Any] = json.loads(path.read_text())
    laws = {f: {p: Coefficients(*c) for p, c in law.items()} for f, law in found["laws"].items()}
    curves = {
        (c["platform"], c["op"], Group(c["ranks"], c["per_domain"])): Correction(c["first"], tuple(c["values"]))
        for c in found["curves"]
    }
    return CollectiveParameters(laws, Corrections(curves, found["fabrics"]))


@cache
def shipped_parameters() -> CollectiveParameters:
    """What comes with presage."""
    return load_parameters(SHIPPED)
