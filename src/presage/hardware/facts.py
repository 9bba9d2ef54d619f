"""Fact files: TOML whose figures stand under the source they are taken from.

name = "..."

[[figures]]
source = "which document or measurement"
date = "2024-11"
memory_bandwidth_GBps = 4800
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError, near
from presage.files.finite import check_finite
from presage.files.reading import read_toml

MANY = 40  # figures of a kind, of which only those of a like name are offered
DATE = re.compile(r"^\d{4}(-\d\d){0,2}$")


@dataclass(frozen=True, slots=True)
class FigureSource:
    """Source and date of a figure."""

    text: str
    date: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a file may have: its unit in SI, and its valid range in the unit of the file."""

    unit: float
    low: float
    high: float
    required: bool = True
    whole: bool = False  # no fractions, as for things that are counted


@dataclass(frozen=True, slots=True)
class SourcedFigures:
    """A checked data file: texts, figures in SI units, and the source of each figure."""

    key: str
    texts: dict[str, Any]
    figures: dict[str, float]
    sources: dict[str, FigureSource]
    units: dict[str, float]

    def as_written(self) -> dict[str, float]:
        """The figures in the units of their keys."""
        return {name: value / self.units[name] for name, value in self.figures.items()}


def read_figures(path: Path, texts: Mapping[str, type], known: Mapping[str, Figure]) -> SourcedFigures:
    """Read and check a file with these texts and figures; anything else in it is an error."""
    return check_figures(path, load_toml(path), texts, known)


def load_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file, checked only for finite numbers."""
    table = read_toml(path)
    check_finite(path, table)
    return table


def check_figures(
    path: Path, table: dict[str, Any], texts: Mapping[str, type], known: Mapping[str, Figure]
) -> SourcedFigures:
    """The texts and figures of a table; anything else in it is an error."""
    groups = table.pop("figures", None)
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise InputError(path, "no [[figures]] in it", "figures")
    _check_texts(path, table, texts)
    figures: dict[str, float] = {}
    sources: dict[str, FigureSource] = {}
    for group in groups:
        source = _source(path, group)
        for name, value in group.items():
            if name in figures:
                raise InputError(path, "is given twice", name)
            figures[name], sources[name] = _figure(path, name, value, known), source
    missing = [name for name, figure in known.items() if figure.required and name not in figures]
    if missing:
        raise InputError(path, "is missing", missing[0])
    return SourcedFigures(path.stem, table, figures, sources, {name: known[name].unit for name in figures})


def shipped_files(kind: str) -> Iterator[Path]:
    """The data files of a kind (a folder name) that ship with presage."""
    with_facts = (Path(str(f)) for f in files("presage.hardware").joinpath(kind).iterdir())
    return iter(sorted(f for f in with_facts if f.suffix == ".toml"))


def find_file(kind: str, name: str) -> Path | None:
    """The file for a user's name: a path, or a file that ships with presage."""
    if name.endswith(".toml"):
        return Path(name)
    return next((f for f in shipped_files(kind) if f.stem == name.lower()), None)


def _check_texts(path: Path, table: Mapping[str, Any], texts: Mapping[str, type]) -> None:
    for name, value in table.items():
        if name not in texts:
            raise InputError(path, f"is unknown: choose from {', '.join([*texts, 'figures'])}", name)
        if not isinstance(value, texts[name]) or not value:
            raise InputError(path, f"should be a {texts[name].__name__}, and not empty", name)
    for name in texts:
        if name not in table:
            raise InputError(path, "is missing", name)


def _source(path: Path, group: dict[str, Any]) -> FigureSource:
    text, date = group.pop("source", None), group.pop("date", None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(path, "every [[figures]] needs a source", "source")
    if not isinstance(date, str) or not DATE.match(date):
        raise InputError(path, f"is {date!r}; should be text like 2024, 2024-11 or 2024-11-30", "date")
    return FigureSource(text, date)


def _figure(path: Path, name: str, value: Any, known: Mapping[str, Figure]) -> float:
    if name not in known:
        close = near(name, known) if len(known) > MANY else ""
        every = f": choose from {', '.join(known)}"
        raise InputError(path, f"is unknown{close or every}", name)
    figure = known[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(path, f"is {value!r}, not a number", name)
    if not figure.low <= value <= figure.high:
        raise InputError(path, f"{value:g} is out of range [{figure.low:g}, {figure.high:g}]", name)
    if figure.whole and value != int(value):
        raise InputError(path, f"is {value:g}, not a whole number", name)
    return value * figure.unit


def unknown_name(kind: str, name: str, otherwise: str = "or give the path of a .toml file") -> PresageError:
    """The error for an unknown name."""
    known = [f.stem for f in shipped_files(f"{kind}s")]
    if close := near(name, known):
        return PresageError(f"no {kind} {name!r}{close} `presage {kind}s` lists all; {otherwise}")
    return PresageError(f"no {kind} {name!r}: choose from {', '.join(known)}; {otherwise}")
