"""Noise files: TOML of a noise model, its intervals and its sources.

    [spread.products]
    rank = { value = 0.02, low = 0.01, high = 0.03, source = "392 V100s of Longhorn" }
    own = 0.015

    [stalls]
    per_node_hour = 0.01
    seconds = { lognormal = { median = 3.0, log_sd = 1.0 } }

    [sources]                       # of several numbers at once: a path, or the start of some
    "spread.attention" = "guessed"

A number may stand alone. A distribution is a table of one key, its kind; a bare number is fixed. What is left out does
not vary. Keys have units where numbers have: seconds of jitter are `jitter_seconds`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.hardware.facts import load_toml
from presage.noise import distribution as kinds
from presage.noise.distribution import Distribution
from presage.noise.model import Belief, CredibleInterval, NoiseModel, default_of, limits_of

KINDS: dict[str, type[Distribution]] = {
    n.lower(): getattr(kinds, n) for n in kinds.__all__ if n != Distribution.__name__
}
ALONE = {"empirical": "values", "sum": "parts", "fixed": "value"}  # kinds of one field: it stands for the table
WRITTEN = {"jitter": "jitter_seconds"}  # a field, and its key in a file
POSITIVE = ("slow.factor", "load")  # distributions of factors,
SIGNED = ("fixed", "normal", "empirical")  # and those of their kinds that could be below 0
HEAD = "# How steps differ: see docs/noise.md. Standard deviations are of logarithms, ranges hold 90%.\n"


def read_noise(path: str | Path) -> Belief:
    """The noise model of a file, with the intervals and sources of its numbers."""
    table = load_toml(Path(path))
    if not table:
        raise InputError(path, "is empty: a noise file needs sections such as [spread.products] rank = 0.02")
    return parse_noise(table, path)


def write_noise(belief: Belief, path: str | Path) -> None:
    """Write a file that `read_noise` reads the same belief from."""
    write_whole(path, format_noise(belief).encode())


def parse_noise(table: Mapping[str, Any], path: str | Path = "noise", model: type[NoiseModel] = NoiseModel) -> Belief:
    """The belief of a parsed file; `path` is named in errors."""
    reader = _Reader(str(path), model)
    given = dict(table)
    reader.prefixes(given.pop("sources", {}))
    noise = reader.value("", given, model)
    for extra in sorted(set(reader.intervals) - set(noise.numbers())):
        raise InputError(path, "measured values stand alone, without ranges", extra)
    return Belief(noise, reader.intervals, reader.sources)


def format_noise(belief: Belief) -> str:
    """The belief as TOML; an error where that could not be read again."""
    import tomllib

    unknown = sorted(set(belief.intervals) - set(belief.noise.numbers()))
    if unknown:
        raise PresageError(f"range for {unknown[0]}, which is not a parameter of the noise model")
    text = HEAD + "".join(_sections(_Writer(belief)))
    parse_noise(tomllib.loads(text), model=type(belief.noise))
    return text


@dataclass
class _Reader:
    """Values of tables by their types; collects intervals and sources on the way."""

    file: str
    model: type[NoiseModel] = NoiseModel
    intervals: dict[str, CredibleInterval] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def prefixes(self, given: Any) -> None:
        self._table("sources", given)
        for path, text in given.items():
            self.sources[path] = self._text(f"sources.{path}", text)

    def value(self, path: str, given: Any, hint: Any) -> Any:
        """Convert the value at a path to a type."""
        if hint in (float, int):
            return self._number(path, given, hint)
        if hint is str:
            return self._text(path, given)
        if hint is Distribution:
            return self._distribution(path, given)
        if is_dataclass(hint):
            return self._fields(path, given, hint)
        if get_origin(hint) in (tuple, np.ndarray):
            item = get_args(hint)[0] if get_origin(hint) is tuple else float
            return tuple(self.value(_at(path, str(i)), x, item) for i, x in enumerate(self._list(path, given)))
        return {k: self.value(_at(path, k), v, get_args(hint)[1]) for k, v in self._table(path, given).items()}

    def _fields(self, path: str, given: Any, cls: Any) -> Any:
        hints = get_type_hints(cls)
        names = {WRITTEN.get(f.name, f.name): f.name for f in fields(cls)}
        needed = [k for k, n in names.items() if _default(cls, n) is MISSING]
        for key in self._table(path, given):
            if key not in names:
                also = ["sources"] if not path else []
                there = f"is unknown: choose from {', '.join([*names, *also])}"
                raise InputError(self.file, there, _at(_written(path), key))
        for key in needed:
            if key not in given:
                raise self._wrong(_at(path, key), "is missing")
        values = {names[k]: self.value(_at(path, names[k]), v, hints[names[k]]) for k, v in given.items()}
        return self._checked(path, lambda: cls(**values))

    def _distribution(self, path: str, given: Any) -> Distribution:
        if isinstance(given, int | float) and not isinstance(given, bool):
            given = {"fixed": {"value": given}}
        table = self._table(path, given)
        if len(table) != 1 or next(iter(table)) not in KINDS:
            raise self._wrong(path, f"should be a table of one key: {', '.join(KINDS)}")
        (kind, given), cls = next(iter(table.items())), KINDS[next(iter(table))]
        if kind in ALONE and not (isinstance(given, Mapping) and set(given) == {ALONE[kind]}):
            given = {ALONE[kind]: given}
        distribution: Distribution = self._fields(path, given, cls)
        if path.startswith(POSITIVE) and kind in SIGNED and distribution.mean <= 0:
            raise self._wrong(path, f"is a factor of {distribution.mean:g} on average: it should be above 0")
        return distribution

    def _number(self, path: str, given: Any, hint: type) -> float | int:
        if not isinstance(given, Mapping):
            return self._plain(path, given, hint)
        unknown = sorted(set(given) - {"value", "low", "high", "source"})
        if unknown:
            raise self._wrong(_at(path, unknown[0]), "is unknown: choose from value, low, high, source")
        if "value" not in given or ("low" in given) != ("high" in given):
            raise self._wrong(path, "needs a value, and low and high or neither")
        if "low" in given:
            self.intervals[path] = self._interval(path, given)
        if "source" in given:
            self.sources[path] = self._text(_at(path, "source"), given["source"])
        return self._plain(path, given["value"], hint)

    def _interval(self, path: str, given: Mapping[str, Any]) -> CredibleInterval:
        low, high = (self._plain(path, given[k], float) for k in ("low", "high"))
        if low > high:
            raise self._wrong(path, f"its low, {low:g}, is above its high, {high:g}")
        return CredibleInterval(low, high)

    def _plain(self, path: str, given: Any, hint: type) -> float | int:
        if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
            raise self._wrong(path, f"is {given!r}: it should be a number")
        low, high = limits_of(path, self.model)
        if not low <= given <= high:
            raise self._wrong(path, f"{given:g} is out of range [{low:g}, {high:g}]")
        if hint is int and given != int(given):
            raise self._wrong(path, f"is {given:g}: it should be a whole number")
        return hint(given)  # type: ignore[no-any-return]

    def _checked(self, path: str, make: Any) -> Any:
        try:
            return make()
        except (PresageError, ValueError) as e:
            raise self._wrong(path, str(e)) from e

    def _table(self, path: str, given: Any) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self._wrong(path, f"is {given!r}: it should be a table")
        return given

    def _list(self, path: str, given: Any) -> list[Any]:
        if not isinstance(given, list):
            raise self._wrong(path, f"is {given!r}: it should be a list")
        return given

    def _text(self, path: str, given: Any) -> str:
        if not isinstance(given, str):
            raise self._wrong(path, f"is {given!r}: it should be text")
        return given

    def _wrong(self, path: str, what: str) -> InputError:
        return InputError(self.file, what, _written(path) or None)


@dataclass(frozen=True)
class _Writer:
    belief: Belief

    def known(self, path: str) -> bool:
        """Whether a number at or below a path has an interval or a source."""
        known = [*self.belief.intervals, *(s for s in self.belief.sources if s in self.belief.noise.numbers())]
        return any(k == path or k.startswith(f"{path}.") for k in known)

    def inline(self, path: str, value: Any) -> str:
        """A value on one line."""
        if isinstance(value, int | float):
            return self._number(path, value)
        if isinstance(value, str):
            return _quoted(value)
        if isinstance(value, Distribution):
            return f"{{ {self.distribution(path, value)} }}"
        if isinstance(value, tuple | np.ndarray):
            return f"[{', '.join(self.inline(_at(path, str(i)), x) for i, x in enumerate(value))}]"
        raise PresageError(f"{path}: a noise file has no way to say {type(value).__name__}")

    def distribution(self, path: str, value: Distribution) -> str:
        kind = type(value).__name__.lower()
        if KINDS.get(kind) is not type(value):
            raise PresageError(f"{path}: a noise file has no way to say {type(value).__name__}")
        if kind in ALONE:
            return f"{kind} = {self.inline(_at(path, ALONE[kind]), getattr(value, ALONE[kind]))}"
        return f"{kind} = {{ {', '.join(self.keys(path, value, every=True))} }}"

    def keys(self, path: str, value: Any, every: bool = False) -> list[str]:
        """`key = value` of the fields of a value: those that are not as usual, or that something is known of."""
        out = []
        for f in fields(value):
            given, at = getattr(value, f.name), _at(path, f.name)
            if every or self.known(at) or given != _default(type(value), f.name):
                out.append(f"{WRITTEN.get(f.name, f.name)} = {self.inline(at, given)}")
        return out

    def _number(self, path: str, value: float | int) -> str:
        if not self.known(path):
            return _digits(value, path)
        out = [f"value = {_digits(value, path)}"]
        interval, source = self.belief.intervals.get(path), self.belief.sources.get(path)
        if interval is not None:
            out.append(f"low = {_digits(interval.low)}, high = {_digits(interval.high)}")
        if source is not None:
            out.append(f"source = {_quoted(source)}")
        return f"{{ {', '.join(out)} }}"


def _sections(w: _Writer) -> list[str]:
    """Tables of sources, then bare distributions, then lists of tables; last the sources of several numbers at once."""
    noise = w.belief.noise
    tables, bare, lists = [], [], []
    for f in fields(noise):
        name, value = f.name, getattr(noise, f.name)
        if isinstance(value, Mapping):
            tables += [_section(f"[{name}.{k}]", w.keys(f"{name}.{k}", s)) for k, s in value.items()]
        elif isinstance(value, tuple):
            lists += [_section(f"[[{name}]]", w.keys(f"{name}.{i}", s)) for i, s in enumerate(value)]
        elif isinstance(value, Distribution):
            bare += [_section(f"[{name}]", [w.distribution(name, value)])] * (value != default_of(f) or w.known(name))
        elif lines := w.keys(name, value):
            tables.append(_section(f"[{name}]", lines))
    rest = {p: s for p, s in w.belief.sources.items() if p not in noise.numbers()}
    out = [*tables, *bare, *lists]
    return [*out, _section("[sources]", [f"{_quoted(p)} = {_quoted(s)}" for p, s in rest.items()])] if rest else out


def _section(head: str, lines: list[str]) -> str:
    return "\n" + "\n".join([head, *lines]) + "\n"


def _default(cls: type, name: str) -> Any:
    return default_of(next(f for f in fields(cls) if f.name == name))


def _written(path: str) -> str:
    return ".".join(WRITTEN.get(p, p) for p in path.split("."))


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _digits(value: float | int, path: str = "") -> str:
    if not math.isfinite(value):
        raise PresageError(f"{path or 'a range'}: a noise file cannot hold {value}")
    return repr(int(value)) if path.endswith(".n") else repr(float(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
