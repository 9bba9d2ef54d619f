"""A LightningModule under Lightning's Trainer: bf16-mixed, clipped gradients, a validation loop."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


if __name__ == "__main__":
    data = TensorDataset(torch.randn(512, 64), torch.randint(8, (512,)))
    trainer = L.Trainer(
        max_epochs=2, precision="bf16-mixed", gradient_clip_val=1.0, accelerator="gpu", devices=1, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(data, 32, num_workers=2), DataLoader(data, 32))
