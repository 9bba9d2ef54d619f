"""Small transformers that can be built as one rank's part: `parts` divides heads and inner widths, by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 1024, 256, 8, 2, 2, 128


class GptAttention(nn.Module):
    """Queries, keys and values from one layer, laid out as models of several makers have them."""

    def __init__(self, parts, layout):
        super().__init__()
        self.heads, self.depth, self.layout = HEADS // parts, WIDTH // HEADS, layout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH // parts), nn.Linear(WIDTH // parts, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, s, _ = x.shape
        h, e = self.heads, self.depth
        y = self.qkv(x)
        if self.layout == "permuted":
            q, k, v = y.view(b, s, 3, h, e).permute(2, 0, 3, 1, 4)
        elif self.layout == "by head":
            q, k, v = y.view(b, s, h, 3 * e).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (t.view(b, s, h, e).transpose(1, 2) for t in y.chunk(3, -1))
        if self.layout == "manual":
            hidden = torch.ones(s, s, device=x.device, dtype=torch.bool).triu(1)
            a = (q @ k.transpose(-1, -2) / e**0.5).masked_fill(hidden, float("-inf"))
            y = self.drop(a.softmax(-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(b, s, h * e)))


class GptFeed(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // parts), nn.Linear(4 * WIDTH // parts, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class LlamaAttention(nn.Module):
    """Grouped queries, rotary positions, optionally a norm of each query."""

    def __init__(self, parts, layout):
        super().__init__()
        self.heads, self.kv, self.depth = HEADS // parts, HEADS // 2 // parts, WIDTH // HEADS
        inner = self.heads * self.depth
        self.q, self.o = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, self.kv * self.depth, bias=False) for _ in range(2))
        self.norm = RmsNorm(self.depth) if layout == "query norm" else nn.Identity()

    def forward(self, x):
        b, s, _ = x.shape
        e = self.depth
        q, k, v = (f(x).view(b, s, -1, e).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = self.norm(q)
        angle = torch.arange(s, device=q.device)[:, None] * torch.arange(e, device=q.device)
        q, k = (t * angle.cos().to(q.dtype) + turned(t) * angle.sin().to(q.dtype) for t in (q, k))
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(b, -1, s, e) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class LlamaFeed(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH // parts, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH // parts, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class BertAttention(nn.Module):
    """Queries, keys and values from three layers, whose input is also the residual."""

    def __init__(self, parts, _layout):
        super().__init__()
        self.depth = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // parts) for _ in range(3))
        self.o = nn.Linear(WIDTH // parts, WIDTH)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.depth).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, kind, parts, layout):
        super().__init__()
        attention, feed, norm = KINDS[kind]
        self.post = kind == "bert"
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.feed = attention(parts, layout), feed(parts)

    def forward(self, x):
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.feed(x))
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


KINDS = {
    "gpt": (GptAttention, GptFeed, nn.LayerNorm),
    "llama": (LlamaAttention, LlamaFeed, RmsNorm),
    "bert": (BertAttention, GptFeed, nn.LayerNorm),
}


class Model(nn.Module):
    def __init__(self, kind, parts=1, layout="", vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([Block(kind, parts, layout) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens, recompute=False):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(self.norm(x))


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "lists": lambda p: torch.optim.AdamW(p),
    "loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


def builder(
    kind, parts=1, layout="", amp=True, dtype=torch.float32, optimizer="fused",
    recompute=False, clip=False, tied=False, shared=False,
):  # fmt: skip
    """A function that builds a training step; `shared` gives a rank its part of the vocabulary too."""

    def build(device):
        vocab = VOCAB // parts if shared else VOCAB
        model = Model(kind, parts, layout, vocab).to(device).to(dtype)
        if tied:
            model.head.weight = model.embed.weight
        update = OPTIMIZERS[optimizer](model.parameters())
        tokens = torch.randint(vocab, (BATCH, LENGTH + 1), device=device)

        def step():
            update.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                logits = model(tokens[:, :-1], recompute)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()

        return step

    return build


def trained(model, batch):
    """A step that trains a model on a batch, the sum of its output being the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step
