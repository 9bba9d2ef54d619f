"""Measure on a GPU what training jobs run most: fp8, bf16 and expert products, attention, casts, and sustained mixes.

    PYTHONPATH=src python tools/measure_jobs.py OUT [products experts attention casts sustained]

Writes OUT/NAME.json.gz. A burst is a few calls in a row, queued behind a kernel that only waits, so that the host's
launches cost nothing; seconds are those between two events, over the calls. Operands are slices of one random buffer.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from presage_fit.calibrate.power import GpuSensor, Load, _one, _watts

Row = dict[str, Any]
Call = Callable[[], Any]
WAIT = 2_000_000  # cycles
FP8 = torch.float8_e4m3fn


class Bench:
    """Random operands, and the time of calls on them."""

    def __init__(self, elements: int = 2_200_000_000) -> None:
        self.bf16 = torch.empty(elements, device="cuda", dtype=torch.bfloat16).normal_()
        self.fp8 = torch.empty(elements, device="cuda", dtype=FP8)
        for part in range(0, elements, 1 << 28):
            self.fp8[part : part + (1 << 28)] = self.bf16[part : part + (1 << 28)].to(FP8)
        self.one = torch.ones((), device="cuda", dtype=torch.float32)

    def some(self, dtype: torch.dtype, *shape: int, offset: int = 0) -> torch.Tensor:
        size = 1
        for n in shape:
            size *= n
        buffer = self.fp8 if dtype == FP8 else self.bf16
        offset = min(offset, buffer.numel() - size) // 128 * 128
        return buffer[offset : offset + size].view(*shape)

    def seconds(self, call: Call, at_least: float = 6e-4, most: int = 8) -> float:
        """A burst at the full clock."""
        call()
        torch.cuda.synchronize()
        once = self._burst(call, 1)
        return self._burst(call, max(2, min(most, int(at_least / once) + 1)))

    def _burst(self, call: Call, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / calls


def tried(bench: Bench, call: Call) -> float | str:
    try:
        return float(f"{bench.seconds(call):.5g}")
    except Exception as e:  # what this torch cannot do is part of the result
        return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}"


WIDTHS = (
    512, 640, 768, 896, 1024, 1280, 1408, 1536, 1792, 2048, 2304, 2560, 2816, 3072, 3584, 3840, 4096, 4608, 5120, 5632,
    6144, 7168, 8192, 9216, 10240, 11008, 12288, 13824, 14336, 14400, 16384, 18432, 20480, 24576, 28672, 32768,
)  # fmt: skip
TOKENS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)


def product_shapes(draws: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Forward products (tokens, width, width) and weight gradients (width, width, tokens)."""
    rng = random.Random(seed)
    out = []
    while len(out) < draws:
        tokens, n, k = rng.choice(TOKENS), rng.choice(WIDTHS), rng.choice(WIDTHS)
        shape = (tokens, n, k) if rng.random() < 0.65 else (n, k, tokens)
        if 4e9 < 2.0 * tokens * n * k < 2.5e13:
            out.append(shape)
    return out


def products(bench: Bench) -> list[Row]:
    return [_product(bench, *shape) for shape in product_shapes(600)]


def _product(bench: Bench, m: int, n: int, k: int) -> Row:
    a, b = bench.some(FP8, m, k), bench.some(FP8, n, k, offset=m * k)
    x, w = bench.some(torch.bfloat16, m, k), bench.some(torch.bfloat16, n, k, offset=m * k)
    ra, rb = bench.one.expand(m, 1).contiguous(), bench.one.expand(1, n).contiguous()
    ways = {
        "bf16": lambda: x @ w.t(),
        "fp8": lambda: torch._scaled_mm(a, b.t(), bench.one, bench.one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "fp8_exact": lambda: torch._scaled_mm(
            a, b.t(), bench.one, bench.one, out_dtype=torch.bfloat16, use_fast_accum=False
        ),
        "fp8_rows": lambda: torch._scaled_mm(a, b.t(), ra, rb, out_dtype=torch.bfloat16, use_fast_accum=True),
    }
    return {"m": m, "n": n, "k": k} | {name: tried(bench, call) for name, call in ways.items()}


def gradients(bench: Bench) -> list[Row]:
    """Weight gradients in bf16: as they lie in memory, to bf16, to fp32, and added to an fp32 sum."""
    shapes = [s for s in product_shapes(400, 1) if s[2] in TOKENS]
    return [_gradient(bench, *shape) for shape in shapes[:120]]


def _gradient(bench: Bench, n: int, k: int, tokens: int) -> Row:
    dy, x = bench.some(torch.bfloat16, tokens, n), bench.some(torch.bfloat16, tokens, k, offset=tokens * n)
    total = torch.zeros(n, k, device="cuda", dtype=torch.float32)
    ways: dict[str, Call] = {
        "bf16": lambda: dy.t() @ x,
        "fp32": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32),
        "added": lambda: torch.addmm(total, dy.t(), x, out_dtype=torch.float32),
    }
    return {"m": n, "n": k, "k": tokens} | {name: tried(bench, call) for name, call in ways.items()}


def blocks(bench: Bench) -> list[Row]:
    """fp8 with scales of 1 x 128 and 128 x 128 blocks (DeepSeek's)."""
    shapes = [s for s in product_shapes(200, 2) if not any(v % 128 for v in s)]
    return [_block(bench, *shape) for shape in shapes[:60]]


def _block(bench: Bench, m: int, n: int, k: int) -> Row:
    from torch.nn.functional import ScalingType, scaled_mm

    a, b = bench.some(FP8, m, k), bench.some(FP8, n, k, offset=m * k)
    sa = torch.ones(k // 128, m, device="cuda").t()
    sb = torch.ones(n // 128, k // 128, device="cuda").t()

    def call() -> Any:
        return scaled_mm(
            a, b.t(), sa, ScalingType.BlockWise1x128, sb, ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    return {"m": m, "n": n, "k": k, "fp8_blocks": tried(bench, call)}


EXPERTS = {  # hidden, width of an expert
    "deepseek-v3": (7168, 2048), "deepseek-v2": (5120, 1536), "mixtral-8x7b": (4096, 14336),
    "qwen3-30b": (2048, 768), "qwen3-235b": (4096, 1536), "gpt-oss": (2880, 2880),
}  # fmt: skip


def experts(bench: Bench) -> list[Row]:
    rows = []
    for name, (hidden, ffn) in EXPERTS.items():
        for n, k in ((2 * ffn, hidden), (hidden, ffn)):
            for groups in (4, 8, 16, 32, 64):
                for m in (64, 128, 256, 512, 1024, 2048, 4096):
                    if groups * m <= 65536 and groups * max(n * k, m * k, m * n) < 2.0e9:
                        rows.append({"model": name} | _grouped(bench, groups, m, n, k))
    return rows


def _grouped(bench: Bench, groups: int, m: int, n: int, k: int) -> Row:
    x = bench.some(torch.bfloat16, groups * m, k)
    w = bench.some(torch.bfloat16, groups, n, k).transpose(-2, -1)
    dy = bench.some(torch.bfloat16, groups * m, n)
    ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * m
    rng = random.Random(groups * m)
    cuts = sorted(rng.sample(range(8, groups * m, 8), groups - 1)) if groups * m > 8 * groups else []
    uneven = torch.tensor([*cuts, groups * m], device="cuda", dtype=torch.int32)
    a8, w8 = bench.some(FP8, groups * m, k), bench.some(FP8, groups, n, k).transpose(-2, -1)
    sa, sb = torch.ones(groups * m, device="cuda"), torch.ones(groups, n, device="cuda")

    def loop() -> None:
        for g in range(groups):
            torch.mm(x[g * m : (g + 1) * m], w[g])

    ways: dict[str, Call] = {
        "bf16": lambda: torch._grouped_mm(x, w, offs=ends),
        "uneven": lambda: torch._grouped_mm(x, w, offs=uneven if cuts else ends),
        "weights": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
        "fp8_rows": lambda: torch._scaled_grouped_mm(a8, w8, sa, sb, offs=ends, out_dtype=torch.bfloat16),
    }
    if groups <= 16 and m >= 256:
        ways["loop"] = loop
    return {"groups": groups, "m": m, "n": n, "k": k} | {name: tried(bench, call) for name, call in ways.items()}


ATTENTIONS = [  # heads, heads of keys, width, width of values
    (16, 16, 64, 64), (16, 16, 128, 128), (32, 8, 128, 128), (8, 1, 128, 128), (16, 16, 192, 128), (16, 16, 192, 192),
    (8, 8, 256, 256), (12, 12, 96, 96), (40, 40, 80, 80),
]  # fmt: skip


def attentions(bench: Bench) -> list[Row]:
    rows = []
    for heads, kv, dim, value in ATTENTIONS:
        for length in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
            for batch in sorted({1, max(1, 16384 // length)}):
                for causal in (True, False):
                    if causal or length <= 16384:
                        rows += _attention(bench, batch, heads, kv, length, dim, value, causal)
    return rows


def _attention(
    bench: Bench, batch: int, heads: int, kv: int, length: int, dim: int, value: int, causal: bool
) -> list[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    def leaf(h: int, d: int, offset: int) -> torch.Tensor:  # [batch, length, heads, width], as models have it
        x = bench.some(torch.bfloat16, batch, length, h, d, offset=offset).transpose(1, 2)
        return x.detach().requires_grad_(True)

    q, k, v = leaf(heads, dim, 0), leaf(kv, dim, 1 << 28), leaf(kv, value, 1 << 29)
    grouped = kv != heads
    out = []
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        row: Row = {
            "backend": backend[:5].lower().rstrip("_"), "batch": batch, "heads": heads, "kv_heads": kv,
            "length": length, "dim": dim, "value_dim": value, "causal": causal,
        }  # fmt: skip
        with sdpa_kernel(getattr(SDPBackend, backend)):

            def forward() -> Any:
                with torch.no_grad():
                    return attend(q, k, v, is_causal=causal, enable_gqa=grouped)

            row["forward"] = tried(bench, forward)
            if isinstance(row["forward"], float):
                y = attend(q, k, v, is_causal=causal, enable_gqa=grouped)
                gradient = torch.randn_like(y)
                row["backward"] = tried(
                    bench, lambda y=y, g=gradient: torch.autograd.grad(y, (q, k, v), g, retain_graph=True)
                )
        out.append(row)
    return out


KERNEL = (
    "import triton\nimport triton.language as tl\n\n"
    "@triton.jit\n"
    "def cast(x, y, yt, top, M, N, scale, B: tl.constexpr, T: tl.constexpr):\n"
    "    i = tl.program_id(0) * B + tl.arange(0, B)\n"
    "    j = tl.program_id(1) * B + tl.arange(0, B)\n"
    "    v = tl.load(x + i[:, None] * N + j[None, :]).to(tl.float32)\n"
    "    tl.atomic_max(top, tl.max(tl.abs(v)))\n"
    "    q = (v * scale).to(tl.float8e4nv)\n"
    "    tl.store(y + i[:, None] * N + j[None, :], q)\n"
    "    if T:\n"
    "        tl.store(yt + j[:, None] * M + i[None, :], tl.trans(q))\n"
)


def casts(bench: Bench) -> list[Row]:
    """A fused pass as Transformer Engine's: read bf16 once, write fp8 and its transpose, find the largest value."""
    folder = tempfile.mkdtemp()  # the compiler wants the source in a file
    Path(folder, "presage_cast.py").write_text(KERNEL)
    sys.path.insert(0, folder)
    sizes = ((4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192), (16384, 16384), (4096, 28672))
    return [_cast(bench, m, n) for m, n in sizes]


def _cast(bench: Bench, m: int, n: int) -> Row:
    from presage_cast import cast

    x = bench.some(torch.bfloat16, m, n)
    y = torch.empty(m, n, device="cuda", dtype=FP8)
    yt, top = torch.empty(n, m, device="cuda", dtype=FP8), torch.zeros(1, device="cuda")
    f = torch.nn.functional
    gain = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    ways: dict[str, Call] = {
        "cast_transpose": lambda: cast[(m // 64, n // 64)](x, y, yt, top, m, n, 0.5, B=64, T=True, num_warps=4),
        "cast": lambda: cast[(m // 64, n // 64)](x, y, yt, top, m, n, 0.5, B=64, T=False, num_warps=4),
        "amax": lambda: x.abs().max(),
        "copy": lambda: x.clone(),
        "rms_norm": lambda: f.rms_norm(x, (n,), gain),
        "gelu": lambda: f.gelu(x, approximate="tanh"),
        "add": lambda: x + x,
        "softmax": lambda: torch.softmax(x, -1),
    }
    return {"m": m, "n": n} | {name: tried(bench, call) for name, call in ways.items()}


def _loads(bench: Bench) -> dict[str, Load]:
    size = 8192
    x, w = bench.some(torch.bfloat16, size, size), bench.some(torch.bfloat16, size, size, offset=size * size)
    a, b = bench.some(FP8, size, size), bench.some(FP8, size, size, offset=size * size)
    xs, ws = bench.some(torch.bfloat16, 8192, 5120), bench.some(torch.bfloat16, 1280, 5120, offset=1 << 28)
    source, target = bench.bf16[: 1 << 28], torch.empty(1 << 28, device="cuda", dtype=torch.bfloat16)
    one, f = bench.one, torch.nn.functional
    q = bench.some(torch.bfloat16, 4, 4096, 32, 128).transpose(1, 2).detach().requires_grad_(True)
    y = f.scaled_dot_product_attention(q, q, q, is_causal=True)
    g = torch.randn_like(y)
    h = bench.some(torch.bfloat16, 32768, 4096)
    gain = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    flops = 2.0 * size**3
    pairs = 2.0 * 4 * 32 * 4096 * 4096 * 128
    ws2 = bench.some(torch.bfloat16, 16, 4096, 2048).transpose(-2, -1)
    ends = torch.arange(1, 17, device="cuda", dtype=torch.int32) * 1024
    xe = bench.some(torch.bfloat16, 16 * 1024, 2048)

    def scaled(fast: bool) -> Call:
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {
        "gemm_bf16": Load(lambda: x @ w.t(), flops, 6.0 * size * size, "bfloat16"),
        "gemm_fp8": Load(scaled(True), flops, 4.0 * size * size, "float8"),
        "gemm_fp8_exact": Load(scaled(False), flops, 4.0 * size * size, "float8"),
        "gemm_narrow": Load(lambda: xs @ ws.t(), 2.0 * 8192 * 1280 * 5120, 1.2e8, "bfloat16"),
        "experts": Load(
            lambda: torch._grouped_mm(xe, ws2, offs=ends), 2.0 * 16 * 1024 * 4096 * 2048, 4.7e8, "bfloat16"
        ),
        "attention": Load(lambda: f.scaled_dot_product_attention(q, q, q, is_causal=True), pairs, 5e8, "bfloat16"),
        "attention_back": Load(lambda: torch.autograd.grad(y, q, g, retain_graph=True), 2.5 * pairs, 1e9, "bfloat16"),
        "copy": Load(lambda: target.copy_(source), 0, 2.0**30, "memory"),
        "norm": Load(lambda: f.rms_norm(h, (4096,), gain), 0, 2.0**29, "memory"),
        "gelu": Load(lambda: f.gelu(source), 0, 2.0**30, "memory"),
    }


def sustained(bench: Bench) -> Row:
    gauge = GpuSensor()
    loads = _loads(bench)
    idle = _watts(gauge, lambda: time.sleep(1.0))
    plan: list[tuple[str, list[str], float]] = [(name, [], 0.0) for name in loads]
    for name in ("gemm_bf16", "gemm_fp8"):
        plan += [(name, ["copy"] * copies, 0.0) for copies in (1, 2, 4)]
        plan += [(name, [], pause) for pause in (0.15, 0.3, 0.5)]
    plan += [
        ("gemm_bf16", ["attention", "attention_back"], 0.0),
        ("gemm_bf16", ["attention", "attention_back", "norm", "gelu"], 0.0),
        ("gemm_fp8", ["attention", "attention_back"], 0.0),
        ("gemm_fp8", ["norm", "gelu"], 0.0),
        ("gemm_bf16", ["norm", "gelu"], 0.0),
        ("gemm_fp8", ["gemm_bf16"], 0.0),
        ("gemm_narrow", ["norm"], 0.0),
    ]
    rows = []
    for name, others, pause in plan:
        row = _one(torch, gauge, name, loads[name], [loads[o] for o in others], pause, 1.6)
        rows.append(row | {"others": others})
    return {"limit_watts": gauge.limit_watts(), "idle_watts": round(idle, 1), "loads": rows}


PARTS: dict[str, Callable[[Bench], Any]] = {
    "products": products,
    "gradients": gradients,
    "casts": casts,
    "sustained": sustained,
    "experts": experts,
    "attention": attentions,
    "blocks": blocks,
}


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or list(PARTS)
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in chosen:
        begin = time.perf_counter()
        try:
            rows = PARTS[name](bench)
        except Exception as e:
            print(name, "failed:", type(e).__name__, str(e)[:300], flush=True)
            continue
        with gzip.open(out / f"{name}.json.gz", "wt") as f:
            json.dump(about | {"rows": rows}, f, separators=(",", ":"))
        print(name, len(rows), f"{time.perf_counter() - begin:.1f} s", str(rows)[-400:], flush=True)


if __name__ == "__main__":
    main()
