"""Keys of a job's file that are said anew: `parallel.tp=8` on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from presage.configs.schema import SECTIONS
from presage.errors import PresageError

__all__ = ["overrides"]

# Sections that a file may also give as one word, and the key which that word stands for.
WORDS = {"framework": "name", "training.recompute": "mode"}


def overrides(pairs: Iterable[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """KEY=VALUE pairs as sections that go over those of a file."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not all(key.split(".")):
            raise PresageError(f"--set {pair}: write KEY=VALUE with the key of the job's file, such as parallel.tp=8")
        value = _value(text)
        if key in SECTIONS and key not in WORDS and not isinstance(value, Mapping):
            raise PresageError(f"--set {pair}: {key} is a section: say one of its keys, such as parallel.tp=8")
        _put(out, key, value, table)
    return out


def _value(text: str) -> Any:
    """As TOML has it; what is none is a text, so that nobody has to quote twice."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _put(out: dict[str, Any], key: str, value: Any, table: Mapping[str, Any]) -> None:
    *sections, last = key.split(".")
    here: Any = out
    for i, section in enumerate(sections):
        said = _said(table, sections[: i + 1])
        whole = {WORDS[name]: said} if isinstance(said, str) and (name := ".".join(sections[: i + 1])) in WORDS else {}
        here = here.setdefault(section, whole)
        if not isinstance(here, dict):
            raise PresageError(f"--set {key}: {'.'.join(sections[: i + 1])} is no section")
    here[last] = value


def _said(table: Mapping[str, Any], sections: list[str]) -> Any:
    found: Any = table
    for section in sections:
        found = found.get(section) if isinstance(found, Mapping) else None
    return found
