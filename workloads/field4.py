"""A fourth list of training steps, none of them in workloads/field.py, field2.py or field3.py: public libraries' models,
and nets written by hand as tutorials and papers have them. Half of them are convolutional.

It was written before any of them was measured (`python tools/record.py workloads/field4.py OUT`), after presage began to
ask cuDNN for its engines, and no sweep, law or setting was chosen with their residuals in view. Names and precisions as
in field.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from field import (  # noqa: E402
    ADAM, ADAMW, BERT, FUSED, LLM, classes, hf, imported, masked, named, pixels, scenes, segmentation, stepper,
    text, vision, waves,
)  # fmt: skip


def plain(module, loss_of, precision, device, optimizer=ADAM):
    """A step of a module made on the device."""
    with torch.device(device):
        model = module()
    return stepper(model.train(), loss_of, precision, optimizer)


def double(conv, norm, inside, out, k=3, **more):
    """Two convolutions, each with a norm and an activation."""
    layers = []
    for a, b in ((inside, out), (out, out)):
        layers += [conv(a, b, k, padding=k // 2, bias=False, **more), norm(b), nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Contracting and expanding path with transposed convolutions; its skips are concatenated."""

    def __init__(self, inside, classes, width=64, depth=4):
        super().__init__()
        sizes = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(double(nn.Conv2d, nn.BatchNorm2d, a, b) for a, b in zip([inside, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:], strict=False))
        self.merge = nn.ModuleList(double(nn.Conv2d, nn.BatchNorm2d, 2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.merge[i](torch.cat([self.up[i](x), kept[i]], 1))
        return self.head(x)


def unet(device, precision, batch=8, side=256):
    x, y = torch.randn(batch, 3, side, side, device=device), torch.randint(0, 5, (batch, side, side), device=device)
    return plain(lambda: UNet(3, 5), lambda m: F.cross_entropy(m(x), y), precision, device)


class ResNet3d(nn.Module):
    """Residual blocks of 3-D convolutions on scans of one channel."""

    def __init__(self, width=32, classes=2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, width, 7, 2, 3, bias=False), nn.BatchNorm3d(width), nn.ReLU(True), nn.MaxPool3d(3, 2, 1))
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.first = nn.ModuleList(double(nn.Conv3d, nn.BatchNorm3d, a, b) for a, b in zip([width, *sizes], sizes, strict=False))
        self.skip = nn.ModuleList(nn.Conv3d(a, b, 1, bias=False) for a, b in zip([width, *sizes], sizes, strict=False))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        x = self.stem(x)
        for i, (body, skip) in enumerate(zip(self.first, self.skip, strict=True)):
            x = F.avg_pool3d(x, 2) if i else x
            x = F.relu(body(x) + skip(x))
        return self.head(x.mean((2, 3, 4)))


def resnet3d(device, precision, batch=4, side=112):
    x, y = torch.randn(batch, 1, side, side, side, device=device), classes(device, batch, 2)
    return plain(ResNet3d, lambda m: F.cross_entropy(m(x), y), precision, device)


class WaveNet(nn.Module):
    """Gated dilated causal convolutions over samples of sound."""

    def __init__(self, width=96, layers=20, levels=256):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2 ** (i % 10)) for i in range(layers))
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, levels, 1))

    def forward(self, x):
        x, total = self.stem(x), 0.0
        for i, (conv, out) in enumerate(zip(self.dilated, self.out, strict=True)):
            a, b = conv(F.pad(x, (2 ** (i % 10), 0))).chunk(2, 1)
            kept, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + kept, total + skip
        return self.head(total)


def wavenet(device, precision, batch=8, length=8000):
    x, y = torch.randn(batch, 1, length, device=device), torch.randint(0, 256, (batch, length), device=device)
    return plain(WaveNet, lambda m: F.cross_entropy(m(x), y), precision, device)


class TextCNN(nn.Module):
    """1-D convolutions of several widths over words, the maximum of each."""

    def __init__(self, words=30000, width=256, filters=128):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, filters, k) for k in (3, 4, 5, 7))
        self.head = nn.Linear(4 * filters, 20)

    def forward(self, x):
        e = self.table(x).transpose(1, 2)
        return self.head(torch.cat([F.relu(c(e)).amax(2) for c in self.convs], 1))


def text_cnn(device, precision, batch=256, length=200):
    x, y = torch.randint(0, 30000, (batch, length), device=device), classes(device, batch, 20)
    return plain(TextCNN, lambda m: F.cross_entropy(m(x), y), precision, device)


class PatchJudge(nn.Module):
    """A generator that keeps the size (residual blocks with instance norms) and a judge of patches."""

    def __init__(self, width=64, blocks=6):
        super().__init__()

        def layer(conv, a, b, k, s, p):
            return [conv(a, b, k, s, p), nn.InstanceNorm2d(b), nn.ReLU(True)]

        body = [nn.ReflectionPad2d(3), *layer(nn.Conv2d, 3, width, 7, 1, 0), *layer(nn.Conv2d, width, 2 * width, 3, 2, 1)]
        body += layer(nn.Conv2d, 2 * width, 4 * width, 3, 2, 1)
        for _ in range(blocks):
            body += layer(nn.Conv2d, 4 * width, 4 * width, 3, 1, 1)
        for a in (4 * width, 2 * width):
            body += [nn.ConvTranspose2d(a, a // 2, 3, 2, 1, 1), nn.InstanceNorm2d(a // 2), nn.ReLU(True)]
        self.make = nn.Sequential(*body, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())
        sizes = [3, width, 2 * width, 4 * width]
        judge = [p for a, b in zip(sizes, sizes[1:], strict=False) for p in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True))]
        self.judge = nn.Sequential(*judge, nn.Conv2d(4 * width, 1, 4, 1, 1))

    def forward(self, x):
        return self.judge(self.make(x))


def patch_gan(device, precision, batch=4, side=256):
    x = torch.randn(batch, 3, side, side, device=device)
    return plain(PatchJudge, lambda m: F.softplus(-m(x)).mean(), precision, device)


class VAE(nn.Module):
    """Strided convolutions down to a code, transposed ones back."""

    def __init__(self, width=48, code=128):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        pairs = list(zip(sizes, sizes[1:], strict=False))
        self.down = nn.Sequential(*[p for a, b in pairs for p in (nn.Conv2d(a, b, 4, 2, 1), nn.SiLU())])
        self.mean, self.spread, self.back = (nn.Linear(a, b) for a, b in ((128 * width, code), (128 * width, code), (code, 128 * width)))
        self.up = nn.Sequential(*[p for a, b in reversed(pairs) for p in (nn.ConvTranspose2d(b, a, 4, 2, 1), nn.SiLU())])

    def forward(self, x):
        h = self.down(x)
        mean, spread = self.mean(h.flatten(1)), self.spread(h.flatten(1))
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.up(self.back(z).view_as(h)), mean, spread


def vae(device, precision, batch=128, side=64):
    x = torch.randn(batch, 3, side, side, device=device)

    def loss(m):
        out, mean, spread = m(x)
        return F.mse_loss(out, x) + 1e-3 * (mean**2 + spread.exp() - spread).mean()

    return plain(VAE, loss, precision, device)


class Detector(nn.Module):
    """A backbone of partial stages, a pyramid and heads at three scales, as one-stage detectors have them."""

    def __init__(self, width=48, outputs=85):
        super().__init__()

        def conv(a, b, k=3, s=1):
            return nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU(True))

        sizes = [width, 2 * width, 4 * width, 8 * width, 16 * width]
        self.stem = conv(3, width, 6, 2)
        self.down = nn.ModuleList(conv(a, b, 3, 2) for a, b in zip(sizes, sizes[1:], strict=False))
        self.split = nn.ModuleList(conv(b, b // 2, 1) for b in sizes[1:])
        self.body = nn.ModuleList(nn.Sequential(*[nn.Sequential(conv(b // 2, b // 2, 1), conv(b // 2, b // 2)) for _ in range(2)]) for b in sizes[1:])
        self.join = nn.ModuleList(conv(b, b, 1) for b in sizes[1:])
        self.lateral = nn.ModuleList(conv(b, 2 * width, 1) for b in sizes[2:])
        self.heads = nn.ModuleList(nn.Sequential(conv(2 * width, 2 * width), nn.Conv2d(2 * width, 3 * outputs, 1)) for _ in range(3))

    def forward(self, x):
        x, kept = self.stem(x), []
        for down, split, body, join in zip(self.down, self.split, self.body, self.join, strict=True):
            x = split(down(x))
            x = join(torch.cat([x, body(x)], 1))
            kept.append(x)
        top, out = None, []
        for lateral, head, level in zip(reversed(self.lateral), self.heads, reversed(kept[1:]), strict=True):
            level = lateral(level)
            top = level if top is None else level + F.interpolate(top, size=level.shape[-2:], mode="nearest")
            out.append(head(top).flatten(2))
        return torch.cat(out, 2)


def detector(device, precision, batch=16, side=416):
    x = torch.randn(batch, 3, side, side, device=device)
    return plain(Detector, lambda m: m(x).square().mean(), precision, device, ADAMW)


class ConvRecurrent(nn.Module):
    """Gates of convolutions over frames, one after the other."""

    def __init__(self, width=64):
        super().__init__()
        self.width, self.gates, self.head = width, nn.Conv2d(1 + width, 4 * width, 3, padding=1), nn.Conv2d(width, 1, 1)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], self.width, *x.shape[-2:])
        out = []
        for frame in x.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(self.head(h))
        return torch.stack(out, 1)


def conv_lstm(device, precision, batch=16, frames=10, side=64):
    x = torch.randn(batch, frames, 1, side, side, device=device)
    return plain(ConvRecurrent, lambda m: F.mse_loss(m(x), x), precision, device)


class Mixed(nn.Module):
    """Depthwise convolutions with large kernels and pointwise ones, a residual around each."""

    def __init__(self, width=384, depth=12, kernel=9, patch=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.GELU(), nn.BatchNorm2d(width))
        self.deep = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width), nn.GELU(), nn.BatchNorm2d(width)) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, x):
        x = self.stem(x)
        for deep, wide in zip(self.deep, self.wide, strict=True):
            x = wide(x + deep(x))
        return self.head(x.mean((2, 3)))


def conv_mixer(device, precision, batch=48, side=224):
    x, y = torch.randn(batch, 3, side, side, device=device), classes(device, batch, 1000)
    return plain(Mixed, lambda m: F.cross_entropy(m(x), y), precision, device, ADAMW)


SPEECH = {"num_hidden_layers": 4, "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 8}

CASES = {
    # convolutions of torchvision
    "resnet18_b64_fp16": (vision, dict(name="resnet18", batch=64)),
    "resnet152_b12_fp32": (vision, dict(name="resnet152", batch=12)),
    "resnext101_32x8d_b12_amp": (vision, dict(name="resnext101_32x8d", batch=12)),
    "regnet_x_400mf_b64_fp32": (vision, dict(name="regnet_x_400mf", batch=64)),
    "regnet_y_8gf_b16_amp_cl": (vision, dict(name="regnet_y_8gf", batch=16, last=True)),
    "vgg13_b48_amp": (vision, dict(name="vgg13", batch=48)),
    "alexnet_b192_fp32": (vision, dict(name="alexnet", batch=192)),
    "mnasnet1_3_b64_amp": (vision, dict(name="mnasnet1_3", batch=64)),
    "shufflenet_v2_x0_5_b192_amp_cl": (vision, dict(name="shufflenet_v2_x0_5", batch=192, last=True)),
    "efficientnet_b5_b8_amp": (vision, dict(name="efficientnet_b5", batch=8, size=380)),
    "densenet121_b40_fp16": (vision, dict(name="densenet121", batch=40)),
    "lraspp_b12_amp": (segmentation, dict(name="lraspp_mobilenet_v3_large", batch=12)),
    "deeplabv3_resnet50_b6_amp_cl": (segmentation, dict(name="deeplabv3_resnet50", batch=6, last=True)),
    "mc3_18_b6_amp": (vision, dict(name="mc3_18", batch=6, size=112, frames=16, count=400)),
    # by hand
    "unet_b8_amp": (unet, {}),
    "unet_b4_fp32": (unet, dict(batch=4)),
    "resnet3d_b4_amp": (resnet3d, {}),
    "wavenet_b8_fp32": (wavenet, {}),
    "wavenet_b8_amp": (wavenet, {}),
    "text_cnn_b256_fp32": (text_cnn, {}),
    "patch_gan_b4_fp32": (patch_gan, {}),
    "vae_b128_amp": (vae, {}),
    "detector_b16_amp": (detector, {}),
    "conv_lstm_b16_fp32": (conv_lstm, {}),
    "conv_mixer_b48_amp": (conv_mixer, {}),
    # others
    "vit_b_32_b64_fp32": (vision, dict(name="vit_b_32", batch=64, optimizer=ADAMW)),
    "swin_v2_s_b12_fp32": (vision, dict(name="swin_v2_s", batch=12, size=256, optimizer=ADAMW)),
    "xlm_roberta_b16_s256_amp": (hf, dict(config="XLMRobertaConfig", model="XLMRobertaForSequenceClassification", batch_of=masked(16, 256, 30522, 2), **BERT)),
    "qwen2_b2_s2048_bf16": (hf, dict(config="Qwen2Config", model="Qwen2ForCausalLM", batch_of=text(2, 2048, 32000), num_key_value_heads=4, intermediate_size=2816, optimizer=FUSED, **LLM)),
    "gpt_bigcode_b4_s1024_amp": (hf, dict(config="GPTBigCodeConfig", model="GPTBigCodeForCausalLM", batch_of=text(4, 1024, 32000), vocab_size=32000, n_embd=1024, n_layer=8, n_head=16, n_positions=1024, use_cache=False)),
    "segformer_b6_512_amp": (hf, dict(config="SegformerConfig", model="SegformerForSemanticSegmentation", batch_of=scenes(6, 512, 21), num_labels=21)),
    "convnext_hf_b32_fp32": (hf, dict(config="ConvNextConfig", model="ConvNextForImageClassification", batch_of=pixels(32, labels=2), num_labels=2)),
    "sew_d_b4_fp32": (hf, dict(config="SEWConfig", model="SEWForSequenceClassification", batch_of=waves(4, 64000), **SPEECH)),
    "hubert_b6_amp": (hf, dict(config="HubertConfig", model="HubertForSequenceClassification", batch_of=waves(6, 48000), **SPEECH)),
}  # fmt: skip

CASES = named(CASES)


def prepare(name):
    """Import what a case needs, before it has the GPU."""
    imported(*CASES[name])


def build(device, name):
    """The step of a case."""
    function, options = CASES[name]
    return function(device, **options)
