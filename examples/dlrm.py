"""A small DLRM: `presage predict examples/dlrm.py:build --arg batch=2048`.

Dense features go through a network, indices through embedding tables; the products of all pairs go through another.
"""

from itertools import pairwise

import torch
from torch import nn

TABLES, ROWS, WIDTH = 8, 100_000, 64


def layers(*sizes):
    parts = [part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*parts)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = layers(13, 512, 256, WIDTH)
        self.top = layers(WIDTH + TABLES * (TABLES + 1) // 2, 512, 256, 1)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        found = [table(indices[k], offsets) for k, table in enumerate(self.tables)]
        both = torch.stack([x, *found], 1)
        pairs = torch.bmm(both, both.transpose(1, 2))
        row, column = torch.tril_indices(TABLES + 1, TABLES + 1, -1, device=x.device)
        return self.top(torch.cat([x, pairs[:, row, column]], 1))


def build(device, batch=2048, lookups=20):
    model = DLRM().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = torch.randn(batch, 13, device=device)
    indices = torch.randint(0, ROWS, (TABLES, batch * lookups), device=device)
    offsets = torch.arange(0, batch * lookups, lookups, device=device)
    labels = torch.rand(batch, 1, device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, indices, offsets), labels)
        loss.backward()
        optimizer.step()

    return step
