"""Families with few rows: pooling and upsampling, random numbers. All by bytes moved."""

from __future__ import annotations

from math import prod

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import Rates

__all__ = ["POOL", "RANDOM"]

POOLS = codes(
    "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward adaptive_max_pool2d "
    "adaptive_max_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d "
    "upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward avg_pool3d avg_pool3d_backward "
    "adaptive_max_pool3d adaptive_max_pool3d_backward".split()
)
POOLS_ALIKE = {
    "aten::avg_pool3d": "aten::avg_pool2d", "aten::avg_pool3d_backward": "aten::avg_pool2d_backward",
    "aten::adaptive_max_pool3d": "aten::adaptive_max_pool2d",
    "aten::adaptive_max_pool3d_backward": "aten::adaptive_max_pool2d_backward",
}  # fmt: skip
RANDOMS = codes(
    ("native_dropout", "bernoulli_", "uniform_", "normal_", "random_", "arange", "exponential_", "randperm")
)
RANDOMS_ALIKE = {"aten::exponential_": "aten::uniform_"}


def _pool_law(call: Call, rates: Rates) -> Law:
    return moved_law(float(sum(t.nbytes for t in call.tensors)), float(_pooled(call)), rates)


def _pooled(call: Call) -> float:
    """Bytes of the result: of the larger side where sizes are given, else of the first tensor."""
    x = call.tensors[0]
    sizes = max((call.numbers(place) for place in (1, 2) if len(call.numbers(place)) >= 2), key=prod, default=())
    if call.name.startswith("aten::upsample"):
        whole = prod(sizes) if len(sizes) == 4 else prod(sizes) * prod(x.sizes[:2])
        return whole * x.width
    return float(max(t.nbytes for t in call.tensors))


def _pool_features(call: Call, law: Law) -> list[float]:
    x = call.tensors[0]
    window = call.numbers(1) if not call.name.endswith("backward") else call.numbers(2)
    last = float(len(x.strides) > 2 and x.strides[1] == 1 and x.sizes[1] > 1)
    return [
        *plain_features(call, law, POOLS[POOLS_ALIKE.get(call.name, call.name)], 2), last, *[*window, 0.0, 0.0][:2],
        ln(prod(x.sizes[:2])), ln(prod(x.sizes[2:])), ln(call.tensors[-1].elements / max(1, x.elements)),
    ]  # fmt: skip


def _random_law(call: Call, rates: Rates) -> Law:
    if call.name == "aten::arange":
        return moved_law(0.0, 8 * abs(call.number(1) - call.number(0)), rates)
    x = call.tensors[0]
    both = x.nbytes if call.name == "aten::native_dropout" else 0
    return moved_law(float(both), float(x.nbytes + both // max(1, x.width)), rates)


def _random_features(call: Call, law: Law) -> list[float]:
    return plain_features(call, law, RANDOMS[RANDOMS_ALIKE.get(call.name, call.name)], 1)


POOL = Family("pool", frozenset(POOLS), _pool_law, _pool_features, rounds=400, leaves=23)
RANDOM = Family("random", frozenset(RANDOMS), _random_law, _random_features, rounds=400, leaves=23)
