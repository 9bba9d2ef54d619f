"""A text classifier as a LightningModule: bf16-mixed, gradient clipping, logging, a schedule by steps."""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, n, length, vocab):
        self.n, self.length, self.words = n, length, torch.randint(vocab, (1 << 18,))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        start = i * 61 % (len(self.words) - self.length)
        return self.words[start : start + self.length], i % 5


class ReviewData(pl.LightningDataModule):
    def __init__(self, batch_size, length, workers):
        super().__init__()
        self.batch_size, self.length, self.workers = batch_size, length, workers

    def train_dataloader(self):
        data = Reviews(10_000_000, self.length, 30000)
        return DataLoader(data, self.batch_size, num_workers=self.workers, pin_memory=True, persistent_workers=True)


class TextClassifier(pl.LightningModule):
    def __init__(self, vocab=30000, width=768, layers=8, heads=12, classes=5, length=256, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids) + self.position).mean(1))

    def training_step(self, batch, batch_idx):
        ids, label = batch
        logits = self(ids)
        loss = F.cross_entropy(logits, label)
        self.log("train_loss", loss)
        self.log("train_acc", (logits.argmax(-1) == label).float().mean())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=200000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--max-steps", type=int, default=100000)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--accelerator", default="auto")
    args = p.parse_args()
    pl.seed_everything(7)
    trainer = pl.Trainer(
        max_steps=args.max_steps, precision="bf16-mixed", gradient_clip_val=1.0, logger=False, devices=1,
        enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=50, accelerator=args.accelerator,
    )  # fmt: skip
    trainer.fit(TextClassifier(layers=args.layers), datamodule=ReviewData(args.batch_size, 256, args.workers))


if __name__ == "__main__":
    main()
