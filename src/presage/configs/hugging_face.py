"""Hugging Face configurations (config.json) as words of a [model] table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from presage.configs.hf_layers import HYBRIDS, REFUSED, hybrid_words, vision_words
from presage.configs.transformer import CLAMPED
from presage.errors import WRONG_VALUE, InputError, PresageError, near
from presage.files.reading import read_json

GPT = {"activation": "gelu", "norm": "layernorm", "bias": True, "tied": True, "positions": "learned"}
LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "bias": False, "tied": False, "positions": "rope"}
TIED = LLAMA | {"tied": True}
NEOX = GPT | {"positions": "rope", "tied": False}
LIKE_LLAMA = (
    "llama", "llama4", "llama4_text", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "deepseek_v2", "deepseek_v3", "kimi_k2", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "internlm", "internlm2",
    "glm4", "glm4_moe", "exaone4", "smollm3", "seed_oss", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava",
    "hunyuan_v1_dense", "ernie4_5", "ernie4_5_moe", "arcee", "helium", "dots1", "minimax_m2", "mistral3", "ministral3",
    "yi", "baichuan", "deepseek", "aquila",
)  # fmt: skip

# What a family's layers have, where the file does not say otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LIKE_LLAMA, LLAMA),
    **dict.fromkeys(["granite", "granitemoe"], TIED),
    **dict.fromkeys(["gemma", "gemma2", "gemma3", "gemma3_text"], TIED | {"activation": "geglu"}),
    "gpt_oss": LLAMA | {"activation": CLAMPED, "bias": True},
    "olmo": LLAMA | {"norm": "layernorm"},
    "stablelm": LLAMA | {"norm": "layernorm"},
    "cohere": TIED | {"norm": "layernorm"},
    "cohere2": TIED | {"norm": "layernorm"},
    "dbrx": LLAMA | {"norm": "layernorm"},
    "grok-1": TIED | {"activation": "geglu"},
    "nemotron": LLAMA | {"activation": "relu2", "norm": "layernorm"},
    "gpt2": GPT,
    "gpt_neo": GPT,
    "gpt_bigcode": GPT,
    "opt": GPT | {"activation": "relu"},
    "bloom": GPT | {"positions": "none"},
    "mpt": GPT | {"positions": "none", "bias": False},
    "falcon": GPT | {"positions": "rope", "bias": False},
    "gpt_neox": NEOX,
    "gptj": NEOX,
    "phi": NEOX,
    "starcoder2": NEOX | {"tied": True},
    **dict.fromkeys(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bamba"], LLAMA),
    "granitemoehybrid": TIED | {"positions": "none"},
    "mamba2": LLAMA,
    "nemotron_h": LLAMA | {"activation": "relu2"},
    "bert": GPT | {"causal": False},
    "roberta": GPT | {"causal": False},
}
# Our word, and what it is called there: the first that is found.
SIZES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "num_selected_experts")
STRANGE = ("ssm", "recurrent", "rwkv", "state_size", "conv_kernel", "hybrid_override_pattern")  # of layers with a state


class Config(NamedTuple):
    """The fields of a [model] table, and notes on what they cannot express."""

    words: dict[str, Any]
    notes: tuple[str, ...]


def read_config(path: str | Path) -> Config:
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(path, "is not a Hugging Face configuration: no table of names")
    try:
        return config_words(config)
    except PresageError as e:
        raise InputError(path, str(e)) from e
    except WRONG_VALUE as e:
        raise InputError(path, f"has a value of the wrong kind: {e}") from e


def config_words(config: Mapping[str, Any]) -> Config:
    """A configuration as words of a [model] table."""
    kind = str(config.get("model_type", ""))
    inner = config.get("text_config")
    if isinstance(inner, dict):  # of a model that sees, too: its text part
        outer = {k: config[k] for k in ("model_type", "tie_word_embeddings") if k in config}
        outer |= {"vision_config": config["vision_config"]} if "vision_config" in config else {}
        config = outer | inner
        kind = kind if kind in FAMILIES else str(config.get("model_type", kind))
    _refuse(config, kind)
    notes = [] if kind else ["it has no model_type: read as one like Llama"]
    words: dict[str, Any] = dict(FAMILIES.get(kind, LLAMA))
    config = _unfolded(config, kind)
    words |= {word: value for word, names in SIZES.items() if (value := _first(config, names))}
    if words["positions"] != "learned" and config.get("positions") != "learned":
        words.pop("max_positions", None)
    if kind == "mamba2":
        words |= {"heads": words.get("heads", 1), "kv_heads": 1, "head_dim": 64}
    for key in ("hidden", "layers", "heads", "vocab"):
        if key not in words:
            raise PresageError(f"has no {SIZES[key][0]}")
    words |= _traits(config, words) | ({} if kind in HYBRIDS else _window(config, words))
    words |= {k: v for k, v in (("latent", _latent(config)), ("experts", _experts(config, words))) if v}
    if "latent" in words:
        words |= {"head_dim": words["latent"]["value"], "kv_heads": words["heads"]}
    words |= {"vision": seen} if (seen := vision_words(config, notes)) else {}
    if kind in HYBRIDS:
        words |= hybrid_words(config, kind, int(words["layers"]))
    if config.get("num_nextn_predict_layers"):
        words["predicted"] = int(config["num_nextn_predict_layers"])
    if config.get("parallel_attn") or config.get("use_parallel_residual") or kind in ("phi", "gptj", "cohere"):
        notes.append("attention and feed-forward blocks stand side by side there: here they are one after the other")
    words["name"] = str(config.get("_name_or_path") or kind)
    return Config(words, tuple(notes))


def _refuse(config: Mapping[str, Any], kind: str) -> None:
    """Models whose layers presage has no law for, that are two stacks, or that it does not know."""
    if kind in REFUSED:
        raise PresageError(f"model_type {kind!r}: {REFUSED[kind]}")
    if config.get("is_encoder_decoder"):
        raise PresageError(f"{kind or 'it'} is an encoder with a decoder: only one stack of layers is described here")
    if kind and kind not in FAMILIES and kind not in HYBRIDS:
        told = near(kind, (*FAMILIES, *HYBRIDS))
        raise PresageError(
            f"model_type {kind!r} is not known{told or ''}{' ' if told else ': '}give its sizes in [model]"
        )
    if kind in HYBRIDS:
        return
    kinds = set(map(str, config.get("layer_types") or ()))
    strange = [w for w in (*STRANGE, "mamba", "linear_attention") if any(w in k for k in (*config, *kinds))]
    if strange:
        raise PresageError(
            f"{kind or 'it'} has layers other than attention ({strange[0]}): give model_type, or its sizes in [model]"
        )


def _unfolded(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Families that nest, or that count in ways of their own, as the others have it."""
    out = dict(config)
    for nested in ("attn_config", "ffn_config"):  # DBRX, MPT
        if isinstance(config.get(nested), dict):
            out |= {k: v for k, v in config[nested].items() if k not in ("hidden_size", "model_type")}
    hidden = _first(config, SIZES["hidden"]) or 0
    if kind == "mpt":
        out["n_inner"] = int(config.get("expansion_ratio", 4) * hidden)
        if not out.get("alibi", True):
            out["positions"] = "learned"
    if (kind == "falcon" and not config.get("new_decoder_architecture")) or kind == "gpt_bigcode":
        out["num_kv_heads"] = 1 if config.get("multi_query", True) else None
    if kind in ("olmoe", "qwen2_moe", "granitemoe", "phimoe") and "moe_intermediate_size" not in out:
        out["moe_intermediate_size"] = config.get("intermediate_size")
    if kind == "dbrx":
        out["intermediate_size"] = out.get("ffn_hidden_size")
    return out


def _traits(config: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Activation, biases, tied embeddings."""
    out: dict[str, Any] = {}
    act = _first(config, ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function", "ffn_act_fn"))
    act = act.get("name", "") if isinstance(act, dict) else act
    if isinstance(act, str) and act and words["activation"] != CLAMPED:
        out["activation"] = _activation(act, words["activation"] in ("swiglu", "geglu"))
    if isinstance(config.get("tie_word_embeddings"), bool):
        out["tied"] = config["tie_word_embeddings"]
    if isinstance(config.get("bias"), bool) and words.get("positions") == "rope":
        out["bias"] = config["bias"]
    if config.get("positions") == "learned":
        out["positions"] = "learned"
    if not words.get("ffn"):
        out["ffn"] = 4 * words["hidden"]
    return out


def _activation(name: str, gated: bool) -> str:
    low = name.lower()
    if "relu" in low:
        return "relu2" if "2" in low else "reglu" if gated else "relu"
    if "gelu" in low:
        return "geglu" if gated else "gelu"
    return "swiglu" if gated else "silu"


def _window(config: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows: in every layer, or in some."""
    width = _first(config, ("sliding_window", "attention_chunk_size"))
    if not width or config.get("use_sliding_window") is False:
        return {}
    layers = int(words["layers"])
    chunks = {"chunked": True} if config.get("attention_chunk_size") else {}
    at = _narrow(config, layers)
    if not any(at):
        return {}
    every = layers // sum(at)
    if at == [i % every == 0 for i in range(layers)]:
        return {"window": int(width), "window_every": every} | chunks
    return {"window": int(width), "pattern": "".join("w" if narrow else "a" for narrow in at)} | chunks


def _narrow(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have the window."""
    kinds, kind = config.get("layer_types"), config.get("model_type")
    if isinstance(kinds, Sequence) and kinds and not isinstance(kinds, str):
        return ["sliding" in str(k) or "chunked" in str(k) for k in kinds]
    if kind == "gemma2":
        return [i % 2 == 0 for i in range(layers)]
    full = {"gemma3": 6, "gemma3_text": 6, "llama4": 4, "llama4_text": 4}.get(str(kind))
    if full:
        full = int(config.get("sliding_window_pattern") or config.get("no_rope_layer_interval") or full)
        return [(i + 1) % full != 0 for i in range(layers)]
    if config.get("use_sliding_window"):
        return [i >= int(config.get("max_window_layers", 0)) for i in range(layers)]
    return [True] * layers


def _latent(config: Mapping[str, Any]) -> dict[str, int]:
    if not config.get("kv_lora_rank"):
        return {}
    return {
        "query_rank": int(config.get("q_lora_rank") or 0),
        "key_rank": int(config["kv_lora_rank"]),
        "rope": int(config.get("qk_rope_head_dim", 64)),
        "nope": int(config.get("qk_nope_head_dim", 128)),
        "value": int(config.get("v_head_dim", 128)),
    }


def _experts(config: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    count = _first(config, EXPERTS)
    if not count or int(count) < 2:
        return {}
    llama4 = str(config.get("model_type", "")).startswith("llama4")
    width = int(
        config.get("intermediate_size", 0) if llama4 else config.get("moe_intermediate_size") or words.get("ffn", 0)
    )
    shared = int(config.get("n_shared_experts") or 0) * width
    given = config.get("moe_shared_expert_intermediate_size")  # of all shared experts (Nemotron)
    shared = (
        int(given or 0) or shared or int(config.get("shared_expert_intermediate_size") or 0) or (width if llama4 else 0)
    )
    dense, every = _expert_layers(config, int(words["layers"]))
    top = int(_first(config, TOP_K) or 1)
    groups, chosen = config.get("n_group"), config.get("topk_group")
    return {
        "experts": int(count),
        "top_k": top,
        "ffn": width,
        "shared_ffn": shared,
        "dense_layers": dense,
        "every": every,
        "latent": int(config.get("moe_latent_size") or 0),
    } | ({"groups": int(groups), "group_top_k": int(chosen)} if groups and chosen and int(groups) > int(chosen) else {})


def _expert_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers at the start have no experts, and of the others every how many."""
    if config.get("moe_layers"):  # numbers of layers
        which = sorted(int(i) for i in config["moe_layers"])
        return which[0], which[1] - which[0] if len(which) > 1 else layers
    step = int(_first(config, ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq")) or 1)
    dense = int(config.get("first_k_dense_replace") or 0) or len(config.get("mlp_only_layers") or ())
    return max(dense, step - 1), step


def _first(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of the names that has a value."""
    return next((config[n] for n in names if config.get(n) is not None), None)
