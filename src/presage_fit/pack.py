"""A calibration pack: what was measured on one kind of GPU with one software stack, as a folder of data.

    header.json              which GPU, host and software, and when
    FAMILY.jsonl[.gz]        a sweep: a line per draw, its parameters and the kernel times of every leaf op in it
    NAME.json                a small table: latencies, copies, host, cache, power

Packs of the same GPU and stack can be merged. A draw measured twice is kept twice (`Row.repeat` 0, 1, ...), for the
difference between two runs is a measurement too. Of a small table that several have, the newest pack's is taken; the
others are named in `Pack.notes`.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from rich.markup import escape
from rich.table import Table

from presage.errors import InputError, PresageError
from presage.files.decoding import decode_json, describe_validation_error
from presage.files.reading import read_bytes
from presage.files.writing import PART, write_whole
from presage.report.terminal import plain_table
from presage.text import percent, seconds, shorten, size

VERSIONS = (1, 2)  # 2 adds times with a cold cache, clocks, the driver and the power limit
SAME = ("gpu", "sms", "torch", "cuda", "cudnn")  # what packs must agree in to be merged
US = 1e-6
ROWS, ZIPPED, TABLE = ".jsonl", ".jsonl.gz", ".json"

Positive = Annotated[int, msgspec.Meta(gt=0)]
Time = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a pack was measured."""

    presage_pack: int
    gpu: Name
    sms: Positive
    memory_bytes: Positive
    l2_bytes: Annotated[int, msgspec.Meta(ge=0)]
    torch: Name
    cuda: Name
    cudnn: int
    host: str
    python: str
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
    driver: str = ""
    power_limit_W: Time = 0.0  # zero where unknown
    repeats: Positive = 1  # how often a draw was run
    parts: tuple[dict[str, Any], ...] = ()  # the headers of the packs this one was merged from


@dataclass(frozen=True, slots=True)
class Leaf:
    """An op of a draw that launched kernels: what went in as the profiler tells it, and how long its kernels took."""

    op: str
    dims: list[Any]
    types: list[str]
    strides: list[Any]
    concrete: list[Any]
    seconds: float  # median over the repeats, what fits into the cache being there
    cold: float | None  # the same with nothing of it in the cache, where measured
    spread: float  # largest less smallest
    n: int  # repeats
    kernels: tuple[tuple[str, float], ...]  # names and seconds, in one of the repeats


@dataclass(frozen=True, slots=True)
class PackRow:
    """One draw of a family's sweep: its leaf ops, or the error it ended with."""

    family: str
    params: dict[str, Any]
    ops: tuple[Leaf, ...]
    error: str | None = None
    mhz: int | None = None  # the SM clock around it, where read
    repeat: int = 0  # how many earlier rows of the family have the same parameters


@dataclass(frozen=True)
class Pack:
    """A pack in memory, checked."""

    header: Header
    families: dict[str, tuple[PackRow, ...]]
    tables: dict[str, Any]
    folders: tuple[Path, ...]  # where it was read from
    notes: tuple[str, ...] = ()  # what is not in it, and why

    def rows(self, family: str) -> Iterator[PackRow]:
        """The draws of a family, failed ones too."""
        if family not in self.families:
            there = ", ".join(sorted(self.families)) or "none"
            raise PresageError(f"{self.folders[0]}: no family {family!r} in this pack; it has {there}")
        return iter(self.families[family])

    def table(self, name: str) -> Any:
        if name not in self.tables:
            raise InputError(self.folders[0] / f"{name}.json", "not in this pack; measure it with presage calibrate")
        return self.tables[name]


def read(path: str | Path) -> Pack:
    """The pack in a folder. What is wrong is told in one sentence with its file and line."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(folder, "no such folder; a pack is the folder that presage calibrate --out wrote")
    header = _header(folder)
    families: dict[str, tuple[PackRow, ...]] = {}
    tables: dict[str, Any] = {}
    notes = []
    for file in sorted(f for f in folder.iterdir() if f.name != "header.json"):
        family = _family(file.name)
        if family in families:
            raise InputError(file, f"the folder has both {family}{ROWS} and {family}{ZIPPED}: keep one")
        if family is not None:
            families[family] = tuple(_rows(file, family))
        elif file.suffix == TABLE:
            tables[file.stem] = decode_json(file, read_bytes(file), Any)
        else:
            notes.append(f"{file} is no part of a pack")
    return Pack(header, families, tables, (folder,), tuple(notes))


def merge(packs: Sequence[Pack]) -> Pack:
    """One pack of several of the same GPU and software, rows in the order given."""
    if not packs:
        raise PresageError("nothing to merge")
    if len(packs) == 1:
        return packs[0]
    for other in packs[1:]:
        _check_same(packs[0], other)
    folders = tuple(f for p in packs for f in p.folders)
    if len({f.resolve() for f in folders}) < len(folders):
        raise PresageError("one pack is given twice: its rows would count twice")
    names = dict.fromkeys(name for p in packs for name in p.families)
    families = {name: _numbered([r for p in packs for r in p.families.get(name, ())]) for name in names}
    ordered = sorted(packs, key=lambda p: p.header.date)  # stable: of one day, the later given is the newer
    tables = {name: value for p in ordered for name, value in p.tables.items()}
    notes = (*(note for p in packs for note in p.notes), *_left_out(ordered))
    parts = tuple(part for p in packs for part in p.header.parts or (_plain(p.header),))
    header = msgspec.structs.replace(ordered[-1].header, parts=parts)
    return Pack(header, families, tables, folders, notes)


def write(pack: Pack, out: str | Path) -> None:
    """The pack as a new folder, rows as they were read, compressed; the same rows always give the same bytes."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PresageError(f"{out}: is there already; name a new folder")
    part = out.with_name(f".{out.name}{PART}")  # whoever is killed leaves no half pack, and the next run starts anew
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write_all(pack, part)
        os.replace(part, out)
    except OSError as e:
        raise PresageError(f"{out}: cannot be made: {e.strerror or e}") from e


def _write_all(pack: Pack, out: Path) -> None:
    for family in pack.families:
        lines = b"".join(_lines_of(folder, family) for folder in pack.folders)
        write_whole(out / f"{family}{ZIPPED}", lines, level=9)
    for name, value in pack.tables.items():
        write_whole(out / f"{name}{TABLE}", msgspec.json.encode(value) + b"\n")
    write_whole(out / "header.json", msgspec.json.encode(_plain(pack.header)) + b"\n")


def compact(path: str | Path, out: str | Path) -> Pack:
    """Check a pack and write it compressed; it is returned, with notes of what was left behind."""
    pack = read(path)
    write(pack, out)
    return pack


class _Op(msgspec.Struct, frozen=True):
    """A leaf op as a line has it."""

    op: Name
    us: Time
    spread_us: Time
    n: Positive
    dims: list[Any]
    types: list[str]
    strides: list[Any]
    concrete: list[Any]
    kernels: list[tuple[str, Time]]
    cold_us: Time | None = None

    def leaf(self) -> Leaf:
        cold = None if self.cold_us is None else self.cold_us * US
        kernels = tuple((name, us * US) for name, us in self.kernels)
        told = (self.dims, self.types, self.strides, self.concrete)
        return Leaf(self.op, *told, self.us * US, cold, self.spread_us * US, self.n, kernels)


class _Line(msgspec.Struct, frozen=True):
    p: dict[str, Any]
    ops: list[_Op] | None = None
    error: str | None = None
    mhz: int | None = None


_LINE = msgspec.json.Decoder(_Line)


def _header(folder: Path) -> Header:
    path = folder / "header.json"
    if not path.is_file():
        raise InputError(folder, "no header.json in it; a pack is the folder that presage calibrate --out wrote")
    data = read_bytes(path)
    version = decode_json(path, data, dict[str, Any]).get("presage_pack")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise InputError(path, f"is {version!r}; this presage reads versions {known}", "presage_pack")
    return decode_json(path, data, Header)  # type: ignore[no-any-return]


def _family(name: str) -> str | None:
    for suffix in (ROWS, ZIPPED):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return None


def _rows(path: Path, family: str) -> tuple[PackRow, ...]:
    lines = read_bytes(path).splitlines() if path.stat().st_size else []
    return _numbered([_row(path, number, line, family) for number, line in enumerate(lines, 1)])


def _row(path: Path, number: int, line: bytes, family: str) -> PackRow:
    try:
        found = _LINE.decode(line)
    except (msgspec.ValidationError, RecursionError) as e:
        raise describe_validation_error(path, e, f"line {number}") from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        problem = f"not valid JSON ({e}); if a sweep was cut off here, delete the line and calibrate again"
        raise InputError(path, problem, f"line {number}") from e
    if (found.ops is None) == (found.error is None):
        raise InputError(path, "a draw has either ops or an error", f"line {number}")
    return PackRow(family, found.p, tuple(op.leaf() for op in found.ops or ()), found.error, found.mhz)


def _numbered(rows: Sequence[PackRow]) -> tuple[PackRow, ...]:
    """With `repeat` counting the rows of the same parameters."""
    seen: dict[bytes, int] = {}
    out = []
    for r in rows:
        key = msgspec.json.encode(r.params, order="sorted")
        repeat = seen[key] = seen.get(key, -1) + 1
        out.append(r if r.repeat == repeat else PackRow(r.family, r.params, r.ops, r.error, r.mhz, repeat))
    return tuple(out)


def _check_same(one: Pack, other: Pack) -> None:
    for name in SAME:
        mine, theirs = getattr(one.header, name), getattr(other.header, name)
        if mine != theirs:
            where = other.folders[0] / "header.json"
            raise InputError(where, f"is {theirs}, but {mine} in {one.folders[0]}; such packs cannot be merged", name)


def _left_out(ordered: Sequence[Pack]) -> Iterator[str]:
    """The small tables of older packs that newer ones replace."""
    for k, pack in enumerate(ordered):
        for name in pack.tables:
            newer = [p for p in ordered[k + 1 :] if name in p.tables]
            if newer:
                yield f"{pack.folders[0] / name}.json is left out for that of {newer[-1].folders[0]}"


def _plain(header: Header) -> dict[str, Any]:
    fields = msgspec.structs.asdict(header)
    return {k: v for k, v in fields.items() if k != "parts" or v}


def _lines_of(folder: Path, family: str) -> bytes:
    found = [p for p in (folder / f"{family}{ROWS}", folder / f"{family}{ZIPPED}") if p.exists()]
    data = read_bytes(found[0]) if found and found[0].stat().st_size else b""
    return data if not data or data.endswith(b"\n") else data + b"\n"


# Rich tables of calibration packs. Knows no physics: it prints values.


def origin_table(pack: Pack) -> Table:
    """Where a pack comes from."""
    h = pack.header
    table = plain_table("Pack", "", "", left=2)
    rows = {
        "folder": ", ".join(map(str, pack.folders)),
        "GPU": f"{h.gpu}, {h.sms} SMs, {size(h.memory_bytes)}, L2 {size(h.l2_bytes)}",
        "power limit": f"{h.power_limit_W:g} W" if h.power_limit_W else "not recorded",
        "software": f"torch {h.torch}, CUDA {h.cuda}, cuDNN {h.cudnn}, Python {h.python}",
        "driver": h.driver or "not recorded",
        "host": h.host,
        "date": h.date,
        "merged from": f"{len(h.parts)} packs" if h.parts else "",
        "small tables": ", ".join(sorted(pack.tables)) or "none",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(value))
    return table


def family_table(pack: Pack) -> Table:
    """Each family's draws: how many, which failed, how far repeats lie apart."""
    columns = ("draws", "errors", "repeated", "ops", "shortest", "longest", "spread p50", "p90")
    table = plain_table("Sweeps", "family", *columns, fold=False)
    for name, rows in sorted(pack.families.items()):
        table.add_row(escape(name), *_cells(rows))
    table.add_row("total", *_cells([r for rows in pack.families.values() for r in rows]), style="bold")
    return table


def error_table(pack: Pack, most: int = 10) -> Table:
    """What the failed draws ended with, the most common first."""
    counts = Counter((name, r.error) for name, rows in pack.families.items() for r in rows if r.error is not None)
    table = plain_table("Draws that failed", "family", "error", "draws", left=2)
    for (name, error), n in counts.most_common(most):
        table.add_row(escape(name), escape(shorten(error or "", 100)), str(n))
    if len(counts) > most:
        table.add_row("", f"and {len(counts) - most} other errors", "")
    return table


def _cells(rows: Sequence[PackRow]) -> list[str]:
    times = [op.seconds for r in rows for op in r.ops]
    counts = (len(rows), sum(r.error is not None for r in rows), sum(r.repeat > 0 for r in rows), len(times))
    ends = (min(times), max(times)) if times else (float("nan"),) * 2
    return [*map(str, counts), *map(seconds, ends), *(percent(s) for s in spreads(rows))]


def spreads(rows: Sequence[PackRow]) -> tuple[float, float]:
    """Median and 90th percentile over the ops of (largest - smallest repeat) / median."""
    found = [op.spread / op.seconds for r in rows for op in r.ops if op.seconds > 0 and op.n > 1]
    if not found:
        return float("nan"), float("nan")
    return float(np.percentile(found, 50)), float(np.percentile(found, 90))
