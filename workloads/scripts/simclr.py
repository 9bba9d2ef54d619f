"""SimCLR with a ResNet: two views of every image, InfoNCE over the batch, fp16 with GradScaler, accuracy of the match."""

import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models as models
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, n=1_000_000, size=96):
        self.n, self.images = n, torch.rand(256, 3, size, size)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        image = self.images[i % 256]
        return [image.flip(-1) if i % 2 else image, image * 0.8 + 0.1], i % 10


class ResNetSimCLR(nn.Module):
    def __init__(self, base_model, out_dim):
        super().__init__()
        self.backbone = models.__dict__[base_model](num_classes=out_dim)
        dim_mlp = self.backbone.fc.in_features
        self.backbone.fc = nn.Sequential(nn.Linear(dim_mlp, dim_mlp), nn.ReLU(), self.backbone.fc)

    def forward(self, x):
        return self.backbone(x)


class SimCLR:
    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.model, self.optimizer, self.scheduler = args, model.to(args.device), optimizer, scheduler
        self.criterion = torch.nn.CrossEntropyLoss().to(args.device)

    def info_nce_loss(self, features):
        labels = torch.cat([torch.arange(self.args.batch_size) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(self.args.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(self.args.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long).to(self.args.device)
        return logits / self.args.temperature, labels

    def train(self, train_loader):
        scaler = torch.amp.GradScaler(self.args.device, enabled=self.args.fp16_precision)
        n_iter = 0
        for epoch in range(self.args.epochs):
            for images, _ in train_loader:
                images = torch.cat(images, dim=0).to(self.args.device)
                with torch.autocast(self.args.device, dtype=torch.float16, enabled=self.args.fp16_precision):
                    features = self.model(images)
                    logits, labels = self.info_nce_loss(features)
                    loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
                if n_iter % self.args.log_every_n_steps == 0:
                    top1 = (logits.argmax(1) == labels).float().mean()
                    logging.info(f"Epoch: {epoch} step {n_iter} Loss: {loss.item():.4f} Top1: {100 * top1.item():.2f}")
                n_iter += 1
            self.scheduler.step()


def main():
    parser = argparse.ArgumentParser(description="PyTorch SimCLR")
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("-j", "--workers", default=8, type=int)
    parser.add_argument("--epochs", default=200, type=int)
    parser.add_argument("-b", "--batch-size", default=256, type=int)
    parser.add_argument("--lr", default=0.0003, type=float)
    parser.add_argument("--out_dim", default=128, type=int)
    parser.add_argument("--temperature", default=0.07, type=float)
    parser.add_argument("--log-every-n-steps", default=100, type=int)
    parser.add_argument("--fp16-precision", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    loader = DataLoader(
        TwoViews(), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
    )
    model = ResNetSimCLR(args.arch, args.out_dim)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0)
    SimCLR(args, model, optimizer, scheduler).train(loader)


if __name__ == "__main__":
    main()
