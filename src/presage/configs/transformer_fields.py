"""A Transformer from words: the fields of a [model] table, with what follows from them where they are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from presage.configs.schema import ModelConfig, converted, plain
from presage.configs.transformer import GATED, Experts, Latent, Transformer
from presage.errors import InputError

__all__ = ["ACTIVATIONS", "transformer_of", "words_of"]

ACTIVATIONS = (*GATED, "gelu", "relu", "relu2", "silu")
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "none")
NEEDED = ("hidden", "layers", "heads", "vocab")


def transformer_of(table: Mapping[str, Any], path: str | Path = "model", name: str = "") -> Transformer:
    """A model from its fields; `path` is the file they stand in."""
    w = converted(path, table, ModelConfig, "model")
    for key in NEEDED:
        if getattr(w, key) is None:
            raise InputError(path, "is missing: give it, or a preset, or a config", f"model.{key}")
    _check(w, path)
    given = {k: v for k, v in plain(w).items() if k not in ("experts", "latent")}
    hidden, heads = given["hidden"], given["heads"]
    given.setdefault("kv_heads", heads)
    given.setdefault("head_dim", hidden // heads)
    given.setdefault("ffn", _ffn(hidden, given.get("activation", "swiglu")))
    given["name"] = given.get("name") or name
    return Transformer(
        **given,
        experts=Experts(**{"ffn": given["ffn"], **plain(w.experts)}) if w.experts else None,
        latent=Latent(**plain(w.latent)) if w.latent else None,
    )


def words_of(model: Transformer) -> dict[str, Any]:
    """A Transformer as the words of a [model] table."""
    return {k: v for k, v in asdict(model).items() if v is not None and (k != "name" or v)}


def _check(w: ModelConfig, path: str | Path) -> None:
    for key, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("positions", POSITIONS)):
        value = getattr(w, key)
        if value is not None and value not in known:
            raise InputError(path, f"is {value!r}: there is {', '.join(known)}", f"model.{key}")
    for key in ("hidden", "layers", "heads", "vocab", "kv_heads", "head_dim"):
        value = getattr(w, key)
        if value is not None and value < 1:
            raise InputError(path, f"is {value}: it should be 1 or more", f"model.{key}")


def _ffn(hidden: int, activation: str) -> int:
    """As Megatron has it: four times as wide, and two thirds of that in multiples of 64 where it is gated."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if activation in GATED else 4 * hidden
