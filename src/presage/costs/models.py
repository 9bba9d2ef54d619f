"""The fitted models of one GPU: trees by family, cache, power; as one file of plain arrays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from presage.costs.cache import Cache, fit_cache
from presage.costs.families import FAMILIES
from presage.costs.fit import fit_counts, fit_family, samples, table
from presage.costs.pack import Pack, read
from presage.costs.power import Power, fit_power
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.errors import InputError, PresageError
from presage.hardware import Gpu, gpu

__all__ = ["Models", "fit_models", "load", "save"]

VERSION = 1
SHIPPED = Path(__file__).resolve().parent.parent / "data"
FILE = "kernels.npz"
CALIBRATED = "h200"  # whose corrections a GPU without a pack gets


@dataclass(frozen=True)
class Models:
    gpu: Gpu
    trees: dict[str, Trees]  # by family: ln(seconds / law)
    counts: dict[str, Trees]  # by family: ln(launches / the law's)
    cache: Cache
    power: Power
    source: dict[str, Any] = field(default_factory=dict)  # the pack's header, rows by family

    @property
    def transferred(self) -> str:
        """The GPU the corrections were measured on, where it is another one."""
        return "" if self.source.get("key", self.gpu.key) == self.gpu.key else str(self.source["gpu"])

    @property
    def rates(self) -> Rates:
        return Rates.of(self.gpu)


def fit_models(pack: Pack, tell: Callable[[str], None] = lambda _: None) -> Models:
    """Fit every family that the pack has rows of."""
    chip = gpu(pack.header.gpu)
    rates, found = Rates.of(chip), samples(pack)
    trees, counts, rows = {}, {}, {}
    for name, family in FAMILIES.items():
        if len(found[name]) < 40:
            raise PresageError(
                f"{pack.folders[0]}: only {len(found[name])} rows of {name}; calibrate that family first"
            )
        tell(name)
        data = table(family, found[name], rates)
        trees[name], counts[name] = fit_family(family, data), fit_counts(family, found[name], data, rates)
        rows[name] = len(found[name])
    source = {
        "key": chip.key,
        "gpu": pack.header.gpu,
        "torch": pack.header.torch,
        "date": pack.header.date,
        "rows": rows,
    }
    return Models(chip, trees, counts, fit_cache(pack.table("cache")), fit_power(pack.table("power")), source)


def save(models: Models, path: Path) -> None:
    arrays: dict[str, Any] = {}
    for name in models.trees:
        arrays |= models.trees[name].to_arrays(f"time.{name}") | models.counts[name].to_arrays(f"count.{name}")
    about = {
        "version": VERSION,
        "gpu": models.gpu.key,
        "families": list(models.trees),
        "cache": asdict(models.cache),
        "power": asdict(models.power),
        "source": models.source,
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with path.open("wb") as f:
        np.savez_compressed(f, **arrays)


def load(name: str | Path) -> Models:
    """The models of a GPU by its name (h200), or of a calibration pack's folder (fitted once, kept beside it).

    A GPU that was never calibrated gets another's corrections over its own law; `Models.transferred` says whose.
    """
    given = Path(name)
    if given.is_dir():
        if not (given / FILE).exists():
            save(fit_models(read(given)), given / FILE)
        return _loaded(given / FILE)
    chip = gpu(str(name))
    if (SHIPPED / chip.key / FILE).exists():
        return _loaded(SHIPPED / chip.key / FILE)
    return replace(_loaded(SHIPPED / CALIBRATED / FILE), gpu=chip)


@lru_cache(4)
def _loaded(path: Path) -> Models:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(bytes(arrays["about"]))
            if about["version"] != VERSION:
                raise InputError(
                    path, f"version {about['version']}, this presage reads {VERSION}; fit it again", "about"
                )
            held = dict(arrays)
    except (KeyError, ValueError, OSError) as e:
        raise InputError(path, f"not a file of kernel models ({e})") from e
    families = about["families"]
    return Models(
        gpu(about["gpu"]),
        {f: Trees.from_arrays(held, f"time.{f}") for f in families},
        {f: Trees.from_arrays(held, f"count.{f}") for f in families},
        Cache(**about["cache"]),
        Power(**about["power"]),
        about["source"],
    )
