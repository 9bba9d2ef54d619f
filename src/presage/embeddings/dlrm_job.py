"""A recommendation job: dense layers, tables, interaction, batch, ranks; as a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from presage.configs.job import Job
from presage.configs.job_file import JobTable
from presage.embeddings import Table
from presage.embeddings.dlrm_system import FRAMEWORKS, DlrmSystem, dlrm_system
from presage.embeddings.table_files import read_tables, tables_of
from presage.errors import InputError, PresageError
from presage.files.decoding import convert_record
from presage.hardware.facts import load_toml

INTERACTIONS = ("dot", "cat", "dcn")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
WIRES = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes
INDICES = {"int64": 8, "int32": 4}
OPTIMIZERS = ("sgd", "adagrad", "adam")
GIB = 1024.0**3
MOST_RANKS, MOST_WIDTH, MOST_LAYERS = 16_384, 10**6, 1000  # all ranks go through one engine


@dataclass(frozen=True)
class Evaluation:
    """Forward passes over an evaluation set, again and again during training."""

    samples: int
    batch: int
    every: int  # samples trained between two evaluations


@dataclass(frozen=True)
class DlrmJob:
    """A recommendation model, its tables, batch, ranks and platform."""

    name: str
    tables: tuple[Table, ...]
    batch: int  # of all ranks together
    ranks: int
    platform: str
    dense: int = 13  # features
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    interaction: str = "dot"
    cross_layers: int = 3
    cross_rank: int = 512
    optimizer: str = "adagrad"  # of the dense layers
    embedding_optimizer: str = "rowwise_adagrad"
    lengths: str = "fixed"
    precision: str = "tf32"
    plan: str = "auto"  # or a heuristic's name, or a plan's file
    pipelined: bool = True
    memory: float = 0.0  # bytes of a rank for tables; 0: four fifths of the GPU's
    index: str = "int64"  # of lookups and lengths
    wire: str = "fp32"  # what pooled rows and their gradients are sent in
    system: DlrmSystem = FRAMEWORKS["torchrec"]
    evaluation: Evaluation | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise PresageError(f"a recommendation job has 1 to {MOST_RANKS:,} ranks: this one has {self.ranks:,}")


class _Dense(msgspec.Struct, forbid_unknown_fields=True):
    features: int
    bottom: list[int]
    top: list[int]
    optimizer: str = "adagrad"


class _Cross(msgspec.Struct, forbid_unknown_fields=True):
    layers: int = 3
    rank: int = 512


class _Embeddings(msgspec.Struct, forbid_unknown_fields=True):
    tables: str | list[dict[str, Any]]
    optimizer: str = "rowwise_adagrad"
    lengths: str = "fixed"
    memory_GiB: float = 0.0
    wire: str = "fp32"
    index: str = "int64"


class _Evaluation(msgspec.Struct, forbid_unknown_fields=True):
    samples: int
    batch: int
    every: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    batch: int
    ranks: int
    platform: str
    dense: _Dense
    embeddings: _Embeddings
    cross: _Cross = msgspec.field(default_factory=_Cross)
    name: str = ""
    interaction: str = "dot"
    precision: str = "tf32"
    plan: str = ""
    pipelined: bool = True
    framework: str = "torchrec"
    system: dict[str, Any] = msgspec.field(default_factory=dict)
    evaluation: _Evaluation | None = None


def read_job(path: str | Path) -> DlrmJob:
    """A job from its file; tables and the plan may be files in the same folder."""
    path = Path(path)
    try:
        file = convert_record(load_toml(path), _File)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at `$.")
        raise InputError(path, what, where.strip("`") or None) from e
    for name, value, known in (
        ("interaction", file.interaction, INTERACTIONS),
        ("precision", file.precision, PRECISIONS),
        ("embeddings.index", file.embeddings.index, tuple(INDICES)),
        ("embeddings.wire", file.embeddings.wire, tuple(WIRES)),
        ("dense.optimizer", file.dense.optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise InputError(path, f"is {value!r}: choose from {', '.join(known)}", name)
    for name, widths in (("dense.bottom", file.dense.bottom), ("dense.top", file.dense.top)):
        if not widths or min(widths) < 1:
            raise InputError(path, "should be widths of layers, each 1 or more", name)
        if max(widths) > MOST_WIDTH or len(widths) > MOST_LAYERS:
            raise InputError(path, f"has up to {MOST_LAYERS:,} layers, none wider than {MOST_WIDTH:,}", name)
    _check_sizes(path, file)
    return _job(path, file)


def read_any_job(path: str | Path) -> Job | DlrmJob:
    """A job of any kind: recommendation jobs have [embeddings]."""
    file = JobTable.read(path)
    return read_job(path) if file.has_embeddings else file.parse().job


def _check_sizes(path: Path, f: _File) -> None:
    e = f.evaluation
    for name, value, least, most in (
        ("ranks", f.ranks, 1, MOST_RANKS),
        ("batch", f.batch, 1, 10**12),
        ("dense.features", f.dense.features, 1, MOST_WIDTH),
        ("cross.layers", f.cross.layers, 0, MOST_LAYERS),
        ("cross.rank", f.cross.rank, 0, MOST_WIDTH),
        ("embeddings.memory_GiB", f.embeddings.memory_GiB, 0, 10**6),
        *((f"evaluation.{k}", v, 1, 10**12) for k, v in (msgspec.structs.asdict(e) if e else {}).items()),
    ):
        if not least <= value <= most:
            raise InputError(path, f"is {value}: it can be {least} to {most:,}", name)


def _system(path: Path, f: _File) -> DlrmSystem:
    try:
        return dlrm_system(f.framework, f.system)
    except PresageError as e:
        raise InputError(path, str(e)) from None


def _job(path: Path, f: _File) -> DlrmJob:
    given = f.embeddings.tables
    tables = tables_of(given, path) if isinstance(given, list) else read_tables(path.parent / given)[0]
    system = _system(path, f)
    plan = str(path.parent / f.plan) if f.plan.endswith(".json") else f.plan or system.plan
    e = f.evaluation
    tested = None if e is None else Evaluation(e.samples, e.batch, e.every)
    return DlrmJob(
        f.name or path.name, tables, f.batch, f.ranks, f.platform, f.dense.features, tuple(f.dense.bottom),
        tuple(f.dense.top), f.interaction, f.cross.layers, f.cross.rank, f.dense.optimizer, f.embeddings.optimizer,
        f.embeddings.lengths, f.precision, plan, f.pipelined, f.embeddings.memory_GiB * GIB,
        f.embeddings.index, f.embeddings.wire, system, tested,
    )  # fmt: skip
