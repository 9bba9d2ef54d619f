"""Hybrids, recipes and adapters from Hugging Face's, Megatron's and TorchTitan's own files."""

from __future__ import annotations

from typing import Any

import pytest

from presage.configs.hugging_face import config_words
from presage.configs.megatron import arguments_sections
from presage.configs.models import preset, transformer_from_fields
from presage.configs.script_arguments import shell
from presage.configs.torchtitan import titan_sections
from presage.errors import PresageError

NANO: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "vocab_size": 131072,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "mlp_hidden_act": "relu2", "tie_word_embeddings": False,
}  # fmt: skip
SUPER = NANO | {
    "hidden_size": 4096, "num_hidden_layers": 88, "intermediate_size": 2688, "mamba_num_heads": 128,
    "hybrid_override_pattern":
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376, "num_nextn_predict_layers": 1,
}  # fmt: skip
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936, "hidden_act": "silu",
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [(NANO, "nemotron-3-nano"), (SUPER, "nemotron-3-super"), (NEXT, "qwen3-next-80b-a3b")],
)
def test_hybrids_are_read_from_their_configs(config: dict[str, Any], name: str) -> None:
    found = transformer_from_fields(config_words(config).words)
    assert found.parameters == preset(name).parameters
    assert found.pattern == preset(name).pattern


def test_places_of_attention_may_be_given_by_number() -> None:
    config = {
        "model_type": "bamba", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
        "intermediate_size": 1024, "attn_layer_indices": [2], "mamba_n_heads": 16, "mamba_d_head": 64,
        "mamba_d_state": 64, "mamba_n_groups": 1,
    }  # fmt: skip
    assert config_words(config).words["pattern"] == "mmam"
    with pytest.raises(PresageError, match="neither layer_types nor attn_layer_indices"):
        config_words({k: v for k, v in config.items() if k != "attn_layer_indices"})


def test_an_encoder_of_images_is_read_or_named_in_a_note() -> None:
    text = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    seen = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
    config = {"model_type": "llava", "text_config": text | {"model_type": "llama"}}
    words, notes = config_words(config | {"vision_config": seen | {"image_size": 336, "patch_size": 14}})
    assert words["vision"]["patches"] == 576 and any("vision tower frozen" in n for n in notes)
    words, notes = config_words(config | {"vision_config": {"model_type": "strange"}})
    assert "vision" not in words and any("vision_config is not read" in n for n in notes)


def sections(text: str) -> dict[str, Any]:
    return arguments_sections(shell(f"python pretrain.py {text}")[0])[0]


BASE = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 1000 --bf16"


def test_megatron_hybrids_and_recipes() -> None:
    found = sections(f"{BASE} --hybrid-override-pattern M-M*M-M- --mamba-num-heads 32 --mamba-state-dim 64")
    assert found["model"]["pattern"] == "M-M*M-M-"
    assert found["model"]["mamba"] == {"heads": 32, "head_dim": 64, "state": 64, "groups": 8}
    assert sections(f"{BASE} --fp8-format hybrid --fp8-recipe blockwise")["training"]["scaling"] == "block"
    muon = sections(f"{BASE} --optimizer dist_muon --muon-num-ns-steps 6")["training"]
    assert (muon["optimizer"], muon["muon_steps"]) == ("muon", 6)
    host = sections(f"{BASE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")["training"]
    assert host["host_optimizer"] == 0.5
    lora = sections(f"{BASE} --peft-scheme lora --adapter-dim 8 --target-modules attention_qkv")["training"]
    assert lora["tune"] == "lora" and lora["lora"] == {"targets": ["attention_qkv"], "rank": 8}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hybrid-attention-ratio 0.1", "give the layers by --hybrid-override-pattern"),
        ("--optimizer muon --muon-tp-mode duplicated", "only blockwise is modelled"),
        ("--cp-comm-type a2a", "use p2p or all_gather"),
        ("--experimental-attention-variant dsa", "sparse attention is not modelled"),
    ],
)
def test_what_megatron_can_and_this_cannot_is_refused(flags: str, says: str) -> None:
    with pytest.raises(PresageError, match=says):
        sections(f"{BASE} {flags}")


def test_titans_recipes() -> None:
    table = {"model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]}, "training": {"seq_len": 8192}}
    assert titan_sections(table)[0]["training"]["scaling"] == "tensorwise"
    rows = table | {"float8": {"recipe_name": "rowwise"}, "parallelism": {"context_parallel_load_balance": False}}
    found = titan_sections(rows)[0]
    assert found["training"]["scaling"] == "rowwise" and found["parallel"]["cp_balance"] == "none"
    with pytest.raises(PresageError, match="use the job's host_optimizer"):
        titan_sections(table | {"training": {"enable_cpu_offload": True}})
