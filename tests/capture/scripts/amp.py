"""float16 with a GradScaler and accumulated gradients; --optimizers each gives every parameter its own, in backward."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--optimizers", default="one")
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--no-train", action="store_true")
args = parser.parse_args()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
x = torch.randn(32, 64, device="cuda")


def train_step(model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x).square().mean() / args.accumulate


if args.no_train:
    with torch.no_grad():
        for _ in range(5):
            train_step(model, x)
elif args.optimizers == "each":
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def stepped(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    for _ in range(args.iterations):
        model(x).square().mean().backward()
else:
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for i in range(args.iterations * args.accumulate):
        loss = train_step(model, x)
        scaler.scale(loss).backward()
        if (i + 1) % args.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
