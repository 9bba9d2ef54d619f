"""Fitted embedding models as a file of plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from presage.embeddings.lookup_correction import Correction, features, fit_correction
from presage.embeddings.lookup_law import backward, forward
from presage.errors import InputError
from presage.files import write_whole
from presage_fit.embeddings import START, Measured, fit_law, sample

__all__ = ["MEASURED_ON", "SHIPPED", "Fitted", "fit", "load", "mark", "save"]

VERSION = 1
MEASURED_ON = "h200"
SHIPPED = Path(__file__).resolve().parents[1] / "data" / MEASURED_ON / "embeddings.json"


@dataclass(frozen=True)
class Fitted:
    """The law's parameters on the GPU they were measured on, and what is learned beyond it."""

    params: Mapping[str, float]
    forward: Correction | None
    backward: Correction | None
    source: str = ""
    seen: frozenset[str] = frozenset()  # marks of the groups it was fitted on


def mark(group: Measured) -> str:
    """Of what a group is, not of what it took."""
    tables = [
        (t.rows, t.dim, t.pooling, t.dtype, k.count, k.distinct)
        for t, k in zip(group.tables, group.lookups, strict=True)
    ]
    return sha256(repr((group.batch, group.optimizer, group.lengths, tables)).encode()).hexdigest()[:10]


def fit(measured: Sequence[Measured], source: str = "", start: Mapping[str, float] = START) -> Fitted:
    """The law first, then corrections of what it leaves."""
    groups = sample(measured, start)
    p = fit_law(groups, start)
    total = groups.totals(p)
    x = features(total, p)
    left = [np.log(groups.times[n] / law(total, p)) for n, law in (("forward", forward), ("backward", backward))]
    return Fitted(p, fit_correction(x, left[0]), fit_correction(x, left[1]), source, frozenset(map(mark, measured)))


def save(found: Fitted, path: Path = SHIPPED) -> None:
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
def load(path: Path = SHIPPED) -> Fitted:
    try:
        value = json.loads(path.read_text())
        if value["version"] != VERSION:
            raise InputError(path, f"is {value['version']}, this presage reads {VERSION}; fit it again", "version")
        there, back = (Correction.from_json(value[n]) if value[n] else None for n in ("forward", "backward"))
        return Fitted(dict(value["params"]), there, back, str(value["source"]), frozenset(value["seen"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(path, f"not a file of embedding parameters ({e})") from e
