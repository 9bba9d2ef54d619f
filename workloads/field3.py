"""A third list of training steps, none of them in workloads/field.py or field2.py: public libraries' models and common
nets written by hand as tutorials have them.

It was written before any of them was measured (`python tools/record.py workloads/field3.py OUT`), and no sweep, law or
setting was chosen with their residuals in view. Names and precisions as in field.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from field import (  # noqa: E402
    ADAM, ADAMW, BERT, FUSED, LLM, RMSPROP, classes, geometric, hf, imported, masked, named, pixels, scenes,
    segmentation, stepper, text, vision, waves,
)  # fmt: skip


def unet3d(device, precision, batch=2, side=96, width=24):
    """Segmentation of volumes: 3-D convolutions, instance norms, transposed convolutions."""

    def block(inside, out):
        layers = [nn.Conv3d(inside, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01)]
        return nn.Sequential(*layers, nn.Conv3d(out, out, 3, padding=1), nn.InstanceNorm3d(out, affine=True), nn.LeakyReLU(0.01))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [width, 2 * width, 4 * width, 8 * width]
            self.down = nn.ModuleList(block(a, b) for a, b in zip([1, *sizes], sizes, strict=False))
            self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:], strict=False))
            self.merge = nn.ModuleList(block(2 * a, a) for a in sizes[:-1])
            self.head = nn.Conv3d(width, 4, 1)

        def forward(self, x):
            kept = []
            for i, layer in enumerate(self.down):
                x = layer(F.max_pool3d(x, 2) if i else x)
                kept.append(x)
            for i in reversed(range(len(self.up))):
                x = self.merge[i](torch.cat([self.up[i](x), kept[i]], 1))
            return self.head(x)

    with torch.device(device):
        model = Net()
    x, y = torch.randn(batch, 1, side, side, side, device=device), torch.randint(0, 4, (batch, side, side, side), device=device)
    return stepper(model.train(), lambda m: F.cross_entropy(m(x), y), precision, ADAM)


def dcgan(device, precision, batch=128, width=64):
    """A generator and the discriminator that judges it: transposed and strided convolutions, batch norms."""
    up = [(100, 8, 4, 1, 0), (8 * width, 4, 4, 2, 1), (4 * width, 2, 4, 2, 1), (2 * width, 1, 4, 2, 1)]
    with torch.device(device):
        generator = nn.Sequential(
            *[part for i, o, k, s, p in up for part in (nn.ConvTranspose2d(i, o * width, k, s, p, bias=False), nn.BatchNorm2d(o * width), nn.ReLU(True))],
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        down = [(width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)]
        judge = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
            *[part for i, o in down for part in (nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True))],
            nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(),
        )  # fmt: skip
    noise = torch.randn(batch, 100, 1, 1, device=device)
    model = nn.Sequential(generator, judge).train()
    return stepper(model, lambda m: F.softplus(-m(noise)).mean(), precision, ADAM)


def edsr(device, precision, batch=8, side=96, width=64, blocks=16):
    """Super-resolution: 3x3 convolutions without norms, pixel shuffle."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1))

        def forward(self, x):
            return x + 0.1 * self.body(x)

    with torch.device(device):
        model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), *[Residual() for _ in range(blocks)],
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip
    x, y = torch.randn(batch, 3, side, side, device=device), torch.randn(batch, 3, 2 * side, 2 * side, device=device)
    return stepper(model.train(), lambda m: F.l1_loss(m(x), y), precision, ADAM)


def tcn(device, precision, batch=32, length=1024, width=128):
    """Time series: dilated causal 1-D convolutions."""

    class Block(nn.Module):
        def __init__(self, inside, dilation):
            super().__init__()
            self.left = 2 * dilation
            self.a = nn.Conv1d(inside, width, 3, dilation=dilation)
            self.b = nn.Conv1d(width, width, 3, dilation=dilation)
            self.skip = nn.Conv1d(inside, width, 1) if inside != width else nn.Identity()

        def forward(self, x):
            y = F.dropout(F.relu(self.a(F.pad(x, (self.left, 0)))), 0.1)
            y = F.dropout(F.relu(self.b(F.pad(y, (self.left, 0)))), 0.1)
            return F.relu(y + self.skip(x))

    with torch.device(device):
        model = nn.Sequential(*[Block(32 if i == 0 else width, 2**i) for i in range(8)], nn.Conv1d(width, 16, 1))
    x, y = torch.randn(batch, 32, length, device=device), torch.randn(batch, 16, length, device=device)
    return stepper(model.train(), lambda m: F.mse_loss(m(x), y), precision, ADAM)


def pointnet(device, precision, batch=32, points=2048):
    """Clouds of points: 1x1 1-D convolutions, batch norms, a maximum over the points."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [3, 64, 64, 64, 128, 1024]
            self.points = nn.Sequential(*[p for a, b in zip(sizes, sizes[1:], strict=False) for p in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())])
            self.head = nn.Sequential(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 256), nn.Dropout(0.3), nn.ReLU(), nn.Linear(256, 40))

        def forward(self, x):
            return self.head(self.points(x).max(2)[0])

    with torch.device(device):
        model = Net()
    x, y = torch.randn(batch, 3, points, device=device), classes(device, batch, 40)
    return stepper(model.train(), lambda m: F.cross_entropy(m(x), y), precision, ADAM)


def mixer(device, precision, batch=64, side=224, patch=16, width=512, depth=8):
    """MLP-Mixer: GEMMs across patches and across channels."""
    patches = (side // patch) ** 2

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
            self.across = nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches))
            self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = x + self.across(self.one(x).transpose(1, 2)).transpose(1, 2)
            return x + self.along(self.two(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, width, patch, patch)
            self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

        def forward(self, x):
            x = self.blocks(self.stem(x).flatten(2).transpose(1, 2))
            return self.head(self.norm(x).mean(1))

    with torch.device(device):
        model = Net()
    x, y = torch.randn(batch, 3, side, side, device=device), classes(device, batch, 1000)
    return stepper(model.train(), lambda m: F.cross_entropy(m(x), y), precision, ADAMW)


def seq2seq(device, precision, batch=64, length=48, vocabulary=16000, width=512):
    """Translation with GRUs and attention over the encoder's states."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(vocabulary, width)
            self.encoder = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
            self.decoder = nn.GRU(width, 2 * width, 1, batch_first=True)
            self.head = nn.Linear(4 * width, vocabulary)

        def forward(self, source, target):
            states, _ = self.encoder(self.table(source))
            out, _ = self.decoder(self.table(target))
            seen = (out @ states.transpose(1, 2)).softmax(-1) @ states
            return self.head(torch.cat([out, seen], -1))

    with torch.device(device):
        model = Net()
    x, y = (torch.randint(0, vocabulary, (batch, length), device=device) for _ in range(2))
    return stepper(model.train(), lambda m: F.cross_entropy(m(x, y).flatten(0, 1), y.flatten()), precision, ADAM)


def deepfm(device, precision, batch=8192, fields=26, vocabulary=100_000, width=16):
    """Click-through rate: embeddings of sparse fields, a factorisation machine and an MLP."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first = nn.Embedding(fields * vocabulary, width), nn.Embedding(fields * vocabulary, 1)
            self.mlp = nn.Sequential(nn.Linear(fields * width, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1))

        def forward(self, x):
            e = self.table(x)
            pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
            return (self.first(x).sum(1) + pairs + self.mlp(e.flatten(1))).squeeze(1)

    with torch.device(device):
        model = Net()
    x = torch.randint(0, vocabulary, (batch, fields), device=device) + torch.arange(fields, device=device) * vocabulary
    y = torch.rand(batch, device=device)
    return stepper(model.train(), lambda m: F.binary_cross_entropy_with_logits(m(x), y), precision, ADAM)


SPEECH = {"num_hidden_layers": 4, "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 8}

CASES = {
    # convolutions
    "resnet34_b96_amp_cl": (vision, dict(name="resnet34", batch=96, last=True)),
    "resnet101_b24_fp32": (vision, dict(name="resnet101", batch=24)),
    "densenet161_b16_fp32": (vision, dict(name="densenet161", batch=16)),
    "efficientnet_b1_b48_fp32": (vision, dict(name="efficientnet_b1", batch=48, size=240, optimizer=RMSPROP)),
    "efficientnet_b2_b32_amp": (vision, dict(name="efficientnet_b2", batch=32, size=260)),
    "efficientnet_v2_m_b12_fp32": (vision, dict(name="efficientnet_v2_m", batch=12)),
    "regnet_y_400mf_b96_amp_cl": (vision, dict(name="regnet_y_400mf", batch=96, last=True)),
    "regnet_x_1_6gf_b64_fp32": (vision, dict(name="regnet_x_1_6gf", batch=64)),
    "regnet_y_3_2gf_b32_fp16": (vision, dict(name="regnet_y_3_2gf", batch=32)),
    "shufflenet_v2_x1_5_b96_fp32": (vision, dict(name="shufflenet_v2_x1_5", batch=96)),
    "mnasnet0_5_b128_amp_cl": (vision, dict(name="mnasnet0_5", batch=128, last=True)),
    "vgg11_b64_fp32": (vision, dict(name="vgg11", batch=64)),
    "vgg19_bn_b24_amp_cl": (vision, dict(name="vgg19_bn", batch=24, last=True)),
    "squeezenet1_1_b128_amp": (vision, dict(name="squeezenet1_1", batch=128)),
    "convnext_base_b16_amp_cl": (vision, dict(name="convnext_base", batch=16, last=True, optimizer=ADAMW)),
    "vit_l_16_b8_amp": (vision, dict(name="vit_l_16", batch=8, optimizer=ADAMW)),
    "swin_s_b16_amp": (vision, dict(name="swin_s", batch=16, optimizer=ADAMW)),
    "deeplabv3_mobilenet_b8_fp32": (segmentation, dict(name="deeplabv3_mobilenet_v3_large", batch=8)),
    "fcn_resnet50_b6_fp32": (segmentation, dict(name="fcn_resnet50", batch=6)),
    "r3d_18_b6_fp32": (vision, dict(name="r3d_18", batch=6, size=112, frames=16, count=400)),
    # text
    "distilbert_b32_s256_amp": (hf, dict(config="DistilBertConfig", model="DistilBertForSequenceClassification", batch_of=masked(32, 256, 30522, 2))),
    "camembert_b16_s256_fp32": (hf, dict(config="CamembertConfig", model="CamembertForSequenceClassification", batch_of=masked(16, 256, 30522, 2), **BERT)),
    "opt_b4_s1024_amp": (hf, dict(config="OPTConfig", model="OPTForCausalLM", batch_of=text(4, 1024, 32000), vocab_size=32000, num_hidden_layers=8, use_cache=False)),
    "gpt_neox_b4_s1024_bf16": (hf, dict(config="GPTNeoXConfig", model="GPTNeoXForCausalLM", batch_of=text(4, 1024, 32000), optimizer=FUSED, intermediate_size=4096, **LLM)),
    "llama_b2_s2048_amp": (hf, dict(config="LlamaConfig", model="LlamaForCausalLM", batch_of=text(2, 2048, 32000), num_key_value_heads=8, intermediate_size=2816, **LLM)),
    "falcon_b4_s1024_amp": (hf, dict(config="FalconConfig", model="FalconForCausalLM", batch_of=text(4, 1024, 32000), **LLM)),
    "t5_b16_s256_fp32": (hf, dict(config="T5Config", model="T5ForConditionalGeneration", batch_of=text(16, 256, 32000), use_cache=False)),
    "marian_b16_s128_amp": (hf, dict(config="MarianConfig", model="MarianMTModel", batch_of=text(16, 128, 32000), vocab_size=32000, pad_token_id=0, decoder_start_token_id=0, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, use_cache=False)),
    # images in transformers
    "resnet_hf_b64_amp": (hf, dict(config="ResNetConfig", model="ResNetForImageClassification", batch_of=pixels(64, labels=2), num_labels=2)),
    "deit_b32_amp": (hf, dict(config="DeiTConfig", model="DeiTForImageClassification", batch_of=pixels(32, labels=2), num_labels=2)),
    "mobilevitv2_b32_amp": (hf, dict(config="MobileViTV2Config", model="MobileViTV2ForImageClassification", batch_of=pixels(32, 256, 2), num_labels=2)),
    "segformer_b4_512_fp32": (hf, dict(config="SegformerConfig", model="SegformerForSemanticSegmentation", batch_of=scenes(4, 512, 21), num_labels=21)),
    # sound
    "unispeech_b4_amp": (hf, dict(config="UniSpeechSatConfig", model="UniSpeechSatForSequenceClassification", batch_of=waves(4, 64000), **SPEECH)),
    "wav2vec2_b8_fp32": (hf, dict(config="Wav2Vec2Config", model="Wav2Vec2ForSequenceClassification", batch_of=waves(8, 48000), **SPEECH)),
    # graphs
    "sage_max_fp32": (geometric, dict(name="GraphSAGE", nodes=60_000, edges=600_000, hidden=128, aggr="max")),
    "gin_large_fp32": (geometric, dict(name="GIN", nodes=80_000, edges=480_000, hidden=128)),
    # written by hand
    "unet3d_b2_amp": (unet3d, {}),
    "unet3d_b1_fp32": (unet3d, dict(batch=1)),
    "dcgan_b128_fp32": (dcgan, {}),
    "edsr_b8_amp": (edsr, {}),
    "tcn_b32_fp32": (tcn, {}),
    "pointnet_b32_amp": (pointnet, {}),
    "mixer_b64_amp": (mixer, {}),
    "seq2seq_b64_fp32": (seq2seq, {}),
    "deepfm_b8192_fp32": (deepfm, {}),
}  # fmt: skip

CASES = named(CASES)


def prepare(name):
    """Import what a case needs, before it has the GPU."""
    imported(*CASES[name])


def build(device, name):
    """The step of a case."""
    function, options = CASES[name]
    return function(device, **options)
