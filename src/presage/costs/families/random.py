"""Random numbers, dropout and ranges: by bytes moved."""

from __future__ import annotations

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, codes, moved_law, plain_features
from presage.costs.rates import Rates

CODES = codes(("native_dropout", "bernoulli_", "uniform_", "normal_", "random_", "arange", "exponential_", "randperm"))
ALIKE = {"aten::exponential_": "aten::uniform_"}


def law(call: Call, rates: Rates) -> Law:
    if call.name == "aten::arange":
        return moved_law(0.0, 8 * abs(call.number(1) - call.number(0)), rates)
    x = call.tensors[0]
    both = x.nbytes if call.name == "aten::native_dropout" else 0
    return moved_law(float(both), float(x.nbytes + both // max(1, x.width)), rates)


def features(call: Call, law: Law) -> list[float]:
    return plain_features(call, law, CODES[ALIKE.get(call.name, call.name)], 1)


FAMILY = KernelFamily("random", frozenset(CODES), law, features, rounds=400, leaves=23)
