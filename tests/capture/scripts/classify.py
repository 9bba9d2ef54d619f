"""An image classifier in the style of the ImageNet examples: argparse, AverageMeter, loader workers, evaluation."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, 64, 64), index % 10


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt, self.sum, self.count = name, fmt, 0, 0

    def update(self, value, n=1):
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def train(loader, model, criterion, optimizer, device, args):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target)[0][0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"[{i}/{len(loader)}] {time.time() - end:.3f} {losses} {top1}")


def validate(loader, model, device):
    model.eval()
    right = 0
    with torch.no_grad():
        for images, target in loader:
            right += (model(images.to(device)).argmax(1) == target.to(device)).sum().item()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int, default=32)
    parser.add_argument("--workers", "-j", type=int, default=4)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--print-freq", type=int, default=10)
    args = parser.parse_args()
    device = torch.device(args.device)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    options = {"num_workers": args.workers, "pin_memory": True, "persistent_workers": args.workers > 0}
    loader = DataLoader(Images(args.images), batch_size=args.batch_size, shuffle=True, **options)
    held_out = DataLoader(Images(64), batch_size=args.batch_size, **options)
    for epoch in range(90):
        train(loader, model, criterion, optimizer, device, args)
        print("accuracy", validate(held_out, model, device))
        scheduler.step()
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth")


if __name__ == "__main__":
    main()
