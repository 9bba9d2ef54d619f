"""Training loops that presage watches on a GPU (tools/measure_watch.py), as steps that it can also predict."""

import torch
import torch.nn.functional as F
from torch import nn


def trainer_step(device, batch=8, sequence=512):
    """What Hugging Face's Trainer runs per step with bf16=True: GPT-2 small, AdamW (fused), clipped gradients."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(50257, (batch, sequence), device=device)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Mlp(nn.Sequential):
    def __init__(self, width=4096, layers=8):
        super().__init__(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])


def lightning_step(device, batch=8192, width=4096):
    """What Lightning runs per step with precision="bf16-mixed": an MLP, Adam."""
    model = Mlp(width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(batch, width, device=device)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()

    return step
