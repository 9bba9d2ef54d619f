"""Results whose places are computed from other places: interpolation, grid sampling, unfolding, padding by reflection.

Law: `near` is the side of the forward's input, `far` that of its output. A thread makes a far number from near ones, or
many one after the other (`lanes`): all planes at one place (cubic, and linear in planar order), all channels
(grids), all images (nearest in planar order), so that few threads leave the GPU idle. Backward every far number is
added to the near ones it was made from, with atomics: what falls onto one near place waits for what fell there before,
so a large scale is slow by far/near, and one near place (a pooled 1x1 image spread out again) takes all far ones one by
one. A sum of such parts with fitted weights, by op, layout and width (data/kernel_laws.toml).

Sweep: 4,000 draws of interpolation in five modes by factors of 0.3 to 16 and from one place, grids, unfolding and
reflection, both layouts, both ways; 250 of upsampling by two.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, fitted_numbers, ln
from presage.costs.rates import REFERENCE_SMS, Rates

MODES = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
OPS = codes(
    [
        *(f"upsample_{mode}{way}" for mode in MODES for way in ("", "_backward")),
        "grid_sampler_2d", "grid_sampler_2d_backward", "im2col", "col2im", "reflection_pad2d",
        "reflection_pad2d_backward", "reflection_pad1d", "reflection_pad1d_backward", "replication_pad2d",
        "replication_pad2d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward", "grid_sampler_3d",
        "grid_sampler_3d_backward",
    ]
)  # fmt: skip
ALIKE = {f"aten::{a}": f"aten::{b}" for a, b in {
    "upsample_nearest1d": "upsample_nearest2d", "upsample_nearest1d_backward": "upsample_nearest2d_backward",
    "upsample_nearest3d": "upsample_nearest2d", "upsample_nearest3d_backward": "upsample_nearest2d_backward",
    "reflection_pad1d": "reflection_pad2d", "reflection_pad1d_backward": "reflection_pad2d_backward",
    "replication_pad2d": "reflection_pad2d", "replication_pad2d_backward": "reflection_pad2d_backward",
    "_upsample_bilinear2d_aa": "upsample_bilinear2d", "_upsample_nearest_exact2d": "upsample_nearest2d",
    "_upsample_bilinear2d_aa_backward": "upsample_bilinear2d_backward", "grid_sampler_3d": "grid_sampler_2d",
    "_upsample_nearest_exact2d_backward": "upsample_nearest2d_backward",
    "grid_sampler_3d_backward": "grid_sampler_2d_backward",
}.items()}  # fmt: skip
TAPS = {"linear1d": 2, "bilinear2d": 4, "trilinear3d": 8, "bicubic2d": 16, "grid": 4}  # near numbers a far one is of
ADDED = ("linear", "bicubic", "grid")  # whose gradients are added with atomics
CACHED = 3e7  # bytes of the near side that stay in the L2


class Resampling(NamedTuple):
    """Planes of `near` places (the forward's input) and `far` ones (its output)."""

    name: str
    backward: bool
    planes: int
    channels: int
    near: int
    far: int
    taps: int
    width: int
    channels_last: bool

    @property
    def added(self) -> bool:
        """Whether near places are added to with atomics."""
        return self.backward and any(mode in self.name for mode in ADDED)

    @property
    def contention(self) -> float:
        """Far numbers that fall onto a near place."""
        return max(1.0, self.far * self.taps / max(1, self.near)) if self.added else 1.0

    @property
    def moved(self) -> float:
        return float(self.planes * self.width * (self.near + self.far))


def resampling(call: Call) -> Resampling:
    name, first = ALIKE.get(call.name, call.name), call.tensors[0]
    backward = call.name.endswith("backward")
    taps = next((n for mode, n in TAPS.items() if mode in name), 1)
    last = len(first.strides) > 3 and first.strides[1] == 1 and first.sizes[1] > 1 and not first.is_contiguous
    if "im" in call.name and "col" in call.name:
        near, far, lead = _unfolded(call, first)
        return Resampling(name, False, prod(lead), lead[-1], near, far, 1, first.width, last)
    lead = first.sizes[:2] if len(first.sizes) > 2 else first.sizes[:1]
    own, other = prod(first.sizes[len(lead) :]), _other(call, first, backward)
    near, far = (other, own) if backward else (own, other)
    return Resampling(name, backward, prod(lead), lead[-1], near, far, taps, first.width, last)


def _unfolded(call: Call, first: Shape) -> tuple[int, int, tuple[int, ...]]:
    """Places of an image, numbers of its columns for each channel, images and channels."""
    folds = call.name == "aten::col2im"
    kernel = prod(call.numbers(2 if folds else 1))
    if folds:
        near = prod(int(n) for n in call.numbers(1))
        channels = max(1, int(first.sizes[-2] / max(1.0, kernel)))
        return near, int(kernel * first.sizes[-1]), (prod(first.sizes[:-2]), channels)
    near = prod(first.sizes[-2:])
    return near, int(kernel * near), (prod(first.sizes[:-3]), first.sizes[-3])


def _other(call: Call, first: Shape, backward: bool) -> int:
    """Places of the side that is not the first input."""
    if "grid" in call.name:
        grid = call.tensors[2 if backward else 1]
        return prod(call.tensors[1].sizes[2:]) if backward else prod(grid.sizes[1:-1])
    if "pad" in call.name:
        if backward:
            return prod(call.tensors[1].sizes[2:])
        pads = [int(n) for n in call.numbers(1)]
        sides = [*reversed(first.sizes[2:])]
        return prod(n + sum(pads[2 * i : 2 * i + 2]) for i, n in enumerate(sides))
    if backward:
        return prod(int(n) for n in call.numbers(2)[2:]) or prod(first.sizes[2:])
    given = call.numbers(1)
    if given:
        return prod(int(n) for n in given)
    scales = [v for place in (2, 3, 4) for v in call.numbers(place) if v > 1] or [2.0]
    return int(prod(first.sizes[2:]) * scales[0] ** len(first.sizes[2:]))


def lanes(r: Resampling) -> tuple[float, float]:
    """How many numbers a thread makes one after the other, and how many threads there are."""
    images = r.planes / max(1, r.channels)
    if "grid" in r.name:
        return float(r.channels), images * r.far
    if "bicubic" in r.name or ("linear" in r.name and not r.backward and not r.channels_last):
        return float(r.planes), float(r.far)
    if "nearest" in r.name and not r.channels_last:
        side = r.near if r.backward else r.far
        return images * (max(1.0, r.far / max(1, r.near)) if r.backward else 1.0), float(r.channels * side)
    return 1.0, float(r.planes * r.far)


def parts(r: Resampling, rates: Rates) -> list[float]:
    """Seconds before their weights: a launch; bytes; what the cache does not keep of the near side; numbers read;
    numbers in a row, those of large near sides, those of more threads than run at once; numbers added to one place,
    all in all and at one place; results."""
    serial, threads = lanes(r)
    numbers = r.planes * (r.near if r.backward and not r.added else r.far)
    row, contended = serial * 1e-7, (r.contention - 1) * r.planes * r.far * r.taps * 1e-13
    return [
        rates.floor, r.moved / rates.bandwidth, max(0.0, r.planes * r.near * r.width - CACHED) / rates.bandwidth,
        numbers * r.taps * 1e-10 / rates.sms, row, row * min(1.0, r.near / 1000),
        row * max(1.0, threads / (rates.sms * 2048)), contended, r.contention * 1e-8,
        r.planes * r.far * 1e-10 / rates.sms,
    ]  # fmt: skip


def path(r: Resampling) -> str:
    """Which weights are its own: by op, layout and width, or those of the nearest that was measured."""
    known = fitted_numbers("resample")["weights"]
    name, here = r.name.removeprefix("aten::"), "last" if r.channels_last else "planar"
    ways = [f"{name} {layout} {width}" for layout in (here, "planar", "last") for width in (min(r.width, 4), 4, 2)]
    return next((way for way in ways if way in known), "upsample_bilinear2d planar 4")


def law(call: Call, rates: Rates) -> Law:
    r = resampling(call)
    weights = fitted_numbers("resample")["weights"][path(r)]
    seconds = sum(w * part for w, part in zip(weights, parts(r, rates), strict=True))
    return Law(max(0.5 * rates.floor, seconds, r.moved / rates.bandwidth / 3), 0.0, r.moved)


def features(call: Call, law: Law) -> list[float]:
    r = resampling(call)
    serial, threads = lanes(r)
    waves = threads / REFERENCE_SMS / 2048
    return [
        OPS[r.name], float(r.width), float(r.channels_last), ln(r.planes), ln(r.near), ln(r.far), ln(r.far / r.near),
        ln(r.channels), ln(r.planes / max(1, r.channels)), ln(r.contention), ln(law.seconds), ln(r.moved),
        ln(r.planes * r.near), ln(r.planes * r.far), float(alignment(r.channels, 32)), float(alignment(r.far, 16)),
        *(ln(t / law.seconds + 1e-6) for t in parts(r, REFERENCE)), float(min(r.near, 64)), ln(serial), ln(threads),
        ceil(waves) / waves, waves, ln(law.seconds / serial), call.number(3 if r.backward else 2),
    ]  # fmt: skip


REFERENCE = Rates(4.2e12, {"fp32": 5.4e13}, REFERENCE_SMS)  # whose parts the features speak of
FAMILY = KernelFamily("resample", frozenset(OPS), law, features, rounds=700, leaves=63, rate=0.08, bound=0.3)
