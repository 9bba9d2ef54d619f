from torch import nn


def build(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
