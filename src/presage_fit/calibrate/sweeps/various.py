"""What public models run beside the large families: scans, scatters, small batched products, windows of attention,
Fourier transforms, resampling, 3-D pooling, grouped products, recurrent nets, routers, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, one, pick, tensor, typical, values
from presage_fit.calibrate.sweeps.sparse import indices

HALF = {"float32": 0.5, "bfloat16": 0.4, "float16": 0.1}
Draw = Callable[[np.random.Generator], dict[str, Any]]


def _scan(rng: np.random.Generator) -> dict[str, Any]:
    length, inner = log_int(rng, 2, 8192), 1 if rng.random() < 0.6 else typical(rng, 2, 2048)
    return {
        "op": near(rng, {"cumsum": 0.7, "cumprod": 0.1, "logcumsumexp": 0.1, "cummax": 0.1}),
        "dtype": near(rng, HALF),
        "shape": [log_int(rng, 1, max(1.0, min(1e5, 6e7 / length / inner))), length, inner],
    }


def _scatter(rng: np.random.Generator) -> dict[str, Any]:
    columns = int(pick(rng, (1, 4, 8, 16, 32, 40, 64, 64, 128, 128, 256, 256, 512)))
    rows = log_int(rng, 100, 2e5)
    return {"op": near(rng, {"scatter_add": 0.35, "index_add": 0.2, "gather_rows": 0.2, "amax": 0.15, "mean": 0.1}),
            "dtype": near(rng, {"float32": 0.85, "bfloat16": 0.15}), "rows": rows, "columns": columns,
            "count": log_int(rng, rows, min(3e7 / columns, 30.0 * rows)) if rows < 3e7 / columns else rows,
            "alpha": near(rng, {0.0: 0.5, 0.5: 0.25, 0.9: 0.15, 1.1: 0.1})}  # fmt: skip


def sample_products(rng: np.random.Generator) -> dict[str, Any]:
    """Windows, relative positions, chunks of a scan: many small products."""
    batch = log_int(rng, 16, 16384)
    m, n, k = (int(pick(rng, (4, 8, 16, 16, 32, 32, 49, 64, 64, 96, 128, 128, 196, 256))) for _ in range(3))
    kind = near(rng, {"float32": 0.3, "tf32": 0.2, "bfloat16": 0.4, "float16": 0.1})
    most = 4e8 if kind in ("float32", "tf32") else 8e8
    batch = int(max(1, min(batch, most / (4.0 * (m * k + k * n + m * n)))))
    return {"kind": kind, "batch": batch, "m": m, "n": n, "k": k, "layout": pick(rng, ("nn", "nt", "tn"))}


def _windows(rng: np.random.Generator) -> dict[str, Any]:
    """Attention with a bias or a mask: windows of images, relative positions, padding, odd heads."""
    s = int(pick(rng, (16, 49, 49, 64, 64, 98, 128, 144, 196, 197, 256, 256, 384, 392, 512, 577, 1024, 1500)))
    h, d = (
        int(pick(rng, (1, 2, 3, 4, 6, 8, 12, 16, 24))),
        int(pick(rng, (16, 24, 32, 32, 40, 48, 56, 64, 64, 72, 80, 96, 112, 128, 160))),
    )
    most = max(1.0, min(4096.0, 1.2e8 / (s * h * d), 2e11 / (4.0 * s * s * d * h), 4e8 / (float(s) * s * h)))
    return {
        "dtype": near(rng, HALF),
        "b": log_int(rng, 1, most),
        "h": h,
        "s": s,
        "d": d,
        "mask": near(rng, {"bias": 0.4, "by_batch": 0.25, "bool": 0.25, "none": 0.1}),
        "dropout": 0.1 if rng.random() < 0.1 else 0.0,
        "grad": bool(rng.random() < 0.5),
    }


def _fft(rng: np.random.Generator) -> dict[str, Any]:
    dims = int(pick(rng, (1, 1, 2)))
    n = (
        int(pick(rng, (64, 128, 256, 400, 512, 512, 768, 1024, 1024, 2048, 4096, 16384)))
        if dims == 1
        else int(pick(rng, (8, 14, 16, 28, 32, 56, 64, 128, 224)))
    )
    return {
        "op": pick(rng, ("rfft", "rfft", "irfft", "fft", "ifft")),
        "dims": dims,
        "n": n,
        "batch": log_int(rng, 1, max(2.0, 3e7 / n**dims)),
        "both": bool(rng.random() < 0.5),
    }


def _resample(rng: np.random.Generator) -> dict[str, Any]:
    op = near(
        rng, {"bilinear": 0.35, "nearest": 0.15, "bicubic": 0.15, "grid": 0.25, "trilinear": 0.05, "linear": 0.05}
    )
    n, c, size = (
        int(pick(rng, (1, 2, 4, 8, 16, 32))),
        int(pick(rng, (2, 3, 16, 19, 21, 32, 64, 128, 150, 256, 512, 960))),
        int(pick(rng, (1, 7, 8, 14, 16, 28, 30, 32, 33, 56, 60, 64, 65, 128))),
    )
    scale = float(pick(rng, (0.5, 1.5, 2, 2, 4, 8, 16)))
    out = max(1, round(size * scale)) if size > 1 else int(pick(rng, (14, 28, 33, 60, 65)))  # pooled to one place
    n = int(max(1, min(n, 1e8 / (c * max(size, out) ** 2))))
    return {
        "op": op,
        "dtype": near(rng, {"float32": 0.7, "bfloat16": 0.3}),
        "n": n,
        "c": c,
        "size": size,
        "out": min(out, 600),
        "channels_last": bool(rng.random() < 0.25),
        "align": bool(rng.random() < 0.2),
    }


def _pool(rng: np.random.Generator) -> dict[str, Any]:
    op = near(rng, {"max2": 0.35, "avg2": 0.2, "adaptive": 0.1, "max3": 0.12, "avg3": 0.05, "adaptive3": 0.08,
                    "max1": 0.05, "avg1": 0.05})  # fmt: skip
    k = int(pick(rng, (2, 2, 3, 3, 3, 5)))
    n, c, size = (
        int(pick(rng, (1, 4, 8, 16, 32, 48, 64, 96, 128, 256))),
        int(pick(rng, (3, 32, 40, 64, 64, 96, 128, 192, 256, 320, 480, 512, 832, 1024, 2048))),
        int(pick(rng, (7, 8, 14, 17, 28, 32, 35, 56, 56, 64, 71, 75, 112, 112, 128, 147, 150, 192, 240))),
    )
    n = int(max(1, min(n, 1.2e8 / (c * size**2))))
    return {
        "op": op,
        "dtype": near(rng, HALF),
        "n": n,
        "c": c,
        "size": size,
        "k": k,
        "stride": int(pick(rng, (1, 2, 2, 2))) if k > 2 else 2,
        "padding": int(pick(rng, (0, k // 2))),
        "out": int(pick(rng, (1, 1, 2, 3, 6, 7))),
        "frames": int(pick(rng, (2, 4, 8, 16))),
        "channels_last": bool(rng.random() < 0.45),
    }


def _recurrent(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "op": near(rng, {"LSTM": 0.6, "GRU": 0.32, "RNN": 0.08}),
        "dtype": near(rng, {"float32": 0.6, "bfloat16": 0.25, "float16": 0.15}),
        "b": int(pick(rng, (1, 2, 4, 8, 16, 20, 32, 32, 40, 64, 64, 80, 128, 128, 256, 512))),
        "s": int(pick(rng, (8, 16, 24, 32, 35, 35, 50, 64, 70, 100, 128, 200, 256, 400))),
        "i": values(rng, (32, 64, 80, 128, 200, 256, 300, 400, 512, 650, 768, 1024, 1500), 0.85, 16, 2048),
        "d": values(
            rng,
            (32, 64, 96, 128, 200, 256, 256, 320, 400, 512, 512, 600, 650, 768, 800, 1024, 1024, 1150, 1500),
            0.9,
            16,
            2048,
        ),
        "layers": int(pick(rng, (1, 1, 2, 2, 3, 4))),
        "both": bool(rng.random() < 0.3),
        "dropout": 0.2 if rng.random() < 0.3 else 0.0,
        "tf32": bool(rng.random() < 0.75),
    }


def _grouped(rng: np.random.Generator) -> dict[str, Any]:
    experts = int(pick(rng, (4, 8, 8, 16, 32, 60, 64, 64, 128, 256)))
    n, k = (int(pick(rng, (256, 512, 704, 768, 1024, 1408, 1536, 1792, 2048, 2816, 4096, 7168))) for _ in range(2))
    tokens = int(max(experts, min(log_int(rng, 64, 65536), 1.2e12 / (2.0 * n * k), 4e8 / max(n, k))))
    return {
        "experts": experts if experts * n * k < 1.5e9 else 8,
        "tokens": tokens,
        "n": n,
        "k": k,
        "uneven": near(rng, {0.0: 0.25, 0.3: 0.25, 0.6: 0.25, 1.0: 0.25}),
        "way": pick(rng, ("forward", "forward", "weight")),
    }


def _router(rng: np.random.Generator) -> dict[str, Any]:
    rows, columns = log_int(rng, 64, 65536), int(pick(rng, (4, 8, 16, 32, 60, 64, 128, 160, 256, 512, 1000, 32000)))
    rows = int(max(1, min(rows, 6e7 / columns)))
    return {
        "op": near(rng, {"topk": 0.45, "sort": 0.2, "argsort": 0.15, "histc": 0.05, "one_hot": 0.05, "flip": 0.1}),
        "dtype": near(rng, {"float32": 0.7, "bfloat16": 0.3}),
        "rows": rows,
        "columns": columns,
        "k": int(min(columns, pick(rng, (1, 2, 4, 5, 6, 8, 10)))),
    }


def _sorted(rng: np.random.Generator) -> dict[str, Any]:
    count = log_int(rng, 16, 2e7)
    return {
        "op": near(rng, {"sort": 0.35, "argsort": 0.15, "unique": 0.2, "nonzero": 0.15, "bincount": 0.15}),
        "dtype": pick(rng, ("int64", "float32")),
        "count": count,
        "values": log_int(rng, 2, 1e6),
    }


def _other(rng: np.random.Generator) -> dict[str, Any]:
    a, b, c = log_int(rng, 1, 256), typical(rng, 4, 2048), typical(rng, 4, 2048)
    a = int(max(1, min(a, 6e7 / (b * c))))
    return {
        "op": near(rng, {"weight_norm": 0.2, "reflect": 0.2, "unfold": 0.2, "fold": 0.1, "glu": 0.1, "std_mean": 0.1,
                         "repeat_interleave": 0.1}),
        "dtype": near(rng, HALF),
        "shape": [a, b, c],
        "k": int(pick(rng, (3, 4, 5, 7, 128))),
    }  # fmt: skip


DRAWS: dict[str, tuple[Draw, float]] = {
    "scan": (_scan, 0.1), "scatter": (_scatter, 0.14), "products": (sample_products, 0.12), "windows": (_windows, 0.12),
    "fft": (_fft, 0.07), "resample": (_resample, 0.1), "pool": (_pool, 0.13), "grouped": (_grouped, 0.07),
    "router": (_router, 0.06), "sorted": (_sorted, 0.05), "other": (_other, 0.04),
}  # fmt: skip


def sample_various(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {name: weight for name, (_, weight) in DRAWS.items()})
    return {"what": what, **DRAWS[what][0](rng)}


def build_scan(torch: Any, p: dict[str, Any]) -> Parts:
    x = tensor(torch, p["shape"], p["dtype"])
    return one(lambda: getattr(torch, p["op"])(x, 1))


def build_scatter(torch: Any, p: dict[str, Any]) -> Parts:
    """Messages of a graph: rows by the nodes they come from, added up at those they go to."""
    i = indices(torch, p, p["count"], p["rows"], p["alpha"])
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"])
    if p["op"] == "gather_rows":
        x.requires_grad_(True)
        return both_ways(torch, lambda: x.index_select(0, i), [x])
    source, wide = tensor(torch, (p["count"], p["columns"]), p["dtype"]), i.unsqueeze(1).expand(-1, p["columns"])
    if p["op"] in ("amax", "mean"):
        return one(lambda: x.scatter_reduce_(0, wide, source, p["op"], include_self=False))
    if p["op"] == "index_add":
        return one(lambda: x.index_add_(0, i, source))
    return one(lambda: x.scatter_add_(0, wide, source))


def build_products(torch: Any, p: dict[str, Any]) -> Parts:
    torch.backends.cuda.matmul.allow_tf32 = p["kind"] == "tf32"
    dtype = "float32" if p["kind"] == "tf32" else p["kind"]
    order = {"n": [0, 1, 2], "t": [0, 2, 1]}
    x = tensor(torch, (p["batch"], p["m"], p["k"]), dtype, order=order[p["layout"][0]])
    y = tensor(torch, (p["batch"], p["k"], p["n"]), dtype, order=order[p["layout"][1]])
    return one(lambda: torch.bmm(x, y))


def build_windows(torch: Any, p: dict[str, Any]) -> Parts:
    b, h, s, d = p["b"], p["h"], p["s"], p["d"]
    q, k, v = (tensor(torch, (b, h, s, d), p["dtype"], True, [0, 2, 1, 3]) for _ in range(3))
    mask = None
    if p["mask"] != "none":
        places = (b if p["mask"] == "by_batch" else 1, 1 if p["mask"] == "bool" else h, s, s)
        mask = tensor(torch, places, "bool" if p["mask"] == "bool" else p["dtype"])
        if p["mask"] == "bool":
            mask[..., 0] = True
        elif p["grad"]:
            mask.requires_grad_(True)
    attend = torch.nn.functional.scaled_dot_product_attention
    leaves = [q, k, v, *([mask] if p["grad"] and mask is not None else [])]
    return both_ways(torch, lambda: attend(q, k, v, attn_mask=mask, dropout_p=p["dropout"]), leaves)


def build_fft(torch: Any, p: dict[str, Any]) -> Parts:
    n, dims, op = p["n"], tuple(range(-p["dims"], 0)), p["op"]
    x = tensor(torch, (p["batch"], *[n] * p["dims"]), "float32")
    if op != "rfft":
        x = torch.fft.rfftn(x, dim=dims) if op == "irfft" else torch.complex(x, x)
    f = getattr(torch.fft, op + "n")
    if p["both"]:
        x = x.detach().requires_grad_(True)
        return both_ways(torch, lambda: f(x, dim=dims), [x])
    return one(lambda: f(x, dim=dims))


def build_resample(torch: Any, p: dict[str, Any]) -> Parts:
    f, op = torch.nn.functional, p["op"]
    sides = {"linear": [p["size"] ** 2], "trilinear": [p.get("frames", 4), *[p["size"]] * 2]}.get(op, [p["size"]] * 2)
    x = tensor(torch, (p["n"], p["c"], *sides), p["dtype"])
    if p["channels_last"] and len(sides) == 2:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(True)
    if op == "grid":
        at = (torch.rand(p["n"], p["out"], p["out"], 2, device="cuda") * 2 - 1).to(x.dtype).requires_grad_(True)
        return both_ways(torch, lambda: f.grid_sample(x, at, align_corners=False), [x, at])
    out = {"linear": [p["out"] ** 2], "trilinear": [p.get("out_frames", 4), *[p["out"]] * 2]}.get(op, [p["out"]] * 2)
    align = {} if op == "nearest" else {"align_corners": p["align"]}
    return both_ways(torch, lambda: f.interpolate(x, size=out, mode=op, **align), [x])


def build_pool(torch: Any, p: dict[str, Any]) -> Parts:
    f, dims = torch.nn.functional, 3 if p["op"].endswith("3") else 1 if p["op"].endswith("1") else 2
    frames = p["frames"]
    sides = {1: [p["size"] ** 2], 2: [p["size"]] * 2, 3: [frames, p["size"], p["size"]]}[dims]
    x = tensor(torch, (max(1, p["n"] // (frames if dims == 3 else 1)), p["c"], *sides), p["dtype"])
    if p["channels_last"] and dims > 1:
        x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    x.requires_grad_(True)
    if p["op"].startswith("adaptive"):
        return both_ways(torch, lambda: getattr(f, f"adaptive_avg_pool{dims}d")(x, p["out"]), [x])
    name = f"{p['op'][:3]}_pool{dims}d"
    return both_ways(torch, lambda: getattr(f, name)(x, p["k"], p["stride"], p["padding"]), [x])


def build_recurrent(torch: Any, p: dict[str, Any]) -> Parts:
    torch.backends.cudnn.allow_tf32 = p["tf32"]
    kind = getattr(torch, p["dtype"])
    m = getattr(torch.nn, p["op"])(
        p["i"],
        p["d"],
        p["layers"],
        bidirectional=p["both"],
        dropout=p["dropout"] if p["layers"] > 1 else 0.0,
        device="cuda",
        dtype=kind,
    )
    x = tensor(torch, (p["s"], p["b"], p["i"]), p["dtype"], True)
    return both_ways(torch, lambda: m(x)[0], [x, *m.parameters()])


def build_grouped(torch: Any, p: dict[str, Any]) -> Parts:
    e, t, n, k = p["experts"], p["tokens"], p["n"], p["k"]
    shares = torch.exp(p["uneven"] * torch.randn(e, device="cuda"))
    ends = (shares.cumsum(0) / shares.sum() * t).int()
    ends[-1] = t
    x = tensor(torch, (t, k), "bfloat16")
    if p["way"] == "weight":
        y = tensor(torch, (t, n), "bfloat16")
        return one(lambda: torch._grouped_mm(x.t(), y, offs=ends))
    w = tensor(torch, (e, n, k), "bfloat16").transpose(1, 2)
    return one(lambda: torch._grouped_mm(x, w, offs=ends))


def build_router(torch: Any, p: dict[str, Any]) -> Parts:
    x = tensor(torch, (p["rows"], p["columns"]), p["dtype"])
    i = torch.randint(0, p["columns"], (p["rows"],), device="cuda")
    calls: dict[str, Any] = {
        "topk": lambda: x.topk(p["k"], -1),
        "sort": lambda: x.sort(-1),
        "argsort": lambda: x.argsort(-1),
        "histc": lambda: torch.histc(i.float(), p["columns"]),
        "one_hot": lambda: torch.nn.functional.one_hot(i, p["columns"]),
        "flip": lambda: x.flip(-1),
    }
    return one(calls[p["op"]])


def build_sorted(torch: Any, p: dict[str, Any]) -> Parts:
    x = torch.randint(0, p["values"], (p["count"],), device="cuda").to(getattr(torch, p["dtype"]))
    calls: dict[str, Any] = {
        "sort": lambda: x.sort(),
        "argsort": lambda: x.argsort(),
        "unique": lambda: torch.unique(x, return_counts=True),
        "nonzero": lambda: (x > p["values"] / 2).nonzero(),
        "bincount": lambda: torch.bincount(x.long()),
    }
    return one(calls[p["op"]])


def build_other(torch: Any, p: dict[str, Any]) -> Parts:
    f, (a, b, c), k = torch.nn.functional, p["shape"], p["k"]
    x = tensor(torch, (a, b, c), p["dtype"], True)
    if p["op"] == "weight_norm":
        g = tensor(torch, (a, 1, 1), p["dtype"], True)
        return both_ways(torch, lambda: torch._weight_norm(x, g, 0), [x, g])
    if p["op"] == "reflect":
        side = min(3, b - 1, c - 1)
        return both_ways(torch, lambda: f.pad(x[None], (side,) * 4, mode="reflect"), [x])
    if p["op"] in ("unfold", "fold"):
        k = min(k, 7)
        side = max(8, min(b, c) // 4 * 4, k)
        y = tensor(torch, (max(1, min(64, a)), 16, min(side, 128), min(side, 128)), p["dtype"], True)
        if p["op"] == "unfold":
            return both_ways(torch, lambda: f.unfold(y, k, padding=k // 2), [y])
        z = f.unfold(y, k, padding=k // 2).detach().requires_grad_(True)
        return both_ways(torch, lambda: f.fold(z, y.shape[-2:], k, padding=k // 2), [z])
    if p["op"] == "glu":
        z = x[..., : c // 2 * 2].contiguous().detach().requires_grad_(True)
        return both_ways(torch, lambda: f.glu(z, -1), [z])
    if p["op"] == "std_mean":
        return one(lambda: torch.var_mean(x, -1))
    return one(lambda: x.repeat_interleave(2, 0))


BUILDS = {
    "scan": build_scan, "scatter": build_scatter, "products": build_products, "windows": build_windows,
    "fft": build_fft, "resample": build_resample, "pool": build_pool, "grouped": build_grouped, "router": build_router,
    "sorted": build_sorted, "other": build_other,
}  # fmt: skip


def build_various(torch: Any, p: dict[str, Any]) -> Parts:
    return BUILDS[p["what"]](torch, p)


FAMILIES = {
    "various": (sample_various, build_various, 4000),
    "recurrent": (_recurrent, build_recurrent, 300),
}
