"""A module of a package: python -m pack.train width=128 (settings as hydra takes them)."""

import sys

import torch

from .net import build


def main():
    options = dict(word.split("=") for word in sys.argv[1:])
    width = int(options.get("width", 64))
    model = build(width).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, width, device="cuda")).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
