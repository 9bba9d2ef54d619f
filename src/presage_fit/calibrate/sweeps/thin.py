"""More draws where `various` has few for what varies: pools over blocks of places, resampling by many factors,
scatters that do not add, counting, scans, recurrent nets of all widths. `places` draws, once more and denser, the ops
whose times depend on every side of both images: 3-D and adaptive pools, resampling both ways, scatters that compare.

Counting and picking depend on the data as scatters do: how many values there are is part of the draw.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, one, pick, tensor, typical, values
from presage_fit.calibrate.sweeps.sparse import indices
from presage_fit.calibrate.sweeps.various import (
    HALF,
    Draw,
    build_products,
    build_recurrent,
    build_resample,
    build_scan,
    sample_products,
)

CHANNELS = (3, 16, 21, 24, 32, 40, 64, 64, 96, 128, 128, 192, 256, 320, 480, 512, 768, 960, 1024, 1536, 2048)
SIDES = (3, 5, 7, 8, 10, 14, 16, 17, 20, 28, 32, 33, 35, 40, 56, 60, 64, 65, 71, 80, 96, 112, 128, 150, 192, 240, 256)

HIDDEN = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536)


POOLS = {"adaptive2": 0.3, "adaptive3": 0.18, "max3": 0.2, "avg3": 0.1, "adaptive_max2": 0.06, "max2": 0.08,
         "avg2": 0.08}  # fmt: skip
RESAMPLINGS = {"bilinear": 0.3, "nearest": 0.2, "bicubic": 0.17, "grid": 0.25, "trilinear": 0.04, "linear": 0.04}
SCATTERS = {"amax": 0.35, "amin": 0.05, "prod": 0.03, "mean": 0.07, "index_copy": 0.2, "index_put": 0.3}


def _pool(rng: np.random.Generator, ops: dict[str, float] = POOLS) -> dict[str, Any]:
    op = near(rng, ops)
    k, c, size = int(pick(rng, (2, 3, 3, 5, 7))), int(pick(rng, CHANNELS)), int(pick(rng, SIDES))
    size, frames = max(k, size), int(pick(rng, (1, 2, 4, 4, 8, 8, 16, 32)))
    n = log_int(rng, 1, 256)
    n = int(max(1, min(n, 1.2e8 / (c * size**2 * (frames if op.endswith("3") else 1)))))
    return {"op": op, "dtype": near(rng, HALF), "n": n, "c": c, "size": size, "k": k,
            "stride": int(pick(rng, (1, 2, 2, k))), "padding": int(pick(rng, (0, k // 2))), "frames": max(k, frames),
            "out": int(pick(rng, (1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16))),
            "channels_last": bool(rng.random() < 0.4)}  # fmt: skip


def build_pool(torch: Any, p: dict[str, Any]) -> Parts:
    f, dims, size = torch.nn.functional, int(p["op"][-1]), p["size"]
    sides = [p["frames"], size, p.get("across", size)][-dims:]
    x = tensor(torch, (p["n"], p["c"], *sides), p["dtype"])
    if p["channels_last"]:
        x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    x.requires_grad_(True)
    if p["op"].startswith("adaptive"):
        kind = "max" if "max" in p["op"] else "avg"
        out = [min(p["out"], p["frames"]), p["out"], p["out"]][-dims:]
        return both_ways(torch, lambda: getattr(f, f"adaptive_{kind}_pool{dims}d")(x, out), [x])
    by = [[p[name]] * dims for name in ("k", "stride", "padding")]
    if p.get("by_frame"):
        by = [[n, *sides[1:]] for n, sides in zip((1, 1, 0), by, strict=True)]
    return both_ways(torch, lambda: getattr(f, f"{p['op'][:3]}_pool{dims}d")(x, *by), [x])


def _resample(rng: np.random.Generator, ops: dict[str, float] = RESAMPLINGS) -> dict[str, Any]:
    op = near(rng, ops)
    n, c, size = log_int(rng, 1, 48), int(pick(rng, CHANNELS[:18])), int(pick(rng, SIDES[:23]))
    out = max(1, round(size * float(np.exp(rng.uniform(np.log(0.3), np.log(8)))))) if rng.random() < 0.5 else 2 * size
    out = min(out, 640)
    n = int(max(1, min(n, 8e7 / (c * max(size, out) ** 2))))
    return {"op": op, "dtype": near(rng, {"float32": 0.6, "bfloat16": 0.4}), "n": n, "c": c, "size": size, "out": out,
            "channels_last": bool(rng.random() < 0.35), "align": bool(rng.random() < 0.2)}  # fmt: skip


def _scatter(rng: np.random.Generator, ops: dict[str, float] = SCATTERS) -> dict[str, Any]:
    columns, rows = int(pick(rng, (1, 2, 4, 8, 16, 32, 64, 64, 128, 128, 256, 512))), log_int(rng, 100, 3e5)
    return {"op": near(rng, ops), "dtype": near(rng, {"float32": 0.7, "bfloat16": 0.3}), "rows": rows,
            "columns": columns,
            "count": log_int(rng, max(1, rows // 8), max(rows, min(2e7 / columns, 30.0 * rows))),
            "alpha": near(rng, {0.0: 0.5, 0.5: 0.2, 0.9: 0.2, 1.1: 0.1}),
            "fresh": bool(rng.random() < 0.5)}  # fmt: skip


def build_scatter(torch: Any, p: dict[str, Any]) -> Parts:
    """Into zeros (`fresh`), where every value changes the result, or into random numbers, where few are larger."""
    i = indices(torch, p, p["count"], p["rows"], p["alpha"])
    x, source = (tensor(torch, (n, p["columns"]), p["dtype"]) for n in (p["rows"], p["count"]))
    wide = i.unsqueeze(1).expand(-1, p["columns"])
    if p["op"] == "index_copy":
        return one(lambda: x.index_copy_(0, i, source))
    if p["op"] == "index_put":
        return one(lambda: x.index_put_((i,), source, accumulate=True))
    if p["fresh"]:
        return (lambda: x.zero_(), lambda: x.scatter_reduce_(0, wide, source, p["op"], include_self=False))
    return one(lambda: x.scatter_reduce_(0, wide, source, p["op"], include_self=True))


def _counting(rng: np.random.Generator) -> dict[str, Any]:
    return {"op": near(rng, {"bincount": 0.35, "histc": 0.15, "nonzero": 0.3, "topk": 0.2}),
            "dtype": pick(rng, ("int64", "float32", "bfloat16")), "count": log_int(rng, 16, 2e7),
            "values": log_int(rng, 2, 1e6), "columns": log_int(rng, 8, 60000), "k": log_int(rng, 1, 256),
            "share": round(float(rng.random()), 3)}  # fmt: skip


def build_counting(torch: Any, p: dict[str, Any]) -> Parts:
    if p["op"] == "topk":
        rows = max(1, min(p["count"], 20_000_000) // p["columns"])
        x = tensor(torch, (rows, p["columns"]), p["dtype"])
        return one(lambda: x.topk(min(p["k"], p["columns"]), -1))
    if p["op"] == "nonzero":
        x = torch.rand(p["count"], device="cuda") < p["share"]
        return one(lambda: x.nonzero())
    x = torch.randint(0, p["values"], (p["count"],), device="cuda")
    if p["op"] == "bincount":
        return one(lambda: torch.bincount(x, minlength=p["values"]))
    y, bins = x.float(), min(p["values"], 65536)
    return one(lambda: torch.histc(y, bins))


def _scan(rng: np.random.Generator) -> dict[str, Any]:
    length = log_int(rng, 2, 65536)
    inner = 1 if rng.random() < 0.5 else typical(rng, 2, 2048)
    rows = log_int(rng, 1, max(1.0, min(1e5, 3e7 / length / inner)))
    return {"op": near(rng, {"cumsum": 0.5, "cumprod": 0.1, "logcumsumexp": 0.15, "cummax": 0.25}),
            "dtype": near(rng, {**HALF, "int64": 0.15}), "shape": [rows, length, inner]}  # fmt: skip


def _recurrent(rng: np.random.Generator) -> dict[str, Any]:
    return {"op": near(rng, {"LSTM": 0.55, "GRU": 0.35, "RNN": 0.1}),
            "dtype": near(rng, {"float32": 0.5, "bfloat16": 0.25, "float16": 0.25}),
            "b": int(pick(rng, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))),
            "s": int(pick(rng, (4, 8, 12, 16, 24, 32, 48, 64, 96))),
            "i": values(rng, (32, 64, 80, 128, 200, 256, 300, 512, 768, 1024), 0.8, 16, 2048),
            "d": values(rng, HIDDEN, 0.8, 16, 2048),
            "layers": int(pick(rng, (1, 1, 1, 2, 3))), "both": bool(rng.random() < 0.3), "dropout": 0.0,
            "tf32": bool(rng.random() < 0.75)}  # fmt: skip


DRAWS = {"pool": (_pool, 0.27), "resample": (_resample, 0.27), "scatter": (_scatter, 0.2),
         "counting": (_counting, 0.14), "scan": (_scan, 0.12)}  # fmt: skip
BUILDS = {"pool": build_pool, "resample": build_resample, "scatter": build_scatter, "counting": build_counting,
          "scan": build_scan, "products": build_products}  # fmt: skip


def sample_thin(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {name: weight for name, (_, weight) in DRAWS.items()})
    return {"what": what, **DRAWS[what][0](rng)}


def build_thin(torch: Any, p: dict[str, Any]) -> Parts:
    return BUILDS[p["what"]](torch, p)


def _channels(asked: int, places: int) -> int:
    """As many of the usual numbers as an image of so many places may have."""
    return max((c for c in CHANNELS if c <= asked and c * places < 1.2e8), default=CHANNELS[0])


def _wide_pool(rng: np.random.Generator) -> dict[str, Any]:
    """Pools of all orders and windows, some images wider than high, some windows of one frame."""
    p = _pool(rng, PLACE_POOLS)
    if rng.random() < 0.2:
        p["across"] = max(p["k"], round(p["size"] * float(pick(rng, (0.5, 0.75, 1.33, 1.78)))))
    places = p["size"] * p.get("across", p["size"]) * (p["frames"] if p["op"].endswith("3") else 1)
    p["c"] = _channels(p["c"], places)
    p["n"] = max(1, min(p["n"], int(1.2e8 / (p["c"] * places))))
    return {**p, "by_frame": p["op"] in ("max3", "avg3") and bool(rng.random() < 0.3)}


def _long_resample(rng: np.random.Generator) -> dict[str, Any]:
    """As `_resample`, trilinear between any numbers of frames."""
    p = _resample(rng, PLACE_RESAMPLINGS)
    if p["op"] == "trilinear":
        p["frames"], p["out_frames"] = (int(pick(rng, (2, 4, 4, 8, 16, 32))) for _ in range(2))
        frames = max(p["frames"], p["out_frames"])
        p["n"], p["c"] = max(1, p["n"] // frames), _channels(p["c"], max(p["size"], p["out"]) ** 2 * frames)
    return p


PLACE_POOLS = {"adaptive2": 0.22, "adaptive3": 0.16, "max3": 0.2, "avg3": 0.15, "adaptive_max2": 0.09, "max2": 0.1,
               "avg2": 0.08}  # fmt: skip
PLACE_RESAMPLINGS = {"bilinear": 0.23, "nearest": 0.13, "bicubic": 0.2, "grid": 0.22, "trilinear": 0.11, "linear": 0.11}
PLACE_SCATTERS = {"amax": 0.55, "amin": 0.1, "prod": 0.2, "mean": 0.15}
PLACE_DRAWS: dict[str, tuple[Draw, float]] = {
    "pool": (_wide_pool, 0.42),
    "resample": (_long_resample, 0.33),
    "scan": (_scan, 0.07),
    "scatter": (partial(_scatter, ops=PLACE_SCATTERS), 0.11),
    "products": (sample_products, 0.07),
}


def sample_places(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {name: weight for name, (_, weight) in PLACE_DRAWS.items()})
    return {"what": what, **PLACE_DRAWS[what][0](rng)}


def _sides(rng: np.random.Generator) -> dict[str, Any]:
    """Norms of weights along their first and last dimension, and sums over some of many dimensions."""
    if rng.random() < 0.4:
        shape = [log_int(rng, 16, 2048), log_int(rng, 1, 512), int(pick(rng, (1, 3, 5, 7, 16, 32, 64, 95, 128, 192)))]
        return {"op": "weight_norm", "dtype": near(rng, HALF), "shape": shape, "dim": int(pick(rng, (0, 2, 2)))}
    dims, most = int(pick(rng, (3, 4, 5, 6, 6))), float(np.exp(rng.uniform(np.log(1e4), np.log(2.5e8))))
    shape = [int(pick(rng, (2, 4, 4, 8, 16, 16, 32, 64, 64, 128, 256, 256))) for _ in range(dims)]
    while np.prod(shape, dtype=float) > most:
        shape[int(rng.integers(0, dims))] = int(pick(rng, (1, 2, 4, 8)))
    over = sorted(rng.choice(dims, int(pick(rng, (1, 1, 1, 2))), replace=False).tolist())
    order = rng.permutation(dims).tolist() if rng.random() < 0.5 else list(range(dims))  # in memory
    return {"op": "sum", "dtype": near(rng, HALF), "shape": shape, "over": over, "order": order}


def build_sides(torch: Any, p: dict[str, Any]) -> Parts:
    x = tensor(torch, p["shape"], p["dtype"], order=p.get("order"))
    if p["op"] == "sum":
        return one(lambda: x.sum(p["over"]))
    x.requires_grad_(True)
    g = tensor(torch, [n if i == p["dim"] else 1 for i, n in enumerate(p["shape"])], p["dtype"], True)
    return both_ways(torch, lambda: torch._weight_norm(x, g, p["dim"]), [x, g])


FAMILIES = {
    "places": (sample_places, build_thin, 12000),
    "sides": (_sides, build_sides, 2000),
    "thin": (sample_thin, build_thin, 4000),
    "recurrent_more": (_recurrent, build_recurrent, 600),
}
