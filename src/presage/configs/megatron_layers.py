"""Megatron's arguments of layers other than attention, of recipes and of adapters; and those that are refused."""

from __future__ import annotations

from typing import Any

from presage.configs.given_arguments import GivenArguments, argument_flag
from presage.errors import InputError

Table = dict[str, Any]
SCALINGS = {"delayed": "delayed", "tensorwise": "tensor", "blockwise": "block"}
# Legal arguments that nothing here models, by their values (None: any), and what to do instead.
REFUSED: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "hybrid_attention_ratio": (None, "give the layers by --hybrid-override-pattern"),
    "hybrid_mlp_ratio": (None, "give the layers by --hybrid-override-pattern"),
    "heterogeneous_layers_config_path": (None, "layers of different widths are not modelled: give a uniform model"),
    "experimental_attention_variant": (("dsa",), "sparse attention is not modelled: leave it out for full attention"),
    "muon_tp_mode": (("duplicated", "distributed"), "only blockwise is modelled, Megatron's default"),
    "retro_encoder_layers": (None, "retrieval encoders are not modelled: describe the decoder alone"),
    "fp8_recipe": (("custom",), "choose delayed, tensorwise, blockwise or mxfp8"),
    "cp_comm_type": (("a2a", "a2a+p2p"), "context parallelism by all-to-all is not modelled: use p2p or all_gather"),
    "moe_upcycling_granularity": (None, "give --num-experts and --moe-ffn-hidden-size as they are afterwards"),
}
REFUSED_FLAGS = {  # those without a value
    "moe_extended_tp": "use --expert-tensor-parallel-size",
    "moe_use_upcycling": "give --num-experts and --moe-ffn-hidden-size as they are afterwards",
}


def check_refused(a: GivenArguments) -> None:
    """Raise for an argument that would change the step in a way that is not modelled."""
    for name, (values, instead) in REFUSED.items():
        given = a.text(name) if name in a.found and a.found[name][-1] else None
        number = (given or "").replace(".", "", 1)
        if given is None or (number.isdecimal() and not float(given)) or given.lower() in ("none", "null"):
            continue
        if values is None or given in values:
            raise InputError(a.path, f"is not modelled: {instead}", argument_flag(name))
    for name, instead in REFUSED_FLAGS.items():
        if a.flag(name):
            raise InputError(a.path, f"is not modelled: {instead}", argument_flag(name))


def hybrid_model(a: GivenArguments) -> Table:
    """Words of a [model] table for a hybrid: layers by letter, sizes of Mamba-2 and of linear attention."""
    pattern = (a.text("hybrid_override_pattern", "hybrid_layer_pattern") or "").strip("'\"")
    pattern, *further = pattern.split("/")  # what follows are layers that predict further tokens
    out: Table = {}
    if pattern:
        out = {"pattern": pattern.replace("|", ""), "layers": len(pattern.replace("|", ""))}
        if further:
            out["predicted"] = len(further)
    if "M" in pattern:
        heads, hidden = a.whole("mamba_num_heads"), a.whole("hidden_size") or 0
        dim = a.whole("mamba_head_dim") or 64
        sizes = {"heads": heads or 2 * hidden // dim, "head_dim": dim, "state": a.whole("mamba_state_dim") or 128}
        out["mamba"] = sizes | {"groups": a.whole("mamba_num_groups") or 8}
    if (a.text("experimental_attention_variant", "linear_attention_type") or "") == "gated_delta_net":
        out |= _delta(a)
    if a.flag("attention_output_gate"):
        out["gated_attention"] = True
    return out


def _delta(a: GivenArguments) -> Table:
    """Gated DeltaNet in all layers but every so many."""
    layers, every = a.whole("num_layers") or 0, a.whole("linear_attention_freq") or 4
    names = {
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim", "conv": "linear_conv_kernel_dim",
    }  # fmt: skip
    sizes = {word: a.whole(name) for word, name in names.items()}
    return {
        "pattern": "".join("a" if (i + 1) % every == 0 else "g" for i in range(layers)),
        "linear": {k: v for k, v in sizes.items() if v is not None},
    }


def recipe(a: GivenArguments) -> Table:
    """Words of a [training] table: scaling of fp8, Muon, the host's share of the optimizer, adapters."""
    out: Table = {}
    scaling = SCALINGS.get(a.text("fp8_recipe") or "")
    if scaling and a.flag("fp8_format", "fp8", "fp8_hybrid", "fp8_e4m3"):
        out["scaling"] = scaling
    if a.flag("optimizer_cpu_offload"):
        share = a.number("optimizer_offload_fraction")
        out |= {"host_optimizer": 1.0 if share is None else share}
        out |= {"host_overlap": a.flag("overlap_cpu_optimizer_d2h_h2d")}
    if (a.text("optimizer") or "") in ("muon", "dist_muon", "adaptive_muon"):
        out |= {"optimizer": "muon", "muon_steps": a.whole("muon_num_ns_steps") or 5}
        a.text("muon_tp_mode")
    return out | _adapters(a)


def _adapters(a: GivenArguments) -> Table:
    """NeMo's and Megatron-Bridge's: peft_scheme, adapter_dim or dim, target_modules."""
    scheme = (a.text("peft_scheme", "peft") or "").lower()
    if not scheme or scheme in ("none", "null"):
        return {}
    if scheme not in ("lora", "qlora"):
        raise InputError(a.path, f"is {scheme!r}, which is not modelled: use lora", "--peft-scheme")
    targets, rank = (
        a.several("target_modules") or ["linear_qkv", "linear_proj"],
        a.whole("adapter_dim", "lora_dim", "lora_rank"),
    )
    return {"tune": scheme, "lora": {"targets": [t.strip("[]',\"") for t in targets], "rank": rank or 32}}
