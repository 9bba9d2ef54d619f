"""Hugging Face configs become the models that transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from presage.configs.hugging_face import config_words, read_config
from presage.configs.models import transformer_from_fields
from presage.configs.transformer import Transformer
from presage.errors import PresageError

# Configs as transformers 5.17 writes them, with the parameters it counts on the meta device (DBRX: as published).
CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text())


def model(name: str, **changes: Any) -> Transformer:
    return transformer_from_fields(config_words(CONFIGS[name]["config"] | changes).words)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_transformers_counts(name: str) -> None:
    # BERT's prediction head has a layer of its own, which is left out
    assert model(name).parameters == pytest.approx(CONFIGS[name]["parameters"], rel=0.004 if name == "bert" else 1e-4)


def test_attention_is_of_the_right_kind() -> None:
    assert model("falcon_7b").kv_heads == 1 and model("gpt_bigcode").kv_heads == 1
    assert model("llama").kv_heads == 8 and model("gpt2").kv_heads == 25
    deep = model("deepseek_v3").latent
    assert deep and (deep.query_rank, deep.key_rank, deep.rope, deep.nope, deep.value) == (1536, 512, 64, 128, 128)
    assert model("deepseek_v3").predicted == 1
    assert not model("bert").causal and model("llama").causal


def test_windows_are_in_the_layers_that_have_them() -> None:
    assert (model("mistral").window, model("mistral").window_every) == (4096, 1)
    assert (model("gemma2").window, model("gemma2").window_every) == (4096, 2)
    assert (model("gpt_oss").window, model("gpt_oss").window_every) == (128, 2)
    assert model("qwen2").window == 0 and model("llama").window == 0
    words, notes = config_words(CONFIGS["gemma3_text"]["config"])
    assert words["window"] == 1024 and words["pattern"] == ("wwwwwa" * 11)[:62] and notes == ()


def test_experts_are_in_the_layers_that_have_them() -> None:
    maverick, deep = model("llama4_text"), model("deepseek_v3")
    assert maverick.expert_layers == 24 and deep.expert_layers == 58
    assert deep.experts and deep.experts.shared_ffn == 2048
    assert model("qwen3_moe", mlp_only_layers=[0, 1]).expert_layers == 46


def test_the_text_part_of_a_model_that_sees_is_taken() -> None:
    whole = {
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 1152},
        "text_config": CONFIGS["gemma3_text"]["config"],
    }
    assert transformer_from_fields(config_words(whole).words).parameters == model("gemma3_text").parameters
    other = {"model_type": "seeing", "text_config": CONFIGS["mistral"]["config"]}
    assert config_words(other).notes == ()


def test_an_unknown_family_is_refused_by_its_name() -> None:
    with pytest.raises(PresageError, match="model_type 'newcomer' is not known: give its sizes"):
        config_words(CONFIGS["llama"]["config"] | {"model_type": "newcomer"})
    with pytest.raises(PresageError, match="model_type 'qwen3_nxt' is not known: did you mean qwen3_next"):
        config_words(CONFIGS["llama"]["config"] | {"model_type": "qwen3_nxt"})


def test_a_config_without_a_family_is_read_as_llama_with_a_note() -> None:
    words, notes = config_words({k: v for k, v in CONFIGS["llama"]["config"].items() if k != "model_type"})
    assert transformer_from_fields(words).parameters == CONFIGS["llama"]["parameters"]
    assert notes == ("it has no model_type: read as one like Llama",)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder with a decoder"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "Mamba-1 scans are not modelled: use a Mamba-2 model"),
        ({"model_type": "llama", "layer_types": ["mamba"]}, "layers other than attention"),
        ({"model_type": "llama", "hidden_size": 8}, "has no num_hidden_layers"),
    ],
)
def test_what_cannot_be_described_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(PresageError, match=says):
        config_words(config)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": "llama", "hidden_size": "big"}', '{"text_config": {}}']
)
def test_files_that_are_none_are_told_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PresageError, match=r"config\.json"):
        transformer_from_fields(read_config(tmp_path).words, tmp_path / "config.json")
