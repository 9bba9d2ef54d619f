"""Pooling and resampling: what must hold of their launches and laws."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import pytest

from presage.costs.call import Call, Shape, Value
from presage.costs.families import BY_OP
from presage.costs.families.pool import launch, pool
from presage.costs.families.resample import launch as resample_launch
from presage.costs.families.resample import resampling
from presage.costs.rates import Rates
from presage.hardware import gpu

H200, A100 = (Rates.of(gpu(name)) for name in ("h200", "a100_80gb"))


def shape(*sizes: int, dtype: str = "bfloat16", last: bool = False) -> Shape:
    """A dense tensor, its second dimension the fastest if `last`."""
    order = [0, *range(2, len(sizes)), 1] if last else list(range(len(sizes)))
    strides = [1] * len(sizes)
    for place, after in zip(reversed(order[:-1]), reversed(order[1:]), strict=True):
        strides[place] = strides[after] * sizes[after]
    return Shape(sizes, tuple(strides), dtype)


def max_pool(x: Shape, size: int, stride: int, padding: int = 0, backward: Shape | None = None) -> Call:
    dims = len(x.sizes) - 2
    given: tuple[Value, ...] = ((size,) * dims, (stride,) * dims, (padding,) * dims, (1,) * dims, False)
    name = f"aten::max_pool{dims}d_with_indices"
    return Call(name, (x, *given)) if backward is None else Call(name + "_backward", (backward, x, *given))


def adaptive(kind: str, x: Shape, out: tuple[int, ...], backward: bool = False) -> Call:
    name = f"aten::{kind}_pool{len(out)}d"
    far = shape(*x.sizes[:2], *out, dtype=x.dtype)
    return Call(name + "_backward", (far, x)) if backward else Call(name, (x, out))


def seconds(call: Call, rates: Rates = H200) -> float:
    return BY_OP[call.name].law(call, rates).seconds


def some_calls(n: int, dtype: str, last: bool) -> list[Call]:
    """One of each kind of kernel, of n images."""
    x, volume = shape(n, 64, 28, 28, dtype=dtype, last=last), shape(n, 64, 8, 14, 14, dtype=dtype, last=last)
    half, small = shape(n, 64, 14, 14, dtype=dtype, last=last), shape(n, 64, 4, 7, 7, dtype=dtype, last=last)
    averages: tuple[Value, ...] = ((2, 2), (2, 2), (0, 0), False, True, None)
    scales: tuple[Value, ...] = (False, 2.0, 2.0)
    return [
        max_pool(x, 2, 2), max_pool(x, 2, 2, backward=half), max_pool(volume, 2, 2),
        max_pool(volume, 2, 2, backward=small), Call("aten::avg_pool2d", (x, *averages)),
        Call("aten::avg_pool2d_backward", (half, x, *averages)),
        *(adaptive("_adaptive_avg", t, (*t.sizes[2:-2], 5, 5), way) for t in (x, volume) for way in (False, True)),
        adaptive("adaptive_max", x, (5, 5)), Call("aten::upsample_bilinear2d", (half, (28, 28), *scales)),
        Call("aten::upsample_bilinear2d_backward", (x, (28, 28), half.sizes, *scales)),
        Call("aten::upsample_bicubic2d", (half, (28, 28), *scales)),
        Call("aten::upsample_nearest2d", (half, (28, 28), 2.0, 2.0)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("last", [False, True])
def test_more_images_take_longer(dtype: str, last: bool) -> None:
    for calls in zip(*(some_calls(n, dtype, last) for n in (8, 64, 512)), strict=True):
        times = [seconds(call) for call in calls]
        assert all(a < b for a, b in pairwise(times)), calls[0].name


def test_an_older_gpu_is_slower() -> None:
    for call in some_calls(256, "float32", False):
        assert seconds(call, A100) > seconds(call), call.name


def test_each_pair_of_places_counts_once() -> None:
    """Also where windows hang over, where they leave places out, and where adaptive ones differ in size."""
    for near, size, stride, padding in ((9, 3, 2, 1), (10, 3, 2, 0), (7, 2, 3, 0), (5, 5, 1, 2), (4, 4, 4, 2)):
        starts = range(-padding, near + padding - size + 1, stride)
        expected = sum(len(range(max(0, s), min(near, s + size))) for s in starts)
        line = Call("aten::max_pool2d_with_indices",
                    (shape(1, 1, 1, near), (1, size), (1, stride), (0, padding), (1, 1), False))  # fmt: skip
        assert pool(line).pairs == expected
    assert pool(adaptive("_adaptive_avg", shape(1, 1, 1, 10), (1, 7))).pairs == 16
    assert pool(adaptive("_adaptive_avg", shape(1, 1, 1, 3), (1, 12))).pairs == 12


def test_sections_channels_last_overlap() -> None:
    """Blocks of 32 places take 35 in two rounds, beyond where the next one starts."""
    fits, hangs = (launch(pool(max_pool(shape(1, 32, 4, n, last=True), 1, 1))) for n in (64, 70))
    assert fits.steps == 4 * 64
    assert hangs.steps == 4 * (64 + 35)


def test_many_planes_of_a_volume_take_several_launches() -> None:
    volume = shape(512, 256, 2, 4, 4)
    assert BY_OP["aten::max_pool3d_with_indices"].law(max_pool(volume, 2, 2), H200).launches == 3
    last = shape(512, 256, 2, 4, 4, last=True)
    assert BY_OP["aten::max_pool3d_with_indices"].law(max_pool(last, 2, 2), H200).launches == 1


def test_overlapping_windows_wait_for_each_other_in_half_precision() -> None:
    x, far = shape(32, 96, 16, 40, 40), shape(32, 96, 10, 34, 34)
    apart = shape(32, 96, 2, 5, 5)
    dense, sparse = max_pool(x, 7, 1, backward=far), max_pool(x, 7, 7, backward=apart)
    each = [seconds(call) / pool(call).planes / pool(call).far for call in (dense, sparse)]
    assert each[0] > 3 * each[1]


def test_what_was_never_measured_takes_the_time_of_what_was() -> None:
    volume = shape(4, 16, 8, 12, 12, dtype="float64")
    for way in (False, True):
        call = adaptive("adaptive_max", volume, (2, 3, 3), way)
        law = BY_OP[call.name].law(call, H200)
        assert 0 < law.seconds < 1
        assert all(isfinite(v) for v in BY_OP[call.name].features(call, law))


def test_interpolation_to_the_same_size_only_copies() -> None:
    x = shape(16, 256, 64, 64)
    same, larger = (Call("aten::upsample_bicubic2d", (x, (n, n), False, None, None)) for n in (64, 65))
    assert seconds(larger) > seconds(same)


def test_few_places_leave_most_of_the_gpu_idle() -> None:
    """A thread of the cubic kernel goes through all planes at its place."""
    calls = (Call("aten::upsample_bicubic2d", (shape(8, 64, n, n), (2 * n, 2 * n), False, None)) for n in (14, 112))
    small, large = (resampling(call) for call in calls)
    assert resample_launch(small).blocks == 1
    assert resample_launch(small).rounds == resample_launch(large).rounds == 512
    assert resample_launch(small).uneven(132) > 100 > 3 > resample_launch(large).uneven(132)


def test_unfolding_launches_a_kernel_for_each_image() -> None:
    call = Call("aten::im2col", (shape(7, 16, 32, 32), (3, 3), (1, 1), (1, 1), (1, 1)))
    assert BY_OP["aten::im2col"].law(call, H200).launches == 7


def test_odd_shapes_have_a_time() -> None:
    empty, single = shape(0, 3, 8, 8), shape(1, 1, 1, 1)
    calls = [
        max_pool(empty, 2, 2), max_pool(shape(1, 1, 2, 2), 2, 2), adaptive("_adaptive_avg", single, (1, 1), True),
        adaptive("_adaptive_avg", shape(3, 5, 1, 9, last=True), (7, 7)),
        max_pool(shape(1, 3, 1, 2, 2, last=True), 1, 1),
        Call("aten::upsample_nearest2d", (empty, (16, 16), None, None)),
        Call("aten::upsample_linear1d_backward", (shape(2, 3, 16), (16,), (2, 3, 1), False, None)),
        Call("aten::reflection_pad1d", (shape(2, 3, 5), (1, 1))),
        Call("aten::upsample_nearest3d", (shape(1, 1, 2, 3, 4), None, (2.0, 2.0, 2.0))),
    ]  # fmt: skip
    for call in calls:
        law = BY_OP[call.name].law(call, H200)
        found = BY_OP[call.name].features(call, law)
        assert 0 < law.seconds < 1 and all(isfinite(v) for v in found), call
