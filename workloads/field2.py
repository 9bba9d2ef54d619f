"""A second list of training steps of public libraries' models, none of them in workloads/field.py.

It was written before any of them was measured (`python tools/record.py workloads/field2.py OUT`), and no sweep, law or
setting was chosen with their residuals in view. Names and precisions as in field.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from field import (  # noqa: E402
    ADAM, ADAMW, BERT, FUSED, LLM, RMSPROP, geometric, hf, ids, imported, masked, named, pixels, scenes,
    segmentation, stepper, text, vision, waves,
)  # fmt: skip


def vision_pair(device, precision, name, batch, size=224):
    """Two views through one encoder and a contrastive loss."""
    import torchvision.models as tv

    with torch.device(device):
        model = getattr(tv, name)(weights=None, num_classes=128)
    views = [torch.randn(batch, 3, size, size, device=device) for _ in range(2)]
    labels = torch.arange(batch, device=device)

    def loss(m):
        a, b = (F.normalize(m(v), dim=1) for v in views)
        return F.cross_entropy(a @ b.t() / 0.1, labels)

    return stepper(model.train(), loss, precision, ADAM)


def demucs(device, precision, batch=2, samples=88200):
    """Music separation: spectra, 1-D and 2-D convolutions, transposed ones, an LSTM."""
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.hdemucs_low(["drums", "bass", "other", "vocals"])
    x, y = torch.randn(batch, 2, samples, device=device), torch.randn(batch, 4, 2, samples, device=device)
    return stepper(model.train(), lambda m: (m(x) - y).abs().mean(), precision, ADAM)


def wavernn(device, precision, batch=8, frames=20):
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.WaveRNN([5, 5, 8], 256, 200)
    x = torch.randn(batch, 1, (frames - 4) * 200, device=device)
    mel = torch.randn(batch, 1, 128, frames, device=device)
    labels = ids(device, batch, (frames - 4) * 200, 256)
    return stepper(
        model.train(),
        lambda m: F.cross_entropy(m(x, mel)[:, 0].flatten(0, 1).float(), labels.flatten()),
        precision,
        ADAM,
    )


SPEECH = {"num_hidden_layers": 4, "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 8}

CASES = {
    # convolutions
    "resnet18_b128_fp32": (vision, dict(name="resnet18", batch=128)),
    "resnet152_b16_amp_cl": (vision, dict(name="resnet152", batch=16, last=True)),
    "resnext101_64x4d_b16_amp": (vision, dict(name="resnext101_64x4d", batch=16)),
    "regnet_y_1_6gf_b48_fp32": (vision, dict(name="regnet_y_1_6gf", batch=48)),
    "regnet_x_8gf_b24_amp": (vision, dict(name="regnet_x_8gf", batch=24)),
    "wide_resnet101_b12_fp32": (vision, dict(name="wide_resnet101_2", batch=12)),
    "densenet201_b24_amp": (vision, dict(name="densenet201", batch=24)),
    "efficientnet_b4_b12_amp_cl": (vision, dict(name="efficientnet_b4", batch=12, size=380, optimizer=RMSPROP)),
    "mobilenet_v3_small_b192_fp32": (vision, dict(name="mobilenet_v3_small", batch=192)),
    "shufflenet_v2_x2_b96_amp": (vision, dict(name="shufflenet_v2_x2_0", batch=96)),
    "convnext_small_b20_fp32": (vision, dict(name="convnext_small", batch=20, optimizer=ADAMW)),
    "alexnet_b256_amp": (vision, dict(name="alexnet", batch=256)),
    "swin_t_b32_fp32": (vision, dict(name="swin_t", batch=32, optimizer=ADAMW)),
    "simclr_resnet34_b48_amp": (vision_pair, dict(name="resnet34", batch=48)),
    # segmentation and video
    "deeplabv3_resnet101_b6_amp": (segmentation, dict(name="deeplabv3_resnet101", batch=6)),
    "fcn_resnet101_b4_fp32": (segmentation, dict(name="fcn_resnet101", batch=4)),
    "r2plus1d_18_b8_amp": (vision, dict(name="r2plus1d_18", batch=8, size=112, frames=16, count=400)),
    "mvit_v1_b_b4_amp": (vision, dict(name="mvit_v1_b", batch=4, frames=16, count=400, optimizer=ADAMW)),
    # text
    "mpnet_b16_s256_amp": (hf, dict(config="MPNetConfig", model="MPNetForSequenceClassification", batch_of=masked(16, 256, 30527, 2), **BERT)),
    "fnet_b16_s512_amp": (hf, dict(config="FNetConfig", model="FNetForSequenceClassification", batch_of=text(16, 512, 32000, 2), **BERT)),
    "bloom_b4_s512_amp": (hf, dict(config="BloomConfig", model="BloomForCausalLM", batch_of=text(4, 512, 32000), vocab_size=32000, hidden_size=1024, n_layer=6, n_head=16, use_cache=False)),
    "qwen2_moe_b4_s512_bf16": (hf, dict(config="Qwen2MoeConfig", model="Qwen2MoeForCausalLM", batch_of=text(4, 512, 32000), optimizer=FUSED, num_key_value_heads=16, intermediate_size=2816, moe_intermediate_size=704, shared_expert_intermediate_size=2816, num_experts=16, num_experts_per_tok=2, **LLM)),
    "qwen3_b2_s2048_amp": (hf, dict(config="Qwen3Config", model="Qwen3ForCausalLM", batch_of=text(2, 2048, 32000), num_key_value_heads=4, head_dim=64, intermediate_size=3072, **LLM)),
    "pegasus_b8_s256_fp32": (hf, dict(config="PegasusConfig", model="PegasusForConditionalGeneration", batch_of=text(8, 256, 32000), vocab_size=32000, d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False)),
    # images in transformers
    "levit_b128_amp": (hf, dict(config="LevitConfig", model="LevitForImageClassification", batch_of=pixels(128, labels=2), num_labels=2)),
    "cvt_b32_amp": (hf, dict(config="CvtConfig", model="CvtForImageClassification", batch_of=pixels(32, labels=2), num_labels=2)),
    "focalnet_b24_fp32": (hf, dict(config="FocalNetConfig", model="FocalNetForImageClassification", batch_of=pixels(24, labels=2), num_labels=2)),
    "pvt_v2_b24_amp": (hf, dict(config="PvtV2Config", model="PvtV2ForImageClassification", batch_of=pixels(24, labels=2), num_labels=2)),
    "mobilenet_deeplab_hf_b8_fp32": (hf, dict(config="MobileNetV2Config", model="MobileNetV2ForSemanticSegmentation", batch_of=scenes(8, 512, 21), num_labels=21)),
    # sound
    "wavlm_b4_amp": (hf, dict(config="WavLMConfig", model="WavLMForSequenceClassification", batch_of=waves(4, 64000), **SPEECH)),
    "data2vec_audio_b4_fp32": (hf, dict(config="Data2VecAudioConfig", model="Data2VecAudioForSequenceClassification", batch_of=waves(4, 64000), **SPEECH)),
    "sew_b8_amp": (hf, dict(config="SEWConfig", model="SEWForSequenceClassification", batch_of=waves(8, 80000), **SPEECH)),
    "demucs_b2_fp32": (demucs, {}),
    "wavernn_b8_fp32": (wavernn, {}),
    # graphs
    "edgecnn_fp32": (geometric, dict(name="EdgeCNN", nodes=20_000, edges=200_000, hidden=128)),
    "gatv2_fp32": (geometric, dict(name="GAT", nodes=40_000, edges=320_000, heads=2, v2=True)),
}  # fmt: skip

CASES = named(CASES)


def prepare(name):
    """Import what a case needs, before it has the GPU."""
    imported(*CASES[name], "torchaudio" if CASES[name][0] in (demucs, wavernn) else "torchvision")


def build(device, name):
    """The step of a case."""
    function, options = CASES[name]
    return function(device, **options)
