"""Ops of whole layers as public models have them: norms over few groups or many places, broadcasts and sums over many
dimensions, losses of images, concatenations of channels, thin products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, both_ways, log_int, near, one, pick, tensor, values

KINDS = {"float32": 0.5, "bfloat16": 0.35, "float16": 0.15}
CHANNELS = (16, 24, 32, 40, 48, 64, 64, 96, 112, 128, 128, 144, 192, 240, 256, 256, 288, 320, 384, 480, 512, 512, 672,
            768, 960, 1024, 1152, 1536, 2048)  # fmt: skip
SIDES = (
    1,
    4,
    7,
    7,
    8,
    10,
    14,
    14,
    16,
    17,
    19,
    28,
    28,
    32,
    35,
    38,
    56,
    56,
    60,
    64,
    75,
    80,
    112,
    112,
    128,
    150,
    224,
    240,
)
Draw = Callable[[np.random.Generator], dict[str, Any]]


def _images(rng: np.random.Generator, most: float) -> list[int]:
    """A batch of images, clips or sequences with up to so many numbers."""
    c, side = int(pick(rng, CHANNELS)), int(pick(rng, SIDES))
    dims = int(near(rng, {1: 0.15, 2: 0.7, 3: 0.15}))
    sides = {1: [log_int(rng, 8, 20000)], 2: [side, side], 3: [int(pick(rng, (1, 4, 8, 16))), side, side]}[dims]
    n = int(pick(rng, (1, 2, 4, 8, 8, 16, 32, 32, 48, 64, 96, 128, 256)))
    return [int(max(1, min(n, most / (c * float(np.prod(sides)))))), c, *sides]


def _batch_norm(rng: np.random.Generator) -> dict[str, Any]:
    shape = _images(rng, 1.2e8)
    last = len(shape) > 3 and rng.random() < 0.4
    return {"dtype": near(rng, KINDS), "shape": shape, "channels_last": bool(last)}


def _group_norm(rng: np.random.Generator) -> dict[str, Any]:
    shape = _images(rng, 6e7)
    groups = [g for g in (1, 1, 1, 2, 4, 8, 16, 32, 32, shape[1]) if shape[1] % g == 0]
    return {"dtype": near(rng, KINDS), "shape": shape, "groups": int(pick(rng, groups))}


def _layer_norm(rng: np.random.Generator) -> dict[str, Any]:
    width = values(rng, (48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048, 4096), 0.9, 16, 60000)
    return {
        "dtype": near(rng, KINDS),
        "rows": log_int(rng, 1, max(2.0, min(4e5, 1e8 / width))),
        "width": width,
        "rms": bool(rng.random() < 0.2),
    }


def _sides(rng: np.random.Generator, most: float) -> list[int]:
    """Three to eight dimensions."""
    out: list[int] = []
    for _ in range(int(rng.integers(3, 9))):
        room = most / float(np.prod(out or [1]))
        out.append(int(max(1, min(int(pick(rng, (2, 4, 4, 7, 8, 8, 12, 14, 16, 32, 64, 64, 128, 256))), room))))
    return [int(s) for s in rng.permutation(out)]


def _broadcast(rng: np.random.Generator, least: float = 1e4, most: float = 1e8) -> dict[str, Any]:
    shape = _sides(rng, float(log_int(rng, least, most)))
    ones = [[bool(rng.random() < 0.3) for _ in shape] if rng.random() < 0.7 else [False] * len(shape) for _ in range(2)]
    return {
        "op": near(rng, {"mul": 0.5, "add": 0.3, "sub": 0.1, "div": 0.1}),
        "dtype": near(rng, KINDS),
        "shape": shape,
        "ones": ones,
        "swap": bool(rng.random() < 0.2),
        "mixed": bool(rng.random() < 0.15),
    }


def _sum(rng: np.random.Generator, least: float = 1e4, most: float = 1.5e8) -> dict[str, Any]:
    shape = _sides(rng, float(log_int(rng, least, most)))
    dims = [i for i in range(len(shape)) if rng.random() < 0.35] or [int(rng.integers(len(shape)))]
    return {
        "op": near(rng, {"sum": 0.75, "mean": 0.15, "amax": 0.1}),
        "dtype": near(rng, KINDS),
        "shape": shape,
        "dims": dims,
        "swap": bool(rng.random() < 0.25),
    }


def _loss(rng: np.random.Generator) -> dict[str, Any]:
    c, side = (
        int(pick(rng, (2, 3, 5, 10, 19, 21, 21, 40, 80, 91, 150, 150, 512))),
        int(pick(rng, (32, 64, 128, 224, 240, 256, 480, 512, 520))),
    )
    return {
        "dtype": near(rng, {"float32": 0.75, "bfloat16": 0.25}),
        "shape": [int(max(1, min(int(pick(rng, (1, 2, 4, 8, 16, 32))), 1e8 / (c * side * side)))), c, side, side],
        "ignored": bool(rng.random() < 0.5),
    }


def _cat(rng: np.random.Generator) -> dict[str, Any]:
    side, first = (
        int(pick(rng, (4, 7, 7, 14, 14, 28, 28, 32, 56, 64))),
        int(pick(rng, (32, 58, 64, 116, 128, 256, 256, 512, 640))),
    )
    parts = [first, *[int(pick(rng, (12, 24, 32, 32, 48, first))) for _ in range(int(log_int(rng, 1, 34)))]]
    return {
        "dtype": near(rng, KINDS),
        "n": int(max(1, min(int(pick(rng, (1, 4, 8, 16, 32, 48, 64, 128))), 6e7 / (sum(parts) * side * side)))),
        "side": side,
        "parts": parts,
        "channels_last": bool(rng.random() < 0.4),
    }


def _thin(rng: np.random.Generator) -> dict[str, Any]:
    """Batched products with one short side, or a long inner dimension."""
    batch = int(pick(rng, (2, 4, 8, 14, 16, 32, 64, 128, 384, 1024, 4096)))
    m, k, n = log_int(rng, 4, 2048), log_int(rng, 4, 30000), int(pick(rng, (1, 1, 1, 2, 4, 7, 14, 16, 64, 96, 393)))
    kind = near(rng, {"float32": 0.35, "tf32": 0.15, "bfloat16": 0.4, "float16": 0.1})
    batch = int(max(1, min(batch, 2e8 / (m * k + k * n + m * n))))
    return {
        "kind": kind,
        "batch": batch,
        "m": m,
        "k": k,
        "n": n,
        "left": bool(rng.random() < 0.3),
        "layout": pick(rng, ("nn", "nt", "tn")),
    }


DRAWS: dict[str, tuple[Draw, float]] = {
    "batch_norm": (_batch_norm, 0.22),
    "group_norm": (_group_norm, 0.12),
    "layer_norm": (_layer_norm, 0.1),
    "broadcast": (_broadcast, 0.18),
    "sum": (_sum, 0.14),
    "loss": (_loss, 0.06),
    "cat": (_cat, 0.08),
    "thin": (_thin, 0.1),
}


def sample_layers(rng: np.random.Generator) -> dict[str, Any]:
    what = near(rng, {name: weight for name, (_, weight) in DRAWS.items()})
    return {"what": what, **DRAWS[what][0](rng)}


def sample_large(rng: np.random.Generator) -> dict[str, Any]:
    """Broadcasts and sums of 0.1 to 0.8 billion numbers, half of them in another order of memory."""
    what = near(rng, {"broadcast": 0.45, "sum": 0.55})
    while np.prod((p := (_broadcast if what == "broadcast" else _sum)(rng, 1e8, 8e8))["shape"]) < 1e8:
        pass  # many small dimensions, which are drawn often, multiply to less
    order = [int(i) for i in rng.permutation(len(p["shape"]))] if rng.random() < 0.5 else None
    return {"what": what, **p, "order": order}


def build_batch_norm(torch: Any, p: dict[str, Any]) -> Parts:
    x, c = tensor(torch, p["shape"], p["dtype"]), p["shape"][1]
    if p["channels_last"]:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    x.requires_grad_(True)
    w, b = (torch.randn(c, device="cuda", requires_grad=True) for _ in range(2))
    mean, var = torch.zeros(c, device="cuda"), torch.ones(c, device="cuda")
    run = torch.nn.functional.batch_norm
    return both_ways(torch, lambda: run(x, mean, var, w, b, training=True), [x, w, b])


def build_group_norm(torch: Any, p: dict[str, Any]) -> Parts:
    x, c = tensor(torch, p["shape"], p["dtype"], True), p["shape"][1]
    w, b = (tensor(torch, (c,), p["dtype"], True) for _ in range(2))
    return both_ways(torch, lambda: torch.nn.functional.group_norm(x, p["groups"], w, b), [x, w, b])


def build_layer_norm(torch: Any, p: dict[str, Any]) -> Parts:
    x, w, b = (tensor(torch, s, p["dtype"], True) for s in ((p["rows"], p["width"]), (p["width"],), (p["width"],)))
    f = torch.nn.functional
    if p["rms"]:
        return both_ways(torch, lambda: f.rms_norm(x, (p["width"],), w), [x, w])
    return both_ways(torch, lambda: f.layer_norm(x, (p["width"],), w, b), [x, w, b])


def build_broadcast(torch: Any, p: dict[str, Any]) -> Parts:
    kinds = (p["dtype"], "float32" if p["mixed"] else p["dtype"])
    shapes = [[1 if one_ else n for n, one_ in zip(p["shape"], ones, strict=True)] for ones in p["ones"]]
    x, y = (tensor(torch, s, kind, order=p.get("order")) for s, kind in zip(shapes, kinds, strict=True))
    if p["swap"]:
        y = tensor(torch, [*shapes[1][:-2], shapes[1][-1], shapes[1][-2]], kinds[1]).transpose(-1, -2)
    f = getattr(torch, p["op"])
    return one(lambda: f(x, y))


def build_sum(torch: Any, p: dict[str, Any]) -> Parts:
    x, f = tensor(torch, p["shape"], p["dtype"], order=p.get("order")), getattr(torch, p["op"])
    if p["swap"]:
        x = x.transpose(0, -1)
    return one(lambda: f(x, p["dims"]))


def build_loss(torch: Any, p: dict[str, Any]) -> Parts:
    x, (n, c, h, w) = tensor(torch, p["shape"], p["dtype"], True), p["shape"]
    y = torch.randint(0, c, (n, h, w), device="cuda")
    grad = torch.ones((), device="cuda", dtype=x.dtype)
    return both_ways(torch, lambda: torch.nn.functional.cross_entropy(x, y), [x], grad)


def build_cat(torch: Any, p: dict[str, Any]) -> Parts:
    pieces = [tensor(torch, (p["n"], c, p["side"], p["side"]), p["dtype"]) for c in p["parts"]]
    if p["channels_last"]:
        pieces = [x.to(memory_format=torch.channels_last) for x in pieces]
    return one(lambda: torch.cat(pieces, 1))


def build_thin(torch: Any, p: dict[str, Any]) -> Parts:
    torch.backends.cuda.matmul.allow_tf32 = p["kind"] == "tf32"
    dtype = "float32" if p["kind"] == "tf32" else p["kind"]
    m, n = (p["n"], p["m"]) if p["left"] else (p["m"], p["n"])
    order = {"n": [0, 1, 2], "t": [0, 2, 1]}
    x = tensor(torch, (p["batch"], m, p["k"]), dtype, order=order[p["layout"][0]])
    y = tensor(torch, (p["batch"], p["k"], n), dtype, order=order[p["layout"][1]])
    return one(lambda: torch.bmm(x, y))


BUILDS = {
    "batch_norm": build_batch_norm, "group_norm": build_group_norm, "layer_norm": build_layer_norm,
    "broadcast": build_broadcast, "sum": build_sum, "loss": build_loss, "cat": build_cat, "thin": build_thin,
}  # fmt: skip


def build_layers(torch: Any, p: dict[str, Any]) -> Parts:
    return BUILDS[p["what"]](torch, p)


FAMILIES = {"layers": (sample_layers, build_layers, 4000), "large": (sample_large, build_layers, 1200)}
