"""Single transformer layers in plain PyTorch, to count what the host does for one (tools/count_layer_host.py).

Where a compiler fuses a chain of small ops (bias, dropout and residual; bias and GELU) one op stands for all of it.
"""

import torch
import torch.nn.functional as F
from torch import nn


def split_heads(mixed, heads, width):
    s, b, _ = mixed.shape
    return torch.split(mixed.view(s, b, heads, 3 * width), width, dim=-1)


def fused_attention(q, k, v):
    """One kernel, from and to Megatron's layout: tokens, batch, heads."""
    s, b, h, d = q.shape
    y = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True)
    return y.permute(2, 0, 1, 3).reshape(s, b, h * d)


def unfused_attention(q, k, v):
    """Megatron's of 2021: two products, a softmax kernel and dropout between them."""
    s, b, h, d = q.shape
    q, k = q.reshape(s, b * h, d), k.reshape(s, b * h, d)
    room = torch.empty(b * h, s, s, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(room, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=0.1)
    weights = F.dropout(torch.softmax(scores.view(b, h, s, s), -1), 0.1)
    v = v.reshape(s, b * h, d)
    y = torch.bmm(weights.view(b * h, s, s), v.transpose(0, 1)).view(b, h, s, d)
    return y.permute(2, 0, 1, 3).contiguous().view(s, b, h * d)


class GptJit(nn.Module):
    """A GPT layer as Megatron runs it."""

    def __init__(self, width, heads, attention=fused_attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        width = x.shape[-1] // self.heads
        y = self.attention(*split_heads(self.qkv(self.norm1(x)), self.heads, width))
        x = torch.add(x, self.out(y))
        return torch.add(x, self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class LlamaJit(nn.Module):
    """A Llama layer with one op for each of norm, rotation and gate."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = split_heads(self.qkv(self.norm1(x)), self.heads, x.shape[-1] // self.heads)
        x = x + self.out(fused_attention(torch.sigmoid(q), torch.sigmoid(k), v))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Gpt(GptJit):
    """A GPT layer, every small op by itself."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        width = x.shape[-1] // self.heads
        x = x + self.out(self.attention(*split_heads(self.qkv(self.norm1(x)), self.heads, width)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Llama(nn.Module):
    """A Llama layer as Hugging Face writes it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        turn = torch.ones(s, d // self.heads, dtype=x.dtype, device=x.device)
        y = rms(x, self.norm1)
        q, k, v = (f(y).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q, turn, turn), rotated(k, turn, turn), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        y = rms(x, self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rms(x, weight):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x, cosine, sine):
    one, other = x.chunk(2, -1)
    return x * cosine + torch.cat((-other, one), -1) * sine


LAYERS = {
    "gpt_jit": GptJit,
    "gpt_unfused_jit": lambda width, heads: GptJit(width, heads, unfused_attention),
    "llama_jit": LlamaJit,
    "gpt": Gpt,
    "llama": Llama,
}


def build(device, layer="gpt", layers=2, width=1024, heads=16):
    """So many layers of a kind, forward and backward, in bfloat16."""
    model = nn.Sequential(*[LAYERS[layer](width, heads) for _ in range(layers)]).to(device, torch.bfloat16)
    x = torch.randn(512, 2, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step
