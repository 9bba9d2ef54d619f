"""Launches of reductions and of element-wise kernels, and what they read again."""

from __future__ import annotations

from math import inf, prod

import pytest

from presage.costs.call import Call, Shape, Value
from presage.costs.families import BY_OP
from presage.costs.families.common import Law
from presage.costs.families.reduce import fetched, work
from presage.costs.rates import Rates
from presage.hardware import gpu

RATES = Rates.of(gpu("h200"))


def dense(*sizes: int, dtype: str = "float32", order: tuple[int, ...] = ()) -> Shape:
    """A tensor whose dimensions lie in memory in this order, the slowest first."""
    strides, step = [0] * len(sizes), 1
    for i in reversed(order or range(len(sizes))):
        strides[i], step = step, step * sizes[i]
    return Shape(sizes, tuple(strides), dtype)


def law(name: str, *inputs: Value) -> Law:
    call = Call(f"aten::{name}", inputs)
    return BY_OP[call.name].law(call, RATES)


@pytest.mark.parametrize("cache, times", [(1e9, 1), (10.0, 8)])
def test_sectors_are_read_again_where_the_cache_is_too_small(cache: float, times: int) -> None:
    rows_of_eight = [(1000.0, 8.0), (8.0, 1.0)]  # a number of each row, then the next of each
    assert fetched(rows_of_eight, 4, 32, cache) == pytest.approx(times * 32000, rel=0.01)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_sum_in_the_order_of_memory_reads_all_once(order: tuple[int, ...]) -> None:
    x = dense(64, 64, 128, 256, order=order)
    assert work(x, (order[-1],)).missed < 0.01 * x.nbytes


def test_a_permuted_sum_reads_bursts_for_single_numbers() -> None:
    x, apart = dense(8, 64, 1048576), dense(8, 64, 1048576, order=(0, 2, 1))
    assert work(apart, (0,)).missed > 10 * x.nbytes
    assert law("sum", apart, (0,)).seconds > 10 * law("sum", x, (0,)).seconds


def test_one_block_of_long_columns_takes_longer_than_many_that_share_them() -> None:
    alone, shared = law("sum", dense(1536, 64), (0,)), law("sum", dense(3072, 64), (0,))
    assert alone.launches == 1 and shared.launches == 2  # their counters are cleared first
    assert alone.seconds == pytest.approx(12.5e-6, rel=0.2) and shared.seconds == pytest.approx(7.3e-6, rel=0.2)


def test_only_threads_that_read_count() -> None:
    few = Shape((32, 80), (9600, 120), "float32")  # 80 results for 512 threads
    assert law("sum", few, (0,)).seconds < 5e-6


@pytest.mark.parametrize("gigabytes, launches", [(1, 1), (3, 2), (6, 4)])
def test_tensors_beyond_32_bits_are_cut_in_halves(gigabytes: int, launches: int) -> None:
    x = dense(gigabytes * 2**18, 1024)
    assert law("sum", x, (1,)).launches == law("mul", x, x).launches == launches


def test_an_operand_that_lies_otherwise_is_read_in_bursts() -> None:
    x, other = (dense(16384, 16384, dtype="bfloat16", order=order) for order in ((0, 1), (1, 0)))
    assert law("add", x, other).seconds > 2 * law("add", x, x).seconds


def test_a_tensor_without_dimensions_is_broadcast_and_a_number_is_not() -> None:
    x = dense(1024, 65536, dtype="bfloat16")
    number, tensor = (law("mul", x, Shape((), (), kind)).seconds for kind in ("float64", "bfloat16"))
    assert tensor > 1.5 * number


def test_a_boolean_factor_is_cast_and_a_mask_is_not() -> None:
    x, mask = dense(1024, 65536, dtype="bfloat16"), dense(1024, 65536, dtype="bool")
    assert law("mul", x, mask).seconds > 1.5 * law("masked_fill", x, mask, 0.0).seconds


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 0, 2), (1, 1), (2**40,), (5, 2**33, 3)])
def test_any_shape_has_a_time(sizes: tuple[int, ...]) -> None:
    for x in (
        dense(*sizes),
        dense(*sizes, order=tuple(range(len(sizes)))[::-1]),
        Shape(sizes, (0,) * len(sizes), "bool"),
    ):
        for name, more in (("sum", ()), ("amax", (0,)), ("add", x), ("where", x)):
            call = Call(f"aten::{name}", (x, more, x))
            got = BY_OP[call.name].law(call, RATES)
            assert 0 < got.seconds < inf
            assert all(abs(f) < inf for f in BY_OP[call.name].features(call, got)), prod(sizes)
