"""A job file's [model]: a known model, or a Hugging Face config, and fields of its own over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from presage.configs.hugging_face import read_config
from presage.configs.presets import preset_words
from presage.configs.schema import ModelConfig, known, merged
from presage.configs.transformer import Transformer
from presage.configs.transformer_fields import transformer_of
from presage.errors import InputError

__all__ = ["model_of", "read_model"]


def model_of(table: Mapping[str, Any], path: str | Path = "model", name: str = "") -> Transformer:
    """A [model] table as a Transformer; `path` is the file it stands in, beside which a config is looked for."""
    return read_model(table, path, name)[0]


def read_model(table: Mapping[str, Any], path: str | Path, name: str = "") -> tuple[Transformer, tuple[str, ...]]:
    """And what of a config our words cannot say."""
    known(path, table, ModelConfig, "model")
    base: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    preset, config = table.get("preset"), table.get("config")
    for key, value in (("preset", preset), ("config", config)):
        if value is not None and not isinstance(value, str):
            raise InputError(path, f"is {value!r}: it should be a text", f"model.{key}")
    if preset:
        base = preset_words(preset)
    if config:
        found, notes = read_config(Path(path).parent / config)
        base = merged(base, found)
    own = {k: v for k, v in table.items() if k not in ("preset", "config")}
    return transformer_of(merged(base, own), path, name), notes
