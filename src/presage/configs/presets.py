"""Models that are known by name, with their sources."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.configs.schema import merged
from presage.configs.transformer import Transformer
from presage.configs.transformer_fields import transformer_of
from presage.errors import PresageError
from presage.hardware.facts import load

__all__ = ["Preset", "known", "preset", "preset_facts", "preset_named", "preset_words", "presets"]

Preset = dict[str, Any]
ABOUT = ("source", "parameters_B", "active_B", "aliases", "like")  # what is said of a model, not in its words


@cache
def preset_facts() -> dict[str, Preset]:
    """All of them by name, as the file has them."""
    return load(Path(str(files("presage.configs").joinpath("presets.toml"))))


def presets() -> tuple[str, ...]:
    """The names of all."""
    return tuple(preset_facts())


def preset_words(name: str) -> dict[str, Any]:
    """A known model as words of a [model] table."""
    key = preset_named(name)
    if key is None:
        near = get_close_matches(_folded(name), _names(), 3, 0.5)
        hint = f"did you mean {' or '.join(dict.fromkeys(_names()[n] for n in near))}? " if near else ""
        raise PresageError(f"no model {name!r}: {hint}There is {', '.join(presets())}")
    return {"name": key, **_words(key)}


def preset(name: str) -> Transformer:
    """A known model."""
    return transformer_of(preset_words(name))


def known(name: str) -> Transformer | None:
    """A known model by any of its names; None for one that is not."""
    return preset(name) if preset_named(name) else None


def preset_named(name: str) -> str | None:
    """The key of a model by any of its names; None for one not known."""
    return _names().get(_folded(name))


def _words(key: str) -> dict[str, Any]:
    found = preset_facts()[key]
    base = _words(found["like"]) if "like" in found else {}
    return merged(base, {k: v for k, v in found.items() if k not in ABOUT})


@cache
def _names() -> dict[str, str]:
    """Every name and alias, folded."""
    return {_folded(n): key for key, p in preset_facts().items() for n in (key, *p.get("aliases", ()))}


def _folded(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")
