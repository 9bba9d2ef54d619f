"""Optimizer ops over lists of tensors, foreach and fused: many tensors a launch.

Law: the bytes of the lists read and written over the bandwidth, a launch for every so many tensors or elements.

A long list is the sum of its launches (`launches`): each waits for its longest block, so 500 small tensors take several
times what their bytes do. Sweeps have lists of one launch by number of tensors, of any size.
"""

from __future__ import annotations

from math import ceil

from presage.costs.call import Call, Shape, Value
from presage.costs.families.common import KernelFamily, Law, codes, ln, moved_law
from presage.costs.rates import Rates

CODES = codes(
    "_fused_adamw_ _fused_adam_ _fused_sgd_ _foreach_add_ _foreach_mul_ _foreach_addcdiv_ _foreach_addcmul_ "
    "_foreach_sqrt _foreach_lerp_ _foreach_div_ _foreach_mul _foreach_norm _foreach_abs _foreach_maximum_ _foreach_add "
    "_foreach_sub_ _foreach_neg _foreach_reciprocal _foreach_copy_ _foreach_zero_ _foreach_pow _foreach_sign_ "
    "_fused_adagrad_ _amp_foreach_non_finite_check_and_unscale_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_exp "
    "_foreach_neg_ _foreach_reciprocal_ _foreach_sqrt_"
)
ALIKE = {f"aten::{a}": f"aten::{b}" for a, b in {
    "_foreach_sub_": "_foreach_add_", "_foreach_neg": "_foreach_sqrt", "_foreach_reciprocal": "_foreach_sqrt",
    "_foreach_copy_": "_foreach_add_", "_foreach_zero_": "_foreach_mul_", "_foreach_pow": "_foreach_sqrt",
    "_foreach_sign_": "_foreach_mul_", "_fused_adagrad_": "_fused_sgd_", "_foreach_clamp_max_": "_foreach_maximum_",
    "_foreach_clamp_min_": "_foreach_maximum_", "_foreach_exp": "_foreach_sqrt",
    "_amp_foreach_non_finite_check_and_unscale_": "_foreach_mul_", "_foreach_add": "_foreach_add_",
    "_foreach_neg_": "_foreach_mul_", "_foreach_reciprocal_": "_foreach_mul_", "_foreach_sqrt_": "_foreach_mul_",
}.items()}  # fmt: skip
# Lists that are only read. A fused optimizer reads gradients; what an in-place op changes is its first list.
FUSED_WRITES = {"aten::_fused_adamw_": 3, "aten::_fused_adam_": 3, "aten::_fused_sgd_": 2, "aten::_fused_adagrad_": 2}
KEPT_LISTS = 1e8  # bytes of the lists that are still in the cache when an optimizer runs again at once
CHUNK, TENSORS = 65536, (110, 64, 48, 36, 30)  # elements of a block; tensors of a launch at most, by number of lists


def lists(call: Call) -> list[tuple[Shape, ...]]:
    """The lists of tensors with more than a number in each."""
    tensors = [v for v in call.inputs if isinstance(v, tuple) and v and isinstance(v[0], Shape)]
    return [v for v in tensors if any(s.elements > 1 for s in v)] or tensors[:1]


def law(call: Call, rates: Rates) -> Law:
    many = lists(call)
    sizes = [sum(_moved(s) for s in one) for one in many]
    if call.name in FUSED_WRITES:
        written = sizes[0] * FUSED_WRITES[call.name] if len(many) > 2 else sizes[0]
    else:
        written = 0 if call.name == "aten::_foreach_norm" else sizes[0]
    return moved_law(float(sum(sizes)), float(written), rates, _launches(many[0]))


def _moved(t: Shape) -> int:
    """Bytes; of short numbers twice as many where their count forbids vectors of four."""
    return t.nbytes * (2 if t.width < 4 and t.elements % 4 else 1)


def _launches(tensors: tuple[Shape, ...]) -> int:
    blocks = sum(ceil(s.elements / CHUNK) for s in tensors)
    return max(1, ceil(len(tensors) / TENSORS[0]), ceil(blocks / 320))


def launches(call: Call) -> list[Call]:
    """The op on as many tensors at a time as one launch takes; results are a list too."""
    many = lists(call)
    count = len(many[0]) if many else 0
    most = TENSORS[min(len(many) + (not call.name.endswith("_")), len(TENSORS)) - 1]
    if count <= most:
        return [call]
    return [
        Call(call.name, tuple(_slice(v, count, a, a + most) for v in call.inputs), call.tf32, call.facts)
        for a in range(0, count, most)
    ]


def _slice(value: Value, count: int, first: int, end: int) -> Value:
    """A part of a list of as many tensors as the op has; any other value as it is."""
    is_list = isinstance(value, tuple) and len(value) == count and isinstance(value[0], Shape)
    return value[first:end] if is_list and isinstance(value, tuple) else value


def features(call: Call, law: Law) -> list[float]:
    many = lists(call)
    first = many[0]
    sizes = [s.elements for s in first]
    total, blocks = sum(sizes), sum(ceil(n / CHUNK) for n in sizes)
    return [
        CODES[ALIKE.get(call.name, call.name)], float(len(many)), float(first[0].width), ln(len(first)), ln(total),
        ln(max(sizes)), ln(total / len(first)), ln(blocks), total / (blocks * CHUNK), ln(_launches(first)),
        ln(law.bytes), ln(law.seconds),
        blocks / 320 / ceil(blocks / 320), sum(n for n in sizes if n % 4 == 0) / total,
    ]  # fmt: skip


def cold(law: Law) -> float:
    """The sweep finds short lists in the cache, where a step never leaves them."""
    return law.seconds if law.bytes < KEPT_LISTS else 0.0


FAMILY = KernelFamily("optimizer", frozenset(CODES), law, features, rounds=400, leaves=15, cold=cold, parts=launches)
