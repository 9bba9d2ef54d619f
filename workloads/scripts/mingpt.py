"""A small GPT with a Trainer class and callbacks, as minGPT has it: float32, an endless sampler, workers."""

import argparse
import math
import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(c.pdrop), nn.Dropout(c.pdrop)
        self.register_buffer("bias", torch.tril(torch.ones(c.block_size, c.block_size))[None, None])
        self.n_head, self.n_embd = c.n_head, c.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = CausalSelfAttention(c)
        self.mlp = nn.Sequential(
            nn.Linear(c.n_embd, 4 * c.n_embd), NewGELU(), nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(c.pdrop)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.drop, self.h = nn.Dropout(c.pdrop), nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(c.n_embd), nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device).unsqueeze(0)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Trainer:
    def __init__(self, config, model, dataset):
        self.config, self.model, self.train_dataset = config, model.to(config.device), dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.callbacks = defaultdict(list)
        self.iter_num, self.iter_time, self.iter_dt = 0, 0.0, 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def run(self):
        c, model = self.config, self.model
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e8))
        loader = DataLoader(
            self.train_dataset, sampler=sampler, pin_memory=True, batch_size=c.batch_size, num_workers=c.num_workers
        )
        model.train()
        data_iter = iter(loader)
        self.iter_time = time.time()
        while c.max_iters is None or self.iter_num < c.max_iters:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                batch = next(data_iter)
            x, y = [t.to(c.device) for t in batch]
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_norm_clip)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt, self.iter_time = tnow - self.iter_time, tnow


class CharDataset(Dataset):
    def __init__(self, block_size, vocab_size):
        self.data, self.block_size = torch.randint(vocab_size, (1 << 20,)), block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, i):
        chunk = self.data[i : i + self.block_size + 1]
        return chunk[:-1], chunk[1:]


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--max-iters", type=int)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(3407)
    model_config = CfgNode(vocab_size=65, block_size=256, n_layer=6, n_head=6, n_embd=384, pdrop=0.1)
    config = CfgNode(**vars(args), learning_rate=5e-4, num_workers=4, grad_norm_clip=1.0)
    trainer = Trainer(config, GPT(model_config), CharDataset(256, 65))

    def batch_end_callback(t):
        if t.iter_num % 10 == 0:
            print(f"iter_dt {t.iter_dt * 1000:.2f}ms; iter {t.iter_num}: train loss {t.loss.item():.5f}")

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
