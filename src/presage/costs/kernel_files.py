"""Files of fitted kernel models: trees by family, cache, power; one file of plain arrays a GPU.

A second file, where published tables timed the GPU, has what they show of it: a correction of its own for families that
were never calibrated there (and what serving engines add, which only validation reads: presage_fit.serving).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from presage.costs.cache import Cache
from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.closed_form.kernels import MOST_BASE
from presage.costs.corrections import (
    FP32_CONV_FILE,
    FP32_FILE,
    Fp32ConvCorrection,
    Fp32GemmCorrection,
    TableCorrection,
)
from presage.costs.kernel_model import Power
from presage.costs.trees import Trees
from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.files.arrays import read_npz
from presage.files.decoding import convert_record
from presage.files.reading import DATA, parse_json
from presage.hardware import gpu
from presage.hardware.architecture import architecture
from presage.hardware.facts import shipped_files
from presage.usercode import load_plugin

VERSION = 1
SHIPPED = DATA
FILE, TABLES = "kernels.npz", "tables.npz"
KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # names of types of number in older files
CALIBRATED = "h200"  # whose corrections a GPU without a pack gets


def save(models: CalibratedKernels, path: Path) -> None:
    arrays: dict[str, Any] = {}
    for name in models.trees:
        arrays |= models.trees[name].to_arrays(f"time.{name}") | models.counts[name].to_arrays(f"count.{name}")
    about = {
        "gpu": models.gpu.key,
        "families": list(models.trees),
        "cache": asdict(models.cache),
        "power": asdict(models.power),
        "source": models.source,
    }
    write_arrays(path, arrays, about)


def write_arrays(path: Path, arrays: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write arrays, with a header of plain values."""
    header = np.frombuffer(json.dumps({"version": VERSION, **about}).encode(), np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **arrays, about=header)
    write_whole(path, out.getvalue())


def _names() -> set[str]:
    """Names of known GPUs: a folder of such a name is given as ./h200."""
    return {path.stem for path in shipped_files("gpus")}


def is_pack(name: str | Path) -> bool:
    """Whether a user's name is the folder of a calibration pack."""
    return Path(name).is_dir() and name not in _names()


def load(name: str | Path) -> CalibratedKernels:
    """The models of a GPU by its name (h200), or of a calibration pack's folder (fitted once, kept beside it).

    A GPU that was never calibrated gets another's corrections over its own law; `transferred` names it. Where
    tables timed it, or one of its architecture, `own` corrects the families they time.
    """
    given = Path(name)
    if is_pack(name):
        return load_file(given / FILE) if (given / FILE).exists() else _fitted(given)
    chip = gpu(str(name))
    path, tables = SHIPPED / chip.key / FILE, SHIPPED / chip.key / TABLES
    if path.exists():
        return load_file(path)
    key = chip.key if tables.exists() else architecture(chip.architecture).closed_form
    near = SHIPPED / key / TABLES
    own = _tables(near) if key and near.exists() else {}
    of = gpu(key).name if own and key != chip.key else ""
    single, convolved = _single() if architecture(chip.architecture).fp32_corrected else (None, None)
    models = load_file(SHIPPED / CALIBRATED / FILE)
    power = models.power
    if chip.architecture == models.gpu.architecture:  # the same chip under another limit
        power = replace(power, limit=chip.power_limit, base=min(power.base, MOST_BASE * chip.power_limit))
    return replace(models, gpu=chip, power=power, own=own, own_of=of, single=single, convolved=convolved)


@lru_cache(2)
def _fitted(pack: Path) -> CalibratedKernels:
    """Models fitted from a pack, kept beside it where its folder can be written to."""
    fit_pack = load_plugin("presage.fitters", "kernels", "presage_fit.kernel_models:fit_pack", f"fitting {pack}")
    models: CalibratedKernels = fit_pack(pack)
    with suppress(PresageError):
        save(models, pack / FILE)
    return models


@lru_cache(1)
def _single() -> tuple[Fp32GemmCorrection, Fp32ConvCorrection]:
    """Corrections of float32 kernels for GPUs that are no Hoppers."""
    products, convolutions = (read_npz(SHIPPED / name) for name in (FP32_FILE, FP32_CONV_FILE))
    return (
        Fp32GemmCorrection(Trees.from_arrays(products, "single")),
        Fp32ConvCorrection(Trees.from_arrays(convolutions, "single")),
    )


@lru_cache(8)
def _tables(path: Path) -> dict[str, TableCorrection]:
    about, held = read_arrays(path)
    return {f: TableCorrection(f, tuple(ops), Trees.from_arrays(held, f"own.{f}")) for f, ops in about["own"].items()}


class _About(msgspec.Struct):
    """Header of a file of kernel models."""

    gpu: str
    families: list[str]
    cache: Cache
    power: Power
    source: dict[str, Any]


@lru_cache(4)
def load_file(path: Path) -> CalibratedKernels:
    """The models that a file holds."""
    about, held = read_arrays(path)
    try:
        header = convert_record(about, _About)
        return CalibratedKernels(
            gpu(header.gpu),
            {f: Trees.from_arrays(held, f"time.{f}") for f in header.families},
            {f: Trees.from_arrays(held, f"count.{f}") for f in header.families},
            header.cache,
            replace(header.power, per_flop={KINDS.get(k, k): v for k, v in header.power.per_flop.items()}),
            header.source,
        )
    except (msgspec.ValidationError, PresageError) as e:
        raise InputError(path, f"not a file of kernel models, or a damaged one ({e})") from e


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of a file and its arrays."""
    arrays = read_npz(path)
    about = parse_json(arrays["about"].tobytes(), path) if "about" in arrays else None
    if not isinstance(about, dict):
        raise InputError(path, "not a file of kernel models: remove it, and it is fitted again", "about")
    if about.get("version") != VERSION:
        raise InputError(path, f"version {about.get('version')}, this presage reads {VERSION}; fit it again", "about")
    return about, arrays
