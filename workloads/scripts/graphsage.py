"""GraphSAGE over batches of small graphs with torch_geometric: DataLoader of graphs, global pooling."""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, global_mean_pool


def graphs(n, nodes, degree, features):
    """Graphs of one size: ring neighbours and random ones."""
    for k in range(n):
        edges = torch.randint(nodes, (2, nodes * degree))
        yield Data(x=torch.randn(nodes, features), edge_index=edges, y=torch.tensor([k % 2]))


class Net(torch.nn.Module):
    def __init__(self, features, hidden, layers, classes):
        super().__init__()
        sizes = [features] + [hidden] * layers
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(hidden) for _ in range(layers))
        self.lin1, self.lin2 = torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, classes)

    def forward(self, x, edge_index, batch):
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu()
        x = global_mean_pool(x, batch)
        x = F.dropout(self.lin1(x).relu(), p=0.5, training=self.training)
        return self.lin2(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=128)
    p.add_argument("--graphs", type=int, default=2560)
    p.add_argument("--nodes", type=int, default=256)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--epochs", type=int, default=10000)
    args = p.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(list(graphs(args.graphs, args.nodes, 8, 64)), batch_size=args.batch_size, shuffle=True)
    model = Net(64, args.hidden, args.layers, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for data in loader:
            data = data.to(device)
            optimizer.zero_grad()
            out = model(data.x, data.edge_index, data.batch)
            loss = F.cross_entropy(out, data.y)
            loss.backward()
            total_loss += loss.item() * data.num_graphs
            optimizer.step()
        print(f"Epoch: {epoch:03d}, Loss: {total_loss / args.graphs:.4f}")


if __name__ == "__main__":
    main()
