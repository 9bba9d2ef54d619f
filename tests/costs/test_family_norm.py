"""Normalisation: which kernels run, what must hold of their laws, and some measured times."""

from __future__ import annotations

from math import isfinite

import pytest

from presage.costs.call import Call, Shape
from presage.costs.families import norm
from presage.costs.families.norm import channels_last, kernels
from presage.costs.rates import Rates
from presage.hardware import gpu

H200, A100, T4 = (Rates.of(gpu(name)) for name in ("h200", "a100_80gb", "t4"))


def shape(*sizes: int, dtype: str = "float32", last: bool = False) -> Shape:
    """A dense tensor, its second dimension the fastest if `last`."""
    strides, step = [1] * len(sizes), 1
    for place in [1, *range(len(sizes) - 1, 1, -1), 0] if last else reversed(range(len(sizes))):
        strides[place], step = step, step * sizes[place]
    return Shape(sizes, tuple(strides), dtype)


def batch(x: Shape, backward: bool = False, cudnn: bool = False, weights: str = "float32", train: bool = True) -> Call:
    w = shape(x.sizes[1], dtype=weights)
    name = f"aten::{'cudnn' if cudnn else 'native'}_batch_norm"
    if backward:
        return Call(name + "_backward", (x, x, w, w, w, w, w, True, 1e-5))
    return Call(name, (x, w, w, w, w, train, 0.1, 1e-5))


def layer(rows: int, columns: int, backward: bool = False) -> Call:
    x, w, each = shape(rows, columns), shape(columns), shape(rows, 1)
    if backward:
        return Call("aten::native_layer_norm_backward", (x, x, (columns,), each, each, w, w, (True, True, True)))
    return Call("aten::native_layer_norm", (x, (columns,), w, w, 1e-5))


def group(x: Shape, groups: int, backward: bool = False) -> Call:
    n, c, plane, w = x.sizes[0], x.sizes[1], x.elements // max(1, x.sizes[0] * x.sizes[1]), shape(x.sizes[1])
    if backward:
        return Call("aten::native_group_norm_backward", (x, x, w, w, w, n, c, plane, groups, (True, True, True)))
    return Call("aten::native_group_norm", (x, w, w, n, c, plane, groups, 1e-5))


def names(call: Call) -> list[str]:
    return [k.name for k in kernels(call, H200.sms)]


def seconds(call: Call, rates: Rates = H200) -> float:
    return norm.law(call, rates).seconds


HALF, VOLUME = shape(8, 64, 32, 32, dtype="bfloat16"), shape(4, 64, 8, 16, 16, dtype="bfloat16", last=True)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (batch(shape(28, 8, 32, 32), cudnn=True), ["single"]),  # 28,672 places of a channel stay on the SM
        (batch(shape(29, 8, 32, 32), cudnn=True), ["again 4"]),
        (batch(shape(14, 8, 32, 32), True, cudnn=True), ["single backward"]),
        (batch(shape(15, 8, 32, 32), True, cudnn=True), ["again 4 backward"]),
        (batch(shape(75, 8, 32, 32, dtype="float16"), cudnn=True), ["pairs"]),
        (batch(shape(75, 8, 31, 31, dtype="float16"), cudnn=True), ["again 2"]),
        (batch(shape(72, 64, 32, 32, last=True), cudnn=True), ["rows"]),
        (batch(shape(75, 64, 32, 32, last=True), cudnn=True), ["rows again"]),
        (batch(HALF), ["channels", "write"]),
        (batch(HALF, train=False), ["write"]),
        (batch(HALF, True), ["channels backward"]),
        (batch(shape(8, 64, 32, 32, dtype="bfloat16", last=True)), ["columns 2", "columns write"]),
        (batch(shape(8, 1, 32, 32, dtype="bfloat16"), True), ["columns 2 backward", "write"]),
        (batch(shape(4096, 64)), ["columns 4", "columns write"]),
        (batch(VOLUME), ["variance", "strided"]),
        (batch(VOLUME, weights="bfloat16"), ["variance", "cast"]),
        (batch(VOLUME, True), ["columns 2 backward", "strided backward"]),
    ],
)
def test_the_kernels_are_those_that_were_seen(call: Call, expected: list[str]) -> None:
    assert names(call) == expected


def test_one_channel_or_one_place_may_be_either_layout() -> None:
    """As PyTorch tells them apart: by the strides of sides of one place."""
    assert not channels_last(shape(8, 1, 19, 19))
    assert channels_last(shape(8, 1, 19, 19, last=True))
    assert not channels_last(shape(8, 16, 1, 1))
    assert channels_last(Shape((8, 16, 1, 1), (16, 1, 16, 16), "float32"))
    assert not channels_last(shape(8, 16, 100))


@pytest.mark.parametrize(
    ("call", "microseconds"),
    [
        (batch(shape(1, 32768, 4, 4), cudnn=True), 238),  # an instance norm: as many channels as planes
        (batch(shape(1, 32768, 4, 4), True, cudnn=True), 256),
        (batch(shape(64, 64, 32, 32), cudnn=True), 29),
        (batch(shape(145, 2, 304, 304), True, cudnn=True), 18130),
        (batch(shape(278, 1, 241, 241, dtype="bfloat16")), 10990),
        (batch(shape(14, 128, 32, 22, 22, dtype="bfloat16", last=True)), 538),  # the last block joins 2,112
        (group(shape(256, 2048, 1, 1, dtype="float16"), 8, True), 14),  # planes of one place: a block for a group
        (layer(858680, 65), 4461),
        (layer(65536, 256, True), 332),
        (layer(335493, 48, True), 305),
    ],
)
def test_the_law_alone_is_near_what_was_measured(call: Call, microseconds: float) -> None:
    assert seconds(call) == pytest.approx(microseconds * 1e-6, rel=0.25)


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_few_channels_leave_most_of_the_gpu_idle(cudnn: bool, backward: bool) -> None:
    """One block a channel: 33 times as many take little longer while each has an SM, and the next waves do."""
    few, full, more = (
        seconds(batch(shape(4, c, 256, 256, dtype="bfloat16"), backward, cudnn)) for c in (4, 132, 132 * 8)
    )
    assert few < full < 2.5 * few
    assert more > 2 * full


def test_sixty_five_thousand_rows_are_added_up_one_after_the_other() -> None:
    """Few columns have as few blocks for the gradient of the weights, until there are more rows than that."""
    assert seconds(layer(65536, 32, True)) > 3 * seconds(layer(65540, 32, True))


def test_rows_that_no_four_numbers_divide_take_longer() -> None:
    assert seconds(layer(8192, 706)) > 3 * seconds(layer(8192, 708))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "sizes", [(0, 3), (7, 5), (3, 1, 1), (2, 7, 9), (1, 1, 3, 5), (0, 4, 8, 8), (70000, 3, 1, 2, 2)]
)
def test_every_shape_has_a_law_and_as_many_features(sizes: tuple[int, ...], dtype: str) -> None:
    lasts = (False, True) if len(sizes) > 3 else (False,)
    calls = [batch(shape(*sizes, dtype=dtype, last=last), way, cudnn)
             for last in lasts for way in (False, True) for cudnn in (False, True)]  # fmt: skip
    calls += [group(shape(*sizes, dtype=dtype), 1, way) for way in (False, True)]
    calls += [layer(sizes[0], sizes[1], way) for way in (False, True)]
    w = shape(*sizes, dtype=dtype)
    calls += [Call("aten::_weight_norm_interface", (w, w, dim)) for dim in (0, len(sizes) - 1)]
    for call in calls:
        for rates in (H200, A100, T4):
            law = norm.law(call, rates)
            told = norm.features(call, law)
            assert isfinite(law.seconds) and law.seconds > 0
            assert len(told) == len(norm.features(calls[0], norm.law(calls[0], rates))) and all(map(isfinite, told))
