"""Files of kernel corrections learned from traces: PACK/learned.npz, written by `presage calibrate --from`.

The pack holds the calls that the traces measured, with what was predicted of each; the corrections follow from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.corrections import FP32_CONV_FILE, FP32_FILE
from presage.costs.kernel_files import FILE, SHIPPED, TABLES, load, read_arrays, write_arrays
from presage.costs.learned_kernels import COLUMNS, CallTable, LearnedCorrection, LearnedKernels
from presage.errors import InputError, PresageError
from presage.files.decoding import convert_record
from presage.hardware import Gpu, gpu

LEARNED = "learned.npz"
HOST_FILE = "overheads.toml"  # host overheads of the same traces
KIND = "learned"


class LearnedHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a pack was learned from, and over which models."""

    gpu: str  # as the traces name it
    like: str  # the GPU whose models are corrected
    base: str  # fingerprint of these models
    date: str
    traces: tuple[str, ...]  # file names
    family: tuple[str, ...]
    op: tuple[str, ...]
    scale: float = 1.0
    kind: str = KIND


def is_learned(path: str | Path) -> bool:
    """Whether a path is a pack that was learned from traces."""
    return (Path(path) / LEARNED).is_file()


def fingerprint(models: CalibratedKernels) -> str:
    """A digest of the figures and files that a GPU's models are made of: corrections of other models do not fit."""
    parts = [repr(sorted(models.gpu.facts.figures.items())).encode()]
    places = (SHIPPED / key / name for key in sorted({"h200", models.gpu.key}) for name in (FILE, TABLES))
    shared = (SHIPPED / name for name in (FP32_FILE, FP32_CONV_FILE, "kernel_laws.toml"))
    parts += [p.read_bytes() for p in (*places, *shared) if p.exists()]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:16]


def write_learned(folder: Path, found: LearnedCorrection, header: Mapping[str, Any]) -> None:
    """Write the pack's file."""
    arrays = {c: getattr(found.calls, c) for c in ("call", *COLUMNS)}
    texts = {"family": found.calls.family, "op": found.calls.op, "kind": KIND, "scale": found.scale}
    write_arrays(folder / LEARNED, {**arrays, "measured": found.measured}, {**header, **texts})


@lru_cache(4)
def read_learned(folder: str | Path) -> LearnedKernels:
    """The kernel model of a pack that was learned from traces."""
    path = Path(folder) / LEARNED
    header, found = read_correction(path)
    base = models_like(header.like)
    if fingerprint(base) != header.base:
        raise InputError(path, "was learned over kernel models of another version of presage: learn it again", "base")
    return LearnedKernels(replace(base, gpu=named_gpu(header, base.gpu)), found, notes=_notes(header, found, base))


def models_like(name: str) -> CalibratedKernels:
    """Models of the GPU that a pack begins from."""
    return load(name)


def read_correction(path: Path) -> tuple[LearnedHeader, LearnedCorrection]:
    """The header of a pack's file and its corrections, checked."""
    about, held = read_arrays(path)
    try:
        header = convert_record(about, LearnedHeader)
        columns = [np.asarray(held[c], np.float64) for c in (*COLUMNS, "measured")]
        call = np.asarray(held["call"], np.int64)
        calls = CallTable(header.family, header.op, call, columns[0], columns[1], columns[2], columns[3])
    except (msgspec.ValidationError, KeyError, ValueError, TypeError) as e:
        raise InputError(path, f"not a pack learned from traces, or a damaged one ({e}): learn it again") from e
    if {*map(len, columns), len(calls.op), len(calls.family)} != {len(calls)} or not len(calls):
        raise InputError(path, "is damaged (its columns are of different lengths): learn it again")
    if not all(np.isfinite(c).all() for c in columns) or min(columns[0].min(), columns[-1].min()) <= 0.0:
        raise InputError(path, "is damaged (a time in it is not a number above zero): learn it again")
    return header, LearnedCorrection(calls, columns[-1], header.scale)


def named_gpu(header: LearnedHeader, like: Gpu) -> Gpu:
    """The GPU of a pack: its own figures of memory where it is listed, else those of the one it is like."""
    try:
        own = gpu(header.gpu)
    except PresageError:
        return replace(like, name=f"{header.gpu} (figures of {like.name})")
    return like if own.key == like.key else replace(like, name=own.name, memory=own.memory)


def check_pack(folder: Path, name: str | None) -> None:
    """Raise where a folder is no pack, or one of another GPU than the one named."""
    if not folder.is_dir():
        raise InputError(folder, "no such folder; a pack is the folder that presage calibrate --out wrote")
    of, key = (
        (read_correction(folder / LEARNED)[0].gpu if is_learned(folder) else load(folder).gpu.name),
        pack_gpu(folder),
    )
    if name is not None and name.lower() != of.lower() and gpu(name).key != key:
        other = gpu(name).name
        raise InputError(folder, f"is of {of}, not of {other}: leave {other} out, or give a pack of it")


def pack_gpu(folder: Path) -> str:
    """The listed GPU that a pack is of: its own, or where that is not listed the one it is like."""
    if not is_learned(folder):
        return load(folder).gpu.key
    header, _ = read_correction(folder / LEARNED)
    own = _key(header.gpu)
    return own or gpu(header.like).key


def _key(name: str) -> str:
    """The short name of a listed GPU; empty for one that is not."""
    try:
        return gpu(name).key
    except PresageError:
        return ""


def _notes(header: LearnedHeader, found: LearnedCorrection, base: CalibratedKernels) -> tuple[str, ...]:
    traces = f"{len(header.traces)} trace{'s' if len(header.traces) > 1 else ''}"
    known = f"kernels are corrected by {len(found.calls):,} calls of {traces} of {header.gpu}"
    over = f"over the models of {base.gpu.name}"
    without = ", ".join(found.unknown_families)
    more = (f"no call of these families was measured, and their range is wider: {without}",) if without else ()
    return (f"{known}, {over}", *more)
