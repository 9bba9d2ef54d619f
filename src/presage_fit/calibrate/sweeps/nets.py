"""Convolutions as published nets have them: widths that go with sizes, grouped, dilated, long 1-D, factorised 3-D ones.

`conv` draws every parameter for itself; here they are drawn together, layer by layer of made-up nets. Beside the times
stands how much workspace cuDNN took (bytes, for each of the three ways).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import Parts, log_int, near, pick, tensor
from presage_fit.calibrate.sweeps.convolution import BATCHES, LONGEST

IMAGES = (96, 112, 128, 160, 192, 224, 224, 224, 224, 240, 256, 256, 288, 299, 300, 320, 384, 416, 448, 480, 512, 520,
          600, 640, 800)  # fmt: skip
WIDTHS = (16, 24, 32, 32, 40, 48, 56, 64, 64, 64, 64, 72, 80, 96, 96, 112, 128, 128, 144, 160, 192, 256)
GROUP_WIDTHS = (4, 8, 16, 24, 32, 40, 48, 56, 64, 112, 120, 128, 168, 232)
HEADS = (2, 10, 19, 21, 75, 80, 91, 100, 150, 255, 256, 512, 1000)
KINDS = {"float32": 0.12, "tf32": 0.36, "bfloat16": 0.36, "float16": 0.16}
Shape = dict[str, Any]


def _layer(i: int, o: int, k: Any, stride: Any = 1, dilation: Any = 1, groups: int = 1, padding: Any = None) -> Shape:
    return {"i": i, "o": o, "k": k, "stride": stride, "dilation": dilation, "groups": groups, "padding": padding}


def _wide(rng: np.random.Generator, stage: int) -> int:
    """Channels of a block at this stage: they double as the size halves."""
    return int(min(2048, pick(rng, WIDTHS) * 2 ** max(0, stage - int(pick(rng, (0, 1, 1, 2))))))


def _image_layer(rng: np.random.Generator, stage: int) -> Shape:
    c = _wide(rng, stage)
    what = near(
        rng,
        {
            "same": 0.2,
            "wider": 0.11,
            "narrower": 0.11,
            "down": 0.07,
            "shortcut": 0.04,
            "depthwise": 0.12,
            "grouped": 0.08,
            "dilated": 0.06,
            "stem": 0.04,
            "patches": 0.03,
            "joined": 0.05,
            "flat": 0.04,
            "up": 0.03,
            "head": 0.02,
        },
    )
    by = int(pick(rng, (2, 3, 4, 4, 6)))
    if what == "same":
        return _layer(c, c, int(pick(rng, (3, 3, 3, 3, 5, 7))))
    if what == "wider":
        return _layer(c, min(4096, c * by), 1)
    if what == "narrower":
        return _layer(min(4096, c * by), c, 1)
    if what in ("down", "shortcut"):
        return _layer(c, min(2048, 2 * c), 3 if what == "down" else 1, 2)
    if what == "depthwise":
        c = min(3072, c * int(pick(rng, (1, 1, 3, 4, 6))))
        return _layer(c, c, int(pick(rng, (3, 3, 5, 7))), int(pick(rng, (1, 1, 1, 2))), groups=c)
    if what == "grouped":
        one = int(pick(rng, GROUP_WIDTHS))
        groups = max(2, c * int(pick(rng, (1, 2))) // one)
        return _layer(
            one * groups, one * groups, int(pick(rng, (3, 3, 3, 1))), int(pick(rng, (1, 1, 1, 2))), groups=groups
        )
    if what == "dilated":
        i, o = int(pick(rng, (64, 128, 256, 512, 960, 1024, 2048))), int(pick(rng, (64, 128, 256, 512)))
        return _layer(i, o, 3, 1, int(pick(rng, (2, 2, 4, 4, 6, 8, 12, 18, 24, 36))))
    if what == "stem":
        return _layer(int(pick(rng, (1, 3, 3, 3, 4))), c, int(pick(rng, (3, 3, 5, 7, 7))), int(pick(rng, (1, 2, 2))))
    if what == "patches":
        k = int(pick(rng, (2, 4, 4, 8, 14, 16, 32)))
        return _layer(
            3 if k > 2 else c, int(pick(rng, (96, 128, 192, 384, 768, 1024))) if k > 2 else 2 * c, k, k, padding=0
        )
    if what == "joined":
        i = 32 * int(rng.integers(2, 52))
        return _layer(i, 128, 1) if rng.random() < 0.5 else _layer(128, int(pick(rng, (12, 24, 32, 48))), 3)
    if what == "flat":
        sides = [1, int(pick(rng, (3, 5, 7)))]
        wider = min(2048, int(c * pick(rng, (1, 1, 1.5))))
        return _layer(c, wider, sides if rng.random() < 0.5 else sides[::-1])
    if what == "up":
        k, padding = pick(rng, ((2, 0), (4, 1), (3, 1)))
        return {**_layer(c, max(8, c // 2), k, 2, padding=padding), "transposed": True}
    return _layer(c, int(pick(rng, HEADS)), 1)


def _image(rng: np.random.Generator) -> Shape:
    if rng.random() < 0.04:  # squeeze and excitation: convolutions of single places
        c, less = int(pick(rng, WIDTHS)) * int(pick(rng, (1, 2, 4, 6, 8))), int(pick(rng, (4, 4, 16, 24)))
        ends = (c, max(4, c // less))
        return {"dims": 2, "size": [1, 1], **_layer(*(ends if rng.random() < 0.5 else ends[::-1]), 1)}
    stage = int(rng.integers(0, 6))
    shape = _image_layer(rng, stage)
    size = int(pick(rng, IMAGES))
    if shape["i"] > 4:
        size = -(-size // 2 ** max(stage, int(shape["i"] > 256)))
    other = size if rng.random() < 0.85 else max(1, round(size * float(pick(rng, (0.5, 0.75, 1.33, 2, 4)))))
    return {"dims": 2, "size": [size, other], **shape}


def _sound(rng: np.random.Generator) -> Shape:
    """1-D: front ends over samples, blocks over frames, depthwise and dilated ones, positions."""
    what = near(rng, {"samples": 0.25, "frames": 0.25, "depthwise": 0.25, "single": 0.1, "positions": 0.05, "up": 0.1})
    c = int(pick(rng, (32, 64, 128, 192, 256, 384, 512, 512, 768, 1024)))
    frames = log_int(rng, 40, 6000)
    if what == "samples":
        k, stride = pick(rng, ((10, 5), (3, 2), (2, 2), (5, 2), (7, 2), (8, 4), (16, 8), (250, 160), (48, 2), (7, 1)))
        return {
            "dims": 1,
            "size": [log_int(rng, 2000, 120000)],
            **_layer(1 if rng.random() < 0.4 else c, c, k, stride, padding=0),
        }
    if what == "depthwise":
        c, k = int(pick(rng, (128, 256, 512, 768, 1024, 1536, 2048, 3072))), int(pick(rng, (3, 4, 5, 7, 15, 31)))
        dilation = 2 ** int(rng.integers(0, 8)) if k == 3 else 1
        return {"dims": 1, "size": [frames], **_layer(c, c, k, 1, dilation, c, padding=3 if k == 4 else None)}
    if what == "positions":
        return {"dims": 1, "size": [frames], **_layer(c, c, 128, 1, groups=16, padding=64)}
    if what == "up":
        k = int(pick(rng, (2, 4, 8, 16)))
        return {
            "dims": 1,
            "size": [frames],
            **_layer(c, max(1, c // 2), k, max(1, k // 2), padding=k // 4),
            "transposed": True,
        }
    k = 1 if what == "single" else int(pick(rng, (3, 3, 5, 7, 9, 32)))
    return {
        "dims": 1,
        "size": [frames],
        **_layer(
            c,
            c if rng.random() < 0.6 else 2 * c,
            k,
            int(pick(rng, (1, 1, 1, 2))),
            int(pick(rng, (1, 1, 2, 4))) if k == 3 else 1,
        ),
    }


def _video(rng: np.random.Generator) -> Shape:
    """3-D: whole, factorised in space and time, depthwise, patches."""
    stage = int(rng.integers(1, 6))
    side, frames = (
        -(-int(pick(rng, (64, 96, 112, 112, 128, 160, 224))) // 2**stage),
        int(pick(rng, (1, 2, 4, 8, 8, 16, 32))),
    )
    c = int(min(1024, pick(rng, (16, 24, 32, 45, 64, 64, 144)) * 2 ** max(0, stage - 1)))
    what = near(
        rng, {"whole": 0.3, "space": 0.2, "time": 0.2, "single": 0.15, "depthwise": 0.07, "stem": 0.04, "patches": 0.04}
    )
    down = rng.random() < 0.15
    if what == "patches":
        return {
            "dims": 3,
            "size": [16, 224, 224],
            **_layer(
                3,
                int(pick(rng, (96, 384, 768))),
                [2, *[int(pick(rng, (4, 16)))] * 2],
                [2, *[int(pick(rng, (4, 16)))] * 2],
                padding=0,
            ),
        }
    if what == "stem":
        return {
            "dims": 3,
            "size": [16, 112, 112],
            **_layer(3, int(pick(rng, (45, 64))), [int(pick(rng, (1, 3))), 7, 7], [1, 2, 2]),
        }
    k = {"whole": 3, "space": [1, 3, 3], "time": [3, 1, 1], "single": 1, "depthwise": 3}[what]
    stride = (
        {"whole": 2, "space": [1, 2, 2], "time": [2, 1, 1], "single": 2, "depthwise": [1, 2, 2]}[what] if down else 1
    )
    o = c if what == "depthwise" else int(min(1024, c * float(pick(rng, (1, 1, 2, 2.25, 0.5)))))
    return {
        "dims": 3,
        "size": [frames, side, side],
        **_layer(c, max(1, o), k, stride, groups=c if what == "depthwise" else 1),
    }


def sample_conv_net(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind, p = near(rng, KINDS), near(rng, {_image: 0.78, _sound: 0.12, _video: 0.1})(rng)
        n = int(pick(rng, BATCHES)) if rng.random() < 0.7 else log_int(rng, 1, 300)
        found = finished(rng, kind, n, p)
        if found is not None:
            return found


def finished(
    rng: np.random.Generator, kind: str, n: int, p: Shape, largest: float | None = None
) -> dict[str, Any] | None:
    """A layer with its settings spelled out for each dimension, in some layout; nothing where it is too large."""
    lists = {k: v if isinstance(v, list) else [v] * p["dims"] for k, v in p.items() if k in ("k", "stride", "dilation")}
    padding = p["padding"]
    if padding is None:  # the size stays
        padding = [d * (k - 1) // 2 for k, d in zip(lists["k"], lists["dilation"], strict=True)]
    elif not isinstance(padding, list):
        padding = [padding] * p["dims"]
    p = {"kind": kind, "n": n, "transposed": False, **p, **lists, "padding": padding}
    if not _fits(p, largest or (6e8 if p["groups"] > 1 else 1.5e9)):
        return None
    wide = p["dims"] > 1 and rng.random() < (0.5 if kind in ("bfloat16", "float16") else 0.25)
    return {**p, "channels_last": bool(wide)}


def _fits(p: dict[str, Any], largest: float) -> bool:
    sizes = zip(p["size"], p["k"], p["stride"], p["padding"], p["dilation"], strict=True)
    if p["transposed"]:
        out = [(n - 1) * s - 2 * q + d * (k - 1) + 1 for n, k, s, q, d in sizes]
    else:
        out = [(n + 2 * q - d * (k - 1) - 1) // s + 1 for n, k, s, q, d in sizes]
    if min(out) < 1:
        return False
    before, after = (p["n"] * float(np.prod(s)) for s in (p["size"], out))
    flops = 2 * (before if p["transposed"] else after) * p["o"] * p["i"] / p["groups"] * float(np.prod(p["k"]))
    moved = 4 * (before * p["i"] + after * p["o"])
    rate = 4e13 if p["kind"] == "float32" else 1e14 if p["groups"] > 1 else 2e14
    return bool(1e4 < flops < rate * LONGEST * 0.6 and moved < largest)


def build_conv_net(torch: Any, p: dict[str, Any]) -> Parts:
    """The two gradients are asked for one by one, as in `conv`."""
    torch.backends.cudnn.allow_tf32 = p["kind"] == "tf32"
    dtype, groups = "float32" if p["kind"] == "tf32" else p["kind"], p["groups"]
    ends = (p["i"], p["o"] // groups) if p["transposed"] else (p["o"], p["i"] // groups)
    w, x = tensor(torch, (*ends, *p["k"]), dtype), tensor(torch, (p["n"], p["i"], *p["size"]), dtype)
    if p["channels_last"]:
        last = torch.channels_last if p["dims"] == 2 else torch.channels_last_3d
        w, x = w.to(memory_format=last), x.to(memory_format=last)
    rest = (p["stride"], p["padding"], p["dilation"], p["transposed"], [0] * p["dims"], groups)
    y = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))

    def gradient(*mask: bool) -> Any:
        return lambda: torch.ops.aten.convolution_backward(y, x, w, None, *rest, [*mask, False])

    ways = (lambda: torch.ops.aten.convolution(x, w, None, *rest), gradient(True, False), gradient(False, True))
    p["workspace"] = [_workspace(torch, way) for way in ways]
    return ways


def _workspace(torch: Any, call: Any) -> int:
    """Bytes that a call has at most beside its results."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    made = call()
    most = int(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    del made
    return most


FAMILIES = {"conv_net": (sample_conv_net, build_conv_net, 4000)}
