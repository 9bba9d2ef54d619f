
import random
import torch

layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12)).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(40):
    x = torch.randn(8, 64, device="cuda")
    for layer in layers:
        if random.random() >= 0.05:
            x = layer(x)
    optimizer.zero_grad()
    x.sum().backward()
    optimizer.step()
