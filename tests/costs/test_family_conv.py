"""Convolutions and pooling: what must hold of their laws, and how well some draws of the pack tell of the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path

import numpy as np
import pytest

from presage.costs.call import Call, Shape
from presage.costs.families import BY_OP, FAMILIES
from presage.costs.families.conv import BACKWARD, FORWARD, TRANSPOSED, conv, gradients, law, product
from presage.costs.families.pool import pool
from presage.costs.families.resample import resampling
from presage.costs.rates import Rates
from presage.hardware import gpu
from presage_fit import kernel_models as fit
from presage_fit import pack

RATES = Rates.of(gpu("h200"))
PACK = Path(__file__).resolve().parents[2] / "data" / "h200_pack"


def shape(*sizes: int, dtype: str = "bfloat16", last: bool = False) -> Shape:
    """A dense tensor, its second dimension the fastest if `last`."""
    order = [0, *range(2, len(sizes)), 1] if last else list(range(len(sizes)))
    strides = [1] * len(sizes)
    for place, after in zip(reversed(order[:-1]), reversed(order[1:]), strict=True):
        strides[place] = strides[after] * sizes[after]
    return Shape(sizes, tuple(strides), dtype)


def forward(x: Shape, w: Shape, stride: int = 1, padding: int = 0, groups: int = 1) -> Call:
    dims = len(x.sizes) - 2
    given = ((padding,) * dims, (stride,) * dims, (1,) * dims)
    return Call(FORWARD, (x, w, *given, groups, False, False, False))


def backward(y: Shape, x: Shape, w: Shape, mask: tuple[bool, bool, bool], stride: int = 1, padding: int = 0,
             groups: int = 1, transposed: bool = False) -> Call:  # fmt: skip
    dims = len(x.sizes) - 2
    given = ((stride,) * dims, (padding,) * dims, (1,) * dims)
    return Call(BACKWARD, (y, x, w, None, *given, transposed, (0,) * dims, groups, mask))


def three_ways(
    n: int, c: int, k: int, size: int, taps: int = 3, last: bool = True, dtype: str = "bfloat16"
) -> list[Call]:
    x, w = shape(n, c, size, size, last=last, dtype=dtype), shape(k, c, taps, taps, last=last, dtype=dtype)
    y = shape(n, k, size, size, last=last, dtype=dtype)
    both = backward(y, x, w, (True, True, False), padding=taps // 2)
    return [forward(x, w, padding=taps // 2), *gradients(both)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("last", [True, False])
def test_a_larger_batch_takes_longer(dtype: str, last: bool) -> None:
    for way in range(3):
        times = [law(three_ways(n, 64, 128, 56, last=last, dtype=dtype)[way], RATES).seconds for n in (8, 32, 128, 512)]
        assert all(b > a for a, b in pairwise(times))
        assert 2 < times[-1] / times[-2] < 5


def test_all_ways_do_the_same_product() -> None:
    found = [conv(call) for call in three_ways(8, 64, 96, 28)]
    assert [c.role for c in found] == [0, 1, 2]
    assert len({c.flops for c in found}) == 1
    sizes = [product(c) for c in found]
    assert len({p.m * p.n * p.taps * p.inner * p.outer for p in sizes}) == 1


def test_no_law_beats_the_hardware() -> None:
    for call in three_ways(64, 256, 256, 56):
        found = law(call, RATES)
        assert found.seconds > found.flops / 990e12
        assert found.seconds > found.bytes / 4.8e12


def test_planar_halves_pay_for_changing_the_layout() -> None:
    planar, last = three_ways(64, 64, 64, 56, last=False), three_ways(64, 64, 64, 56, last=True)
    for a, b in zip(planar, last, strict=True):
        moved = law(b, RATES).bytes
        assert law(a, RATES).seconds - law(b, RATES).seconds > moved / 4.8e12


def test_gradients_are_the_parts_that_are_needed() -> None:
    x, w, y = shape(4, 8, 16, 16), shape(8, 8, 3, 3), shape(4, 8, 16, 16)
    for mask, roles in (((True, True, True), [1, 2]), ((False, True, False), [2]), ((True, False, False), [1])):
        assert [conv(c).role for c in gradients(backward(y, x, w, mask, padding=1))] == roles
    assert gradients(forward(x, w)) == [forward(x, w)]


def test_a_transposed_convolution_is_a_plain_one_backwards() -> None:
    x, w = shape(4, 64, 16, 16), shape(64, 32, 2, 2)
    up = Call(TRANSPOSED, (x, w, (0, 0), (0, 0), (2, 2), (1, 1), 1, False, False, False))
    down = backward(x, shape(4, 32, 32, 32), shape(64, 32, 2, 2), (True, False, False), stride=2)
    assert conv(up)._replace(transposed=False) == conv(down)
    assert law(up, RATES) == law(down, RATES)
    back = backward(shape(4, 32, 32, 32), x, w, (True, False, False), stride=2, transposed=True)
    assert conv(back).role == 0


def test_one_dimension_is_the_same_however_it_comes() -> None:
    line, flat = (shape(8, 16, 100), shape(32, 16, 3)), (shape(8, 16, 1, 100), shape(32, 16, 1, 3))
    plain = conv(forward(*line, stride=2, padding=1))
    assert plain.small == (1, 1, 50)
    listed = Call(FORWARD, (*flat, (0, 1), (1, 2), (1, 1), 1, False, False, False))
    short = Call(FORWARD, (*flat, (1,), (2,), (1,), 1, False, False, False))
    assert conv(listed) == plain == conv(short)


def test_planar_depthwise_is_native_both_ways() -> None:
    x, w = shape(8, 32, 28, 28), shape(32, 1, 3, 3)
    call = Call("aten::_conv_depthwise2d", (x, w, (3, 3), None, (1, 1), (1, 1), (1, 1)))
    gradient = backward(x, x, w, (False, True, False), padding=1, groups=32)
    last = shape(8, 32, 28, 28, last=True)
    assert conv(call).native and conv(gradient).native
    assert conv(call).groups == 32 and conv(call).small == (1, 28, 28)
    assert not conv(backward(last, last, w, (False, True, False), padding=1, groups=32)).native


def test_features_of_odd_shapes() -> None:
    x5, w5 = shape(1, 3, 4, 5, 6), shape(7, 3, 1, 1, 1)
    x = shape(2, 6, 9, 9)
    calls = [
        forward(x5, w5), forward(shape(1, 1, 1, 1), shape(1, 1, 1, 1)),
        forward(shape(1, 12, 7), shape(4, 3, 7), groups=4),
        forward(shape(3, 5, 1, 50), shape(5, 5, 1, 50)), forward(shape(1, 16, 1, 1), shape(2, 16, 1, 1)),
        backward(shape(1, 7, 4, 5, 6), x5, w5, (False, True, False)),
        Call("aten::max_pool2d_with_indices", (x, (3, 3), (2, 2), (1, 1), (1, 1), False)),
        Call("aten::avg_pool2d", (x, (2,), (), (0,), False, True, None)),
        Call("aten::_adaptive_avg_pool2d", (x, (1, 1))),
        Call("aten::_adaptive_avg_pool2d_backward", (shape(2, 6, 1, 1), x)),
        Call("aten::upsample_nearest2d", (x, (18, 18), 2.0, 2.0)),
        Call("aten::upsample_nearest2d", (x, None, (2.0, 2.0))),
        Call("aten::upsample_bilinear2d_backward", (shape(2, 6, 18, 18), (18, 18), (2, 6, 9, 9), False, 2.0, 2.0)),
        Call("aten::avg_pool3d", (shape(1, 2, 4, 4, 4), (2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None)),
        Call("aten::max_pool2d_with_indices", (shape(6, 9, 9), (3, 3), (2, 2), (1, 1), (1, 1), False)),
    ]  # fmt: skip
    lengths: dict[str, set[int]] = {}
    for call in calls:
        family = BY_OP[call.name]
        found = family.law(call, RATES)
        row = family.features(call, found)
        assert found.seconds > 0 and all(isfinite(v) for v in row[: (family.told or len(row)) + 1]), call
        lengths.setdefault(family.name, set()).add(len(row))
    assert all(len(found) == 1 for found in lengths.values())


def test_pools_know_both_sides() -> None:
    x = shape(2, 6, 9, 9)
    largest = pool(Call("aten::max_pool2d_with_indices", (x, (3, 3), (2, 2), (1, 1), (1, 1), False)))
    assert (largest.planes, largest.near, largest.far, largest.window, largest.overlap) == (12, 81, 25, 9, 4)
    assert pool(Call("aten::avg_pool2d", (x, (2,), (), (0,), False, True, None))).far == 16
    scaled = resampling(Call("aten::upsample_nearest2d", (x, None, (2.0, 2.0))))
    assert scaled.far == prod((18, 18))
    back = Call("aten::upsample_nearest2d_backward", (shape(2, 6, 18, 18), (18, 18), (2, 6, 9, 9), 2.0, 2.0))
    assert resampling(back)._replace(name=scaled.name, backward=False) == scaled


def test_planar_bilinear_upsampling_goes_through_the_planes() -> None:
    """Its time goes with the number of planes, not with their size; channels last, with all numbers."""

    def seconds(c: int, size: int, last: bool) -> float:
        x = shape(32, c, size, size, last=last)
        return (
            BY_OP["aten::upsample_bilinear2d"]
            .law(Call("aten::upsample_bilinear2d", (x, (2 * size, 2 * size), False, 2.0, 2.0)), RATES)
            .seconds
        )

    assert seconds(1024, 16, False) > 3 * seconds(256, 16, False)
    assert seconds(1024, 32, False) < 1.5 * seconds(1024, 16, False)
    assert seconds(1024, 32, True) > 3 * seconds(1024, 16, True)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[fit.KernelSample]]:
    """Of our families; other draws are only counted, for they decide which are held out."""
    measured = pack.read(PACK)
    ours = {"conv", "pool"}
    families = {n: r if n in ours else tuple(replace(x, ops=()) for x in r) for n, r in measured.families.items()}
    return fit.samples(replace(measured, families=families))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds", "typical", "most"),
    [
        pytest.param("conv", 600, 0.18, 0.75, marks=pytest.mark.slow),
        ("pool", 300, 0.05, 0.25),
    ],
)
def test_error_on_held_out_draws(
    samples: dict[str, list[fit.KernelSample]], name: str, rounds: int, typical: float, most: float
) -> None:
    """With fewer trees than are shipped. Geometric mean of the errors, and the error nine of ten stay under."""
    family = replace(FAMILIES[name], rounds=rounds)
    rows = fit.table(family, samples[name], RATES)
    test, large = fit.held_out(samples[name], rows)
    trees = fit.fit_family(family, rows.part(~test & ~large))
    found = rows.part(test)
    error = np.abs(found.law * np.exp(trees.predict(found.x)) / found.seconds - 1)
    assert np.exp(np.log(np.maximum(error, 1e-3)).mean()) < typical
    assert np.quantile(error, 0.9) < most


def test_permuted_1d_inputs_are_made_contiguous_first() -> None:
    """PyTorch copies them, so that cuDNN never gets channels last: x.transpose(1, 2) before a Conv1d is planar."""
    y, w = shape(4, 768, 249), shape(768, 48, 128)
    permuted = Shape((4, 768, 249), (768 * 249, 1, 768), "bfloat16")
    calls = [backward(y, x, w, (True, False, False), padding=64, groups=16) for x in (permuted, shape(4, 768, 249))]
    assert conv(calls[0]) == conv(calls[1])
    assert not conv(calls[0]).channels_last
