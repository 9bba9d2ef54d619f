"""U-Net for segmentation, as Pytorch-UNet's train.py: Dice and cross-entropy losses, AMP, RMSprop, channels last."""

import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset


class Masks(Dataset):
    def __init__(self, n=5000, size=320, classes=4):
        self.n, self.images = n, torch.rand(16, 3, size, size)
        self.masks = torch.randint(classes, (16, size, size))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"image": self.images[i % 16], "mask": self.masks[i % 16]}


class DoubleConv(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, n_classes, width=64):
        super().__init__()
        w = [width * k for k in (1, 2, 4, 8, 16)]
        self.inc = DoubleConv(3, w[0])
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b)) for a, b in zip(w, w[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(w[-2::-1], w[:0:-1]))
        self.conv = nn.ModuleList(DoubleConv(2 * a, a) for a in w[-2::-1])
        self.outc = nn.Conv2d(w[0], n_classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, conv in zip(self.up, self.conv):
            x = conv(torch.cat([skips.pop(), up(x)], dim=1))
        return self.outc(x)


def dice_loss(probs, target, epsilon=1e-6):
    inter = 2 * (probs * target).sum(dim=(-1, -2))
    sets = probs.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets = torch.where(sets == 0, inter, sets)
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()


def train_model(model, device, args):
    loader = DataLoader(Masks(), args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    optimizer = optim.RMSprop(model.parameters(), lr=args.lr, weight_decay=1e-8, momentum=0.999, foreach=True)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    criterion = nn.CrossEntropyLoss()
    global_step = 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        epoch_loss = 0
        for batch in loader:
            images = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = batch["mask"].to(device=device, dtype=torch.long)
            with torch.autocast(device.type, enabled=args.amp):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
                onehot = F.one_hot(true_masks, args.classes).permute(0, 3, 1, 2).float()
                loss += dice_loss(F.softmax(masks_pred, dim=1).float(), onehot)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.item()
        logging.info(f"epoch {epoch}: loss {epoch_loss / len(loader):.4f} after {global_step} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=1000)
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--classes", "-c", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(args.classes).to(memory_format=torch.channels_last).to(device)
    train_model(model, device, args)
