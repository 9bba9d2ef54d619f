"""Node classification on one graph with torch_geometric, as its gcn.py: masks, dropout, evaluation every epoch."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["gcn", "gat"], default="gcn")
parser.add_argument("--nodes", type=int, default=169343)
parser.add_argument("--edges", type=int, default=1166243)
parser.add_argument("--features", type=int, default=128)
parser.add_argument("--hidden_channels", type=int, default=256)
parser.add_argument("--classes", type=int, default=40)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=100000)
parser.add_argument("--eval_every", type=int, default=50)
args = parser.parse_args()
torch.manual_seed(12345)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

edge_index = torch.randint(args.nodes, (2, args.edges))
y = torch.randint(args.classes, (args.nodes,))
data = Data(x=torch.randn(args.nodes, args.features), edge_index=edge_index, y=y)
data.train_mask = torch.zeros(args.nodes, dtype=torch.bool)
data.train_mask[: args.nodes // 2] = True
data.val_mask = ~data.train_mask
data = data.to(device)


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        if args.model == "gcn":
            self.conv1 = GCNConv(in_channels, hidden_channels)
            self.conv2 = GCNConv(hidden_channels, out_channels)
        else:
            self.conv1 = GATConv(in_channels, hidden_channels // 8, heads=8, dropout=0.5)
            self.conv2 = GATConv(hidden_channels, out_channels, heads=1, concat=False, dropout=0.5)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


model = GCN(args.features, args.hidden_channels, args.classes).to(device)
optimizer = torch.optim.Adam(
    [dict(params=model.conv1.parameters(), weight_decay=5e-4), dict(params=model.conv2.parameters(), weight_decay=0)],
    lr=args.lr,
)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return [int((pred[m] == data.y[m]).sum()) / int(m.sum()) for m in (data.train_mask, data.val_mask)]


for epoch in range(1, args.epochs + 1):
    start = time.time()
    loss = train()
    if epoch % args.eval_every == 0:
        train_acc, val_acc = test()
        print(f"Epoch {epoch:03d}, Loss {loss:.4f}, Train {train_acc:.4f}, Val {val_acc:.4f}, {time.time() - start:.3f}s")
