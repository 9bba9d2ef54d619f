"""Fitted embedding models as a file of plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from presage.embeddings.lookup_correction import LookupCorrection
from presage.errors import InputError
from presage.files import write_whole

__all__ = ["MEASURED_ON", "SHIPPED", "LookupParameters", "load_lookup_parameters", "save_lookup_parameters"]

VERSION = 1
MEASURED_ON = "h200"
SHIPPED = Path(__file__).resolve().parents[1] / "data" / MEASURED_ON / "embeddings.json"


@dataclass(frozen=True)
class LookupParameters:
    """The law's parameters on the GPU they were measured on, and what is learned beyond it."""

    params: Mapping[str, float]
    forward: LookupCorrection | None
    backward: LookupCorrection | None
    source: str = ""
    seen: frozenset[str] = frozenset()  # marks of the groups it was fitted on


def save_lookup_parameters(found: LookupParameters, path: Path = SHIPPED) -> None:
    value = {
        "version": VERSION,
        "source": found.source,
        "seen": sorted(found.seen),
        "params": {name: float(f"{value:.5g}") for name, value in found.params.items()},
        "forward": found.forward and found.forward.to_json(),
        "backward": found.backward and found.backward.to_json(),
    }
    write_whole(path, (json.dumps(value) + "\n").encode())


@lru_cache(4)
def load_lookup_parameters(path: Path = SHIPPED) -> LookupParameters:
    try:
        value = json.loads(path.read_text())
        if value["version"] != VERSION:
            raise InputError(path, f"is {value['version']}, this presage reads {VERSION}; fit it again", "version")
        there, back = (LookupCorrection.from_json(value[n]) if value[n] else None for n in ("forward", "backward"))
        return LookupParameters(dict(value["params"]), there, back, str(value["source"]), frozenset(value["seen"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(path, f"not a file of embedding parameters ({e})") from e
