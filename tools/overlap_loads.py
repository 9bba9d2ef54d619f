"""Kernels to run beside a collective: what steps are made of, with their FLOPs and the bytes they must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Load", "loads"]


@dataclass(frozen=True)
class Load:
    """One call, made anew by `make()`; every third of a family is kept out of the fit."""

    name: str
    family: str
    number: str  # the type of number its products work on; empty for those that only move
    flops: float
    bytes: float
    make: Callable[[], Callable[[], Any]]


Found = Iterator[Load]
BF16 = (
    (8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 1024), (8192, 1024, 4096), (16384, 768, 3072),
    (16384, 3072, 768), (8192, 50304, 1024), (2048, 2048, 2048), (4096, 1024, 1024), (1408, 3072, 4096),
    (2816, 3072, 4096), (1536, 3072, 4096), (3072, 3072, 2048), (6144, 6144, 6144), (5120, 5120, 1536),
    (12288, 4096, 4096), (2048, 11008, 4096), (4096, 14336, 4096),
)  # fmt: skip
TF32 = ((4096, 4096, 4096), (8192, 4096, 1024), (2048, 2048, 8192), (16384, 1024, 1024))
FP32 = ((4096, 4096, 4096), (4096, 3072, 768), (2048, 2048, 2048))
ATTENTION = ((8, 16, 1024, 64), (4, 16, 4096, 128), (32, 12, 512, 64), (2, 32, 2048, 128))
CONV = ((64, 64, 64, 56, 3), (64, 256, 64, 56, 1), (64, 256, 256, 14, 3), (32, 128, 128, 28, 3), (64, 512, 512, 28, 3))


def loads(torch: Any) -> list[Load]:
    """All of them. Nothing is allocated before a load is made."""
    made = (_gemms, _attention, _convolutions, _pointwise, _norms, _reductions, _optimizers, _lookups)
    return [load for some in made for load in some(torch)]


def _random(torch: Any, *shape: int, dtype: str = "bfloat16") -> Any:
    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype))


def _gemms(torch: Any) -> Found:
    def product(m: int, n: int, k: int, kind: str) -> Load:
        width = 2 if kind == "bfloat16" else 4

        def make() -> Callable[[], Any]:
            dtype = "bfloat16" if kind == "bfloat16" else "float32"
            a, b = _random(torch, m, k, dtype=dtype), _random(torch, n, k, dtype=dtype).t()
            out = torch.empty(m, n, device="cuda", dtype=a.dtype)

            def call() -> Any:
                torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
                return torch.mm(a, b, out=out)

            return call

        return Load(
            f"gemm_{kind}_{m}x{n}x{k}", "matrix multiply", kind, 2.0 * m * n * k, width * (m * k + n * k + m * n), make
        )

    for kind, shapes in (("bfloat16", BF16), ("tf32", TF32), ("float32", FP32)):
        for m, n, k in shapes:
            yield product(m, n, k, kind)


def _attention(torch: Any) -> Found:
    f = torch.nn.functional

    def attended(b: int, h: int, s: int, d: int, back: bool) -> Load:
        def make() -> Callable[[], Any]:
            q, k, v = (_random(torch, b, h, s, d).requires_grad_(back) for _ in range(3))
            if not back:
                return lambda: f.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        flops = 2.0 * b * h * s * s * d * (2.5 if back else 1)
        name = f"attention{'_back' if back else ''}_{b}x{h}x{s}x{d}"
        return Load(name, "attention", "bfloat16", flops, 2.0 * b * h * s * d * (8 if back else 4), make)

    for shape in ATTENTION:
        yield attended(*shape, False)
        yield attended(*shape, True)


def _convolutions(torch: Any) -> Found:
    f = torch.nn.functional

    def conv(n: int, c: int, o: int, size: int, k: int, kind: str) -> Load:
        dtype, width = ("bfloat16", 2) if kind == "bfloat16" else ("float32", 4)

        def make() -> Callable[[], Any]:
            torch.backends.cudnn.allow_tf32 = True
            x = _random(torch, n, c, size, size, dtype=dtype).to(memory_format=torch.channels_last)
            w = _random(torch, o, c, k, k, dtype=dtype).to(memory_format=torch.channels_last)
            return lambda: f.conv2d(x, w, padding=k // 2)

        moved = width * (n * size * size * (c + o) + o * c * k * k)
        return Load(
            f"conv_{kind}_{n}x{c}x{o}x{size}x{k}", "convolution", kind, 2.0 * n * size**2 * c * o * k * k, moved, make
        )

    for shape in CONV:
        yield conv(*shape, "bfloat16")
    yield conv(*CONV[0], "tf32")
    yield conv(*CONV[4], "tf32")


def _moves(name: str, family: str, moved: float, make: Callable[[], Callable[[], Any]]) -> Load:
    return Load(name, family, "", 0.0, moved, make)


def _pointwise(torch: Any) -> Found:
    f = torch.nn.functional

    def one(n: int, dtype: str, call: Callable[[Any, Any], Any]) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x, y = _random(torch, n, dtype=dtype), _random(torch, n, dtype=dtype)
            return lambda: call(x, y)

        return make

    big, mid, small = 2**27, 2**24, 2**21
    for n, size in ((big, "big"), (mid, "mid"), (small, "small")):
        yield _moves(f"gelu_{size}", "elementwise", 4.0 * n, one(n, "bfloat16", lambda x, _: f.gelu(x)))
        yield _moves(f"add_{size}", "elementwise", 12.0 * n, one(n, "float32", lambda x, y: x.add_(y)))
        yield _moves(f"copy_{size}", "copy and cast", 8.0 * n, one(n, "float32", lambda x, y: y.copy_(x)))
    yield _moves("cast_mid", "copy and cast", 6.0 * 2**26, one(2**26, "float32", lambda x, _: x.bfloat16()))
    yield _moves("dropout_mid", "random", 5.0 * 2**26, one(2**26, "bfloat16", lambda x, _: f.dropout(x, 0.1)))


def _norms(torch: Any) -> Found:
    f = torch.nn.functional

    def layer_norm(rows: int, width: int, dtype: str, back: bool) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x, g = _random(torch, rows, width, dtype=dtype), _random(torch, width, dtype=dtype)
            out, mean, rstd = torch.ops.aten.native_layer_norm(x, [width], g, g, 1e-5)
            if not back:
                return lambda: torch.ops.aten.native_layer_norm(x, [width], g, g, 1e-5)
            return lambda: torch.ops.aten.native_layer_norm_backward(
                out, x, [width], mean, rstd, g, g, [True, True, True]
            )

        return make

    def batch_norm() -> Callable[[], Any]:
        x = _random(torch, 64, 256, 56, 56).to(memory_format=torch.channels_last)
        w = _random(torch, 256, dtype="float32")
        return lambda: f.batch_norm(x, None, None, w, w, training=True)

    def softmax(rows: int, width: int, dtype: str) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = _random(torch, rows, width, dtype=dtype)
            return lambda: torch.log_softmax(x, -1)

        return make

    for rows, width, dtype, size in (
        (65536, 2048, "bfloat16", 2),
        (16384, 1024, "float32", 4),
        (8192, 4096, "bfloat16", 2),
    ):
        n = rows * width * size
        yield _moves(f"layer_norm_{rows}x{width}", "normalisation", 2.0 * n, layer_norm(rows, width, dtype, False))
        yield _moves(f"layer_norm_back_{rows}x{width}", "normalisation", 3.0 * n, layer_norm(rows, width, dtype, True))
    yield _moves("batch_norm", "normalisation", 3.0 * 2 * 64 * 256 * 56 * 56, batch_norm)
    yield _moves("log_softmax_8192x50304", "softmax and loss", 8.0 * 8192 * 50304, softmax(8192, 50304, "float32"))
    yield _moves("log_softmax_65536x1024", "softmax and loss", 4.0 * 65536 * 1024, softmax(65536, 1024, "bfloat16"))


def _reductions(torch: Any) -> Found:
    def reduced(rows: int, width: int, dim: int | None) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = _random(torch, rows, width, dtype="float32")
            return lambda: x.sum() if dim is None else x.sum(dim)

        return make

    yield _moves("sum_all", "reduction", 4.0 * 16384 * 8192, reduced(16384, 8192, None))
    yield _moves("sum_rows", "reduction", 4.0 * 65536 * 1024, reduced(65536, 1024, 1))
    yield _moves("sum_columns", "reduction", 4.0 * 8192 * 4096, reduced(8192, 4096, 0))


def _optimizers(torch: Any) -> Found:
    def lists(count: int, n: int, how: str) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            p, g, m, v = ([_random(torch, n, dtype="float32") for _ in range(count)] for _ in range(4))
            v = [t.abs_() for t in v]
            steps = [torch.ones((), device="cuda") for _ in range(count)]
            if how == "add":
                return lambda: torch._foreach_add_(p, g, alpha=-0.001)
            told = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
            return lambda: torch._fused_adamw_(p, g, m, v, [], steps, **told, amsgrad=False, maximize=False)

        return make

    yield _moves("foreach_add", "optimizer", 12.0 * 100 * 2**20, lists(100, 2**20, "add"))
    yield _moves("fused_adamw", "optimizer", 28.0 * 60 * 2**20, lists(60, 2**20, "adamw"))
    yield _moves("fused_adamw_small", "optimizer", 28.0 * 200 * 2**14, lists(200, 2**14, "adamw"))


def _lookups(torch: Any) -> Found:
    rows, width = 2_000_000, 128

    def lookup(count: int, back: bool) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            table = _random(torch, rows, width, dtype="float32")
            at = torch.randint(0, rows, (count,), device="cuda")
            if not back:
                return lambda: torch.embedding(table, at)
            grad = _random(torch, count, width, dtype="float32")
            return lambda: torch.ops.aten.index_add_(table, 0, at, grad)

        return make

    for count in (2**20, 2**17):
        yield _moves(f"lookup_{count}", "embedding", 8.0 * count * width, lookup(count, False))
        yield _moves(f"index_add_{count}", "index", 12.0 * count * width, lookup(count, True))
