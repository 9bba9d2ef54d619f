"""Training steps with and without a change that might speed them up: pairs to measure what a change is worth.

`PAIRS[name] = (edit, base, changed)`; base and changed are (builder, arguments, ways). `build(device, name, changed)` returns a
zero-argument callable that runs one training step. Ways: "graph" (one CUDA graph a step), "compile" (the loss compiled), "sync"
(wait for the GPU after every step).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import varied


class Tables(nn.Module):
    """A recommendation model: embedding tables looked up one by one, or all in one lookup of one large table."""

    def __init__(self, sizes, dim, dense, top, joined, device):
        super().__init__()
        self.joined, self.count = joined, len(sizes)
        rows = [sum(sizes)] if joined else sizes
        self.tables = nn.ModuleList([nn.EmbeddingBag(n, dim, mode="sum", device=device) for n in rows])
        first = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
        self.register_buffer("first", first, persistent=False)
        self.dense = nn.Sequential(nn.Linear(dense, 256, device=device), nn.ReLU(), nn.Linear(256, dim, device=device))
        wide = dim * (len(sizes) + 1)
        self.top = nn.Sequential(
            nn.Linear(wide, top, device=device), nn.ReLU(), nn.Linear(top, top, device=device), nn.ReLU(),
            nn.Linear(top, 1, device=device),
        )  # fmt: skip

    def forward(self, x, index):
        """`index`: [table, sample, lookups]."""
        tables, samples, looked = index.shape
        if self.joined:
            flat = (index + self.first[:, None, None]).view(tables * samples, looked)
            parts = self.tables[0](flat).view(tables, samples, -1).unbind(0)
        else:
            parts = [table(one) for table, one in zip(self.tables, index, strict=True)]
        return self.top(torch.cat([self.dense(x), *parts], 1)).squeeze(1)


def recommender(device, batch, tables, rows, looked, dim=64, joined=False, opt="sgd", top=512):
    varied.flags()
    m = Tables([rows] * tables, dim, 13, top, joined, device)
    x = torch.rand(batch, 13, device=device)
    index = torch.randint(0, rows, (tables, batch, looked), device=device)
    y = torch.randint(0, 2, (batch,), device=device).float()
    loss = lambda: F.binary_cross_entropy_with_logits(m(x, index), y)  # noqa: E731
    return varied.stepper(m, loss, OPTIMIZERS[opt](m.parameters()))


class Mlp(nn.Module):
    """Layer norm, GELU and bias in chains that a compiler fuses; many small tensors for optimizers."""

    def __init__(self, d, layers, device):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d, device=device), nn.Linear(d, d, device=device), nn.GELU()) for _ in range(layers)
        )

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def mlp(device, batch, d, layers, opt="adam", amp=None, tf32=False):
    varied.flags(tf32)
    m = Mlp(d, layers, device)
    x, y = (torch.randn(batch, d, device=device) for _ in range(2))
    return varied.stepper(m, lambda: F.mse_loss(m(x).float(), y), OPTIMIZERS[opt](m.parameters()), amp)


OPTIMIZERS = varied.OPTIMIZERS | {
    "adam_capturable": lambda p: torch.optim.Adam(p, lr=1e-4, capturable=True),
    "adamw_fused_capturable": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True, capturable=True),
}
varied.OPTIMIZERS.update(OPTIMIZERS)

D = {"batch": 4, "seq": 1024, "d": 1024, "h": 16, "kv": 16, "ff": 2816, "n": 8, "amp": "bfloat16"}
SMALL = {"batch": 1, "seq": 256, "d": 1024, "h": 16, "kv": 16, "ff": 2816, "n": 16, "amp": "bfloat16"}
F32 = {k: v for k, v in D.items() if k != "amp"} | {"seq": 512}
UNET = {"batch": 8, "size": 64, "c": 64}
ENC = {"batch": 16, "seq": 256, "d": 512, "h": 8, "n": 6}
REC = {"batch": 2048, "tables": 26, "rows": 100_000, "looked": 1}
CONV = {"dims": 2, "batch": 64, "size": 96, "c": 64}
RNN = {"kind": "lstm", "batch": 64, "seq": 128, "d": 512, "layers": 2}
dec, enc, unet, conv, rnn = varied.decoder, varied.encoder_layers, varied.unet, varied.small_net, varied.recurrent


def _pair(edit, builder, base, changed, ways=((), ())):
    return edit, (builder, base, ways[0]), (builder, base | changed, ways[1])


GRAPH, COMPILE, SYNC = ((), ("graph",)), ((), ("compile",)), (("sync",), ())
CAP = {"opt": "adamw_fused_capturable"}
PAIRS = {
    "fused_adam/decoder": _pair("fused_optimizer", dec, D | {"opt": "adamw"}, {"opt": "adamw_fused"}),
    "fused_adam/decoder_small": _pair("fused_optimizer", dec, SMALL | {"opt": "adamw"}, {"opt": "adamw_fused"}),
    "fused_adam/mlp": _pair("fused_optimizer", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam"}, {"opt": "adam_fused"}),
    "fused_adam/encoder": _pair("fused_optimizer", enc, ENC | {"opt": "adam"}, {"opt": "adam_fused"}),
    "foreach_adam/decoder_small": _pair("foreach_optimizer", dec, SMALL | {"opt": "adam_loop"}, {"opt": "adam"}),
    "foreach_adam/mlp": _pair("foreach_optimizer", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam_loop"}, {"opt": "adam"}),
    "foreach_adam/encoder": _pair("foreach_optimizer", enc, ENC | {"opt": "adam_loop"}, {"opt": "adam"}),
    "cuda_graph/decoder_small": _pair("cuda_graph", dec, SMALL | CAP, {}, GRAPH),
    "cuda_graph/decoder": _pair("cuda_graph", dec, D | CAP, {}, GRAPH),
    "cuda_graph/mlp": _pair("cuda_graph", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam_capturable"}, {}, GRAPH),
    "cuda_graph/encoder": _pair("cuda_graph", enc, ENC | CAP, {}, GRAPH),
    "cuda_graph/recommender": _pair("cuda_graph", recommender, REC, {}, GRAPH),
    "cuda_graph/unet": _pair("cuda_graph", unet, UNET | CAP, {}, GRAPH),
    "tf32/decoder": _pair("tf32", dec, F32, {"tf32": True}),
    "tf32/unet": _pair("tf32", unet, UNET, {"tf32": True}),
    "tf32/mlp": _pair("tf32", mlp, {"batch": 4096, "d": 2048, "layers": 12}, {"tf32": True}),
    "autocast/decoder": _pair("autocast_bf16", dec, F32, {"amp": "bfloat16"}),
    "autocast/encoder": _pair("autocast_bf16", enc, ENC, {"amp": "bfloat16"}),
    "autocast/unet": _pair("autocast_bf16", unet, UNET, {"amp": "bfloat16"}),
    "autocast/conv": _pair("autocast_bf16", conv, CONV, {"amp": "bfloat16"}),
    "autocast/mlp": _pair("autocast_bf16", mlp, {"batch": 4096, "d": 2048, "layers": 12}, {"amp": "bfloat16"}),
    "bf16/decoder": _pair("bf16", dec, D, {"amp": None, "dtype": "bfloat16"}),
    "fused_attention/decoder": _pair("fused_attention", dec, D | {"how": "manual"}, {"how": "causal"}),
    "fused_attention/decoder_512": _pair("fused_attention", dec, D | {"how": "manual", "seq": 512}, {"how": "causal"}),
    "fused_attention/decoder_f32": _pair("fused_attention", dec, F32 | {"how": "manual"}, {"how": "causal"}),
    "channels_last/unet": _pair("channels_last", unet, UNET | {"amp": "bfloat16"}, {"channels_last": True}),
    "channels_last/unet_f32": _pair("channels_last", unet, UNET | {"tf32": True}, {"channels_last": True}),
    "checkpoint/decoder": _pair("checkpoint", dec, D, {"ckpt": "plain"}),
    "checkpoint/decoder_small": _pair("checkpoint", dec, SMALL, {"ckpt": "plain"}),
    "checkpoint/decoder_f32": _pair("checkpoint", dec, F32, {"ckpt": "plain"}),
    "accumulate/decoder": _pair("accumulate", dec, D | {"batch": 8}, {"batch": 4, "accumulate": 2}),
    "accumulate/decoder_small": _pair("accumulate", dec, SMALL | {"batch": 2}, {"batch": 1, "accumulate": 2}),
    "batch/decoder": _pair("batch", dec, D, {"batch": 8}),
    "batch/decoder_small": _pair("batch", dec, SMALL, {"batch": 4}),
    "batch/recommender": _pair("batch", recommender, REC, {"batch": 8192}),
    "batch/lstm": _pair("batch", rnn, RNN, {"batch": 128}),
    "joined_tables/recommender": _pair("joined_tables", recommender, REC, {"joined": True}),
    "joined_tables/recommender_long": _pair("joined_tables", recommender, REC | {"looked": 20}, {"joined": True}),
    "joined_tables/recommender_wide": _pair("joined_tables", recommender, REC | {"batch": 16384, "dim": 128}, {"joined": True}),
    "no_sync/decoder_small": _pair("no_sync", dec, SMALL, {}, SYNC),
    "no_sync/mlp": _pair("no_sync", mlp, {"batch": 2048, "d": 1024, "layers": 24, "opt": "adam_fused"}, {}, SYNC),
    "no_sync/recommender": _pair("no_sync", recommender, REC, {}, SYNC),
    "compile/decoder": _pair("compile", dec, D, {}, COMPILE),
    "compile/encoder": _pair("compile", enc, ENC | {"amp": "bfloat16"}, {}, COMPILE),
    "compile/mlp": _pair("compile", mlp, {"batch": 16384, "d": 1024, "layers": 12, "opt": "adam_fused", "tf32": True}, {}, COMPILE),
    "compile/unet": _pair("compile", unet, UNET | {"amp": "bfloat16", "channels_last": True}, {}, COMPILE),
}  # fmt: skip


def build(device, name, changed=False):
    """One training step of a pair, as it is or changed; ways are the measurer's to apply."""
    builder, arguments, _ = PAIRS[name][2 if changed else 1]
    return builder(device, **arguments)
