"""Attention's and recurrent nets' laws: what must hold for any shape."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import pytest

from presage.costs.call import Call, Shape
from presage.costs.families import FAMILIES
from presage.costs.families.attention import tiles
from presage.costs.rates import Rates
from presage.hardware import gpu

RATES = Rates.of(gpu("h200"))


def shape(*sizes: int, dtype: str = "bfloat16") -> Shape:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return Shape(sizes, tuple(strides), dtype)


def cudnn(b: int, h: int, s: int, t: int, d: int, causal: bool = False, dropout: float = 0.0) -> Call:
    q, k = shape(b, h, s, d), shape(b, h, t, d)
    inputs = (q, k, k, None, None, None, s, t, True, dropout, causal, False)
    return Call("aten::_cudnn_attention_forward", inputs)


def lstm(steps: int, batch: int, hidden: int, layers: int = 1, dtype: str = "float32") -> Call:
    x = shape(batch, steps, hidden, dtype=dtype)
    inputs = (x, (), 4, None, None, None, 2, hidden, 0, layers, True, 0.0, True, False, (), None)
    return Call("aten::_cudnn_rnn", inputs)


def seconds(call: Call) -> float:
    family = next(f for f in FAMILIES.values() if call.name in f.ops)
    return family.law(call, RATES).seconds


def test_longer_sequences_take_longer() -> None:
    times = [seconds(cudnn(2, 16, s, s, 64)) for s in (128, 512, 2048, 8192, 32768)]
    assert all(b > a for a, b in pairwise(times))
    assert times[-1] / times[-2] == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize("s", [16, 100, 128, 129, 1000, 4096])
def test_a_causal_mask_never_costs_more(s: int) -> None:
    assert seconds(cudnn(4, 12, s, s, 64, causal=True)) <= seconds(cudnn(4, 12, s, s, 64))


def test_a_long_causal_mask_halves_the_time() -> None:
    whole, masked = (seconds(cudnn(1, 16, 16384, 16384, 128, causal)) for causal in (False, True))
    assert masked / whole == pytest.approx(0.5, abs=0.06)


def test_dropout_and_wider_heads_cost_more() -> None:
    assert seconds(cudnn(4, 12, 1024, 1024, 64, dropout=0.1)) > seconds(cudnn(4, 12, 1024, 1024, 64))
    assert seconds(cudnn(4, 12, 1024, 1024, 128)) > seconds(cudnn(4, 12, 1024, 1024, 64))
    assert seconds(cudnn(4, 12, 1024, 1024, 40)) >= 0.9 * seconds(cudnn(4, 12, 1024, 1024, 64))  # padded to 64


def test_tiles_up_to_the_diagonal() -> None:
    assert tiles(128, 128, 512, 512, False) == (4, 16, 4)
    assert tiles(128, 128, 512, 512, True) == (4, 1 + 2 + 3 + 4, 4)
    assert tiles(128, 64, 129, 129, True) == (2, 2 + 3, 3)


def test_features_of_odd_shapes() -> None:
    family = FAMILIES["attention"]
    rows = [family.features(c, family.law(c, RATES)) for c in (cudnn(1, 1, 1, 1, 8), cudnn(3, 7, 77, 1500, 200))]
    assert len({len(r) for r in rows}) == 1
    assert all(isfinite(v) for r in rows for v in r)


def test_recurrent_time_grows_with_steps_layers_and_width() -> None:
    assert seconds(lstm(200, 32, 512)) > 1.8 * seconds(lstm(100, 32, 512))
    assert seconds(lstm(100, 32, 512, layers=2)) > 1.8 * seconds(lstm(100, 32, 512))
    assert seconds(lstm(100, 32, 1024)) > seconds(lstm(100, 32, 512))
    assert seconds(lstm(100, 32, 128)) < 0.5 * seconds(lstm(100, 32, 192))  # one persistent kernel
