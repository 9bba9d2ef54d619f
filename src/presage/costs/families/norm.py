"""Layer, RMS, batch and group normalisation, and the norms of weights, both ways.

Law: each kernel as it is launched (`NormKernel`): its blocks in waves, the places a thread takes one after the other,
and bytes. One block has a channel, a group or a weight's row, so few of them leave most of the GPU idle. cuDNN's keeps
a channel of up to some thousand places on the SM, and else reads it again, from the L2 or from memory. Channels last,
blocks share the rows. Seconds are a sum of such parts (`parts`) with fitted weights, by kernel
(data/kernel_laws.toml). Rows of a layer norm take their bytes, or their blocks' least time; the gradient of its weights
is a kernel as above.

Features: sizes, layout and types, how the longest kernel is launched, and each part's share.

Sweeps: 11,000 draws, and 3,000 of few channels over large planes. The worst are rows of milliseconds that took twice or
three times as long as others of their size.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import (
    KernelFamily,
    Law,
    alignment,
    codes,
    fitted_numbers,
    ln,
    moved_law,
    plain_features,
    power,
)
from presage.costs.rates import REFERENCE, REFERENCE_SMS, Rates
from presage.hardware import Gpu

THREADS_AT_MOST = 512  # of a block
# Places of a thread that cuDNN's block for a channel keeps, forward and backward: one by one, as pairs of half
# precision, and as pairs with three blocks on an SM. Steps of a block for rows that it keeps: float32, half precision.
KEPT, KEPT_PAIRS, SMALL_PAIRS = (56, 28), (152, 84), (20, 14)
KEPT_ROWS, KEPT_ROWS_BACKWARD = (9, 12), 6
CACHED = 2.4e7  # bytes that stay in the L2
ALL_CACHED, NONE_CACHED = 2e7, 3.2e7  # where bytes are taken in the same order: at most, and at least
ROWWISE, THREADS = ("aten::native_layer_norm", "aten::_fused_rms_norm"), 128  # a block of so many threads for a row
ROW, ROW_BACKWARD = 7e-8, 1.1e-7  # seconds of a thread for a number of a row, alone on an SM
EACH_ROW = {  # seconds of an SM for a row, however short
    "aten::native_layer_norm": 1.5e-7, "aten::native_layer_norm_backward": 1.05e-7,
    "aten::_fused_rms_norm": 9.5e-8, "aten::_fused_rms_norm_backward": 9e-8,
}  # fmt: skip


CODES = codes(
    "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm "
    "cudnn_batch_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "_weight_norm_interface _weight_norm_interface_backward"
)


def activations(call: Call) -> Shape:
    """The activations (backward: their gradient): what comes first, but for cuDNN's backward."""
    return call.tensors[0]


def law(call: Call, rates: Rates) -> Law:
    """The sum of the kernels, and no less than memory takes; of a layer norm, what its rows take besides."""
    x = activations(call)
    backward = call.name.endswith("backward")
    moved = moved_law((3 if backward else 2) * x.nbytes, x.nbytes, rates, 2)
    launched = kernels(call, rates.sms)
    own = sum(sum(weighed(k, rates)) for k in launched)
    if "layer" in call.name or "rms" in call.name:
        columns = _columns(call)
        longest = columns / THREADS * (ROW_BACKWARD if backward else ROW)
        rows = x.elements / columns / rates.sms * EACH_ROW[call.name]
        return Law(max(moved.seconds, longest, rows) + own, 0.0, moved.bytes)
    return Law(max(own, (sum(k.moved for k in launched) - NONE_CACHED) / rates.bandwidth), 0.0, moved.bytes)


class NormKernel(NamedTuple):
    """A kernel as it is launched."""

    name: str
    blocks: int
    steps: float  # places that a thread takes, one after the other
    moved: float  # bytes
    held: float  # bytes that the cache has to hold for what is read a second time, or was there before
    threads: int = THREADS_AT_MOST
    resident: int = 4  # blocks that an SM holds
    joined: float = 0.0  # steps of the last block, which joins what the others found

    def busiest(self, sms: int) -> tuple[int, int]:
        """Blocks of the busiest SM: one after the other, and all in all."""
        full, rest = divmod(self.blocks, sms * self.resident)
        return full + (rest > 0), full * self.resident + ceil(rest / sms)


class Planes(NamedTuple):
    """What a batch norm is given, and the GPU's SMs."""

    n: int
    channels: int
    plane: int  # places of an image
    width: int  # bytes
    backward: bool
    sms: int

    @property
    def rows(self) -> int:
        """Places of a channel."""
        return self.n * self.plane

    @property
    def nbytes(self) -> int:
        return self.rows * self.channels * self.width

    @property
    def way(self) -> str:
        return " backward" if self.backward else ""

    @property
    def kind(self) -> str:
        return f"{2 if self.width == 2 else 4}{self.way}"

    def at_work(self, channels: int) -> float:
        """Bytes of so many channels; backward, of their gradient too."""
        return min(self.channels, channels) * self.rows * self.width * (1 + self.backward)


def kernels(call: Call, sms: int) -> list[NormKernel]:
    """The kernels of a call; of a layer norm, those that take longer than their bytes."""
    if "weight" in call.name:
        return [_of_weights(call)]
    if "group" in call.name:
        return _of_groups(call)
    return _of_batch(call, sms) if "batch" in call.name else _of_rows(call, sms)


def _of_rows(call: Call, sms: int) -> list[NormKernel]:
    """The statistics of rows that no four numbers divide; the gradient of the weights, from blocks of 32 columns over
    all rows, unless columns are few and the rows worth sharing."""
    columns, weights = _columns(call), call.shape(5 if "layer" in call.name else 4)
    rows = max(1, activations(call).elements // columns)
    if not call.name.endswith("backward"):
        return [NormKernel("moments", rows, ceil(columns / THREADS_AT_MOST), 0.0, 1.0)] if columns % 4 else []
    if weights is None or not weights.sizes or (rows > 65536 and columns // 32 < sms // 2):
        return []
    high = 1 if rows < 64 else 8 if rows < 128 else 16 if rows < 256 else 32
    held = 2.0 * rows * columns * activations(call).width
    return [
        NormKernel("columns of rows", ceil(columns / 32), ceil(rows / high), 0.0, held, 32 * high, min(32, 64 // high))
    ]


def _of_weights(call: Call) -> NormKernel:
    """A block for a row; or, along the last dimension, for 16 columns."""
    v, backward = activations(call), call.name.endswith("backward")
    moved, way = (3 if backward else 2) * v.nbytes, " backward" if backward else ""
    if call.number(4 if backward else 2):
        columns = max(1, v.sizes[-1])
        return NormKernel("weight columns" + way, ceil(columns / 16), ceil(v.elements / columns / 32), moved, moved)
    rows = max(1, v.sizes[0])
    return NormKernel("weight rows" + way, rows, ceil(v.elements / rows / THREADS_AT_MOST), moved, moved)


def _of_groups(call: Call) -> list[NormKernel]:
    """A block for a group, backward for a plane of several places; those that write; backward, those that join images
    for the weights."""
    x, backward = activations(call), call.name.endswith("backward")
    n, channels, *sides = _sizes(x)
    groups, plane = max(1, int(call.number(8 if backward else 6))), prod(sides)
    planes = backward and plane > 1
    each = plane if planes else x.elements / (n * groups)
    blocks, threads = n * (channels if planes else groups), THREADS_AT_MOST if each >= THREADS_AT_MOST else 32
    name, moved, way = "planes" if backward else "moments", (1 + backward) * x.nbytes, " backward" if backward else ""
    out = [
        NormKernel(name, blocks, ceil(each / threads), moved, moved, threads, min(32, 2048 // threads)),
        NormKernel("affine" + way, max(1, ceil(x.elements / 512)), 4, moved + x.nbytes, moved + x.nbytes, 128, 16),
    ]
    if not backward:
        return out
    few = n <= 128
    return [
        *out,
        NormKernel("images" if few else "many images", ceil(channels / (256 if few else 32)), n, 0.0, 1.0, 256, 8),
    ]


def _of_batch(call: Call, sms: int) -> list[NormKernel]:
    """The statistics, unless they are given, and the result."""
    x = activations(call)
    n, channels, *sides = _sizes(x)
    p = Planes(n, channels, prod(sides), x.width, call.name.endswith("backward"), sms)
    if "cudnn" in call.name:
        return [_by_rows(p) if channels_last(x) else _by_channel(p)]
    if len(x.strides) != len(x.sizes) or x.strides[1:2] != (1,):
        out = _native_by_channel(p, alike=channels == 1 and len(sides) > 1)
    else:
        weights = call.shape(2 if p.backward else 1)
        out = _native_by_rows(p, x.is_contiguous or len(sides) == 2, weights is not None and weights.width != 4)
    return out if p.backward or call.number(5, 1.0) else out[1:]


def _sizes(x: Shape) -> list[int]:
    """Images, channels and sides, none of them empty."""
    return [max(1, n) for n in (*x.sizes, 1, 1)[: max(2, len(x.sizes))]]


def channels_last(x: Shape) -> bool:
    """Whether PyTorch takes an image or a volume to be channels last, also where sides of one place leave it open."""
    least = 0
    if len(x.sizes) not in (4, 5) or len(x.strides) != len(x.sizes):
        return False
    for place in (1, *range(len(x.sizes) - 1, 1, -1), 0):
        if x.strides[place] < least or (place == 0 and least == x.strides[1]):
            return False
        least = x.strides[place] * max(1, x.sizes[place])
    return True


def _by_channel(p: Planes) -> NormKernel:
    """cuDNN, a block for a channel: it keeps the places in registers and shared memory, or reads them again."""
    pairs, steps, moved = p.width == 2 and p.plane % 2 == 0, p.rows / THREADS_AT_MOST, (2 + p.backward) * p.nbytes
    if steps > (KEPT_PAIRS if pairs else KEPT)[p.backward]:
        resident = 2 if p.width == 2 and not p.backward else 4
        if not p.backward:
            across = 128 if p.plane < 1024 else THREADS_AT_MOST
            steps = ceil(p.n / (THREADS_AT_MOST // across)) * ceil(p.plane / across)
        name, held = f"again {p.kind}", p.at_work(resident * p.sms)
        return NormKernel(name, p.channels, steps, moved, held, resident=resident)
    resident = 3 if pairs and steps <= SMALL_PAIRS[p.backward] else 2
    return NormKernel(("pairs" if pairs else "single") + p.way, p.channels, steps, moved, moved, resident=resident)


def _by_rows(p: Planes) -> NormKernel:
    """cuDNN, channels last: two blocks an SM share the rows of some channels, which they keep or read again."""
    wide, moved = 64 if p.channels % 4 == 0 else 16 if p.channels > 3 else 4, (2 + p.backward) * p.nbytes
    high, tiles, slots = 32 if wide > 4 else 128, ceil(p.channels / wide), 2 * p.sms
    least = ceil(p.rows / high / (KEPT_ROWS_BACKWARD if p.backward else KEPT_ROWS[p.width == 2]))
    side = max(1, min(tiles, slots // least))
    steps = ceil(p.rows / (slots // side) / high)
    blocks, held = (
        ceil(tiles / side) * side * ceil(p.rows / (steps * high)),
        moved if least <= slots else p.at_work(wide),
    )
    return NormKernel(("rows" if least <= slots else "rows again") + p.way, blocks, steps, moved, held, resident=2)


def _native_by_channel(p: Planes, alike: bool) -> list[NormKernel]:
    """PyTorch's own: a block for a channel, and forward one for a channel of some images to write them. One channel
    is `alike` in all layouts: backward, its sums are found as where channels are last."""
    across = _threads(p.plane)
    steps = ceil(p.n / (THREADS_AT_MOST // across)) * ceil(p.plane / across)
    first = NormKernel("channels" + p.way, p.channels, steps, (1 + 2 * p.backward) * p.nbytes, p.at_work(4 * p.sms))
    if p.backward and not alike:
        return [first]
    across = max(_threads(p.plane // 4), min(_threads(p.plane), 64))
    high, moved = max(1, 64 // across), (2 + p.backward) * p.nbytes
    along = min(65535, max(1, min(2**18 // p.channels, ceil(p.n / high))))
    steps, threads = ceil(p.n / (high * along)) * ceil(p.plane / across), across * high
    if p.backward:
        first = _shared(p, f"columns {p.kind}", 2 * p.nbytes, 3)
    return [first, NormKernel("write", p.channels * along, steps, moved, moved, threads, min(32, 2048 // threads))]


def _native_by_rows(p: Planes, image: bool, casts: bool) -> list[NormKernel]:
    """PyTorch's own, channels last. Volumes have kernels for all layouts, slow where weights are not float32."""
    moved, elements = (2 + p.backward) * p.nbytes, p.rows * p.channels
    first = _shared(p, f"columns {p.kind}", (1 + p.backward) * p.nbytes, 3) if image or p.backward else _variance(p)
    if image:
        return [first, _shared(p, "columns write" + p.way, moved, 4)]
    name = ("cast" if casts else "strided") + p.way
    return [first, NormKernel(name, ceil(elements / 512), 4, moved, moved, 128, 16)]


def _shared(p: Planes, name: str, moved: float, resident: int) -> NormKernel:
    """Blocks of some channels, several sharing the rows: few of them unless they write."""
    wide = min(power(p.channels), 32)
    high = min(power(ceil(p.rows / 16)), THREADS_AT_MOST // wide)
    wide = min(power(p.channels), THREADS_AT_MOST // high)
    along = min(ceil(p.rows / (16 * high)), 128)
    along = along if "write" in name or along >= 8 else 1
    steps, joined = 4 * ceil(p.rows / (4 * high * along)), along / high if "write" not in name and along > 1 else 0.0
    return NormKernel(name, ceil(p.channels / wide) * along, steps, moved, moved, wide * high, resident, joined)


def _variance(p: Planes) -> NormKernel:
    """PyTorch's reduction for all layouts: blocks fill the GPU, and the last of them joins what they found."""
    at_once = alignment(p.channels, 4)
    threads, columns = THREADS_AT_MOST // at_once, p.channels // at_once
    high = min(power(p.rows), threads // min(power(columns), 32))
    across, each = ceil(columns / min(power(columns), threads // high)), ceil(p.rows / high)
    room = p.sms * 2048 // threads
    along = max(min(ceil(room / across), ceil(each / 16)), ceil(each / 256)) if each >= 256 and across <= room else 1
    joined = along / high if along > 1 else 0.0
    return NormKernel("variance", across * along, each / along, p.nbytes, p.nbytes, threads, 2048 // threads, joined)


def _threads(n: int) -> int:
    """Threads along n places."""
    return min(THREADS_AT_MOST, max(32, 1 << (max(1, n) - 1).bit_length()))


def parts(kernel: NormKernel, rates: Rates) -> list[float]:
    """Seconds before their weights: one launch; bytes, those that the cache does not keep; of the busiest SM's blocks,
    one after the other and all of them, the launch and the steps, and the steps that wait for memory; joining."""
    chain, load = kernel.busiest(rates.sms)
    turns = (chain * kernel.steps, load * kernel.steps * kernel.threads / THREADS_AT_MOST)
    missed = min(1.0, max(0.0, (kernel.held - ALL_CACHED) / (NONE_CACHED - ALL_CACHED)))
    waits = turns[0] * missed, turns[0] * max(0.0, 1.0 - CACHED / max(1.0, kernel.held))
    return [
        1e-6, kernel.moved / rates.bandwidth, max(0.0, kernel.moved - NONE_CACHED) / rates.bandwidth, chain * 1e-6,
        load * 1e-6, *(n * 1e-6 for n in (*turns, *waits, kernel.joined)),
    ]  # fmt: skip


def weights() -> dict[str, list[float]]:
    """Weights of the parts, by kernel."""
    known: dict[str, list[float]] = fitted_numbers("norm")["weights"]
    return known


def weighed(kernel: NormKernel, rates: Rates) -> list[float]:
    """Its parts with their weights; no kernel is shorter than half of what others take at least."""
    least, *more = (w * part for w, part in zip(weights()[kernel.name], parts(kernel, rates), strict=True))
    return [max(0.5 * rates.floor, least), *more]


def from_memory(call: Call, gpu: Gpu) -> float:
    """A row's second read comes from L2 where the rows in flight, one to a block, fit with what is written of them."""
    if call.name not in ROWWISE:
        return 1.0
    x = activations(call)
    in_flight = 2 * gpu.sms * (gpu.threads_per_sm // THREADS) * _columns(call) * x.width
    return 2 / 3 if in_flight <= gpu.l2 else 1.0


def _columns(call: Call) -> int:
    x, place = activations(call), 1 if not call.name.endswith("backward") else 2
    return prod(int(n) for n in call.numbers(place)) or max((1, *x.sizes[-1:]))


def features(call: Call, law: Law) -> list[float]:
    x = activations(call)
    channels, elements = max((1, *x.sizes[1:2])), max(1, x.elements)
    if "layer" in call.name or "rms" in call.name:
        columns = _columns(call)
        channels = batch = 1
    elif "weight" in call.name:
        along = x.sizes[-1] if call.number(4 if call.name.endswith("backward") else 2) else x.sizes[0]
        channels, columns, batch = max(1, along), elements // max(1, along), 1
    else:
        columns, batch = max(1, prod(x.sizes[2:])), x.sizes[0]
    rows = elements / max(1, columns)
    groups = call.number(8 if call.name.endswith("backward") else 6) if "group" in call.name else 0.0
    widths = [float(t.width) for t in call.tensors[1:3]] + [0.0] * 2
    blocks = channels / REFERENCE_SMS if channels > 1 else rows / REFERENCE_SMS
    return [
        *plain_features(call, law, CODES[call.name], 2), ln(channels), ln(columns), ln(rows), float(channels_last(x)),
        ln(batch), *widths[:2], ln(ceil(blocks)), blocks / ceil(blocks), ln(elements / channels), groups,
        ln(batch * max(1.0, groups)), float(alignment(columns, 32)), float(columns % 512),
        float(alignment(channels, 32)), ln(elements / max(1.0, batch * groups)),
        *launch_features(kernels(call, REFERENCE_SMS)),
    ]  # fmt: skip


def launch_features(launched: list[NormKernel]) -> list[float]:
    """How the longest kernel is launched, which the shortest is, and the shares of the parts of their time."""
    times = sorted(((weighed(k, REFERENCE), k) for k in launched), key=lambda pair: -sum(pair[0]))
    if not times:
        return [-1.0] * (9 + len(weights()["single"]))
    total, (first, k) = sum(sum(seconds) for seconds, _ in times), times[0]
    waves, names = k.blocks / (REFERENCE_SMS * k.resident), list(weights())
    return [
        float(names.index(k.name)), float(names.index(times[-1][1].name)), ln(k.blocks), ln(k.steps), float(k.threads),
        ln(k.held), ln(waves), waves / ceil(waves), sum(first) / total,
        *(sum(part) / total for part in zip(*(seconds for seconds, _ in times), strict=True)),
    ]  # fmt: skip


FAMILY = KernelFamily(
    "norm",
    frozenset(CODES),
    law,
    features,
    rounds=1200,
    leaves=47,
    rate=0.065,
    least=30,
    bound=0.05,
    works=lambda _: True,
    from_memory=from_memory,
)
