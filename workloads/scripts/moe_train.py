"""A transformer with a mixture of experts, two per token: a loop over the experts, tokens found with torch.where."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x):
        flat = x.view(-1, x.size(-1))
        scores = F.softmax(self.gate(flat), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(scores, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == k)
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weights[token, nth, None])
        density = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0)
        aux = len(self.experts) * (density * scores.mean(0)).sum()
        return out.view_as(x), aux


class Block(nn.Module):
    def __init__(self, dim, heads, experts, top_k):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = MoE(dim, 4 * dim, experts, top_k)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, C))
        y, aux = self.moe(self.norm2(x))
        return x + y, aux


class Model(nn.Module):
    def __init__(self, vocab, dim, layers, heads, experts, top_k):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(dim, heads, experts, top_k) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)

    def forward(self, ids):
        x, total = self.embed(ids), 0.0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(self.norm(x)), total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--seq-len", type=int, default=1024)
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--experts", type=int, default=8)
    p.add_argument("--top-k", type=int, default=2)
    p.add_argument("--max-iters", type=int, default=100000)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(0)
    vocab = 32000
    model = Model(vocab, args.dim, args.layers, args.dim // 64, args.experts, args.top_k).to(args.device, torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    tokens = torch.randint(vocab, (64, args.batch_size, args.seq_len + 1))
    for it in range(args.max_iters):
        batch = tokens[it % 64].to(args.device)
        logits, aux = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().view(-1, vocab), batch[:, 1:].reshape(-1)) + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if it % 25 == 0:
            print(f"iter {it}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
