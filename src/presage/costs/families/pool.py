"""Pooling, forward and backward, 2-D and 3-D.

These are PyTorch's own kernels, most of them far from bandwidth. Law: each as it is launched (`launch`): the blocks,
the places that a thread takes one after the other, and the sectors of memory that a warp touches in a step. Adaptive
pools have one block a plane. Channels last, sections of a 2-D image overlap where no power of two divides them, and
warps of 3-D pools take four channels of 2 x 4 places. Backward, where windows overlap, many add to one place, and in
half precision neighbours to one word. Seconds are a sum of such parts (`parts`) with fitted weights, by kernel and
width (data/kernel_laws.toml).

Features: the op and its kernel, sizes of both sides, windows, the launch, and each part's share.

Sweep: 550 draws of 1-512 images, 4-2048 channels, 4-256 places a side, windows of 2 and 3, and 2,200 of 1-D to 3-D
pools with windows of 2 to 7, and 2,270 of adaptive and 3-D pools. Half precision in 3-D and adaptive
backward passes is the worst: threads wait for each other's additions.
"""

from __future__ import annotations

from functools import cache
from math import ceil, gcd, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, fitted_numbers, ln, power
from presage.costs.rates import REFERENCE, REFERENCE_SMS, Rates

POOLS = ("max_pool{}d_with_indices", "avg_pool{}d", "adaptive_max_pool{}d", "_adaptive_avg_pool{}d")
KINDS = ("adaptive_avg", "adaptive_max", "avg", "max")
OPS = codes([op.format(dims) + way for op in POOLS for dims in (2, 3) for way in ("", "_backward")])
LAST = {False: ("max", "avg", "adaptive_avg"), True: ("max",)}  # with kernels for channels last, 2-D and 3-D
Sides = tuple[int, int, int]
WARP, RESIDENT = 32, 2048  # threads of a warp, and of an SM at most
SECTOR, WORD, CACHED = 32, 4, 4e7  # bytes: read at once, added to at once, that stay in the L2
GRID = 65535  # blocks of a launch of planes in 3-D; more are launched one after the other


class PoolCall(NamedTuple):
    """Planes of `near` places (the forward's input) and `far` ones (its output), by depth, height and width."""

    name: str
    kind: str
    backward: bool
    deep: bool  # a 3-D op
    planes: int
    channels: int
    near_sides: Sides
    far_sides: Sides
    windows: Sides  # near places a far one looks at, at most
    overlaps: Sides  # far places that look at a near one, at most
    strides: tuple[float, float, float]
    padded: bool
    pairs: int  # of a near place and a far one that looks at it, in a plane
    width: int
    channels_last: bool
    layouts: int  # of the tensors given: bits, channels last

    @property
    def near(self) -> int:
        return prod(self.near_sides)

    @property
    def far(self) -> int:
        return prod(self.far_sides)

    @property
    def window(self) -> int:
        return prod(self.windows)

    @property
    def overlap(self) -> int:
        return prod(self.overlaps)

    @property
    def adaptive(self) -> bool:
        return self.kind.startswith("adaptive")

    @property
    def last(self) -> bool:
        """Whether a kernel for channels last runs; others copy to planar order first, which is an op of its own."""
        return self.channels_last and self.kind in LAST[self.deep]

    @property
    def divides(self) -> bool:
        """Whether adaptive windows are all of one size."""
        return all(n % f == 0 for n, f in zip(self.near_sides, self.far_sides, strict=True))

    @property
    def gathers(self) -> bool:
        """Whether a backward has a thread for each near place, which reads; else one for each far one, which adds."""
        if not self.backward:
            return False
        if self.adaptive:
            return self.kind == "adaptive_avg" and (self.divides if self.deep else self.last)
        return not self.deep or (self.kind == "avg" and not self.padded and max(self.strides) == 1)

    @property
    def writes(self) -> bool:
        """Whether a backward has a thread for each far place that needs not add: no windows overlap."""
        apart = all(s >= k for s, k in zip(self.strides, self.windows, strict=True))
        return self.backward and self.deep and self.kind == "avg" and not self.gathers and apart

    @property
    def path(self) -> str:
        """The kernel."""
        way = " gathers" if self.deep and self.gathers else " writes" if self.writes else " last" if self.last else ""
        return f"{self.kind}{3 if self.deep else 2}{' backward' if self.backward else ''}{way}"

    @property
    def sides(self) -> Sides:
        """The sides of which threads take a place each."""
        return self.near_sides if self.gathers else self.far_sides

    @property
    def reads(self) -> tuple[int, float]:
        """Places that a thread sees for the one it takes: at most, and on average."""
        if self.backward and not self.gathers and "max" in self.kind:
            return 1, 1.0
        return self.overlap if self.gathers else self.window, self.pairs / prod(self.sides)

    @property
    def step(self) -> float:
        """Bytes between what neighbouring threads see along the width."""
        return self.width / self.strides[2] if self.gathers else self.width * self.strides[2]

    @property
    def shared(self) -> tuple[float, float]:
        """Far places that add to one word: of a warp's at once, which wait for each other, and all."""
        if not self.backward or self.gathers or self.writes:
            return 1.0, 1.0
        if self.kind == "max":
            return _largest_in_common(self.windows, self.strides)
        return max(1.0, min(WORD / self.step, self.far_sides[2])), max(1.0, self.pairs / self.near)

    @property
    def moved(self) -> float:
        indices = 8 * ("max" in self.kind)
        return float(self.planes * (self.width * (self.near + self.far) + indices * self.far))


def pool(call: Call) -> PoolCall:
    name, backward, first = call.name, call.name.endswith("backward"), call.tensors[0]
    dims, kind = 3 if "3d" in name else 2, next(k for k in KINDS if k in name)
    near = (call.tensors[1] if backward else first).sizes[-dims:]
    far = first.sizes[-dims:] if backward else _far(call, near)
    layouts = [channels_last(t) for t in call.tensors[: 1 + backward]]
    lead = first.sizes[:-dims] or (1,)
    given = sum(1 << i for i, last in enumerate(layouts) if last)
    return PoolCall(name, kind, backward, dims == 3, prod(lead) or 1, lead[-1] or 1, three(near), three(far),
                    *_windows(call, near, far, backward), first.width, layouts[-1], given)  # fmt: skip


def three(sides: tuple[int, ...]) -> Sides:
    depth, height, width = (max(1, n) for n in (1, 1, 1, *sides)[-3:])
    return depth, height, width


def channels_last(t: Shape) -> bool:
    return len(t.strides) > 2 and t.sizes[1] > 1 and t.strides[1] == 1 and not t.is_contiguous


def _far(call: Call, near: tuple[int, ...]) -> tuple[int, ...]:
    """The output's sizes: given, or by window, stride and padding."""
    if "adaptive" in call.name:
        return tuple(int(n) for n in call.numbers(1))
    size, stride, padding = (_spread(call.numbers(p), len(near)) for p in (1, 2, 3))
    steps = zip(near, size, stride or size, padding or (0,) * len(near), strict=True)
    return tuple(max(1, int((n + 2 * p - k) // max(1, s) + 1)) for n, k, s, p in steps)


def _spread(numbers: tuple[float, ...], dims: int) -> tuple[float, ...]:
    return numbers * dims if len(numbers) == 1 else numbers[:dims]


def _windows(
    call: Call, near: tuple[int, ...], far: tuple[int, ...], backward: bool
) -> tuple[Sides, Sides, tuple[float, float, float], bool, int]:
    """The largest windows and overlaps, strides, whether any place is padding, and pairs of places."""
    both = list(zip(three(near), three(far), strict=True))
    if "adaptive" in call.name:
        ways = both, [(f, n) for n, f in both]
        windows, overlaps = (three(tuple(_widest(*pair) for pair in way)) for way in ways)
        depth, height, width = (n / max(1, f) for n, f in both)
        return windows, overlaps, (depth, height, width), False, prod(n + f - gcd(n, f) for n, f in both)
    given = (call.numbers(p + backward) for p in (1, 2, 3))
    size, stride, padding = (tuple(int(n) for n in _spread(numbers, len(near))) for numbers in given)
    windows, strides = three(size), three(stride or size)
    pads = (0, 0, 0, *(padding or (0,) * len(near)))[-3:]
    overlaps = three(tuple(ceil(k / s) for k, s in zip(windows, strides, strict=True)))
    pairs = (_pairs(n, f, k, s, p) for (n, f), k, s, p in zip(both, windows, strides, pads, strict=True))
    return windows, overlaps, strides, any(padding), prod(pairs)


@cache
def _widest(near: int, far: int) -> int:
    """The widest of `far` windows over `near` places."""
    return max((-(-(i + 1) * near // far) - i * near // far for i in range(min(far, 256))), default=1)


def _pairs(near: int, far: int, size: int, stride: int, padding: int) -> int:
    """Places that all windows see along a side, less those that lie before it and those behind."""
    behind = (far - 1) * stride - padding + size - near  # of the last window
    outside = (n - i for n in (padding, behind) for i in range(0, min(n, far * stride), stride))
    return max(1, far * size - sum(min(size, n) for n in outside))


@cache
def _largest_in_common(windows: Sides, strides: Sides) -> tuple[float, float]:
    """Windows that have their largest number at the same place, of those along the width and of all: two have it in
    common as often as it lies where they overlap."""
    common = [[k - abs(i) * s for i in range(-9, 10) if abs(i) * s < k] for k, s in zip(windows, strides, strict=True)]
    whole, (depth, height, width) = prod(windows), common
    pairs = (d * h * w for d in depth for h in height for w in width)
    return sum(w / (2 * windows[2] - w) for w in width), sum(n / (2 * whole - n) for n in pairs)


class KernelLaunch(NamedTuple):
    """How a kernel covers the places it takes."""

    blocks: float
    threads: int  # of a block
    rounds: float  # places one after the other in a thread
    steps: float  # places that warps take, all in all
    sectors: float  # that a warp touches in a step
    lanes: float = WARP  # threads of a warp that have a place
    launches: int = 1

    def waves(self, sms: int) -> float:
        """How often the threads that run at once would cover it."""
        return self.blocks * self.threads / (sms * RESIDENT)

    def uneven(self, sms: int) -> float:
        """Blocks of the busiest SM, relative to an even spread."""
        return ceil(self.blocks / sms) * sms / self.blocks


def launch(p: PoolCall) -> KernelLaunch:
    if p.last and not p.deep and p.kind != "avg":
        return _by_sections(p)
    if p.last and p.deep:
        return _by_columns(p)
    return _by_tiles(p) if p.deep or p.adaptive else _by_place(p)


def sectors(lanes: float, step: float) -> float:
    """Sectors that neighbouring threads touch, so many bytes apart."""
    return min(lanes, (lanes - 1) * step / SECTOR + 1)


def _by_place(p: PoolCall) -> KernelLaunch:
    """A thread for each place; of a max backward, blocks of one plane."""
    threads, places = 256 if p.kind == "max" else 1024, prod(p.sides)
    whole = p.kind == "max" and p.backward and not p.last
    blocks = p.planes * ceil(places / 256) if whole else ceil(p.planes * places / threads)
    lanes = min(p.channels if p.last else p.sides[2], WARP)
    touched = WARP / lanes * sectors(lanes, p.width if p.last else p.step)
    return KernelLaunch(blocks, threads, 1, p.planes * places / WARP, touched)


def _by_tiles(p: PoolCall) -> KernelLaunch:
    """Blocks of 32 x 8 threads: of a tile of a plane, or, adapting, one or a few that go over all of it."""
    depth, height, width = p.sides
    planes, high, wide = p.planes * depth, ceil(height / 8), ceil(width / WARP)
    lanes, steps = width / wide, float(planes * height * wide)
    touched = sectors(lanes, p.step)
    if not p.adaptive:
        return KernelLaunch(planes * high * wide, 256, 1, steps, touched, lanes, ceil(planes / GRID))
    rows = max(1, 16 // (planes if p.deep else p.channels))
    launches = ceil(planes / GRID) if p.deep else 1
    return KernelLaunch(planes * rows, 256, ceil(high / rows) * wide, steps, touched, lanes, launches)


def _by_columns(p: PoolCall) -> KernelLaunch:
    """Channels last in 3-D: blocks of 2 x 4 places in 64 channels, warps of as many places in 4."""
    depth, height, width = p.sides
    tiles, deep = ceil(width / 2) * ceil(height / 4), ceil(p.planes * depth / 64)
    places = height * width / tiles
    return KernelLaunch(tiles * deep, 512, 1, 16.0 * tiles * deep, places, 4 * places, ceil(deep / GRID))


def _by_sections(p: PoolCall) -> KernelLaunch:
    """Channels last: blocks of channels x width x height threads, each over a section of an image."""
    _, height, width = p.sides
    across = min(power(p.channels), WARP)
    wide = min(power(width), 1024 // across)
    high = min(power(height), 1024 // across // wide)
    across = min(power(p.channels), 1024 // wide // high)
    strides = ceil(p.channels / (4 * across))
    columns, rows = _sections(width, wide), _sections(height, high)
    blocks = p.planes // p.channels * strides * columns[0] * rows[0]
    rounds = ceil(p.channels / (across * strides)) * columns[1] * rows[1]
    lanes = min(across, WARP)
    touched = WARP / lanes * sectors(lanes, p.width)
    return KernelLaunch(blocks, across * wide * high, rounds, p.planes * columns[2] * rows[2] / WARP, touched)


def _sections(side: int, threads: int) -> tuple[int, int, int]:
    """Sections of a side, places of a thread in each, and places taken all in all: sections that the threads do not
    divide go on into the next one."""
    sections = ceil(side / (2 * threads))
    length = ceil(side / sections)
    rounds = ceil(length / threads)
    return sections, rounds, sum(max(0, min(rounds * threads, side - i * length)) for i in range(sections))


def parts(p: PoolCall, rates: Rates) -> list[float]:
    """Seconds before their weights: launches; bytes, those that the cache does not keep; blocks; places taken and seen
    by warps of the busiest SM, sectors there and all in all, numbers; results; rounds, places seen one after the other
    by all waves, by one, and from memory; what waits to be added to one word, of a warp and of all."""
    t, (most, seen), (row, whole) = launch(p), p.reads, p.shared
    each = REFERENCE_SMS / rates.sms * 1e-10
    steps = t.steps * t.uneven(rates.sms) * each
    taps, chain, turns = steps * seen, t.rounds * most * 1e-8, ceil(t.waves(rates.sms))
    return [
        t.launches * rates.floor, p.moved / rates.bandwidth, max(0.0, p.moved - CACHED) / rates.bandwidth,
        t.blocks * each, steps, taps, taps * t.sectors / 10, t.steps * seen * each * t.sectors / 10,
        taps * t.lanes / 100, p.planes * prod(p.sides) * each / 100, turns * t.rounds * 1e-7, turns * chain, chain,
        chain * max(0.0, 1 - CACHED / p.moved), (row - 1) * taps, (whole - 1) * taps / 10,
    ]  # fmt: skip


def weights(p: PoolCall) -> list[float]:
    """The kernel's own weights of the parts, or those of the 2-D one that was measured."""
    known: dict[str, list[float]] = fitted_numbers("pool")["weights"]
    name = f"{p.path} {2 if p.width == 2 else 4}"
    return known[name] if name in known else known[name.replace("3", "2", 1)]


def law(call: Call, rates: Rates) -> Law:
    p = pool(call)
    seconds = sum(w * part for w, part in zip(weights(p), parts(p, rates), strict=True))
    return Law(max(0.5 * rates.floor, seconds), 0.0, p.moved, float(launch(p).launches))


def features(call: Call, law: Law) -> list[float]:
    p = pool(call)
    t, waves = launch(p), launch(p).waves(REFERENCE_SMS)
    return [
        OPS[p.name], float(p.last), float(p.gathers), float(p.writes), float(p.width), float(p.layouts), ln(p.planes),
        ln(p.channels), ln(p.near), ln(p.far), ln(p.far / p.near), float(p.window), float(p.overlap),
        ln(p.pairs / p.near), ln(p.pairs / p.far), ln(law.seconds), ln(p.moved), float(alignment(p.channels, 32)),
        float(alignment(p.near, 16)), *(float(n) for n in (*p.near_sides, *p.far_sides, *p.windows)), p.strides[0],
        p.strides[2], float(p.divides), float(p.padded), ln(p.planes * p.near), ln(p.planes * p.far), ln(t.blocks),
        float(t.threads), ln(t.rounds), float(p.reads[0]), ln(t.rounds * p.reads[0]), ln(t.steps), ln(p.reads[1]),
        *(ln(n) for n in p.shared), t.sectors, t.lanes, t.uneven(REFERENCE_SMS), waves, waves / ceil(waves),
        ln(t.steps * WARP / (t.blocks * t.threads)), *(ln(s / law.seconds + 1e-6) for s in parts(p, REFERENCE)),
        *(float(alignment(side[2], 16)) for side in (p.near_sides, p.far_sides)),
    ]  # fmt: skip


FAMILY = KernelFamily("pool", frozenset(OPS), law, features, rounds=600, leaves=63, rate=0.08)
