"""A Transformer from words: the fields of a [model] table, with what follows from them where they are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from presage.configs.hugging_face import read_config
from presage.configs.model_schema import ExpertConfig, ModelConfig
from presage.configs.schema import check_keys, convert_section, given_fields, merge_sections
from presage.configs.transformer import GATED, LETTERS, Experts, Latent, LinearAttention, Mamba, Transformer
from presage.configs.vision import VisionTower
from presage.errors import InputError, PresageError, near
from presage.files.reading import lines
from presage.hardware.facts import load_toml

ACTIVATIONS = (*GATED, "gelu", "relu", "relu2", "silu")
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "none")
SPREAD = 17  # busy experts are so far from each other, for software deals them out to ranks
REQUIRED = ("hidden", "layers", "heads", "vocab")
PARTS = ("experts", "latent", "mamba", "linear", "vision", "pattern", "layer_types")  # what is no plain field
# Hugging Face's names of layers, as letters of a pattern. Each is followed by a feed-forward block.
LAYER_TYPES = {
    "full_attention": "a", "attention": "a", "sliding_attention": "w", "chunked_attention": "w", "mamba": "m",
    "mamba2": "m", "linear_attention": "g",
}  # fmt: skip


def transformer_from_fields(table: Mapping[str, Any], path: str | Path = "model", name: str = "") -> Transformer:
    """A model from its fields; `path` is their file."""
    w = convert_section(path, table, ModelConfig, "model")
    for key in REQUIRED:
        if getattr(w, key) is None:
            raise InputError(path, "is missing: give it, or a preset, or a config", f"model.{key}")
    _check_fields(w, path)
    given = {k: v for k, v in given_fields(w).items() if k not in PARTS}
    hidden, heads = given["hidden"], given["heads"]
    given.setdefault("kv_heads", heads)
    given.setdefault("head_dim", hidden // heads)
    given.setdefault("ffn", _ffn(hidden, given.get("activation", "swiglu")))
    given["name"] = given.get("name") or name
    return Transformer(
        **given,
        experts=_experts(w.experts, given["ffn"], path) if w.experts else None,
        latent=Latent(**given_fields(w.latent)) if w.latent else None,
        mamba=Mamba(**given_fields(w.mamba)) if w.mamba else None,
        linear=LinearAttention(**given_fields(w.linear)) if w.linear else None,
        vision=VisionTower(**given_fields(w.vision)) if w.vision else None,
        pattern=_pattern(w, path),
    )


def model_fields(model: Transformer) -> dict[str, Any]:
    """A Transformer as the words of a [model] table."""
    return {k: v for k, v in asdict(model).items() if v is not None and (k != "name" or v)}


def _pattern(w: ModelConfig, path: str | Path) -> str:
    """Layers by letter; empty where all are alike, or where windows are a matter of `window_every`."""
    text, layers = w.pattern or "", w.layers or 0
    if w.layer_types and not text:
        for name in w.layer_types:
            if name not in LAYER_TYPES:
                what = f"knows no layer {name!r}{near(name, LAYER_TYPES)}: choose from {', '.join(LAYER_TYPES)}"
                raise InputError(path, what, "model.layer_types")
        text = "".join(LAYER_TYPES[name] for name in w.layer_types)
    if strange := sorted(set(text) - set(LETTERS)):
        raise InputError(
            path, f"has {strange[0]!r}: layers are {' '.join(LETTERS)} (see docs/recipes.md)", "model.pattern"
        )
    if text and len(text) != layers:
        raise InputError(path, f"has {len(text)} layers: layers is {layers}", "model.pattern")
    for mixer, section, given in (("mamba", "mamba", w.mamba), ("linear", "linear", w.linear)):
        if any(LETTERS[x][0] == mixer for x in text) and given is None:
            raise InputError(path, f"has layers of [model.{section}]: give its sizes", "model.pattern")
    if "E" in text and w.experts is None:
        raise InputError(path, "has layers of experts: give [model.experts]", "model.pattern")
    return "" if set(text) <= {"a"} else text


def _check_fields(w: ModelConfig, path: str | Path) -> None:
    for key, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("positions", POSITIONS)):
        value = getattr(w, key)
        if value is not None and value not in known:
            raise InputError(path, f"is {value!r}: choose from {', '.join(known)}", f"model.{key}")
    for key in ("hidden", "layers", "heads", "vocab", "kv_heads", "head_dim"):
        value = getattr(w, key)
        if value is not None and value < 1:
            raise InputError(path, f"is {value}: it should be 1 or more", f"model.{key}")


def _experts(w: ExpertConfig, ffn: int, path: str | Path) -> Experts:
    """Experts from their fields; loads from a list, a file of numbers, or a law: "zipf 0.5"."""
    given = {"ffn": ffn, **given_fields(w)}
    loads = given.pop("loads", ())
    if isinstance(loads, str):
        loads = expert_loads(loads, w.experts, path)
    if loads and (len(loads) != w.experts or min(loads) < 0 or not 0 < sum(loads) < inf):
        what = f"has {len(loads)} numbers: it should be {w.experts}, one for each expert, none negative"
        raise InputError(path, what, "model.experts.loads")
    return Experts(**given, loads=tuple(map(float, loads)))


def expert_loads(text: str, experts: int, path: str | Path) -> list[float]:
    """Tokens of each expert: by a power law of its rank ("zipf 0.5", spread over experts in turn), or from a file
    beside the job's, numbers apart by commas, blanks or lines."""
    kind, _, power = text.partition(" ")
    if kind == "zipf":
        try:
            law = [(i + 1) ** -float(power) for i in range(experts)]
        except ValueError:
            raise InputError(path, f'is {text!r}: a law is like "zipf 0.5"', "model.experts.loads") from None
        return [law[(i * SPREAD) % experts] for i in range(experts)] if experts % SPREAD else law
    file = Path(path).parent / text
    try:
        return [float(word) for word in re.split(r"[\s,]+", " ".join(lines(file)).strip()) if word]
    except ValueError as e:
        raise InputError(file, f"should be {experts} numbers: {e}") from e


def _ffn(hidden: int, activation: str) -> int:
    """As Megatron has it: four times as wide, and two thirds of that in multiples of 64 where it is gated."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if activation in GATED else 4 * hidden


# ---- Models that are known by name, with their sources.

Preset = dict[str, Any]
ABOUT = ("source", "parameters_B", "active_B", "aliases", "like")  # what is said of a model, not in its words


@cache
def preset_facts() -> dict[str, Preset]:
    """Facts of the known models by name."""
    return load_toml(Path(str(files("presage.configs").joinpath("presets.toml"))))


def presets() -> tuple[str, ...]:
    """Names of all models that come with presage."""
    return tuple(preset_facts())


def preset_fields(name: str) -> dict[str, Any]:
    """A known model as words of a [model] table."""
    key = preset_key(name)
    if key is None:
        near = get_close_matches(_folded(name), _names(), 3, 0.5)
        hint = f"did you mean {' or '.join(dict.fromkeys(_names()[n] for n in near))}? " if near else ""
        raise PresageError(f"no model {name!r}: {hint}choose from {', '.join(presets())}")
    return {"name": key, **_preset_fields(key)}


def preset(name: str) -> Transformer:
    """A known model by name."""
    return transformer_from_fields(preset_fields(name))


def find_preset(name: str) -> Transformer | None:
    """A known model by any of its names; None for one that is not."""
    return preset(name) if preset_key(name) else None


def preset_key(name: str) -> str | None:
    """The key of a model by any of its names; None for one not known."""
    return _names().get(_folded(name))


def _preset_fields(key: str) -> dict[str, Any]:
    facts = preset_facts()[key]
    base = _preset_fields(facts["like"]) if "like" in facts else {}
    return merge_sections(base, {k: v for k, v in facts.items() if k not in ABOUT})


@cache
def _names() -> dict[str, str]:
    """Every name and alias, folded."""
    return {_folded(n): key for key, p in preset_facts().items() for n in (key, *p.get("aliases", ()))}


def _folded(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


# ---- A job file's [model]: a known model, or a Hugging Face config, and fields of its own over them.


def read_model(table: Mapping[str, Any], path: str | Path, name: str = "") -> tuple[Transformer, tuple[str, ...]]:
    """The model of a [model] table, and notes on what of its config is not expressed."""
    check_keys(path, table, ModelConfig, "model")
    base: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    preset, config = table.get("preset"), table.get("config")
    for key, value in (("preset", preset), ("config", config)):
        if value is not None and not isinstance(value, str):
            raise InputError(path, f"is {value!r}: it should be text", f"model.{key}")
    if preset:
        base = preset_fields(preset)
    if config:
        config_fields, notes = read_config(Path(path).parent / config)
        base = merge_sections(base, config_fields)
    own = {k: v for k, v in table.items() if k not in ("preset", "config")}
    return transformer_from_fields(merge_sections(base, own), path, name), notes
