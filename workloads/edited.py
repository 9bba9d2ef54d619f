"""Training steps with and without a change that might speed them up: pairs to measure what a change is worth.

`PAIRS[name] = (edit, base, changed)`: the edit as `presage whatif --apply` takes it; base and changed are (builder, arguments,
ways). `build(device, name, changed)` returns a zero-argument callable that runs one training step. Ways: "sync" (wait for the GPU
after every step), "item" (read the loss on the host before the backward pass); "graph" (one CUDA graph a step) and "compile" (the
loss compiled) are the measurer's to apply.
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


class Float8(torch.autograd.Function):
    """A product in fp8 forward and back, every matrix scaled by its largest number."""

    @staticmethod
    def scaled(x, kind):
        scale = torch.finfo(kind).max / x.abs().max().float().clamp(min=1e-12)
        return (x.float() * scale).clamp(torch.finfo(kind).min, torch.finfo(kind).max).to(kind), scale.reciprocal()

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        (a, by), (b, of) = Float8.scaled(x, torch.float8_e4m3fn), Float8.scaled(w, torch.float8_e4m3fn)
        return torch._scaled_mm(a, b.t(), scale_a=by, scale_b=of, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        c, by = Float8.scaled(g.contiguous(), torch.float8_e5m2)
        wt, of = Float8.scaled(w.t().contiguous(), torch.float8_e4m3fn)
        dx = torch._scaled_mm(c, wt.t(), scale_a=by, scale_b=of, out_dtype=torch.bfloat16)
        gt, by = Float8.scaled(g.t().contiguous(), torch.float8_e5m2)
        xt, of = Float8.scaled(x.t().contiguous(), torch.float8_e4m3fn)
        return dx, torch._scaled_mm(gt, xt.t(), scale_a=by, scale_b=of, out_dtype=torch.bfloat16)


class Plain(nn.Module):
    """Linear layers and ReLU, in bf16 or fp8."""

    def __init__(self, d, ff, layers, float8, device):
        super().__init__()
        sizes = [(ff, d), (d, ff)] * layers
        self.weights = nn.ParameterList([torch.randn(*s, device=device, dtype=torch.bfloat16) * 0.02 for s in sizes])
        self.product = Float8.apply if float8 else lambda x, w: F.linear(x, w)

    def forward(self, x):
        for a, b in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = x + self.product(F.relu(self.product(x, a)), b)
        return x


def plain(device, batch, d, ff, layers, float8=False, opt="adam_fused"):
    varied.flags()
    m = Plain(d, ff, layers, float8, device)
    x, y = (torch.randn(batch, d, device=device, dtype=torch.bfloat16) for _ in range(2))
    return varied.stepper(m, lambda: F.mse_loss(m(x), y), OPTIMIZERS[opt](m.parameters()))


class ByHand(nn.Module):
    """Layer norm and GELU written out, or PyTorch's own."""

    def __init__(self, d, fused, device):
        super().__init__()
        self.fused, self.linear = fused, nn.Linear(d, d, device=device)
        self.w, self.b = nn.Parameter(torch.ones(d, device=device)), nn.Parameter(torch.zeros(d, device=device))

    def forward(self, x):
        if self.fused:
            return x + F.gelu(self.linear(F.layer_norm(x, x.shape[-1:], self.w, self.b)), approximate="tanh")
        m = x.mean(-1, keepdim=True)
        v = (x - m).pow(2).mean(-1, keepdim=True)
        y = self.linear((x - m) * torch.rsqrt(v + 1e-5) * self.w + self.b)
        return x + 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))


def by_hand(device, batch, d, layers, fused=False, tf32=True, opt="adam_fused"):
    varied.flags(tf32)
    m = nn.Sequential(*[ByHand(d, fused, device) for _ in range(layers)])
    x, y = (torch.randn(batch, d, device=device) for _ in range(2))
    return varied.stepper(m, lambda: F.mse_loss(m(x), y), OPTIMIZERS[opt](m.parameters()))


class Vision(nn.Module):
    """A residual net: convolutions, batch norm, ReLU."""

    def __init__(self, c, blocks, device):
        super().__init__()
        part = lambda i, o, s: nn.Sequential(  # noqa: E731
            nn.Conv2d(i, o, 3, s, 1, bias=False, device=device), nn.BatchNorm2d(o, device=device)
        )
        self.first = part(3, c, 2)
        self.pairs = nn.ModuleList(nn.Sequential(part(c, c, 1), nn.ReLU(), part(c, c, 1)) for _ in range(blocks))
        self.wider = part(c, 2 * c, 2)
        self.more = nn.ModuleList(nn.Sequential(part(2 * c, 2 * c, 1), nn.ReLU(), part(2 * c, 2 * c, 1)) for _ in range(blocks))
        self.head = nn.Linear(2 * c, 1000, device=device)

    def forward(self, x):
        x = F.relu(self.first(x))
        for p in self.pairs:
            x = F.relu(x + p(x))
        x = F.relu(self.wider(x))
        for p in self.more:
            x = F.relu(x + p(x))
        return self.head(x.mean((2, 3)))


def vision(device, batch, size, c, blocks, amp=None, channels_last=False, tf32=False, opt="sgd_nesterov"):
    varied.flags(tf32)
    m = Vision(c, blocks, device)
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(0, 1000, (batch,), device=device)
    if channels_last:
        m, x = m.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return varied.stepper(m, lambda: F.cross_entropy(m(x).float(), y), OPTIMIZERS[opt](m.parameters()), amp)


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
LARGE = D | {"batch": 16}
WIDE = D | {"d": 2048, "ff": 5632, "batch": 8, "n": 6}
LONG = {"batch": 64, "seq": 512, "d": 768, "h": 12, "n": 6}
FF = {"batch": 16384, "d": 4096, "ff": 16384, "layers": 4}
HAND = {"batch": 16384, "d": 2048, "layers": 12}
NET = {"batch": 128, "size": 128, "c": 128, "blocks": 4}
BIG_UNET = {"batch": 64, "size": 64, "c": 128}
RNN = {"kind": "lstm", "batch": 64, "seq": 128, "d": 512, "layers": 2}
dec, enc, unet, conv, rnn = varied.decoder, varied.encoder_layers, varied.unet, varied.small_net, varied.recurrent


def _pair(edit, builder, base, changed, ways=((), ())):
    return edit, (builder, base, ways[0]), (builder, base | changed, ways[1])


GRAPH, COMPILE, SYNC, ITEM = ((), ("graph",)), ((), ("compile",)), (("sync",), ()), (("item",), ())
CAP = {"opt": "adamw_fused_capturable"}
PAIRS = {
    "fused_adam/decoder": _pair("fused_adam", dec, D | {"opt": "adamw"}, {"opt": "adamw_fused"}),
    "fused_adam/decoder_small": _pair("fused_adam", dec, SMALL | {"opt": "adamw"}, {"opt": "adamw_fused"}),
    "fused_adam/mlp": _pair("fused_adam", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam"}, {"opt": "adam_fused"}),
    "fused_adam/encoder": _pair("fused_adam", enc, ENC | {"opt": "adam"}, {"opt": "adam_fused"}),
    "foreach_adam/decoder_small": _pair("foreach_adam", dec, SMALL | {"opt": "adam_loop"}, {"opt": "adam"}),
    "foreach_adam/mlp": _pair("foreach_adam", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam_loop"}, {"opt": "adam"}),
    "foreach_adam/encoder": _pair("foreach_adam", enc, ENC | {"opt": "adam_loop"}, {"opt": "adam"}),
    "cuda_graph/decoder_small": _pair("cuda_graph", dec, SMALL | CAP, {}, GRAPH),
    "cuda_graph/decoder": _pair("cuda_graph", dec, D | CAP, {}, GRAPH),
    "cuda_graph/mlp": _pair("cuda_graph", mlp, {"batch": 512, "d": 512, "layers": 48, "opt": "adam_capturable"}, {}, GRAPH),
    "cuda_graph/encoder": _pair("cuda_graph", enc, ENC | CAP, {}, GRAPH),
    "cuda_graph/recommender": _pair("cuda_graph", recommender, REC, {}, GRAPH),
    "cuda_graph/unet": _pair("cuda_graph", unet, UNET | CAP, {}, GRAPH),
    "tf32/decoder": _pair("tf32", dec, F32, {"tf32": True}),
    "tf32/unet": _pair("tf32", unet, UNET, {"tf32": True}),
    "tf32/mlp": _pair("tf32", mlp, {"batch": 4096, "d": 2048, "layers": 12}, {"tf32": True}),
    "autocast/decoder": _pair("autocast", dec, F32, {"amp": "bfloat16"}),
    "autocast/encoder": _pair("autocast", enc, ENC, {"amp": "bfloat16"}),
    "autocast/unet": _pair("autocast", unet, UNET, {"amp": "bfloat16"}),
    "autocast/conv": _pair("autocast", conv, CONV, {"amp": "bfloat16"}),
    "autocast/mlp": _pair("autocast", mlp, {"batch": 4096, "d": 2048, "layers": 12}, {"amp": "bfloat16"}),
    "bf16/decoder": _pair("bf16", dec, D, {"amp": None, "dtype": "bfloat16"}),
    "fused_attention/decoder": _pair("fused_attention", dec, D | {"how": "manual"}, {"how": "causal"}),
    "fused_attention/decoder_512": _pair("fused_attention", dec, D | {"how": "manual", "seq": 512}, {"how": "causal"}),
    "fused_attention/decoder_f32": _pair("fused_attention", dec, F32 | {"how": "manual"}, {"how": "causal"}),
    "channels_last/unet": _pair("channels_last", unet, UNET | {"amp": "bfloat16"}, {"channels_last": True}),
    "channels_last/unet_f32": _pair("channels_last", unet, UNET | {"tf32": True}, {"channels_last": True}),
    "checkpoint/decoder": _pair("checkpoint", dec, D, {"ckpt": "plain"}),
    "checkpoint/decoder_small": _pair("checkpoint", dec, SMALL, {"ckpt": "plain"}),
    "checkpoint/decoder_f32": _pair("checkpoint", dec, F32, {"ckpt": "plain"}),
    "accumulate/decoder": _pair("batch=4,accumulate=2", dec, D | {"batch": 8}, {"batch": 4, "accumulate": 2}),
    "accumulate/decoder_small": _pair("batch=1,accumulate=2", dec, SMALL | {"batch": 2}, {"batch": 1, "accumulate": 2}),
    "batch/decoder": _pair("batch=8", dec, D, {"batch": 8}),
    "batch/decoder_small": _pair("batch=4", dec, SMALL, {"batch": 4}),
    "batch/recommender": _pair("batch=8192", recommender, REC, {"batch": 8192}),
    "batch/lstm": _pair("batch=128", rnn, RNN, {"batch": 128}),
    "joined_tables/recommender": _pair("table_batched", recommender, REC, {"joined": True}),
    "joined_tables/recommender_long": _pair("table_batched", recommender, REC | {"looked": 20}, {"joined": True}),
    "joined_tables/recommender_wide": _pair("table_batched", recommender, REC | {"batch": 16384, "dim": 128}, {"joined": True}),
    "no_sync/decoder_small": _pair("no_sync", dec, SMALL, {}, SYNC),
    "no_sync/mlp": _pair("no_sync", mlp, {"batch": 2048, "d": 1024, "layers": 24, "opt": "adam_fused"}, {}, SYNC),
    "no_sync/recommender": _pair("no_sync", recommender, REC, {}, SYNC),
    "compile/decoder": _pair("compile", dec, D, {}, COMPILE),
    "compile/encoder": _pair("compile", enc, ENC | {"amp": "bfloat16"}, {}, COMPILE),
    "compile/mlp": _pair("compile", mlp, {"batch": 16384, "d": 1024, "layers": 12, "opt": "adam_fused", "tf32": True}, {}, COMPILE),
    "compile/unet": _pair("compile", unet, UNET | {"amp": "bfloat16", "channels_last": True}, {}, COMPILE),
    # steps in which the GPU is the limit
    "fused_adam/decoder_wide": _pair("fused_adam", dec, WIDE | {"opt": "adamw"}, {"opt": "adamw_fused"}),
    "fused_adam/plain": _pair("fused_adam", plain, FF | {"opt": "adam"}, {"opt": "adam_fused"}),
    "foreach_adam/decoder_wide": _pair("foreach_adam", dec, WIDE | {"opt": "adam_loop"}, {"opt": "adam"}),
    "cuda_graph/encoder_large": _pair("cuda_graph", enc, LONG | {"amp": "bfloat16"} | CAP, {}, GRAPH),
    "cuda_graph/decoder_large": _pair("cuda_graph", dec, LARGE | CAP, {}, GRAPH),
    "cuda_graph/vision": _pair("cuda_graph", vision, NET | {"amp": "bfloat16", "channels_last": True}, {}, GRAPH),
    "tf32/decoder_large": _pair("tf32", dec, F32 | {"batch": 16}, {"tf32": True}),
    "tf32/vision": _pair("tf32", vision, NET | {"channels_last": True}, {"tf32": True}),
    "tf32/by_hand": _pair("tf32", by_hand, HAND | {"tf32": False}, {"tf32": True}),
    "autocast/decoder_large": _pair("autocast", dec, F32 | {"batch": 16}, {"amp": "bfloat16"}),
    "autocast/encoder_large": _pair("autocast", enc, LONG, {"amp": "bfloat16"}),
    "autocast/vision": _pair("autocast", vision, NET | {"channels_last": True, "tf32": True}, {"amp": "bfloat16"}),
    "bf16/decoder_large": _pair("bf16", dec, LARGE, {"amp": None, "dtype": "bfloat16"}),
    "fp8/plain": _pair("fp8=eager", plain, FF, {"float8": True}),
    "fp8/plain_wide": _pair("fp8=eager", plain, FF | {"d": 8192, "ff": 16384, "layers": 2}, {"float8": True}),
    "fused_attention/decoder_large": _pair("fused_attention", dec, LARGE | {"how": "manual"}, {"how": "causal"}),
    "fused_attention/decoder_long": _pair(
        "fused_attention", dec, D | {"how": "manual", "seq": 4096, "n": 4}, {"how": "causal"}
    ),
    "fused_chains/by_hand": _pair("fused_chains", by_hand, HAND, {"fused": True}),
    "fused_chains/by_hand_wide": _pair("fused_chains", by_hand, HAND | {"d": 4096, "layers": 6}, {"fused": True}),
    "channels_last/unet_large": _pair("channels_last", unet, BIG_UNET | {"amp": "bfloat16"}, {"channels_last": True}),
    "channels_last/vision": _pair("channels_last", vision, NET | {"amp": "bfloat16"}, {"channels_last": True}),
    "channels_last/vision_tf32": _pair("channels_last", vision, NET | {"tf32": True}, {"channels_last": True}),
    "checkpoint/decoder_large": _pair("checkpoint", dec, LARGE, {"ckpt": "plain"}),
    "checkpoint/decoder_long": _pair("checkpoint", dec, D | {"batch": 4, "seq": 4096, "n": 4}, {"ckpt": "plain"}),
    "accumulate/decoder_large": _pair("batch=8,accumulate=2", dec, LARGE, {"batch": 8, "accumulate": 2}),
    "accumulate/decoder_f32": _pair("batch=4,accumulate=4", dec, F32 | {"batch": 16}, {"batch": 4, "accumulate": 4}),
    "batch/decoder_large": _pair("batch=32", dec, LARGE, {"batch": 32}),
    "batch/plain": _pair("batch=4096", plain, FF, {"batch": 4096}),
    "batch/vision": _pair("batch=256", vision, NET | {"amp": "bfloat16", "channels_last": True}, {"batch": 256}),
    "joined_tables/recommender_large": _pair("table_batched", recommender, REC | {"batch": 65536}, {"joined": True}),
    "no_sync/encoder_item": _pair("no_sync", enc, LONG | {"amp": "bfloat16"}, {}, ITEM),
    "no_sync/plain_item": _pair("no_sync", plain, FF | {"batch": 2048}, {}, ITEM),
    "no_sync/recommender_item": _pair("no_sync", recommender, REC | {"batch": 16384, "dim": 128}, {}, ITEM),
    "compile/decoder_large": _pair("compile", dec, LARGE, {}, COMPILE),
    "compile/encoder_large": _pair("compile", enc, LONG, {}, COMPILE),
    "compile/vision": _pair("compile", vision, NET | {"amp": "bfloat16", "channels_last": True}, {}, COMPILE),
    "compile/by_hand": _pair("compile", by_hand, HAND, {}, COMPILE),
}  # fmt: skip


def waited(step):
    """A step after which the host waits for the GPU."""

    def one():
        step()
        torch.cuda.synchronize()

    return one


def read_on_host(model, loss_of, *args, **kw):
    """A stepper whose loss is read before the backward pass."""

    def loss():
        found = loss_of()
        found.item()
        return found

    return STEPPER(model, loss, *args, **kw)


STEPPER = varied.stepper


def built(device, side):
    """A step of (builder, arguments, ways)."""
    builder, arguments, ways = side
    before, varied.stepper = varied.stepper, read_on_host if "item" in ways else varied.stepper
    try:
        step = builder(device, **arguments)
    finally:
        varied.stepper = before
    return waited(step) if "sync" in ways else step


def build(device, name, changed=False):
    """One training step of a pair, as it is or changed."""
    return built(device, PAIRS[name][2 if changed else 1])


def base(device, pair, **changes):
    """The step of a pair as it is, but for these arguments."""
    builder, arguments, ways = PAIRS[pair][1]
    return built(device, (builder, arguments | changes, ways))
