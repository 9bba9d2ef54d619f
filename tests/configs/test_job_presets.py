"""Known models have the parameters that were published for them."""

from __future__ import annotations

import pytest

from presage.configs.models import find_preset, preset, preset_facts, preset_key, presets, read_model
from presage.errors import PresageError

# Published figures that count something else, or that the published shapes do not add up to.
OTHERS = {
    "llama4-scout": 0.012,  # with its vision part
    "kimi-k2": 0.014,  # 1.04 T, and its config's shapes are 1.026 T
    "grok1-314b": 0.006,  # 314 B, and its shapes are 315.7 B
}


def rounding(figure: float) -> float:
    """Half of the last digit that is written: 1.7 may be 1.65."""
    digits = len(text.split(".")[1]) if "." in (text := f"{figure:g}") else 0
    return 0.5 * 10.0**-digits / figure


@pytest.mark.parametrize("name", presets())
def test_parameters_are_the_published_ones(name: str) -> None:
    published = preset_facts()[name]["parameters_B"]
    allowed = max(OTHERS.get(name, 0.005), rounding(published))
    assert preset(name).parameters / 1e9 == pytest.approx(published, rel=allowed)


@pytest.mark.parametrize("name", [n for n in presets() if "active_B" in preset_facts()[n]])
def test_active_parameters_are_near_the_published_ones(name: str) -> None:
    # publishers differ in whether embeddings count
    assert preset(name).active_parameters / 1e9 == pytest.approx(preset_facts()[name]["active_B"], rel=0.12)


def test_each_has_a_source_and_names_of_its_own() -> None:
    assert all(p["source"] for p in preset_facts().values())
    for key, about in preset_facts().items():
        assert {preset_key(n) for n in (key, *about.get("aliases", ()))} == {key}  # no name is of two


def test_a_model_is_found_by_any_of_its_names() -> None:
    for name in ("llama3 8B", "Meta-Llama-3-8B", "LLAMA3_8B", "meta-llama/Llama-3.1-8B"):
        assert preset_key(name) == "llama3-8b"
    assert find_preset("llama9-8b") is None
    with pytest.raises(PresageError, match="did you mean llama3-8b"):
        preset("llama3-8bb")


def test_fields_go_over_a_preset() -> None:
    fewer = {"preset": "deepseek-v3", "layers": 4, "experts": {"dense_layers": 1, "imbalance": 1.2}}
    proxy = read_model(fewer, "model")[0]
    assert (proxy.layers, proxy.hidden, proxy.latent) == (4, 7168, preset("deepseek-v3").latent)
    assert proxy.experts and (proxy.experts.experts, proxy.experts.dense_layers) == (256, 1)
    assert proxy.experts.imbalance == 1.2


def test_what_is_left_out_follows_from_the_rest() -> None:
    gpt = read_model({"hidden": 1024, "layers": 2, "heads": 16, "vocab": 100, "activation": "gelu"}, "model")[0]
    assert (gpt.ffn, gpt.kv_heads, gpt.head_dim) == (4096, 16, 64)
    llama = read_model({"hidden": 4096, "layers": 2, "heads": 32, "vocab": 100}, "model")[0]
    assert llama.ffn == 10880  # Megatron's rule for gated blocks
