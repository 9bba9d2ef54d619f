"""Layers other than attention in Hugging Face configurations: Mamba-2 and linear attention, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from presage.errors import PresageError

# Families whose layers presage has no law for, and what to do instead.
OWN = "describe it by the sizes of [model], as what it comes nearest to"
REFUSED = {
    "mamba": "Mamba-1 scans are not modelled: use a Mamba-2 model, such as preset nemotron-h-8b",
    "falcon_mamba": "Mamba-1 scans are not modelled: use a Mamba-2 model, such as preset nemotron-h-8b",
    "jamba": "Mamba-1 scans are not modelled: use a Mamba-2 model, such as preset nemotron-3-nano",
    "zamba": "attention blocks shared between layers are not modelled: use preset nemotron-h-8b",
    "zamba2": "attention blocks shared between layers are not modelled: use preset nemotron-h-8b",
    "falcon_h1": "attention and Mamba side by side in a layer are not modelled: use preset nemotron-h-8b",
    "recurrent_gemma": "RG-LRU layers are not modelled: use preset nemotron-h-8b",
    "rwkv": "RWKV layers are not modelled: use preset kimi-linear-48b-a3b",
    "lfm2": "gated short convolutions are not modelled: use preset nemotron-h-8b",
    "lfm2_moe": "gated short convolutions are not modelled: use preset nemotron-h-8b",
    "minimax": "lightning attention is not modelled: use preset qwen3-next-80b-a3b",
    "deepseek_v32": "sparse attention with an indexer is not modelled: use preset deepseek-v3, which attends to all",
    "glm_moe_dsa": "sparse attention with an indexer is not modelled: use preset deepseek-v3, which attends to all",
    "gemma3n": f"per-layer embeddings and nested feed-forward blocks are not modelled: {OWN}",
    "gemma3n_text": f"per-layer embeddings and nested feed-forward blocks are not modelled: {OWN}",
}
ASSUMED_PATCHES = 5476  # of an image of 1,036 x 1,036 pixels in patches of 14
HYBRIDS = (
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "granitemoehybrid",
    "bamba",
    "mamba2",
)
STATES = {  # our word, and what it is called there
    "heads": ("mamba_num_heads", "mamba_n_heads", "num_heads"),
    "head_dim": ("mamba_head_dim", "mamba_d_head", "head_dim"),
    "state": ("ssm_state_size", "mamba_d_state", "mamba_state_size", "state_size"),
    "groups": ("n_groups", "mamba_n_groups"),
    "conv": ("conv_kernel", "mamba_d_conv"),
    "chunk": ("chunk_size", "mamba_chunk_size"),
}
DELTA = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "conv": "linear_conv_kernel_dim",
}  # fmt: skip


def hybrid_words(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, Any]:
    """Words of a [model] table for layers that are not all attention."""
    if kind == "nemotron_h":
        pattern = str(config.get("hybrid_override_pattern") or "")
        return {"pattern": pattern, "mamba": _states(config), "positions": "none"}
    if kind == "kimi_linear":
        return _kimi(config, layers)
    if kind in ("granitemoehybrid", "bamba"):
        return {"pattern": _mamba_pattern(config, layers), "mamba": _states(config)}
    if kind == "mamba2":
        return {"pattern": "M" * layers, "mamba": _states(config), "positions": "none"}
    linear = {word: int(config[name]) for word, name in DELTA.items() if name in config}
    return {"pattern": _delta_pattern(config, layers), "linear": linear, "gated_attention": True}


def _states(config: Mapping[str, Any]) -> dict[str, int]:
    found = {w: next((config[n] for n in names if config.get(n) is not None), None) for w, names in STATES.items()}
    out = {w: int(v) for w, v in found.items() if isinstance(v, (int, float))}
    if "heads" not in out:
        raise PresageError("has no mamba_num_heads: the sizes of its Mamba-2 layers are not known")
    return out


def _mamba_pattern(config: Mapping[str, Any], layers: int) -> str:
    """By `layer_types`, or by the places of attention."""
    kinds, at = config.get("layer_types") or config.get("layers_block_type"), config.get("attn_layer_indices")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        return "".join("m" if "mamba" in str(k) else "a" for k in kinds)
    if at is None:
        raise PresageError("has neither layer_types nor attn_layer_indices: where its attention is is not known")
    return "".join("a" if i in at else "m" for i in range(layers))


def _delta_pattern(config: Mapping[str, Any], layers: int) -> str:
    """By `layer_types`, or every so many layers with attention."""
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and kinds and not isinstance(kinds, str):
        return "".join("g" if "linear" in str(k) else "a" for k in kinds)
    every = int(config.get("full_attention_interval") or 4)
    return "".join("a" if (i + 1) % every == 0 else "g" for i in range(layers))


def _kimi(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    z = config.get("linear_attn_config")
    if not isinstance(z, Mapping):
        raise PresageError("has no linear_attn_config: the sizes of its linear attention are not known")
    full = {int(i) for i in z.get("full_attn_layers", ())}  # counted from 1
    heads, dim = int(z["num_heads"]), int(z["head_dim"])
    linear = {
        "key_heads": heads, "value_heads": heads, "key_dim": dim, "value_dim": dim,
        "conv": int(z.get("short_conv_kernel_size", 4)), "kind": "kimi-delta",
    }  # fmt: skip
    return {
        "pattern": "".join("a" if i + 1 in full else "g" for i in range(layers)),
        "linear": linear,
        "positions": "none",
    }


def vision_words(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Words of [model.vision] from a configuration's vision_config; a note where it cannot be read."""
    v = config.get("vision_config")
    if not isinstance(v, Mapping):
        return {}
    size, patch = v.get("image_size"), v.get("patch_size", v.get("spatial_patch_size"))
    layers, heads = v.get("num_hidden_layers", v.get("depth")), v.get("num_attention_heads", v.get("num_heads"))
    hidden, ffn = v.get("hidden_size"), v.get("intermediate_size")
    numbers = [x for x in (patch, layers, heads, hidden, ffn) if isinstance(x, int)]
    if len(numbers) < 5:
        notes.append("vision_config is not read: its encoder costs nothing here; give [model.vision]")
        return {}
    merge = int(v.get("spatial_merge_size", 1)) ** 2
    patches = (int(size) // int(patch)) ** 2 if isinstance(size, int) else ASSUMED_PATCHES
    if not isinstance(size, int):
        notes.append(f"images of {patches:,} patches are assumed: give model.vision.patches")
    notes.append("one image a sample, the vision tower frozen: model.vision.images and frozen say otherwise")
    full = v.get("fullatt_block_indexes") or ()
    window = (int(v.get("window_size", 0)) // int(patch)) ** 2 if full else 0
    inputs = 3 * int(patch) ** 2 * int(v.get("temporal_patch_size", 1))
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "patches": patches, "merge": merge,
        "inputs": inputs, "gated": "silu" in str(v.get("hidden_act", "")), "window": window,
        "full_every": int(layers or 0) // max(1, len(full)) if full else 0,
    }  # fmt: skip
