"""Results whose places are computed from other places: interpolation, grid sampling, unfolding, padding by reflection.

Law: `near` is the side of the forward's input, `far` that of its output. A thread makes a far number from near ones, or
many one after the other (`launch`): all planes at one place (cubic, trilinear, and linear in planar order), all
channels (grids), all images (nearest backward), so that few places leave most SMs idle. A warp of neighbours along the
width touches few sectors of memory in planar order and 32 where channels are last, unless the kernel walks along them.
Backward every far number is added to the near ones it was made from, with atomics: what falls onto one near place waits
for what fell there before, so a large scale is slow by far/near, most of all in half precision, where two places share
a word. A sum of such parts with fitted weights, by op, layout and width (data/kernel_laws.toml).

Sweep: 4,000 draws of interpolation in five modes by factors of 0.3 to 16 and from one place, grids, unfolding and
reflection, both layouts, both ways; 250 of upsampling by two. Cubic ones channels last and half-precision gradients of
few places are the worst.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, fitted_numbers, ln, power
from presage.costs.families.pool import WARP, WORD, KernelLaunch, Sides, channels_last, sectors, three
from presage.costs.rates import REFERENCE, REFERENCE_SMS, Rates

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
ADDED = ("linear", "bicubic", "grid", "pad")  # whose gradients are added with atomics
# threads of a block, forward and backward
THREADS = {"linear1d": (1024, 1024), "bilinear2d": (1024, 1024), "trilinear3d": (512, 256), "bicubic2d": (1024, 1024),
           "grid": (512, 256), "nearest": (512, 512), "pad": (256, 256), "col": (512, 512)}  # fmt: skip
CACHED = 3e7  # bytes of the near side that stay in the L2


class Resampling(NamedTuple):
    """Planes of `near` places (the forward's input) and `far` ones (its output), by depth, height and width."""

    name: str
    backward: bool
    planes: int
    channels: int
    near_sides: Sides
    far_sides: Sides
    taps: int
    width: int
    channels_last: bool

    @property
    def near(self) -> int:
        return prod(self.near_sides)

    @property
    def far(self) -> int:
        return prod(self.far_sides)

    @property
    def images(self) -> int:
        return max(1, self.planes // max(1, self.channels))

    @property
    def kind(self) -> str:
        return next(kind for kind in THREADS if kind in self.name)

    @property
    def copies(self) -> bool:
        """Whether both sides are of one size, of which interpolation only copies."""
        return "upsample" in self.name and self.near_sides == self.far_sides

    @property
    def added(self) -> bool:
        """Whether near places are added to with atomics."""
        return self.backward and not self.copies and any(mode in self.name for mode in ADDED)

    @property
    def gathers(self) -> bool:
        """Whether threads make near numbers, of all far ones that fall there."""
        return self.backward and not self.added

    @property
    def flat(self) -> bool:
        """Whether a kernel of its own walks along the channels, a thread for each number."""
        return self.channels_last and self.kind in ("bilinear2d", "nearest")

    @property
    def window(self) -> float:
        """Numbers that one is made of or added to."""
        return max(1.0, self.far / max(1, self.near)) if self.gathers else float(self.taps)

    @property
    def contention(self) -> float:
        """Far numbers that fall onto a near place."""
        return max(1.0, self.far * self.taps / max(1, self.near)) if self.added else 1.0

    @property
    def crowd(self) -> float:
        """Threads of a warp that add to one word at once, grids' to one of random places."""
        if not self.added or self.flat or self.kind == "grid":
            return max(1.0, WARP / self.near) if self.added and self.kind == "grid" else 1.0
        (_, high, wide), (_, tall, across) = self.near_sides, self.far_sides
        lanes = min(WARP, across)
        rows = min(WARP / lanes, max(1.0, tall / high))
        return max(1.0, rows * min(lanes, WORD * across / (self.width * wide)))

    @property
    def moved(self) -> float:
        return float(self.planes * self.width * (self.near + self.far))


def resampling(call: Call) -> Resampling:
    name, first = ALIKE.get(call.name, call.name), call.tensors[0]
    backward = call.name.endswith("backward")
    if "im" in call.name and "col" in call.name:
        near, far, lead = _unfolded(call, first)
        return Resampling(name, False, prod(lead) or 1, lead[-1] or 1, near, far, 1, first.width, False)
    lead = first.sizes[:2] if len(first.sizes) > 2 else first.sizes[:1]
    own, other = three(first.sizes[len(lead) :]), three(_other(call, first, backward))
    near, far = (other, own) if backward else (own, other)
    copied = near == far and "upsample" in name
    taps = 1 if copied else next((n for mode, n in TAPS.items() if mode in name), 1)
    last = channels_last(call.tensors[1] if "grid" in name and backward else first)
    last = last and not ("bicubic" in name and backward)  # whose gradient is copied to planar order first
    return Resampling(name, backward, prod(lead) or 1, lead[-1] or 1, near, far, taps, first.width, last)


def _unfolded(call: Call, first: Shape) -> tuple[Sides, Sides, tuple[int, ...]]:
    """Sides of an image, those of its columns (numbers of a window, places), images and channels."""
    folds = call.name == "aten::col2im"
    kernel = int(prod(call.numbers(2 if folds else 1)))
    if folds:
        channels = max(1, first.sizes[-2] // max(1, kernel))
        sides = tuple(int(n) for n in call.numbers(1))
        return three(sides), three((kernel, 1, first.sizes[-1])), (prod(first.sizes[:-2]), channels)
    near = first.sizes[-2:]
    return three(near), three((kernel, *near)), (prod(first.sizes[:-3]), first.sizes[-3])


def _other(call: Call, first: Shape, backward: bool) -> tuple[int, ...]:
    """The side that is not the first input's."""
    if "grid" in call.name:
        grid = call.tensors[2 if backward else 1]
        return call.tensors[1].sizes[2:] if backward else grid.sizes[1:-1]
    if "pad" in call.name:
        if backward:
            return call.tensors[1].sizes[2:]
        pads = [int(n) for n in call.numbers(1)]
        padded = [n + sum(pads[2 * i : 2 * i + 2]) for i, n in enumerate(reversed(first.sizes[2:]))]
        return tuple(reversed(padded))
    if backward:
        return tuple(int(n) for n in call.numbers(2)[2:]) or first.sizes[2:]
    given = call.numbers(1)
    if given:
        return tuple(int(n) for n in given)
    scales = [v for place in (2, 3, 4) for v in call.numbers(place) if v > 1] or [2.0]
    return tuple(int(n * scales[0]) for n in first.sizes[2:])


def launch(r: Resampling) -> KernelLaunch:
    threads, made = 1024 if r.flat else THREADS[r.kind][r.backward], r.near_sides if r.gathers else r.far_sides
    places, rounds = prod(made), _rounds(r)
    lanes = min(WARP, r.channels if r.flat else made[2])
    stride = r.far_sides[2] / r.near_sides[2] if r.gathers else r.near_sides[2] / r.far_sides[2]
    step = r.width * (1.0 if r.flat else stride * r.channels if r.channels_last else stride)
    touched = WARP if r.kind == "grid" else WARP / lanes * sectors(lanes, step)
    steps, launches = r.planes * places / WARP, r.images if r.name == "aten::im2col" else 1
    return KernelLaunch(_blocks(r, places, rounds, threads), threads, rounds, steps, touched, launches=launches)


def _rounds(r: Resampling) -> float:
    """Numbers that a thread makes one after the other: all planes at a place, all channels or all images."""
    if r.flat:
        return 1.0
    if r.kind == "grid":
        return float(r.channels)
    if r.kind == "nearest":
        return float(r.images) if r.backward else 4.0
    all_planes = r.kind in ("bicubic2d", "linear1d", "trilinear3d") or (r.kind == "bilinear2d" and not r.backward)
    return float(r.planes) if all_planes else 1.0


def _blocks(r: Resampling, places: int, rounds: float, threads: int) -> float:
    if r.kind == "pad":
        return float(r.planes * ceil(places / threads))
    if r.kind != "nearest" or r.backward or r.flat:
        return float(ceil(r.planes * places / rounds / threads))
    depth, height, width = r.far_sides  # blocks of width x height x planes
    across = min(power(width), threads)
    high = min(power(height), threads // across)
    deep = min(r.planes, threads // across // high)
    return float(depth * ceil(width / across) * ceil(height / high) * ceil(r.planes / deep / rounds))


def parts(r: Resampling, rates: Rates) -> list[float]:
    """Seconds before their weights: launches; bytes, those and the near side's that the cache does not keep; blocks;
    numbers, what they are made of and its sectors, on the busiest SM; the last two all in all; numbers in a row, what
    they are made of, that from memory, and all waves'; what waits to be added to one word, all in all and in a row, and
    to one place."""
    t = launch(r)
    each, row = REFERENCE_SMS / rates.sms * 1e-10, t.rounds * 1e-7
    steps, taps = t.steps * t.uneven(rates.sms) * each, t.steps * r.window * each
    busiest, chain = steps * r.window, row * r.window
    return [
        t.launches * rates.floor, r.moved / rates.bandwidth, max(0.0, r.moved - CACHED) / rates.bandwidth,
        max(0.0, r.planes * r.near * r.width - CACHED) / rates.bandwidth, t.blocks * each, steps, busiest,
        busiest * t.sectors / 10, taps, taps * t.sectors / 10, row, chain, chain * max(0.0, 1 - CACHED / r.moved),
        row * ceil(t.waves(rates.sms)), (r.crowd - 1) * taps, (r.crowd - 1) * chain, (r.contention - 1) * 1e-8,
        (r.contention - 1) * taps / 10,
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
    return Law(max(0.5 * rates.floor, seconds, r.moved / rates.bandwidth / 3), 0.0, r.moved, float(launch(r).launches))


def features(call: Call, law: Law) -> list[float]:
    r = resampling(call)
    t, waves = launch(r), launch(r).waves(REFERENCE_SMS)
    layouts = sum(1 << i for i, x in enumerate(call.tensors[:2]) if channels_last(x))
    scales = [ln(f / n) for f, n in zip(r.far_sides, r.near_sides, strict=True)]
    return [
        OPS[r.name], float(r.width), float(r.channels_last), float(layouts), ln(r.planes), ln(r.near), ln(r.far),
        ln(r.far / r.near), ln(r.channels), ln(r.images), ln(r.contention), ln(law.seconds), ln(r.moved),
        ln(r.planes * r.near), ln(r.planes * r.far), float(alignment(r.channels, 1024)), float(alignment(r.far, 16)),
        *(float(n) for n in (*r.near_sides, *r.far_sides)), *scales, ln(t.blocks), float(t.threads), ln(t.rounds),
        ln(t.steps), t.sectors, r.crowd, t.uneven(REFERENCE_SMS), waves, waves / ceil(waves), ln(ceil(waves)),
        *(ln(s / law.seconds + 1e-6) for s in parts(r, REFERENCE)), float(alignment(r.near, 16)),
        *(float(alignment(side[2], 16)) for side in (r.near_sides, r.far_sides)), call.number(3 if r.backward else 2),
    ]  # fmt: skip


FAMILY = KernelFamily("resample", frozenset(OPS), law, features, rounds=700, leaves=63, rate=0.08)
