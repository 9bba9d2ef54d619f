"""A Vision Transformer fine-tuned on a few classes: new head, mixup, label smoothing, two learning rates, bf16."""

import argparse
import math

import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, n, classes):
        self.n, self.classes, self.images = n, classes, torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return (self.images[i % 64].float() / 255 - 0.5) / 0.25, i % self.classes


def mixup(x, y, classes, alpha=0.2):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    perm = torch.randperm(x.size(0), device=x.device)
    onehot = nn.functional.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[perm], lam * onehot + (1 - lam) * onehot[perm]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--classes", type=int, default=100)
    p.add_argument("--steps", type=int, default=100000)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.manual_seed(0)

    model = torchvision.models.vit_b_16(weights=None)
    model.heads.head = nn.Linear(model.heads.head.in_features, args.classes)
    model.to(args.device)
    head = list(model.heads.parameters())
    body = [q for n, q in model.named_parameters() if not n.startswith("heads.")]
    opt = torch.optim.AdamW([{"params": body, "lr": args.lr}, {"params": head, "lr": 10 * args.lr}], weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 500) * 0.5 * (1 + math.cos(math.pi * s / args.steps))
    )
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    data = Pictures(args.steps * args.batch_size, args.classes)
    loader = DataLoader(data, args.batch_size, shuffle=False, num_workers=args.workers, pin_memory=True)
    model.train()
    for step, (x, y) in enumerate(loader):
        x, y = x.to(args.device, non_blocking=True), y.to(args.device, non_blocking=True)
        x, soft = mixup(x, y, args.classes)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = loss_fn(model(x), soft)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
