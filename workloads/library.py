"""Training steps of models from transformers, to be recorded as execution traces on a GPU (tools/record_traces.py)."""

from __future__ import annotations

import torch
import transformers as hf


def _step(model, batch, dtype):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "amp"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()

    return step


def _ids(device, batch, length, vocabulary):
    return torch.randint(0, vocabulary, (batch, length), device=device)


def qwen(device, batch=4, length=1024, dtype="amp"):
    config = hf.Qwen2Config(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = hf.Qwen2ForCausalLM(config)
    ids = _ids(device, batch, length, 32000)
    return _step(model, {"input_ids": ids, "labels": ids}, dtype)


def t5(device, batch=16, length=256, dtype="fp32"):
    config = hf.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128, decoder_start_token_id=0)
    with torch.device(device):
        model = hf.T5ForConditionalGeneration(config)
    ids = _ids(device, batch, length, 32128)
    return _step(model, {"input_ids": ids, "labels": ids}, dtype)


def images(device, model, batch, size, dtype, labels=1000):
    pixels = torch.randn(batch, 3, size, size, device=device)
    return _step(model, {"pixel_values": pixels, "labels": torch.randint(0, labels, (batch,), device=device)}, dtype)


def swin(device, batch=32, dtype="amp"):
    with torch.device(device):
        model = hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000))
    return images(device, model, batch, 224, dtype)


def resnet(device, batch=64, dtype="amp"):
    with torch.device(device):
        model = hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))
    return images(device, model, batch, 224, dtype)


def wav2vec(device, batch=8, samples=64000, dtype="amp"):
    config = hf.Wav2Vec2Config(num_hidden_layers=6, apply_spec_augment=False, layerdrop=0.0, num_labels=8)
    with torch.device(device):
        model = hf.Wav2Vec2ForSequenceClassification(config)
    waves = torch.randn(batch, samples, device=device)
    return _step(model, {"input_values": waves, "labels": torch.randint(0, 8, (batch,), device=device)}, dtype)


def whisper(device, batch=8, dtype="amp"):
    config = hf.WhisperConfig(
        d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = hf.WhisperForConditionalGeneration(config)
    heard = torch.randn(batch, 80, 3000, device=device)
    return _step(model, {"input_features": heard, "labels": _ids(device, batch, 128, 51865)}, dtype)


def videomae(device, batch=4, dtype="amp"):
    config = hf.VideoMAEConfig(hidden_size=384, intermediate_size=1536, num_attention_heads=6, num_labels=400)
    with torch.device(device):
        model = hf.VideoMAEForVideoClassification(config)
    frames = torch.randn(batch, 16, 3, 224, 224, device=device)
    labels = torch.randint(0, 400, (batch,), device=device)
    return _step(model, {"pixel_values": frames, "labels": labels}, dtype)


def deberta(device, batch=16, length=256, dtype="amp"):
    config = hf.DebertaV2Config(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12, num_labels=2
    )
    with torch.device(device):
        model = hf.DebertaV2ForSequenceClassification(config)
    ids = _ids(device, batch, length, 128100)
    return _step(model, {"input_ids": ids, "labels": torch.randint(0, 2, (batch,), device=device)}, dtype)


CASES = {
    "qwen_b4_s1024_amp": (qwen, {}),
    "t5_b16_s256_fp32": (t5, {}),
    "swin_b32_amp": (swin, {}),
    "resnet_b64_amp": (resnet, {}),
    "wav2vec_b8_amp": (wav2vec, {}),
    "whisper_b8_amp": (whisper, {}),
    "videomae_b4_amp": (videomae, {}),
    "deberta_b16_amp": (deberta, {}),
}
