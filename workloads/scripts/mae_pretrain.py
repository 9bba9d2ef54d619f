"""Masked autoencoder on images: patches kept by the order of random noise, restored with gather, cosine schedule."""

import argparse
import math
import sys

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(B, N, C))
        return x + self.mlp(self.norm2(x))


class MaskedAutoencoder(nn.Module):
    def __init__(self, size=224, patch=16, dim=768, depth=12, heads=12, dec_dim=512, dec_depth=4, dec_heads=16):
        super().__init__()
        self.patch, n = patch, (size // patch) ** 2
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02, requires_grad=False)
        self.blocks, self.norm = nn.ModuleList(Block(dim, heads) for _ in range(depth)), nn.LayerNorm(dim)
        self.decoder_embed, self.mask_token = nn.Linear(dim, dec_dim), nn.Parameter(torch.zeros(1, 1, dec_dim))
        self.decoder_pos = nn.Parameter(torch.randn(1, n + 1, dec_dim) * 0.02, requires_grad=False)
        self.decoder_blocks = nn.ModuleList(Block(dec_dim, dec_heads) for _ in range(dec_depth))
        self.decoder_norm, self.decoder_pred = nn.LayerNorm(dec_dim), nn.Linear(dec_dim, patch**2 * 3)

    def patchify(self, imgs):
        p, h = self.patch, imgs.shape[2] // self.patch
        x = imgs.reshape(imgs.shape[0], 3, h, p, h, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(imgs.shape[0], h * h, p**2 * 3)

    def random_masking(self, x, mask_ratio):
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, 1, ids_shuffle[:, :len_keep].unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, imgs, mask_ratio):
        x = self.patch_embed(imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1) + self.pos_embed[:, :1], x), dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        y = torch.cat([x[:, 1:], tokens], dim=1)
        y = torch.gather(y, 1, ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        y = torch.cat([x[:, :1], y], dim=1) + self.decoder_pos
        for block in self.decoder_blocks:
            y = block(y)
        pred, target = self.decoder_pred(self.decoder_norm(y))[:, 1:], self.patchify(imgs)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        loss = ((pred - (target - mean) / (var + 1.0e-6) ** 0.5) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


def main():
    p = argparse.ArgumentParser("MAE pre-training")
    p.add_argument("--batch_size", default=128, type=int)
    p.add_argument("--mask_ratio", default=0.75, type=float)
    p.add_argument("--steps", default=100000, type=int)
    p.add_argument("--blr", default=1.5e-4, type=float)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(0)
    model = MaskedAutoencoder().to(args.device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.blr, betas=(0.9, 0.95), weight_decay=0.05)
    scaler = torch.amp.GradScaler(args.device)
    images = torch.randn(args.batch_size, 3, 224, 224).pin_memory()
    for step in range(args.steps):
        for group in opt.param_groups:
            group["lr"] = args.blr * 0.5 * (1.0 + math.cos(math.pi * step / args.steps))
        samples = images.to(args.device, non_blocking=True)
        with torch.amp.autocast(args.device):
            loss = model(samples, args.mask_ratio)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step % 20 == 0:
            print(f"[{step}] loss {loss_value:.4f} lr {opt.param_groups[0]['lr']:.6f}")


if __name__ == "__main__":
    main()
