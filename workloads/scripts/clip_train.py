"""CLIP: an image tower and a text tower, a learned temperature clamped after every step, bf16."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, width, layers, heads, causal, length, out):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.position, self.norm = nn.Parameter(0.01 * torch.randn(length, width)), nn.LayerNorm(width)
        self.projection = nn.Parameter(width**-0.5 * torch.randn(width, out))
        mask = torch.full((length, length), float("-inf")).triu_(1) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        return self.norm(self.body(x + self.position, mask=self.mask))


class CLIP(nn.Module):
    def __init__(self, embed=512, vocab=49408, context=77, size=224, patch=32):
        super().__init__()
        self.patches = nn.Conv2d(3, 768, patch, patch, bias=False)
        self.class_token = nn.Parameter(0.01 * torch.randn(768))
        self.visual = Tower(768, 12, 12, False, (size // patch) ** 2 + 1, embed)
        self.words, self.text = nn.Embedding(vocab, 512), Tower(512, 12, 8, True, context, embed)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.to(x.dtype).expand(x.size(0), 1, -1), x], 1)
        return F.normalize(self.visual(x)[:, 0] @ self.visual.projection, dim=-1)

    def encode_text(self, text):
        x = self.text(self.words(text))
        x = x[torch.arange(x.size(0), device=x.device), text.argmax(dim=-1)]  # the end of the text
        return F.normalize(x @ self.text.projection, dim=-1)

    def forward(self, image, text):
        return self.encode_image(image), self.encode_text(text), self.logit_scale.exp()


def clip_loss(image_features, text_features, scale):
    logits = scale * image_features @ text_features.T
    labels = torch.arange(logits.size(0), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(0)
    model = CLIP().to(args.device)
    exclude = lambda n, q: q.ndim < 2 or "norm" in n or "logit_scale" in n  # noqa: E731
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [q for n, q in named if exclude(n, q)], "weight_decay": 0.0},
            {"params": [q for n, q in named if not exclude(n, q)], "weight_decay": 0.2},
        ],
        lr=args.lr, betas=(0.9, 0.98), eps=1e-6,
    )  # fmt: skip
    images = torch.randn(args.batch_size, 3, 224, 224).pin_memory()
    for step in range(args.steps):
        texts = torch.randint(1, 49407, (args.batch_size, 77))
        image = images.to(args.device, non_blocking=True)
        text = texts.to(args.device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = clip_loss(*model(image, text))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if step % 50 == 0:
            print(f"Loss: {loss.item():.5g} Logit scale: {model.logit_scale.exp().item():.3f}")


if __name__ == "__main__":
    main()
