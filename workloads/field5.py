"""A fifth list of training steps, none of them in workloads/field.py, field2.py, field3.py or field4.py: public
libraries' models, and nets written by hand as papers and tutorials have them. About a third have small batches.

It was written before any of them was measured (`python tools/record.py workloads/field5.py OUT`) and before presage was
asked for them, from what is commonly trained; no sweep, law or setting was chosen with their residuals in view. Names
and precisions as in field.py.
"""

# ruff: noqa: C408, E501, I001
from __future__ import annotations

import copy
import itertools
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from field import (
    ADAM, ADAMW, FUSED, LLM, SGD, classes, graph, hf, ids, imported, named, segmentation, stepper, text, vision,
)  # fmt: skip
from field4 import plain

HALF = {"amp": torch.bfloat16, "fp16": torch.float16}
GAN = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))


def clipped(model, loss_of, precision, optimizer, largest=1.0, after=None):
    """One step with its gradients' norm clipped; `after()` follows the optimizer."""
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    made = optimizer(model.parameters())
    half = HALF.get(precision)

    def step():
        made.zero_grad(set_to_none=True)
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            loss = loss_of(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        made.step()
        if after is not None:
            after()

    return step


# ---- torchvision


def ssd(device, precision, batch=16, objects=6):
    """SSD300 with its own resizing, matching of boxes and mining of negatives."""
    import torchvision

    with torch.device(device):
        model = torchvision.models.detection.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=91)
    images = [torch.rand(3, 480, 640, device=device) for _ in range(batch)]
    corners = [torch.rand(objects, 2, device=device) * 200 for _ in range(batch)]
    boxes = [torch.cat([c, c + 20 + torch.rand(objects, 2, device=device) * 200], 1) for c in corners]
    targets = [{"boxes": b, "labels": torch.randint(1, 91, (objects,), device=device)} for b in boxes]
    return stepper(model.train(), lambda m: sum(m(images, targets).values()), precision, partial(SGD, lr=5e-4))


# ---- transformers


def frames(batch, count, size=224, labels=400):
    return lambda device: {
        "pixel_values": torch.randn(batch, count, 3, size, size, device=device),
        "labels": classes(device, batch, labels),
    }


def filterbanks(batch, length=1024, bins=128, labels=50):
    return lambda device: {
        "input_values": torch.randn(batch, length, bins, device=device),
        "labels": classes(device, batch, labels),
    }


def images_only(batch, size=224):
    return lambda device: {"pixel_values": torch.randn(batch, 3, size, size, device=device)}


def captions(batch, length, vocabulary, size=224):
    return lambda device: {
        "input_ids": ids(device, batch, length, vocabulary),
        "return_loss": True,
        "pixel_values": torch.randn(batch, 3, size, size, device=device),
    }


def histories(batch, past, future, features=2):
    return lambda device: {
        "past_values": torch.rand(batch, past, device=device),
        "past_time_features": torch.randn(batch, past, features, device=device),
        "past_observed_mask": torch.ones(batch, past, device=device),
        "future_values": torch.rand(batch, future, device=device),
        "future_time_features": torch.randn(batch, future, features, device=device),
    }


def detr(device, precision, batch=4, height=480, width=640, objects=8):
    """DETR with a ResNet-50; its loss matches queries and objects on the host."""
    import transformers as t

    config = t.DetrConfig(backbone_config=t.ResNetConfig(out_features=["stage4"]), num_labels=91, num_queries=100)
    with torch.device(device):
        model = t.DetrForObjectDetection(config)
    images = torch.randn(batch, 3, height, width, device=device)
    mask = torch.ones(batch, height, width, dtype=torch.long, device=device)
    labels = [
        {
            "class_labels": torch.randint(0, 91, (objects,), device=device),
            "boxes": torch.rand(objects, 4, device=device),
        }
        for _ in range(batch)
    ]

    def loss(m):
        return m(pixel_values=images, pixel_mask=mask, labels=labels).loss

    return clipped(model.train(), loss, precision, ADAMW, 0.1)


def dpt(device, precision, batch=6, size=384):
    """Depth of images: a ViT, a convolutional head, a loss that ignores scale."""
    import transformers as t

    with torch.device(device):
        model = t.DPTForDepthEstimation(t.DPTConfig(image_size=size))
    images = torch.randn(batch, 3, size, size, device=device)
    depth = torch.rand(batch, size, size, device=device) * 10 + 0.1

    def loss(m):
        seen = m(pixel_values=images).predicted_depth.float()
        apart = seen.clamp(min=1e-3).log() - depth.log()
        return ((apart**2).mean() - 0.5 * apart.mean() ** 2).sqrt()

    return stepper(model.train(), loss, precision, ADAMW)


# ---- torch_geometric


def batched_graphs(device, graphs, nodes, edges):
    """Many small graphs as one: edges, and the graph of each node."""
    first = torch.arange(graphs, device=device).repeat_interleave(edges) * nodes
    index = torch.stack([first + torch.randint(0, nodes, (graphs * edges,), device=device) for _ in range(2)])
    return index, torch.arange(graphs, device=device).repeat_interleave(nodes)


class Aggregated(nn.Module):
    """Principal neighbourhood aggregation on molecules with kinds of atoms and of bonds."""

    def __init__(self, degrees, width=75, layers=4):
        super().__init__()
        import torch_geometric.nn as pyg

        self.pool = pyg.global_add_pool
        self.atoms, self.bonds = nn.Embedding(21, width), nn.Embedding(4, 50)
        ways, scales = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
        options = dict(deg=degrees, edge_dim=50, towers=5, pre_layers=1, post_layers=1, divide_input=False)
        self.convs = nn.ModuleList(pyg.PNAConv(width, width, ways, scales, **options) for _ in range(layers))
        self.norms = nn.ModuleList(pyg.BatchNorm(width) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, 50), nn.ReLU(), nn.Linear(50, 25), nn.ReLU(), nn.Linear(25, 1))

    def forward(self, x, index, kinds, which, graphs):
        x, e = self.atoms(x), self.bonds(kinds)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x, index, e)))
        return self.head(self.pool(x, which, graphs))


def pna(device, precision, batch=128, nodes=23, edges=50):
    index, which = batched_graphs(device, batch, nodes, edges)
    atoms, bonds = classes(device, batch * nodes, 21), classes(device, batch * edges, 4)
    y = torch.randn(batch, 1, device=device)
    degrees = torch.tensor([0, 41130, 117278, 70152, 3104], device=device)
    return plain(
        lambda: Aggregated(degrees), lambda m: F.l1_loss(m(atoms, index, bonds, which, batch), y), precision, device
    )


class Relations(nn.Module):
    """A relational graph convolution over entities without features."""

    def __init__(self, nodes, relations, hidden=16, count=4):
        super().__init__()
        import torch_geometric.nn as pyg

        self.one = pyg.FastRGCNConv(nodes, hidden, relations, num_bases=30)
        self.two = pyg.FastRGCNConv(hidden, count, relations, num_bases=30)

    def forward(self, index, kinds):
        return F.log_softmax(self.two(F.relu(self.one(None, index, kinds)), index, kinds), 1)


def rgcn(device, precision, nodes=8285, edges=58086, relations=90):
    _, index = graph(device, nodes, edges, 1)
    kinds, known = classes(device, edges, relations), torch.randint(0, nodes, (140,), device=device)
    labels = classes(device, 140, 4)
    return plain(
        lambda: Relations(nodes, relations), lambda m: F.nll_loss(m(index, kinds)[known], labels), precision, device
    )


class Attending(nn.Module):
    """Graph transformer convolutions with gated residuals."""

    def __init__(self, width, hidden, heads, layers, count):
        super().__init__()
        import torch_geometric.nn as pyg

        sizes = [width] + [heads * hidden] * (layers - 1)
        self.convs = nn.ModuleList(pyg.TransformerConv(a, hidden, heads, beta=True, dropout=0.1) for a in sizes[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(heads * hidden) for _ in sizes[:-1])
        self.last = pyg.TransformerConv(sizes[-1], count, heads, concat=False, beta=True, dropout=0.1)

    def forward(self, x, index):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(F.relu(norm(conv(x, index))), 0.3, self.training)
        return self.last(x, index)


def unimp(device, precision, nodes=40_000, edges=300_000):
    x, index = graph(device, nodes, edges, 128)
    labels = classes(device, nodes, 40)
    return plain(
        lambda: Attending(128, 64, 4, 3, 40), lambda m: F.cross_entropy(m(x, index), labels), precision, device
    )


# ---- torchaudio


def emformer(device, precision, batch=16, length=256, right=4, tokens=1024):
    """A streaming encoder over stacked filter banks and a CTC loss."""
    import torchaudio

    with torch.device(device):
        encoder = torchaudio.models.Emformer(512, 8, 2048, 12, 16, 0.1, "gelu", 30, right)
        model = nn.ModuleList([nn.Linear(320, 512), encoder, nn.Linear(512, tokens)])
    x = torch.randn(batch, length + right, 320, device=device)
    lengths = torch.full((batch,), length, device=device)
    y = torch.randint(1, tokens, (batch, 40), device=device)

    def loss(m):
        out, _ = m[1](m[0](x), lengths)
        scores = m[2](out).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, (length,) * batch, (40,) * batch)

    return stepper(model.train(), loss, precision, ADAMW)


def wav2vec2_ctc(device, precision, batch=4, samples=96000):
    """Fine-tuning of the whole base model with a CTC loss over letters."""
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.wav2vec2_base(encoder_layer_drop=0.0, aux_num_out=32)
    x, y = torch.randn(batch, samples, device=device), torch.randint(1, 32, (batch, 60), device=device)

    def loss(m):
        out, _ = m(x)
        scores = out.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, (scores.shape[0],) * batch, (60,) * batch, zero_infinity=True)

    return stepper(model.train(), loss, precision, ADAMW)


def tacotron(device, precision, batch=32, tokens=80, length=120):
    """Speech from text: the decoder goes frame by frame."""
    import torchaudio

    with torch.device(device):
        model = torchaudio.models.Tacotron2(n_symbol=96)
    x, y = torch.randint(1, 96, (batch, tokens), device=device), torch.randn(batch, 80, length, device=device)
    stop = torch.zeros(batch, length, device=device)
    stop[:, -1] = 1.0
    sizes = [torch.full((batch,), n, device=device) for n in (tokens, length)]

    def loss(m):
        first, after, gate, _ = m(x, sizes[0], y, sizes[1])
        return F.mse_loss(first, y) + F.mse_loss(after, y) + F.binary_cross_entropy_with_logits(gate, stop)

    return clipped(model.train(), loss, precision, ADAM)


# ---- written by hand: images


def conv_bn(a, b, k=3, s=1, pool=False):
    layers = [nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Shortcut(nn.Module):
    """A body around which its input goes."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return x + self.body(x)


def resnet9(device, precision, batch=512):
    """Nine layers for CIFAR-10, channels last."""
    with torch.device(device):
        model = nn.Sequential(
            conv_bn(3, 64), conv_bn(64, 128, pool=True), Shortcut(conv_bn(128, 128), conv_bn(128, 128)),
            conv_bn(128, 256, pool=True), conv_bn(256, 512, pool=True), Shortcut(conv_bn(512, 512), conv_bn(512, 512)),
            nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, 10, bias=False),
        ).to(memory_format=torch.channels_last)  # fmt: skip
    x, y = torch.randn(batch, 3, 32, 32, device=device), classes(device, batch, 10)
    x = x.contiguous(memory_format=torch.channels_last)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return stepper(model.train(), lambda m: F.cross_entropy(m(x), y, label_smoothing=0.1), precision, optimizer)


def wgan_gp(device, precision, batch=64, width=64, code=128, side=64):
    """A step of the critic, with the penalty on its gradient between real and made images."""
    sizes = [width, 2 * width, 4 * width, 8 * width]
    with torch.device(device):
        down = [
            p
            for a, b in itertools.pairwise(sizes)
            for p in (nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.2))
        ]
        critic = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), *down, nn.Conv2d(8 * width, 1, 4))
        up = [
            p
            for a, b in zip(sizes[::-1], sizes[-2::-1], strict=False)
            for p in (nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
        ]
        maker = nn.Sequential(
            nn.ConvTranspose2d(code, 8 * width, 4),
            nn.BatchNorm2d(8 * width),
            nn.ReLU(),
            *up,
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )
    real = torch.randn(batch, 3, side, side, device=device)

    def loss(m):
        with torch.no_grad():
            made = maker(torch.randn(batch, code, 1, 1, device=device))
        share = torch.rand(batch, 1, 1, 1, device=device)
        between = (share * real + (1 - share) * made).requires_grad_(True)
        score = m(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        return m(made).mean() - m(real).mean() + 10 * ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    return stepper(critic.train(), loss, precision, partial(torch.optim.Adam, lr=1e-4, betas=(0.0, 0.9)))


class Translator(nn.Module):
    """Pix2pix's generator: eight halvings, eight doublings, skips between them."""

    def __init__(self, width=64):
        super().__init__()
        sizes = [width * min(2**i, 8) for i in range(8)]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, (a, b) in enumerate(zip([3, *sizes], sizes, strict=False)):
            norm = [nn.BatchNorm2d(b)] if 0 < i < 7 else []
            self.down.append(
                nn.Sequential(*([nn.LeakyReLU(0.2)] if i else []), nn.Conv2d(a, b, 4, 2, 1, bias=not norm), *norm)
            )
        for i, b in reversed(list(enumerate([3, *sizes[:-1]]))):
            a = sizes[i] if i == 7 else 2 * sizes[i]
            last = [nn.Tanh()] if i == 0 else [nn.BatchNorm2d(b), *([nn.Dropout(0.5)] if 4 <= i < 7 else [])]
            self.up.append(nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=i == 0), *last))

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.up[0](kept.pop())
        for layer in self.up[1:]:
            x = layer(torch.cat([x, kept.pop()], 1))
        return x


def pix2pix(device, precision, batch=1, side=256):
    """The judge's step, then the generator's."""
    with torch.device(device):
        maker = Translator()
        body = [
            p
            for a, b, s in ((64, 128, 2), (128, 256, 2), (256, 512, 1))
            for p in (nn.Conv2d(a, b, 4, s, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
        ]
        judge = nn.Sequential(nn.Conv2d(6, 64, 4, 2, 1), nn.LeakyReLU(0.2), *body, nn.Conv2d(512, 1, 4, 1, 1))
    x, y = (torch.randn(batch, 3, side, side, device=device) for _ in range(2))
    half, optimizers = HALF.get(precision), (GAN(maker.parameters()), GAN(judge.parameters()))

    def against(pair, truth):
        score = judge(torch.cat(pair, 1))
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, truth))

    def step():
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            made = maker(x)
        judge.requires_grad_(True)
        optimizers[1].zero_grad()
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            loss = 0.5 * (against((x, made.detach()), 0.0) + against((x, y), 1.0))
        loss.backward()
        optimizers[1].step()
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        with torch.autocast("cuda", half or torch.bfloat16, enabled=half is not None):
            loss = against((x, made), 1.0) + 100 * F.l1_loss(made, y)
        loss.backward()
        optimizers[0].step()

    return step


class VNet(nn.Module):
    """Residual stages of 5x5x5 convolutions on volumes, strided ones between them."""

    def __init__(self, width=16, counts=(1, 2, 3, 3)):
        super().__init__()

        def stage(inside, out, count):
            sizes = [inside] + [out] * count
            return nn.Sequential(
                *[
                    nn.Sequential(nn.Conv3d(a, b, 5, padding=2), nn.BatchNorm3d(b), nn.PReLU(b))
                    for a, b in itertools.pairwise(sizes)
                ]
            )

        sizes = [width * 2**i for i in range(len(counts))]
        self.stem = stage(1, width, 1)
        self.left = nn.ModuleList(stage(a, a, n) for a, n in zip(sizes, counts, strict=True))
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv3d(a, b, 2, 2), nn.PReLU(b)) for a, b in itertools.pairwise(sizes)
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose3d(b, a, 2, 2), nn.PReLU(a)) for a, b in itertools.pairwise(sizes)
        )
        self.right = nn.ModuleList(stage(2 * a, a, n) for a, n in zip(sizes[:-1], counts[:-1], strict=True))
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x):
        x, kept = self.stem(x), []
        for i, layer in enumerate(self.left):
            x = self.down[i - 1](x) if i else x
            x = x + layer(x)
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.up[i](x)
            x = x + self.right[i](torch.cat([x, kept[i]], 1))
        return self.head(x)


def vnet(device, precision, batch=2, size=(64, 96, 96)):
    x = torch.randn(batch, 1, *size, device=device)
    y = (torch.rand(batch, *size, device=device) < 0.2).float()

    def loss(m):
        seen = m(x).float().softmax(1)[:, 1]
        return 1 - (2 * (seen * y).sum((1, 2, 3)) + 1).div((seen**2).sum((1, 2, 3)) + (y**2).sum((1, 2, 3)) + 1).mean()

    return plain(VNet, loss, precision, device)


class Modulated(nn.Module):
    """A convolution whose weights each image's style scales: one group per image."""

    def __init__(self, inside, out, style, kernel=3, demodulate=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inside, kernel, kernel))
        self.style, self.demodulate = nn.Linear(style, inside), demodulate

    def forward(self, x, w):
        batch, inside, high, wide = x.shape
        weight = self.weight[None] * (self.style(w)[:, None, :, None, None] + 1)
        if self.demodulate:
            weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        out, pad = weight.shape[1], weight.shape[-1] // 2
        y = F.conv2d(x.reshape(1, batch * inside, high, wide), weight.flatten(0, 1), padding=pad, groups=batch)
        return y.view(batch, out, high, wide)


class Styled(nn.Module):
    """StyleGAN2's synthesis with skips, its mapping, and the judge."""

    def __init__(self, sizes=(512, 512, 512, 512, 256, 128), style=512):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, sizes[0], 4, 4))
        self.map = nn.Sequential(*[p for _ in range(8) for p in (nn.Linear(style, style), nn.LeakyReLU(0.2))])
        pairs = list(zip([sizes[0], *sizes], sizes, strict=False))
        self.one = nn.ModuleList(Modulated(a, b, style) for a, b in pairs)
        self.two = nn.ModuleList(Modulated(b, b, style) for b in sizes)
        self.noise = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(2 * len(sizes)))
        self.rgb = nn.ModuleList(Modulated(b, 3, style, 1, False) for b in sizes)
        self.stem = nn.Conv2d(3, sizes[-1], 1)
        back = list(zip(sizes[::-1], sizes[-2::-1], strict=False))
        self.first, self.second = (
            nn.ModuleList(nn.Conv2d(a, c, 3, padding=1) for a, c in d) for d in ([(a, a) for a, _ in back], back)
        )
        self.skip = nn.ModuleList(nn.Conv2d(a, b, 1, bias=False) for a, b in back)
        self.end = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * sizes[0], sizes[0]), nn.LeakyReLU(0.2), nn.Linear(sizes[0], 1)
        )

    def make(self, z):
        w, image = self.map(F.normalize(z)), None
        x = self.start.expand(z.shape[0], -1, -1, -1)
        for i, (one, two, rgb) in enumerate(zip(self.one, self.two, self.rgb, strict=True)):
            if i:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
                image = F.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)
            for k, conv in enumerate((one, two)):
                x = conv(x, w)
                x = F.leaky_relu(x + self.noise[2 * i + k] * torch.randn_like(x[:, :1]), 0.2)
            image = rgb(x, w) if image is None else image + rgb(x, w)
        return image

    def forward(self, z):
        x = F.leaky_relu(self.stem(self.make(z)), 0.2)
        for first, second, skip in zip(self.first, self.second, self.skip, strict=True):
            y = F.leaky_relu(second(F.leaky_relu(first(x), 0.2)), 0.2)
            x = (F.avg_pool2d(y, 2) + skip(F.avg_pool2d(x, 2))) / math.sqrt(2)
        return self.end(x)


def style_gan(device, precision, batch=8):
    z = torch.randn(batch, 512, device=device)
    optimizer = partial(torch.optim.Adam, lr=2e-3, betas=(0.0, 0.99))
    return plain(Styled, lambda m: F.softplus(-m(z)).mean(), precision, device, optimizer)


class TextLine(nn.Module):
    """Text in a line of an image: convolutions to one row, two bidirectional LSTMs."""

    def __init__(self, letters=37, hidden=256):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 64, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2),
            conv_bn(128, 256), nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            conv_bn(256, 512), nn.Conv2d(512, 512, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            nn.Conv2d(512, 512, 2), nn.BatchNorm2d(512), nn.ReLU(True),
        )  # fmt: skip
        self.one, self.two = nn.LSTM(512, hidden, bidirectional=True), nn.LSTM(hidden, hidden, bidirectional=True)
        self.between, self.head = nn.Linear(2 * hidden, hidden), nn.Linear(2 * hidden, letters)

    def forward(self, x):
        x = self.convs(x).squeeze(2).permute(2, 0, 1)
        return self.head(self.two(self.between(self.one(x)[0]))[0])


def crnn(device, precision, batch=64, wide=160):
    x, y = torch.randn(batch, 1, 32, wide, device=device), torch.randint(1, 37, (batch, 8), device=device)

    def loss(m):
        scores = m(x).log_softmax(2)
        return F.ctc_loss(scores, y, (scores.shape[0],) * batch, (8,) * batch, zero_infinity=True)

    return plain(TextLine, loss, precision, device, torch.optim.Adadelta)


class Timed(nn.Module):
    """A residual block with group norms, to which the time's code is added; attention after it where asked."""

    def __init__(self, a, b, time, attend):
        super().__init__()
        self.one = nn.Sequential(nn.GroupNorm(32, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1))
        self.two = nn.Sequential(nn.GroupNorm(32, b), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(b, b, 3, padding=1))
        self.time, self.skip = nn.Linear(time, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()
        self.norm, self.qkv, self.out = (
            (nn.GroupNorm(32, b), nn.Conv2d(b, 3 * b, 1), nn.Conv2d(b, b, 1)) if attend else (None,) * 3
        )

    def forward(self, x, t):
        x = self.skip(x) + self.two(self.one(x) + self.time(F.silu(t))[:, :, None, None])
        if self.norm is None:
            return x
        q, k, v = (p.flatten(2).transpose(1, 2)[:, None] for p in self.qkv(self.norm(x)).chunk(3, 1))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        return x + self.out(seen.reshape(x.shape))


class Denoiser(nn.Module):
    """The U-Net of denoising diffusion on 32x32 images."""

    def __init__(self, width=128, levels=(1, 2, 2, 2), blocks=2):
        super().__init__()
        time, sizes = 4 * width, [width * m for m in levels]
        self.width, self.code = width, nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, kept, now = nn.Conv2d(3, width, 3, padding=1), [width], width
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, b in enumerate(sizes):
            for _ in range(blocks):
                self.down.append(Timed(now, b, time, i == 1))
                kept, now = [*kept, b], b
            if i < len(sizes) - 1:
                self.down.append(nn.Conv2d(b, b, 3, 2, 1))
                kept.append(b)
        self.middle = nn.ModuleList([Timed(now, now, time, True), Timed(now, now, time, False)])
        for i, b in reversed(list(enumerate(sizes))):
            for _ in range(blocks + 1):
                self.up.append(Timed(now + kept.pop(), b, time, i == 1))
                now = b
            if i:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, b, 3, padding=1)))
        self.head = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def forward(self, x, t):
        rate = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(10000) / (self.width // 2 - 1)))
        angle = t[:, None].float() * rate[None]
        t, x = self.code(torch.cat([angle.sin(), angle.cos()], 1)), self.stem(x)
        kept = [x]
        for layer in self.down:
            x = layer(x, t) if isinstance(layer, Timed) else layer(x)
            kept.append(x)
        for layer in self.middle:
            x = layer(x, t)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1), t) if isinstance(layer, Timed) else layer(x)
        return self.head(x)


def ddpm(device, precision, batch=64, steps=1000):
    """A step of diffusion, and the running mean of the weights after it."""
    with torch.device(device):
        model = Denoiser()
    mean = copy.deepcopy(model).requires_grad_(False)
    x, kept = (
        torch.randn(batch, 3, 32, 32, device=device),
        (1 - torch.linspace(1e-4, 0.02, steps, device=device)).cumprod(0),
    )

    def loss(m):
        t, noise = torch.randint(0, steps, (batch,), device=device), torch.randn_like(x)
        share = kept[t][:, None, None, None]
        return F.mse_loss(m(share.sqrt() * x + (1 - share).sqrt() * noise, t).float(), noise)

    @torch.no_grad()
    def average():
        for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 1e-4)

    return clipped(model.train(), loss, precision, partial(torch.optim.Adam, lr=2e-4), 1.0, average)


class Quantised(nn.Module):
    """A convolutional autoencoder whose codes are the nearest of a book."""

    def __init__(self, width=128, code=64, book=512):
        super().__init__()

        def rest():
            body = [
                Shortcut(
                    nn.ReLU(),
                    nn.Conv2d(width, 32, 3, padding=1, bias=False),
                    nn.ReLU(),
                    nn.Conv2d(32, width, 1, bias=False),
                )
                for _ in range(2)
            ]
            return [*body, nn.ReLU()]

        self.down = nn.Sequential(
            nn.Conv2d(3, width // 2, 4, 2, 1), nn.ReLU(), nn.Conv2d(width // 2, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), *rest(), nn.Conv2d(width, code, 1),
        )  # fmt: skip
        self.book = nn.Embedding(book, code)
        self.up = nn.Sequential(
            nn.Conv2d(code, width, 3, padding=1), *rest(), nn.ConvTranspose2d(width, width // 2, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(width // 2, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x):
        z = self.down(x).permute(0, 2, 3, 1)
        flat, book = z.flatten(0, 2), self.book.weight
        apart = flat.square().sum(1, keepdim=True) + book.square().sum(1) - 2 * flat @ book.t()
        chosen = F.one_hot(apart.argmin(1), book.shape[0]).to(flat.dtype)
        q = (chosen @ book).view_as(z)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        share = chosen.mean(0)
        return self.up((z + (q - z).detach()).permute(0, 3, 1, 2)), loss, (-(share * (share + 1e-10).log()).sum()).exp()


def vq_vae(device, precision, batch=128, side=64):
    x = torch.randn(batch, 3, side, side, device=device)

    def loss(m):
        out, extra, _ = m(x)
        return F.mse_loss(out, x) + extra

    return plain(Quantised, loss, precision, device)


# ---- written by hand: others


class Rays(nn.Module):
    """A radiance field: eight layers, a skip to the fifth, the view's direction before the colour."""

    def __init__(self, width=256):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, width) for a in (63, width, width, width, width, width + 63, width, width)
        )
        self.density, self.between = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    def forward(self, points, directions):
        x = start = waves_of(points, 10)
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([start, x], -1) if i == 5 else x))
        seen = F.relu(self.view(torch.cat([self.between(x), waves_of(directions, 4)], -1)))
        return self.colour(seen).sigmoid(), F.relu(self.density(x)).squeeze(-1)


def waves_of(x, count):
    """Sines and cosines of the coordinates at doubling frequencies."""
    return torch.cat([x] + [f(2.0**i * x) for i in range(count) for f in (torch.sin, torch.cos)], -1)


def rendered(net, starts, directions, depths):
    """The colour along each ray, and the weights of its points."""
    points = starts[:, None] + directions[:, None] * depths[..., None]
    colour, density = net(points, directions[:, None].expand_as(points))
    apart = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)], 1)
    opaque = 1 - torch.exp(-density * apart)
    left = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], 1), 1)[:, :-1]
    weights = opaque * left
    return (weights[..., None] * colour).sum(1), weights


def finer(middles, weights, count):
    """Depths drawn where the weights are."""
    share = (weights + 1e-5) / (weights + 1e-5).sum(1, keepdim=True)
    total = torch.cat([torch.zeros_like(share[:, :1]), share.cumsum(1)], 1)
    u = torch.rand(total.shape[0], count, device=total.device)
    high = torch.searchsorted(total, u, right=True).clamp(max=total.shape[1] - 1)
    low = (high - 1).clamp(min=0)
    a, b, x, y = total.gather(1, low), total.gather(1, high), middles.gather(1, low), middles.gather(1, high)
    span = torch.where(b - a < 1e-5, torch.ones_like(a), b - a)
    return x + (u - a) / span * (y - x)


def nerf(device, precision, rays=1024, coarse=64, fine=128):
    starts, directions = torch.randn(rays, 3, device=device), F.normalize(torch.randn(rays, 3, device=device), dim=1)
    truth, grid = torch.rand(rays, 3, device=device), torch.linspace(2.0, 6.0, coarse, device=device)

    def loss(m):
        depths = grid + torch.rand(rays, coarse, device=device) * (4.0 / coarse)
        first, weights = rendered(m[0], starts, directions, depths)
        more = finer(0.5 * (depths[:, 1:] + depths[:, :-1]), weights[:, 1:-1].detach(), fine)
        second, _ = rendered(m[1], starts, directions, torch.cat([depths, more], 1).sort(1)[0])
        return F.mse_loss(first, truth) + F.mse_loss(second, truth)

    return plain(lambda: nn.ModuleList([Rays(), Rays()]), loss, precision, device, partial(torch.optim.Adam, lr=5e-4))


def towers(*sizes, last=None):
    """Linear layers with ReLUs; another activation, or none, after the last."""
    layers = [p for a, b in itertools.pairwise(sizes) for p in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *([last] if last is not None else []))


class Clicks(nn.Module):
    """DLRM: bags of embeddings with sparse gradients, their products with the dense features."""

    def __init__(self, rows, width=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum", sparse=True) for n in rows)
        for table in self.tables:
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        self.bottom, pairs = towers(13, 512, 256, width, last=nn.ReLU()), len(rows) * (len(rows) + 1) // 2
        self.top = towers(width + pairs, 512, 256, 1)
        at = torch.tril_indices(len(rows) + 1, len(rows) + 1, -1)
        self.register_buffer("at", at[0] * (len(rows) + 1) + at[1])

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        every = torch.stack([x] + [table(i) for table, i in zip(self.tables, sparse.unbind(1), strict=True)], 1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products[:, self.at]], 1)).squeeze(1)


def dlrm(device, precision, batch=2048, hot=4):
    rows = [200_000, 100_000, 50_000, 20_000, 10_000, 5_000, 1_000, 500, 100, 50, 20, 10, 4] * 2
    dense, y = torch.randn(batch, 13, device=device), torch.randint(0, 2, (batch,), device=device).float()
    sparse = torch.stack([torch.randint(0, n, (batch, hot), device=device) for n in rows], 1)
    return plain(
        lambda: Clicks(rows),
        lambda m: F.binary_cross_entropy_with_logits(m(dense, sparse), y),
        precision,
        device,
        partial(torch.optim.SGD, lr=0.1),
    )


class Interest(nn.Module):
    """DIN: attention of the item on sale over what was bought before."""

    def __init__(self, items=200_000, kinds=2_000, width=64):
        super().__init__()
        self.items, self.kinds = nn.Embedding(items, width), nn.Embedding(kinds, width)
        self.attend = nn.Sequential(
            nn.Linear(8 * width, 80), nn.Sigmoid(), nn.Linear(80, 40), nn.Sigmoid(), nn.Linear(40, 1)
        )
        self.head = nn.Sequential(
            nn.Linear(6 * width, 200), nn.BatchNorm1d(200), nn.PReLU(200), nn.Linear(200, 80), nn.BatchNorm1d(80), nn.PReLU(80),
            nn.Linear(80, 1),
        )  # fmt: skip

    def forward(self, item, kind, past, past_kinds, mask):
        q = torch.cat([self.items(item), self.kinds(kind)], -1)
        k = torch.cat([self.items(past), self.kinds(past_kinds)], -1)
        near = q[:, None].expand_as(k)
        score = self.attend(torch.cat([near, k, near - k, near * k], -1)).squeeze(-1)
        seen = (score.masked_fill(~mask, -(2**32) + 1).softmax(-1)[:, None] @ k).squeeze(1)
        return self.head(torch.cat([seen, q, seen * q], -1)).squeeze(1)


def din(device, precision, batch=2048, length=50):
    item, past = (
        torch.randint(0, 200_000, (batch,), device=device),
        torch.randint(0, 200_000, (batch, length), device=device),
    )
    mask = torch.arange(length, device=device)[None] < torch.randint(1, length, (batch, 1), device=device)
    y = torch.randint(0, 2, (batch,), device=device).float()
    inputs = (item, item % 2_000, past, past % 2_000, mask)
    return plain(Interest, lambda m: F.binary_cross_entropy_with_logits(m(*inputs), y), precision, device)


class Table(nn.Module):
    """Columns of numbers and of categories, residual blocks of linear layers with batch norms and dropout."""

    def __init__(self, numbers=28, categories=(12, 50, 7, 400, 31, 5), width=512, depth=10):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in categories)
        self.first = nn.Linear(numbers + 16 * len(categories), width)
        self.blocks = nn.Sequential(*[
            Shortcut(nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, width), nn.Dropout(0.1))
            for _ in range(depth)
        ])  # fmt: skip
        self.last = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, kinds):
        every = [table(k) for table, k in zip(self.tables, kinds.unbind(1), strict=True)]
        return self.last(self.blocks(self.first(torch.cat([x, *every], 1)))).squeeze(1)


def tabular(device, precision, batch=1024):
    x, y = torch.randn(batch, 28, device=device), torch.randn(batch, device=device)
    kinds = torch.stack([classes(device, batch, n) for n in (12, 50, 7, 400, 31, 5)], 1)
    return plain(
        Table,
        lambda m: F.mse_loss(m(x, kinds), y),
        precision,
        device,
        partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-5),
    )


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.one, self.two = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.one(x)).split(c, 2))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(b, t, c)), 0.1, self.training)
        return x + self.mlp(self.two(x))


class GPT(nn.Module):
    """Tokens and places, blocks, and a head that shares the tokens' table."""

    def __init__(self, vocabulary=50304, length=512, width=768, heads=12, depth=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(F.dropout(x, 0.1, self.training))))


def gpt(device, precision, batch=8, length=512):
    with torch.device(device):
        model = GPT(length=length)
    x, y = (ids(device, batch, length, 50304) for _ in range(2))
    return clipped(model.train(), lambda m: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), precision, FUSED)


CASES = {
    # torchvision
    "resnet50_b192_fp16_cl": (vision, dict(name="resnet50", batch=192, last=True)),
    "convnext_large_b8_amp": (vision, dict(name="convnext_large", batch=8, optimizer=ADAMW)),
    "efficientnet_v2_l_b8_amp_cl": (vision, dict(name="efficientnet_v2_l", batch=8, size=384, last=True)),
    "regnet_y_800mf_b16_fp32": (vision, dict(name="regnet_y_800mf", batch=16)),
    "swin_b_b16_fp16": (vision, dict(name="swin_b", batch=16, optimizer=ADAMW)),
    "vit_l_32_b32_tf32": (vision, dict(name="vit_l_32", batch=32, optimizer=ADAMW)),
    "swin3d_s_b1_amp": (vision, dict(name="swin3d_s", batch=1, frames=16, count=400, optimizer=ADAMW)),
    "ssd300_b16_amp": (ssd, {}),
    "deeplabv3_resnet101_b4_512_fp32": (segmentation, dict(name="deeplabv3_resnet101", batch=4, size=512)),
    # transformers
    "modernbert_b16_s512_amp": (hf, dict(config="ModernBertConfig", model="ModernBertForSequenceClassification", batch_of=text(16, 512, 50280, 2), num_hidden_layers=12)),
    "gemma3_b2_s1024_bf16": (hf, dict(config="Gemma3TextConfig", model="Gemma3ForCausalLM", batch_of=text(2, 1024, 32000), optimizer=FUSED, num_key_value_heads=4, head_dim=128, intermediate_size=4096, sliding_window=512, **LLM)),
    "starcoder2_b2_s2048_amp": (hf, dict(config="Starcoder2Config", model="Starcoder2ForCausalLM", batch_of=text(2, 2048, 32000), num_key_value_heads=2, intermediate_size=4096, **LLM)),
    "m2m_100_b16_s128_fp16": (hf, dict(config="M2M100Config", model="M2M100ForConditionalGeneration", batch_of=text(16, 128, 32000), vocab_size=32000, encoder_layers=4, decoder_layers=4, encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False)),
    "funnel_b8_s256_fp32": (hf, dict(config="FunnelConfig", model="FunnelForSequenceClassification", batch_of=text(8, 256, 30522, 2))),
    "vit_mae_b64_amp": (hf, dict(config="ViTMAEConfig", model="ViTMAEForPreTraining", batch_of=images_only(64))),
    "detr_b4_fp32": (detr, {}),
    "dpt_b6_amp": (dpt, {}),
    "timesformer_b4_amp": (hf, dict(config="TimesformerConfig", model="TimesformerForVideoClassification", batch_of=frames(4, 8), num_labels=400)),
    "ast_b8_tf32": (hf, dict(config="ASTConfig", model="ASTForAudioClassification", batch_of=filterbanks(8), num_labels=50)),
    "siglip_b32_bf16": (hf, dict(config="SiglipConfig", model="SiglipModel", batch_of=captions(32, 64, 32000), optimizer=FUSED)),
    "time_series_b64_fp32": (hf, dict(config="TimeSeriesTransformerConfig", model="TimeSeriesTransformerForPrediction", batch_of=histories(64, 55, 24), prediction_length=24, context_length=48, num_time_features=2, d_model=64, encoder_layers=4, decoder_layers=4, use_cache=False)),
    # torch_geometric
    "pna_b128_fp32": (pna, {}),
    "rgcn_fp32": (rgcn, {}),
    "unimp_tf32": (unimp, {}),
    # torchaudio
    "emformer_b16_amp": (emformer, {}),
    "wav2vec2_ctc_b4_fp16": (wav2vec2_ctc, {}),
    "tacotron2_b32_fp32": (tacotron, {}),
    # by hand
    "resnet9_b512_fp16_cl": (resnet9, {}),
    "wgan_gp_b64_fp32": (wgan_gp, {}),
    "pix2pix_b1_fp32": (pix2pix, {}),
    "vnet_b2_amp": (vnet, {}),
    "style_gan_b8_fp32": (style_gan, {}),
    "crnn_b64_fp32": (crnn, {}),
    "ddpm_b64_amp": (ddpm, {}),
    "vq_vae_b128_fp32": (vq_vae, {}),
    "nerf_b1024_tf32": (nerf, {}),
    "dlrm_b2048_tf32": (dlrm, {}),
    "din_b2048_fp32": (din, {}),
    "tabular_b1024_fp32": (tabular, {}),
    "gpt_b8_s512_tf32": (gpt, {}),
}  # fmt: skip

CASES = named(CASES)
NEEDS = {ssd: "torchvision", detr: "transformers", dpt: "transformers"}
NEEDS |= dict.fromkeys((pna, rgcn, unimp), "torch_geometric.nn")
NEEDS |= dict.fromkeys((emformer, wav2vec2_ctc, tacotron), "torchaudio")


def prepare(name):
    """Import what a case needs, before it has the GPU."""
    imported(*CASES[name], NEEDS.get(CASES[name][0], ""))


def build(device, name):
    """The step of a case."""
    function, options = CASES[name]
    return function(device, **options)
