"""Small models of Hugging Face, to be captured."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="these models come from transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def language_model(name: str, **config: object):
    def build(device: str):
        model = getattr(transformers, f"{name}Config")(vocab_size=500, **config)
        head = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
        with torch.device(device):
            m = getattr(transformers, head)(model)
        tokens = torch.randint(0, 500, (2, 32), device=device)
        optimizer = torch.optim.AdamW(m.parameters())

        def step() -> None:
            optimizer.zero_grad()
            m(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return step

    return build


def vit(device: str):
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=10, **SMALL)
    with torch.device(device):
        m = transformers.ViTForImageClassification(config)
    images, labels = torch.randn(2, 3, 32, 32, device=device), torch.randint(0, 10, (2,), device=device)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        m(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()

    return step


MODELS = {
    "bert": language_model("Bert", **SMALL),
    "gpt2": language_model("GPT2", n_embd=64, n_layer=2, n_head=4),
    "llama": language_model("Llama", num_key_value_heads=2, **SMALL),
    "vit": vit,
}
