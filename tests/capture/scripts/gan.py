"""A GAN: two optimizers that take turns; the critic steps `n_critic` times for each step of the generator."""

import sys

import torch
from torch import nn

n_critic = int(sys.argv[1]) if len(sys.argv) > 1 else 1
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
netG = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128)).to(device)
netD = nn.Sequential(nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for i in range(200):
    real = torch.randn(16, 128, device=device)
    netD.zero_grad()
    errD_real = criterion(netD(real), torch.ones(16, 1, device=device))
    errD_real.backward()
    fake = netG(torch.randn(16, 32, device=device))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(16, 1, device=device))
    errD_fake.backward()
    optD.step()
    if (i + 1) % n_critic == 0:
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(16, 1, device=device))
        errG.backward()
        optG.step()
        print("[%d] Loss_D: %.4f Loss_G: %.4f" % (i, (errD_real + errD_fake).item(), errG.item()))
