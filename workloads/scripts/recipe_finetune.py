"""Full fine-tuning as a recipe class, as torchtune has it: a config file with overrides, setup, train, cleanup."""

import ast
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

CONFIG = {
    "model.dim": 2048, "model.layers": 8, "model.heads": 16, "model.kv_heads": 4, "model.vocab": 32000,
    "batch_size": 2, "max_seq_len": 1024, "gradient_accumulation_steps": 1, "clip_grad_norm": 1.0, "lr": 2e-5,
    "max_steps": 100000, "dtype": "bf16", "device": "cuda", "seed": 0, "enable_activation_checkpointing": True,
    "log_every_n_steps": 1,
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.scale


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(4 * dim, dim, bias=False)
        self.sa_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)

    def rotate(self, x, rope):
        shaped = x.float().reshape(*x.shape[:-1], -1, 2)
        cos, sin = rope[: x.size(1), None].unbind(-1)
        out = torch.stack(
            [shaped[..., 0] * cos - shaped[..., 1] * sin, shaped[..., 1] * cos + shaped[..., 0] * sin], -1
        )
        return out.flatten(3).type_as(x)

    def forward(self, x, rope):
        b, s, _ = x.shape
        h = self.sa_norm(x)
        q = self.rotate(self.q(h).view(b, s, self.heads, self.head_dim), rope).transpose(1, 2)
        k = self.rotate(self.k(h).view(b, s, self.kv_heads, self.head_dim), rope).transpose(1, 2)
        v = self.v(h).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim, head_dim = cfg["model.dim"], cfg["model.dim"] // cfg["model.heads"]
        self.tok = nn.Embedding(cfg["model.vocab"], dim)
        layers = range(cfg["model.layers"])
        self.layers = nn.ModuleList(Layer(dim, cfg["model.heads"], cfg["model.kv_heads"]) for _ in layers)
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, cfg["model.vocab"], bias=False)
        self.recompute = cfg["enable_activation_checkpointing"]
        angles = torch.outer(torch.arange(4096), 10000 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("rope", torch.stack([angles.cos(), angles.sin()], -1).float(), persistent=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, self.rope, use_reentrant=False) if self.recompute else layer(x, self.rope)
        return self.output(self.norm(x)).float()


class Alpaca(Dataset):
    def __init__(self, n, length, vocab):
        self.n, self.length, self.vocab = n, length, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        tokens = torch.randint(self.vocab, (self.length,))
        labels = tokens.clone()
        labels[: self.length // 4] = -100  # the prompt
        return {"tokens": tokens, "labels": labels}


class FullFinetuneRecipe:
    def __init__(self, cfg):
        self.cfg, self.device = cfg, torch.device(cfg["device"])
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg["dtype"]]
        self.global_step = 0
        torch.manual_seed(cfg["seed"])

    def setup(self):
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        with self.device:
            self._model = Decoder(self.cfg)
        torch.set_default_dtype(default)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self.cfg["lr"], fused=True)
        data = Alpaca(10_000_000, self.cfg["max_seq_len"], self.cfg["model.vocab"])
        self._dataloader = DataLoader(data, batch_size=self.cfg["batch_size"], drop_last=True)
        self._loss_fn = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")

    def _loss_step(self, batch):
        labels = batch.pop("labels")
        logits = self._model(batch["tokens"])
        labels = torch.hstack((labels[..., 1:], torch.full_like(labels[..., :1], -100)))
        return self._loss_fn(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))

    def train(self):
        self._optimizer.zero_grad()
        t0, running_loss, num_tokens = time.perf_counter(), 0.0, 0
        accumulation = self.cfg["gradient_accumulation_steps"]
        for idx, batch in enumerate(self._dataloader):
            batch = {k: v.to(self.device) for k, v in batch.items()}
            current = (batch["labels"] != -100).sum()
            num_tokens += current
            loss = self._loss_step(batch)
            running_loss += loss.detach()
            loss.backward()
            if (idx + 1) % accumulation:
                continue
            for p in self._model.parameters():
                p.grad *= 1.0 / num_tokens
            grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=self.cfg["clip_grad_norm"])
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self.global_step += 1
            if self.global_step % self.cfg["log_every_n_steps"] == 0:
                loss_to_log = running_loss.item() / num_tokens.item()
                seconds = time.perf_counter() - t0
                print(f"{self.global_step}|Loss: {loss_to_log:.3f} norm {grad_norm.item():.2f} {seconds:.3f} s")
            t0, running_loss, num_tokens = time.perf_counter(), 0.0, 0
            if self.global_step >= self.cfg["max_steps"]:
                return

    def cleanup(self):
        del self._model


def recipe_main():
    cfg = dict(CONFIG)
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in cfg:
            sys.exit(f"unknown setting {key}")
        try:
            cfg[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            cfg[key] = value
    recipe = FullFinetuneRecipe(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    recipe_main()
