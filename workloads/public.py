"""Models of public training runs, built as their frameworks build them: one training step of one rank, on one GPU.

What several ranks do (DDP, FSDP, tensor parallelism) is not in here: presage applies it to the captured step.

    mpt     llm-foundry: LayerNorm and linear layers with biases (as the published numbers of parameters tell), one
            product for queries, keys and values, learned positions, embedding and head share a weight, FlashAttention
            behind a removal of padding, a loss that keeps logits in bfloat16, gradient clipping, a decoupled AdamW.
            FSDP computes in bfloat16, so the model is in it
    llama   torchtitan: RMSNorm, rotary positions, grouped queries, SwiGLU, untied head, loss in float32, fused AdamW
    gpt     Megatron-LM by way of Accelerate: float32, attention as products and a softmax, dropout

`build(device, family, ...)` returns a callable that runs one step of `accumulate` microbatches. It runs on a GPU too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DROPOUT = 0.1


class Rows(torch.autograd.Function):
    """Rows of a matrix by number, each number once: flash-attn takes padding out with it."""

    @staticmethod
    def forward(ctx, x, numbers):
        wide = numbers[:, None].expand(-1, x.shape[1])
        ctx.save_for_backward(wide)
        ctx.rows = x.shape[0]
        return torch.gather(x, 0, wide)

    @staticmethod
    def backward(ctx, grad):
        (wide,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).scatter_(0, wide, grad), None


class Spread(torch.autograd.Function):
    """The way back: rows to where they stood among the padding."""

    @staticmethod
    def forward(ctx, x, numbers):
        ctx.save_for_backward(numbers)
        out = x.new_zeros(x.shape)
        out[numbers] = x
        return out

    @staticmethod
    def backward(ctx, grad):
        (numbers,) = ctx.saved_tensors
        return grad[numbers], None


class MptBlock(nn.Module):
    def __init__(self, width, heads, ffn, unpad, made):
        super().__init__()
        self.heads, self.unpad = heads, unpad
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, **made) for _ in range(2))
        self.wqkv, self.out = (nn.Linear(width, k * width, **made) for k in (3, 1))
        self.up, self.down = nn.Linear(width, ffn, **made), nn.Linear(ffn, width, **made)

    def attend(self, x, numbers):
        b, s, d = x.shape
        q, k, v = self.wqkv(x).chunk(3, dim=2)
        if self.unpad:
            q, k, v = (Rows.apply(t.reshape(b * s, d), numbers).view(b, s, d) for t in (q, k, v))
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        if self.unpad:
            y = Spread.apply(y.view(b * s, d), numbers).view(b, s, d)
        return self.out(y)

    def forward(self, x, numbers):
        x = x + self.attend(self.norm_1(x), numbers)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    def __init__(self, vocab, width, heads, layers, ffn, sequence, recompute, unpad, made):
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = nn.Embedding(vocab, width, **made), nn.Embedding(sequence, width, **made)
        self.blocks = nn.ModuleList([MptBlock(width, heads, ffn, unpad, made) for _ in range(layers)])
        self.norm_f = nn.LayerNorm(width, **made)

    def forward(self, tokens, places, numbers):
        x = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            x = checkpoint(block, x, numbers, use_reentrant=False) if self.recompute else block(x, numbers)
        return F.linear(self.norm_f(x), self.wte.weight)


def mpt(device, batch, sequence, width, heads, layers, ffn, vocab, recompute=False, accumulate=1, unpad=True):
    model = Mpt(
        vocab, width, heads, layers, ffn, sequence, recompute, unpad, {"device": device, "dtype": torch.bfloat16}
    )
    tokens = torch.randint(vocab, (batch, sequence), device=device)
    places = torch.arange(sequence, device=device)[None]
    numbers = torch.arange(batch * sequence, device=device)

    def loss():
        return F.cross_entropy(model(tokens, places, numbers).view(-1, vocab), tokens.roll(-1, 1).view(-1))

    return _step(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), accumulate, clip=1.0)


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, ffn, made):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv = width // heads * kv_heads
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, eps=1e-5, **made) for _ in range(2))
        self.wq, self.wo = (nn.Linear(width, width, bias=False, **made) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv, bias=False, **made) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, ffn, bias=False, **made) for _ in range(2))
        self.w2 = nn.Linear(ffn, width, bias=False, **made)

    def attend(self, x, turns):
        b, s, d = x.shape
        q, k = (w(x).view(b, s, n, -1) for w, n in ((self.wq, self.heads), (self.wk, self.kv_heads)))
        q, k = (_turned(t, turns) for t in (q, k))
        v = self.wv(x).view(b, s, self.kv_heads, -1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, d))

    def forward(self, x, turns):
        x = x + self.attend(self.norm_1(x), turns)
        h = self.norm_2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _turned(x, turns):
    """Rotary positions: pairs of features as complex numbers, turned by their place."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, vocab, width, heads, kv_heads, layers, ffn, recompute, made):
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(vocab, width, **made), nn.Linear(width, vocab, bias=False, **made)
        self.layers = nn.ModuleList([LlamaBlock(width, heads, kv_heads, ffn, made) for _ in range(layers)])
        self.norm = nn.RMSNorm(width, eps=1e-5, **made)

    def forward(self, tokens, turns):
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, turns, use_reentrant=False) if self.recompute else block(x, turns)
        return self.head(self.norm(x))


def llama(device, batch, sequence, width, heads, layers, ffn, vocab, kv_heads=None, recompute=False, accumulate=1):
    made = {"device": device, "dtype": torch.bfloat16}
    model = Llama(vocab, width, heads, kv_heads or heads, layers, ffn, recompute, made)
    tokens = torch.randint(vocab, (batch, sequence + 1), device=device)
    angles = torch.rand(sequence, width // heads // 2, device=device)
    turns = torch.polar(torch.ones_like(angles), angles)

    def loss():
        return F.cross_entropy(model(tokens[:, :-1], turns).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return _step(model, loss, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), accumulate, clip=1.0)


class GptBlock(nn.Module):
    def __init__(self, width, heads, ffn, made):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, **made) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, k * width, **made) for k in (3, 1))
        self.up, self.down = nn.Linear(width, ffn, **made), nn.Linear(ffn, width, **made)

    def attend(self, x, later):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
        scores = (q @ k.transpose(2, 3) * (d // self.heads) ** -0.5).masked_fill(later, -10000.0)
        y = F.dropout(scores.softmax(-1), DROPOUT) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, d))

    def forward(self, x, later):
        x = x + F.dropout(self.attend(self.norm_1(x), later), DROPOUT)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), DROPOUT)


class Gpt(nn.Module):
    def __init__(self, vocab, width, heads, layers, ffn, sequence, recompute, made):
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = nn.Embedding(vocab, width, **made), nn.Embedding(sequence, width, **made)
        self.blocks = nn.ModuleList([GptBlock(width, heads, ffn, made) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, **made)

    def forward(self, tokens, places, later):
        x = F.dropout(self.wte(tokens) + self.wpe(places), DROPOUT)
        for block in self.blocks:
            x = checkpoint(block, x, later, use_reentrant=False) if self.recompute else block(x, later)
        return F.linear(self.norm(x), self.wte.weight)


def gpt(device, batch, sequence, width, heads, layers, ffn, vocab, recompute=False, accumulate=1):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Gpt(vocab, width, heads, layers, ffn, sequence, recompute, {"device": device})
    tokens = torch.randint(vocab, (batch, sequence + 1), device=device)
    places = torch.arange(sequence, device=device)[None]
    later = torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)

    def loss():
        return F.cross_entropy(model(tokens[:, :-1], places, later).flatten(0, 1), tokens[:, 1:].flatten())

    return _step(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), accumulate, clip=1.0)


def _step(model, loss_of, optimizer, accumulate, clip):
    """A training step. The optimizer makes its state here, so that the first step is like all others."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

    def step():
        optimizer.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            (loss_of() / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


FAMILIES = {"mpt": mpt, "llama": llama, "gpt": gpt}


def build(device, family, **sizes):
    """One training step of a model of this family, its tensors on `device`."""
    return FAMILIES[family](device, **sizes)


build.warm_up = 0  # steps to run before one is captured
