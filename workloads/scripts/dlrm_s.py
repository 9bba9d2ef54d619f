"""Recommendation with embedding bags, as dlrm_s_pytorch.py: sparse features by offsets, dot interactions, SGD."""

import argparse
import sys
import time

import numpy as np
import torch
import torch.nn as nn


def dash(text):
    return [int(x) for x in text.split("-")]


class DLRM_Net(nn.Module):
    def create_mlp(self, ln, sigmoid_layer):
        layers = nn.ModuleList()
        for i in range(len(ln) - 1):
            n, m = ln[i], ln[i + 1]
            layer = nn.Linear(n, m, bias=True)
            layer.weight.data = torch.tensor(
                np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n)).astype(np.float32), requires_grad=True
            )
            layers.append(layer)
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return nn.Sequential(*layers)

    def create_emb(self, m, ln):
        tables = nn.ModuleList()
        for n in ln:
            table = nn.EmbeddingBag(n, m, mode="sum", sparse=self.sparse)
            nn.init.uniform_(table.weight, -np.sqrt(1 / n), np.sqrt(1 / n))
            tables.append(table)
        return tables

    def __init__(self, m_spa, ln_emb, ln_bot, ln_top, sparse):
        super().__init__()
        self.sparse = sparse
        self.emb_l = self.create_emb(m_spa, ln_emb)
        self.bot_l = self.create_mlp(ln_bot, -1)
        self.top_l = self.create_mlp(ln_top, len(ln_top) - 2)

    def interact_features(self, x, ly):
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        ly = [self.emb_l[k](lS_i[k], lS_o[k]) for k in range(len(self.emb_l))]
        return self.top_l(self.interact_features(x, ly))


def random_batch(args, ln_emb, dense):
    n, hots = args.mini_batch_size, args.num_indices_per_lookup
    X = torch.tensor(np.random.rand(n, dense).astype(np.float32))
    lS_i = [torch.from_numpy(np.random.randint(0, size, n * hots)) for size in ln_emb]
    lS_o = torch.arange(0, n * hots, hots).repeat(len(ln_emb), 1)
    T = torch.tensor(np.random.randint(0, 2, (n, 1)).astype(np.float32))
    return X, lS_o, lS_i, T


def run():
    parser = argparse.ArgumentParser(description="Train Deep Learning Recommendation Model (DLRM)")
    parser.add_argument("--arch-sparse-feature-size", type=int, default=64)
    parser.add_argument("--arch-embedding-size", type=dash, default="-".join(["100000"] * 8 + ["1000000"] * 4))
    parser.add_argument("--arch-mlp-bot", type=dash, default="13-512-256-64")
    parser.add_argument("--arch-mlp-top", type=dash, default="512-512-256-1")
    parser.add_argument("--mini-batch-size", type=int, default=16384)
    parser.add_argument("--num-indices-per-lookup", type=int, default=4)
    parser.add_argument("--num-batches", type=int, default=1000000)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--print-freq", type=int, default=100)
    parser.add_argument("--numpy-rand-seed", type=int, default=123)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--use-gpu", action="store_true")
    args = parser.parse_args()
    np.random.seed(args.numpy_rand_seed)
    torch.manual_seed(args.numpy_rand_seed)
    device = torch.device("cuda" if args.use_gpu else "cpu")
    features = len(args.arch_embedding_size) + 1
    if args.arch_mlp_bot[-1] != args.arch_sparse_feature_size:
        sys.exit("ERROR: arch-sparse-feature-size does not match last dim of bottom mlp")
    top = [features * (features - 1) // 2 + args.arch_mlp_bot[-1], *args.arch_mlp_top]
    dlrm = DLRM_Net(args.arch_sparse_feature_size, args.arch_embedding_size, args.arch_mlp_bot, top, args.sparse)
    dlrm = dlrm.to(device)
    loss_fn = nn.BCELoss(reduction="mean")
    optimizer = torch.optim.SGD(dlrm.parameters(), lr=args.learning_rate)
    batches = [random_batch(args, args.arch_embedding_size, args.arch_mlp_bot[0]) for _ in range(4)]
    total_loss, total_iter, t1 = 0.0, 0, time.time()
    for j in range(args.num_batches):
        X, lS_o, lS_i, T = batches[j % len(batches)]
        Z = dlrm(X.to(device), lS_o.to(device), [S_i.to(device) for S_i in lS_i])
        E = loss_fn(Z, T.to(device))
        optimizer.zero_grad()
        E.backward()
        optimizer.step()
        total_loss += E.detach().cpu().numpy()
        total_iter += 1
        if (j + 1) % args.print_freq == 0:
            ms = 1000.0 * (time.time() - t1) / total_iter
            print(f"Finished training it {j + 1}/{args.num_batches}, {ms:.2f} ms/it, loss {total_loss / total_iter:.6f}")
            total_loss, total_iter, t1 = 0.0, 0, time.time()


if __name__ == "__main__":
    run()
