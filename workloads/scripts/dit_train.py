"""A diffusion transformer, as DiT's train.py: noise schedule, class labels dropped, adaptive norms, EMA of weights."""

import argparse
import logging
from collections import OrderedDict
from copy import deepcopy
from time import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    ema_params, model_params = OrderedDict(ema_model.named_parameters()), OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    def __init__(self, size=32, patch=2, channels=4, dim=768, depth=12, heads=12, classes=1000):
        super().__init__()
        self.x_embedder = nn.Conv2d(channels, dim, patch, patch)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02, requires_grad=False)
        self.t_embedder = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder, self.classes = nn.Embedding(classes + 1, dim), classes
        self.blocks = nn.ModuleList([DiTBlock(dim, heads) for _ in range(depth)])
        self.final = nn.Linear(dim, patch * patch * channels)

    @staticmethod
    def timestep_embedding(t, dim=256, max_period=10000):
        freqs = torch.exp(-torch.log(torch.tensor(max_period)) * torch.arange(dim // 2) / (dim // 2)).to(t.device)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x, t, y):
        drop = torch.rand(y.shape[0], device=y.device) < 0.1
        y = torch.where(drop, self.classes, y)
        c = self.t_embedder(self.timestep_embedding(t)) + self.y_embedder(y)
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x, c)
        x = self.final(x)
        B, N, _ = x.shape
        h = int(N**0.5)
        return torch.einsum("nhwpqc->nchpwq", x.reshape(B, h, h, 2, 2, 4)).reshape(B, 4, 2 * h, 2 * h)


def main(args):
    torch.manual_seed(args.seed)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    logger = logging.getLogger(__name__)
    device = args.device
    model = DiT(depth=args.depth)
    ema = deepcopy(model).to(device)
    for p in ema.parameters():
        p.requires_grad = False
    model = model.to(device)
    betas = torch.linspace(1e-4, 0.02, 1000)
    alphas_bar = torch.cumprod(1 - betas, 0).to(device)
    logger.info(f"DiT Parameters: {sum(p.numel() for p in model.parameters()):,}")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    dataset = TensorDataset(torch.randn(2048, 4, 32, 32), torch.randint(1000, (2048,)))
    loader = DataLoader(dataset, args.global_batch_size, shuffle=True, pin_memory=True, drop_last=True)
    update_ema(ema, model, decay=0)
    model.train()
    ema.eval()
    train_steps, log_steps, running_loss, start_time = 0, 0, 0, time()
    for epoch in range(args.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            t = torch.randint(0, 1000, (x.shape[0],), device=device)
            noise = torch.randn_like(x)
            a = alphas_bar[t].view(-1, 1, 1, 1)
            loss = ((model(a.sqrt() * x + (1 - a).sqrt() * noise, t, y) - noise) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model)
            running_loss += loss.item()
            log_steps += 1
            train_steps += 1
            if train_steps % args.log_every == 0:
                rate = log_steps / (time() - start_time)
                logger.info(f"(step={train_steps:07d}) Loss: {running_loss / log_steps:.4f}, Steps/Sec: {rate:.2f}")
                running_loss, log_steps, start_time = 0, 0, time()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    main(parser.parse_args())
