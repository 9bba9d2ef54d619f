"""Training steps of many kinds, to see whether what holds for a few models holds for others.

`CASES[name] = (builder, arguments)`; `build(device, name)` returns a zero-argument callable that runs one training step.
The same builder runs on a GPU (tools/record.py) and under `presage` without one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def stepper(model, loss_of, opt, amp=None, scaler=None, clip=None, accumulate=1):
    """One training step: zero_grad, forward, backward, (clip), optimizer."""

    def step():
        opt.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            if amp:
                with torch.autocast("cuda", dtype=getattr(torch, amp)):
                    loss = loss_of() / accumulate
            else:
                loss = loss_of() / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            if scaler:
                scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()

    return step


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "adam_loop": lambda p: torch.optim.Adam(p, lr=1e-4, foreach=False),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-4, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "lion_like": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def flags(tf32=False):
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


# ---------------------------------------------------------------- recurrent
class Recurrent(nn.Module):
    def __init__(self, kind, vocab, d, layers, device, bidirectional=False, dropout=0.0):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, device=device)
        make = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.rnn = make(d, d, layers, batch_first=True, bidirectional=bidirectional, dropout=dropout, device=device)
        self.head = nn.Linear(d * (2 if bidirectional else 1), vocab, device=device)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])


def recurrent(device, kind, batch, seq, d, layers, vocab=10000, opt="adam", **kw):
    flags()
    m = Recurrent(kind, vocab, d, layers, device, **kw)
    x = torch.randint(0, vocab, (batch, seq), device=device)
    y = torch.randint(0, vocab, (batch * seq,), device=device)
    return stepper(m, lambda: F.cross_entropy(m(x).view(-1, vocab), y), OPTIMIZERS[opt](m.parameters()), clip=1.0)


# ---------------------------------------------------------------- attention in other dress
class RMSNorm(nn.Module):
    def __init__(self, d, device):
        super().__init__()
        self.w = nn.Parameter(torch.ones(d, device=device))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.w


class GroupedBlock(nn.Module):
    """Grouped-query attention with rotary positions, SwiGLU, optional manual attention, bias or dropout."""

    def __init__(self, d, h, kv, ff, device, how, dropout=0.0):
        super().__init__()
        self.h, self.kv, self.how, self.dropout = h, kv, how, dropout
        self.n1, self.n2 = RMSNorm(d, device), RMSNorm(d, device)
        self.q = nn.Linear(d, d, bias=False, device=device)
        self.k, self.v = (nn.Linear(d, d // h * kv, bias=False, device=device) for _ in range(2))
        self.o = nn.Linear(d, d, bias=False, device=device)
        self.gate, self.up = (nn.Linear(d, ff, bias=False, device=device) for _ in range(2))
        self.down = nn.Linear(ff, d, bias=False, device=device)

    def attend(self, x, cos, sin, bias):
        b, s, d = x.shape
        e = d // self.h
        q = self.q(x).view(b, s, self.h, e).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv, e).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv, e).transpose(1, 2)
        q, k = (t * cos + torch.cat([-t[..., e // 2 :], t[..., : e // 2]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.h // self.kv, 1) for t in (k, v))
        p = self.dropout if self.training else 0.0
        if self.how == "manual":
            a = q @ k.transpose(-1, -2) / e**0.5
            a = a.masked_fill(bias, float("-inf"))
            y = F.dropout(a.softmax(-1), p) @ v
        elif self.how == "bias":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.o(y.transpose(1, 2).reshape(b, s, d))

    def forward(self, x, cos, sin, bias):
        x = x + self.attend(self.n1(x), cos, sin, bias)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, kv, ff, n, device, how, dropout, ckpt):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, device=device)
        self.blocks = nn.ModuleList([GroupedBlock(d, h, kv, ff, device, how, dropout) for _ in range(n)])
        self.norm, self.head = RMSNorm(d, device), nn.Linear(d, vocab, bias=False, device=device)
        self.ckpt = ckpt

    def forward(self, x, cos, sin, bias):
        h = self.emb(x)
        for b in self.blocks:
            if self.ckpt == "reentrant":
                h = checkpoint(b, h, cos, sin, bias, use_reentrant=True)
            elif self.ckpt:
                h = checkpoint(b, h, cos, sin, bias, use_reentrant=False)
            else:
                h = b(h, cos, sin, bias)
        return self.head(self.norm(h))


def decoder(
    device, batch, seq, d, h, kv, ff, n, how="causal", dropout=0.0, dtype=None, amp=None, opt="adamw_fused", ckpt=None,
    vocab=32000, fp16_scaler=False, accumulate=1, clip=None, tf32=False,
):  # fmt: skip
    flags(tf32)
    m = Decoder(vocab, d, h, kv, ff, n, device, how, dropout, ckpt)
    kind = getattr(torch, dtype) if dtype else torch.float32
    m = m.to(kind)
    e = d // h
    angles = torch.rand(seq, e, device=device)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    bias = None
    if how == "manual":
        bias = torch.ones(seq, seq, device=device, dtype=torch.bool).triu(1)
    elif how == "bias":
        bias = torch.rand(1, h, seq, seq, device=device, dtype=torch.bfloat16 if amp else kind)
    x = torch.randint(0, vocab, (batch, seq), device=device)
    y = torch.randint(0, vocab, (batch * seq,), device=device)
    scaler = torch.amp.GradScaler("cuda") if fp16_scaler else None
    o = OPTIMIZERS[opt](m.parameters())
    loss = lambda: F.cross_entropy(m(x, cos, sin, bias).view(-1, vocab).float(), y, label_smoothing=0.1)  # noqa: E731
    return stepper(m, loss, o, amp, scaler, clip, accumulate)


def encoder_layers(device, batch, seq, d, h, n, dropout=0.1, amp=None, opt="adam"):
    """PyTorch's own nn.TransformerEncoder and MultiheadAttention, in training."""
    flags()
    layer = nn.TransformerEncoderLayer(d, h, 4 * d, dropout, batch_first=True, norm_first=True, device=device)
    m = nn.TransformerEncoder(layer, n, enable_nested_tensor=False)
    x = torch.randn(batch, seq, d, device=device)
    y = torch.randn(batch, seq, d, device=device)
    return stepper(m, lambda: F.mse_loss(m(x).float(), y), OPTIMIZERS[opt](m.parameters()), amp)


# ---------------------------------------------------------------- convolution in other dress
class UNet(nn.Module):
    """Diffusion-style: group norm, SiLU, skip connections, strided and transposed convolutions, attention in the middle."""

    def __init__(self, c, device):
        super().__init__()
        conv = lambda i, o, s=1: nn.Sequential(  # noqa: E731
            nn.GroupNorm(8, i, device=device), nn.SiLU(), nn.Conv2d(i, o, 3, s, 1, device=device)
        )
        self.inp = nn.Conv2d(4, c, 3, padding=1, device=device)
        self.d1, self.d2, self.d3 = conv(c, c), conv(c, 2 * c, 2), conv(2 * c, 4 * c, 2)
        self.norm = nn.GroupNorm(8, 4 * c, device=device)
        self.qkv, self.proj = (nn.Conv2d(4 * c, k * c, 1, device=device) for k in (12, 4))
        self.u2 = nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1, device=device)
        self.m2 = conv(4 * c, 2 * c)
        self.m1 = conv(3 * c, c)
        self.out = nn.Conv2d(c, 4, 3, padding=1, device=device)

    def forward(self, x):
        a = self.d1(self.inp(x))
        b = self.d2(a)
        h = self.d3(b)
        n, c, y, w = h.shape
        q, k, v = self.qkv(self.norm(h)).view(n, 3, 8, c // 8, y * w).transpose(-1, -2).unbind(1)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(n, c, y, w))
        h = self.m2(torch.cat([self.u2(h), b], 1))
        h = self.m1(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), a], 1))
        return self.out(h)


def unet(device, batch, size, c, amp=None, channels_last=False, opt="adamw_fused", tf32=False):
    flags(tf32)
    m = UNet(c, device)
    x, y = (torch.randn(batch, 4, size, size, device=device) for _ in range(2))
    if channels_last:
        m, x = m.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return stepper(m, lambda: F.smooth_l1_loss(m(x).float(), y), OPTIMIZERS[opt](m.parameters()), amp)


class SmallNet(nn.Module):
    """Odd convolutions: dilated, grouped, 1-d or 3-d, instance norm, leaky ReLU, average and max pooling, upsampling."""

    def __init__(self, dims, c, device):
        super().__init__()
        conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
        pool, bn = getattr(nn, f"AvgPool{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        self.body = nn.Sequential(
            conv(3, c, 3, padding=2, dilation=2, device=device),
            norm(c, affine=True, device=device),
            nn.LeakyReLU(0.1),
            conv(c, 2 * c, 3, stride=2, padding=1, groups=4, device=device),
            bn(2 * c, device=device),
            nn.ReLU6(),
            pool(2),
            conv(2 * c, 4 * c, 1, bias=False, device=device),
            nn.Hardswish(),
            getattr(nn, f"AdaptiveMaxPool{dims}d")(1),
            nn.Flatten(),
            nn.Linear(4 * c, 100, device=device),
        )

    def forward(self, x):
        return self.body(x)


def small_net(device, dims, batch, size, c, opt="sgd_nesterov", amp=None):
    flags()
    m = SmallNet(dims, c, device)
    x = torch.randn(batch, 3, *[size] * dims, device=device)
    y = torch.randint(0, 100, (batch,), device=device)
    return stepper(m, lambda: F.cross_entropy(m(x).float(), y), OPTIMIZERS[opt](m.parameters()), amp)


# ---------------------------------------------------------------- sparse, graphs, ranking
def graph_net(device, nodes, edges, d, layers, opt="adam"):
    """Message passing with gather, index_add and scatter."""
    flags()
    lins = nn.ModuleList([nn.Linear(2 * d, d, device=device) for _ in range(layers)])
    src, dst = (torch.randint(0, nodes, (edges,), device=device) for _ in range(2))
    x0 = torch.randn(nodes, d, device=device)
    y = torch.randint(0, d, (nodes,), device=device)

    def loss():
        x = x0
        for lin in lins:
            m = F.elu(lin(torch.cat([x[src], x.index_select(0, dst)], 1)))
            x = torch.zeros_like(x).index_add(0, dst, m) + x
        return F.nll_loss(F.log_softmax(x, 1), y)

    return stepper(lins, loss, OPTIMIZERS[opt](lins.parameters()))


def routed(device, tokens, d, ff, experts, k, opt="adamw"):
    """A mixture of experts with a fixed capacity: softmax, topk, sort, scatter; no data-dependent shapes."""
    flags()
    router = nn.Linear(d, experts, bias=False, device=device)
    w1 = nn.Parameter(torch.randn(experts, d, ff, device=device) / d**0.5)
    w2 = nn.Parameter(torch.randn(experts, ff, d, device=device) / ff**0.5)
    x = torch.randn(tokens, d, device=device)
    y = torch.randn(tokens, d, device=device)
    capacity = tokens * k // experts

    def loss():
        weight, expert = router(x).softmax(-1).topk(k, -1)
        order = expert.flatten().argsort()
        token = order // k
        slots = x[token].view(experts, capacity, d)
        out = torch.bmm(F.gelu(torch.bmm(slots, w1)), w2).view(-1, d)
        back = torch.zeros_like(x).index_add(0, token, out * weight.flatten()[order].unsqueeze(1))
        return F.mse_loss(back, y)

    ps = [*router.parameters(), w1, w2]
    holder = nn.ParameterList(ps)
    return stepper(holder, loss, OPTIMIZERS[opt](ps))


def two_tower(device, batch, rows, d, opt="adam_fused", sparse=False):
    """Retrieval: shared embeddings, cosine similarity, in-batch softmax, weight norm, prelu."""
    flags()
    user, item = (nn.Embedding(rows, d, device=device, sparse=sparse) for _ in range(2))
    tower = nn.ModuleList(
        [nn.Sequential(nn.Linear(d, 256, device=device), nn.PReLU(device=device), nn.Linear(256, 64, device=device)) for _ in range(2)]
    )
    u, i = (torch.randint(0, rows, (batch,), device=device) for _ in range(2))
    target = torch.arange(batch, device=device)

    def loss():
        a, b = (F.normalize(t(e(x)), dim=-1) for t, e, x in zip(tower, (user, item), (u, i)))
        return F.cross_entropy(a @ b.t() / 0.05, target)

    if sparse:
        o = torch.optim.SGD([*user.parameters(), *item.parameters(), *tower.parameters()], lr=1e-2)
    else:
        o = OPTIMIZERS[opt]([*user.parameters(), *item.parameters(), *tower.parameters()])
    return stepper(tower, loss, o)


def autoencoder(device, batch, size, widths, opt="rmsprop", act="tanh"):
    flags()
    sizes = [size, *widths, *reversed(widths[:-1]), size]
    acts = {"tanh": nn.Tanh, "softplus": nn.Softplus, "mish": nn.Mish, "elu": nn.ELU, "sigmoid": nn.Sigmoid}
    ls = [m for i, o in zip(sizes, sizes[1:]) for m in (nn.Linear(i, o, device=device), acts[act](), nn.LayerNorm(o, device=device))]
    m = nn.Sequential(*ls)
    x = torch.randn(batch, size, device=device)
    return stepper(m, lambda: F.huber_loss(m(x), x) + 1e-4 * m[0].weight.abs().sum(), OPTIMIZERS[opt](m.parameters()))


# ---------------------------------------------------------------- Hugging Face, from configs
def hf(device, kind, batch, seq, opt="adamw", amp=None, dtype=None):
    import transformers as T

    flags()
    small = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 5000}
    made = {
        "t5": lambda: (T.T5Config(vocab_size=5000, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0), T.T5ForConditionalGeneration),
        "mixtral": lambda: (T.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4), T.MixtralForCausalLM),
        "qwen2": lambda: (T.Qwen2Config(**small, num_key_value_heads=2), T.Qwen2ForCausalLM),
        "gemma": lambda: (T.GemmaConfig(**small, num_key_value_heads=1, head_dim=64), T.GemmaForCausalLM),
        "neox": lambda: (T.GPTNeoXConfig(**small), T.GPTNeoXForCausalLM),
        "opt": lambda: (T.OPTConfig(hidden_size=256, ffn_dim=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=5000), T.OPTForCausalLM),
        "roberta": lambda: (T.RobertaConfig(**small), T.RobertaForMaskedLM),
        "distilbert": lambda: (T.DistilBertConfig(dim=256, n_layers=2, n_heads=4, hidden_dim=512, vocab_size=5000), T.DistilBertForMaskedLM),
        "whisper": lambda: (
            T.WhisperConfig(d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                            encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=5000, max_source_positions=200,
                            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1), T.WhisperForConditionalGeneration),
        "mamba": lambda: (T.MambaConfig(hidden_size=256, num_hidden_layers=2, vocab_size=5000), T.MambaForCausalLM),
        "wav2vec2": lambda: (T.Wav2Vec2Config(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
                                              vocab_size=40, mask_time_prob=0.0, layerdrop=0.0), T.Wav2Vec2ForCTC),
        "swin": lambda: (T.SwinConfig(embed_dim=48, depths=[2, 2], num_heads=[2, 4], image_size=112, num_labels=10), T.SwinForImageClassification),
    }  # fmt: skip
    config, cls = made[kind]()
    with torch.device(device):
        m = cls(config)
    m.train()
    if dtype:
        m = m.to(getattr(torch, dtype))
    ids = lambda n: torch.randint(3, 4000, (batch, n), device=device)  # noqa: E731
    if kind == "t5":
        x, y = ids(seq), ids(seq)
        loss = lambda: m(input_ids=x, labels=y).loss  # noqa: E731
    elif kind == "whisper":
        x, y = torch.randn(batch, 80, 400, device=device), ids(seq)
        loss = lambda: m(input_features=x, labels=y).loss  # noqa: E731
    elif kind == "wav2vec2":
        x = torch.randn(batch, 16000, device=device)
        loss = lambda: m(input_values=x).logits.float().pow(2).mean()  # noqa: E731
    elif kind == "swin":
        x, y = torch.randn(batch, 3, 112, 112, device=device), torch.randint(0, 10, (batch,), device=device)
        loss = lambda: m(pixel_values=x, labels=y).loss  # noqa: E731
    else:
        x = ids(seq)
        loss = lambda: m(input_ids=x, labels=x).loss  # noqa: E731
    return stepper(m, loss, OPTIMIZERS[opt](m.parameters()), amp)


GQA = {"batch": 4, "seq": 1024, "d": 1024, "h": 16, "kv": 4, "ff": 2816, "n": 4}

CASES = {
    "lstm_2l": (recurrent, {"kind": "lstm", "batch": 64, "seq": 128, "d": 512, "layers": 2}),
    "gru_bi": (recurrent, {"kind": "gru", "batch": 32, "seq": 100, "d": 256, "layers": 1, "bidirectional": True}),
    "rnn_dropout": (recurrent, {"kind": "rnn", "batch": 32, "seq": 64, "d": 256, "layers": 2, "dropout": 0.2, "opt": "adamax"}),
    "gqa_amp": (decoder, {**GQA, "amp": "bfloat16"}),
    "gqa_bf16_ckpt": (decoder, {**GQA, "dtype": "bfloat16", "ckpt": "plain", "opt": "adamw"}),
    "gqa_bf16_reentrant": (decoder, {**GQA, "dtype": "bfloat16", "ckpt": "reentrant"}),
    "gqa_fp32": (decoder, {**GQA, "seq": 512, "opt": "adam"}),
    "gqa_fp32_tf32": (decoder, {**GQA, "seq": 512, "tf32": True, "opt": "adam_fused"}),
    "gqa_fp16_scaler": (decoder, {**GQA, "amp": "float16", "fp16_scaler": True, "clip": 1.0}),
    "gqa_manual": (decoder, {**GQA, "seq": 512, "how": "manual", "amp": "bfloat16", "dropout": 0.1}),
    "gqa_bias": (decoder, {**GQA, "how": "bias", "amp": "bfloat16"}),
    "gqa_dropout": (decoder, {**GQA, "dropout": 0.1, "amp": "bfloat16", "opt": "adam_loop"}),
    "gqa_bias_fp32": (decoder, {**GQA, "seq": 512, "how": "bias", "dropout": 0.1}),
    "gqa_accumulate": (decoder, {**GQA, "batch": 2, "amp": "bfloat16", "accumulate": 3, "clip": 1.0}),
    "gqa_head256": (decoder, {**GQA, "h": 4, "kv": 2, "dtype": "bfloat16"}),
    "encoder_fp32": (encoder_layers, {"batch": 16, "seq": 256, "d": 512, "h": 8, "n": 3}),
    "encoder_amp": (encoder_layers, {"batch": 16, "seq": 256, "d": 512, "h": 8, "n": 3, "amp": "bfloat16", "opt": "nadam"}),
    "unet_fp32": (unet, {"batch": 8, "size": 64, "c": 64}),
    "unet_amp_cl": (unet, {"batch": 8, "size": 64, "c": 64, "amp": "bfloat16", "channels_last": True}),
    "unet_fp16": (unet, {"batch": 8, "size": 64, "c": 64, "amp": "float16", "tf32": True, "opt": "sgd_fused"}),
    "conv1d": (small_net, {"dims": 1, "batch": 64, "size": 4096, "c": 32}),
    "conv2d": (small_net, {"dims": 2, "batch": 32, "size": 96, "c": 32, "amp": "bfloat16"}),
    "conv3d": (small_net, {"dims": 3, "batch": 4, "size": 32, "c": 16}),
    "graph_net": (graph_net, {"nodes": 20000, "edges": 200000, "d": 64, "layers": 3}),
    "routed": (routed, {"tokens": 8192, "d": 512, "ff": 1024, "experts": 8, "k": 2}),
    "two_tower": (two_tower, {"batch": 4096, "rows": 500000, "d": 64}),
    "two_tower_sparse": (two_tower, {"batch": 4096, "rows": 500000, "d": 64, "sparse": True}),
    "autoencoder": (autoencoder, {"batch": 4096, "size": 784, "widths": [512, 128, 16]}),
    "autoencoder_mish": (autoencoder, {"batch": 4096, "size": 784, "widths": [512, 128, 16], "act": "mish", "opt": "lion_like"}),
    "autoencoder_sigmoid": (autoencoder, {"batch": 4096, "size": 784, "widths": [512, 64], "act": "sigmoid", "opt": "adagrad"}),
    **{
        f"hf_{k}": (hf, {"kind": k, "batch": 8, "seq": 128})
        for k in ("t5", "mixtral", "qwen2", "gemma", "neox", "opt", "roberta", "distilbert", "whisper", "mamba", "wav2vec2", "swin")
    },
    "hf_qwen2_bf16": (hf, {"kind": "qwen2", "batch": 8, "seq": 512, "dtype": "bfloat16", "opt": "adamw_fused"}),
    "hf_t5_amp": (hf, {"kind": "t5", "batch": 8, "seq": 128, "amp": "bfloat16"}),
}


def build(device, name):
    """One training step of the named case, its tensors on `device`."""
    function, arguments = CASES[name]
    return function(device, **arguments)
