"""Loops of broadcasts and reductions, blocks of norms, contention of resampling."""

from __future__ import annotations

from math import prod

import pytest

from presage.costs.call import Call, Shape
from presage.costs.families import BY_OP, FAMILIES
from presage.costs.families.loops import elementwise_loops, reduce_loops
from presage.costs.rates import Rates
from presage.hardware import gpu

RATES = Rates.of(gpu("h200"))


def dense(*sizes: int, dtype: str = "float32") -> Shape:
    return Shape(sizes, tuple(prod(sizes[i + 1 :]) for i in range(len(sizes))), dtype)


def seconds(name: str, *inputs: object) -> float:
    call = Call(f"aten::{name}", inputs)  # type: ignore[arg-type]
    return BY_OP[call.name].law(call, RATES).seconds


def test_equal_layouts_are_one_loop() -> None:
    assert len(elementwise_loops((8, 16, 32), [dense(8, 16, 32)] * 2)) == 1


def test_each_broadcast_dimension_is_a_loop() -> None:
    loops = elementwise_loops((2, 4, 256, 256, 16, 64), [dense(2, 4, 256, 256, 16, 1), dense(2, 4, 1, 256, 16, 64)])
    assert [loop.size for loop in loops] == [64, 4096, 256, 8]


def test_more_loops_take_longer() -> None:
    few = seconds("mul", dense(4096, 64, 64), dense(1, 64, 64))
    many = seconds("mul", dense(64, 64, 64, 64), dense(64, 1, 64, 1))
    assert many > 1.1 * few


def test_a_transposed_input_is_read_in_sectors() -> None:
    x = Shape((128, 32, 125, 256), (1, 32000 * 128 // 32, 256 * 0 + 128, 16000), "float32")
    assert reduce_loops(x, (2,)).stride > 1
    assert reduce_loops(dense(256, 32, 125, 128), (2,)).stride == 1


def test_one_group_is_one_block() -> None:
    x, scale = dense(4, 512, 4001), dense(512)
    one = seconds("native_group_norm", x, scale, scale, 4, 512, 4001, 1, 1e-5)
    many = seconds("native_group_norm", x, scale, scale, 4, 512, 4001, 32, 1e-5)
    assert one > 5 * many


@pytest.mark.parametrize("mode", ["upsample_bilinear2d_backward"])
def test_gradients_wait_where_they_fall_onto_one_place(mode: str) -> None:
    grad = dense(8, 256, 60, 60)
    onto_one = seconds(mode, grad, (60, 60), (8, 256, 1, 1), False, None, None)
    onto_many = seconds(mode, grad, (60, 60), (8, 256, 30, 30), False, None, None)
    assert onto_one > onto_many


def test_families_of_new_ops() -> None:
    assert BY_OP["aten::_grouped_mm"].name == "grouped"
    assert BY_OP["aten::_fft_r2c"].name == "fft"
    assert BY_OP["aten::max_pool3d_with_indices"].name == "pool"
    assert {"scan", "resample", "fft", "grouped"} <= set(FAMILIES)
