"""The fitted models of one GPU: trees by family, cache, power; as one file of plain arrays.

A second file, where published tables timed the GPU, has what they show of it: a correction of its own for families that
were never calibrated there, and what serving engines add.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from presage.costs.cache import Cache
from presage.costs.closed_form.parameters import RELATIVES
from presage.costs.engines import Engine
from presage.costs.own import Own
from presage.costs.power import Power
from presage.costs.rates import Rates
from presage.costs.single import FILE as FLOAT32
from presage.costs.single import Single
from presage.costs.single import read as read_single
from presage.costs.trees import Trees
from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.files.arrays import read_npz
from presage.files.reading import parse_json
from presage.hardware import Gpu, gpu
from presage.hardware.facts import shipped
from presage.usercode import load_plugin

__all__ = ["Models", "load", "save", "save_tables"]

VERSION = 1
SHIPPED = Path(__file__).resolve().parent.parent / "data"
FILE, TABLES = "kernels.npz", "tables.npz"
KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # names of types of number in older files
CALIBRATED = "h200"  # whose corrections a GPU without a pack gets
VECTORS = ("Pascal", "Volta", "Turing", "Ampere", "Ada")  # whose float32 products are corrected by those of their like


@dataclass(frozen=True)
class Models:
    gpu: Gpu
    trees: dict[str, Trees]  # by family: ln(seconds / law)
    counts: dict[str, Trees]  # by family: ln(launches / the law's)
    cache: Cache
    power: Power
    source: dict[str, Any] = field(default_factory=dict)  # the pack's header, rows by family
    own: Mapping[str, Own] = field(default_factory=dict)  # by family: what tables show of a GPU without a pack
    own_of: str = ""  # the GPU they timed, where it is another of the same architecture
    engines: Mapping[str, Engine] = field(default_factory=dict)  # by family: what serving engines add on this GPU
    single: Single | None = None  # corrections of float32 products, where the other GPU's do not fit

    @property
    def transferred(self) -> str:
        """The GPU the corrections were measured on, where it is another one."""
        return "" if self.source.get("key", self.gpu.key) == self.gpu.key else str(self.source["gpu"])

    @property
    def calibrated(self) -> Gpu:
        """The GPU the corrections were measured on."""
        return gpu(str(self.source.get("key", self.gpu.key)))

    @property
    def rates(self) -> Rates:
        return Rates.of(self.gpu)


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
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    write_whole(path, out.getvalue())


def save_tables(path: Path, own: Mapping[str, Own], engines: Mapping[str, Engine], source: Mapping[str, Any]) -> None:
    """What tables show of a GPU, for `load` to find beside its models."""
    arrays: dict[str, Any] = {}
    for kind, some in (("own", own), ("engine", engines)):
        for name, one in some.items():
            arrays |= one.trees.to_arrays(f"{kind}.{name}")
    about = {
        "version": VERSION,
        "own": {name: list(o.ops) for name, o in own.items()},
        "engines": {
            name: {"collectors": e.collectors, "floors": e.floors, "heat": e.heat} for name, e in engines.items()
        },
        "source": dict(source),
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    write_whole(path, out.getvalue())


def _names() -> set[str]:
    """Of GPUs that are known: a folder called so, which lies here by chance, is ./h200."""
    return {path.stem for path in shipped("gpus")}


def load(name: str | Path) -> Models:
    """The models of a GPU by its name (h200), or of a calibration pack's folder (fitted once, kept beside it).

    A GPU that was never calibrated gets another's corrections over its own law; `Models.transferred` says whose. Where
    tables timed it, or one of its architecture, `Models.own` corrects those of the families they have.
    """
    given = Path(name)
    if given.is_dir() and name not in _names():
        return _loaded(given / FILE) if (given / FILE).exists() else _fitted(given)
    chip = gpu(str(name))
    path, tables = SHIPPED / chip.key / FILE, SHIPPED / chip.key / TABLES
    _, engines = _tables(tables) if tables.exists() else ({}, {})
    if path.exists():
        return replace(_loaded(path), engines=engines)
    key = chip.key if tables.exists() else RELATIVES.get(chip.architecture, "")
    near = SHIPPED / key / TABLES
    own = _tables(near)[0] if key and near.exists() else {}
    of = gpu(key).name if own and key != chip.key else ""
    single = _single() if chip.architecture in VECTORS else None
    return replace(_loaded(SHIPPED / CALIBRATED / FILE), gpu=chip, own=own, own_of=of, engines=engines, single=single)


@lru_cache(2)
def _fitted(pack: Path) -> Models:
    """Of a pack that has none yet: kept beside it where its folder can be written to."""
    fit_pack = load_plugin("presage.fitters", "kernels", "presage_fit.kernel_models:fit_pack", f"fitting {pack}")
    models: Models = fit_pack(pack)
    with suppress(PresageError):
        save(models, pack / FILE)
    return models


@lru_cache(1)
def _single() -> Single:
    return read_single(SHIPPED / FLOAT32)


@lru_cache(8)
def _tables(path: Path) -> tuple[dict[str, Own], dict[str, Engine]]:
    about, held = _arrays(path)
    own = {f: Own(f, tuple(ops), Trees.from_arrays(held, f"own.{f}")) for f, ops in about["own"].items()}
    engines = {
        f: Engine(f, tuple(e["collectors"]), tuple(e["floors"]), e["heat"], Trees.from_arrays(held, f"engine.{f}"))
        for f, e in about["engines"].items()
    }
    return own, engines


class _About(msgspec.Struct):
    """What a file of models says of itself."""

    gpu: str
    families: list[str]
    cache: Cache
    power: Power
    source: dict[str, Any]


@lru_cache(4)
def _loaded(path: Path) -> Models:
    about, held = _arrays(path)
    try:
        found = msgspec.convert(about, _About)
        return Models(
            gpu(found.gpu),
            {f: Trees.from_arrays(held, f"time.{f}") for f in found.families},
            {f: Trees.from_arrays(held, f"count.{f}") for f in found.families},
            found.cache,
            replace(found.power, per_flop={KINDS.get(k, k): v for k, v in found.power.per_flop.items()}),
            found.source,
        )
    except (msgspec.ValidationError, PresageError) as e:
        raise InputError(path, f"not a file of kernel models, or a damaged one ({e})") from e


def _arrays(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file says of itself, and its arrays."""
    arrays = read_npz(path)
    about = parse_json(arrays["about"].tobytes(), path) if "about" in arrays else None
    if not isinstance(about, dict):
        raise InputError(path, "not a file of kernel models: remove it, and it is fitted again", "about")
    if about.get("version") != VERSION:
        raise InputError(path, f"version {about.get('version')}, this presage reads {VERSION}; fit it again", "about")
    return about, arrays
