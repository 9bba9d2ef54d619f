"""A loop with accelerate: prepare, accumulate, clip, gather the loss."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--mixed_precision", default="bf16")
args = parser.parse_args()
accelerator = Accelerator(
    gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(640, 32), torch.randn(640, 1)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = tqdm(range(len(loader)), disable=not accelerator.is_local_main_process)
for _ in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        average = accelerator.gather(loss.detach().repeat(16)).mean()
        progress.set_postfix(loss=average.item())
        progress.update(1)
