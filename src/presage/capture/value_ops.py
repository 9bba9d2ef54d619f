"""Which ops the numbers of tensors are followed through, and what it takes to run them on the host."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from presage.capture.contents import leaves, per_op
from presage.capture.op_schema import signature_of

EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
FILLS_AT_RANDOM = {"random_", "uniform_", "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
RANDOM = FILLS_AT_RANDOM | {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "bernoulli_", "native_dropout",
}  # fmt: skip
FILLS = FILLS_AT_RANDOM | {"copy_", "fill_", "zero_"}
SHAPED = {  # like another tensor, whose numbers do not matter
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
    "new_full",
}  # fmt: skip
UNREAD = SHAPED | EMPTY
MADE = {
    "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "scalar_tensor",
}  # fmt: skip
PLAIN = {
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "exp", "exp2", "expm1", "log",
    "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "sign", "floor", "ceil", "round", "trunc",
    "frac", "square", "sin", "cos", "tanh", "sigmoid", "erf", "erfinv", "clamp", "clamp_min", "clamp_max", "minimum",
    "maximum", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
    "logical_and", "logical_or", "logical_not", "logical_xor", "eq", "ne", "lt", "le", "gt", "ge", "where", "isnan",
    "isinf", "isfinite", "lerp", "masked_fill", "_to_copy", "clone", "cat", "stack", "repeat", "roll", "flip", "index",
    "index_select", "gather", "take", "index_put", "index_fill", "index_copy", "index_add", "scatter", "scatter_add",
    "scatter_reduce", "sort", "argsort", "topk", "kthvalue", "median", "cumsum", "cumprod", "cummax", "cummin",
    "constant_pad_nd", "tril", "triu", "bucketize", "searchsorted", "max", "min", "amax", "amin", "aminmax", "argmax",
    "argmin", "sum", "mean", "prod", "all", "any", "count_nonzero", "bincount", "var", "std", "copy", "nonzero",
    "_is_all_true", "_is_any_true",
    "masked_select", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "histc", "_softmax",
    "_log_softmax", "logsumexp", "relu", "gelu", "silu", "leaky_relu", "hardtanh", "softplus", "threshold",
    "linalg_vector_norm", "norm", "embedding", "diff", "unfold", "_unsafe_index", "atan2", "acos", "asin", "atan",
    "hypot", "sgn", "heaviside", "nan_to_num", "_cdist_forward", "roi_align", "nms",
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_cdist_forward"}  # cost more than they read
MOST_PRODUCT = 1 << 26  # elements of one side times elements of the other, of a product that is computed
INDICES = ("index", "indices")
# Ops whose outputs' sizes depend on numbers of some arguments only, by the places of those.
SHAPE_GIVERS = {
    "aten::index": (1,), "aten::masked_select": (1,), "aten::_ctc_loss": (2, 3), "aten::_pack_padded_sequence": (1,),
    "aten::repeat_interleave": (0,), "aten::nonzero": (0,),
}  # fmt: skip
WHOLE_NUMBERS = (torch.int64, torch.int32)
MOST_COPIED = 1 << 20  # elements of host tensors of floats that are copied; larger ones are images and weights
MOST_ASSUMED = 1 << 22  # elements of a tensor whose numbers are partly drawn, and still followed
SEED, NEXT_SEED = 0x5EED, 0x9E3779B97F4A7C15
# Of numbers that are not known: they are finite, and a check of all of them finds nothing.
UNKNOWN_ARE = {"isnan": 0, "isinf": 0, "isfinite": 1, "all": 1, "any": 0, "_is_all_true": 1, "_is_any_true": 0}
# The check for infinities of torch.amp.GradScaler: gradients are taken to be finite.
FINITE = {"_amp_foreach_non_finite_check_and_unscale_"}


@per_op
def short_name(func: Any) -> str:
    return signature_of(func).name.removeprefix("aten::")


@per_op
def is_known(func: Any) -> bool:
    """Whether the op may be run for real; forms that work in place go by the name of the one that does not."""
    name = short_name(func)
    known = EMPTY | RANDOM | SHAPED | FILLS | MADE | PLAIN
    return func.namespace == "aten" and (name in known or name.removesuffix("_") in PLAIN)


@per_op
def index_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple((i, name) for i, (name, _) in enumerate(signature_of(func).arguments) if name in INDICES)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in signature_of(func).writes]
    return [x for x in leaves(values) if isinstance(x, torch.Tensor)]


def is_cheap(func: Any, given: Sequence[torch.Tensor]) -> bool:
    name = short_name(func)
    if name.removesuffix("_").removesuffix("_backward") not in PRODUCTS:
        return name not in EMPTY
    sizes = sorted((x.numel() for x in given), reverse=True)
    return prod(sizes[:2]) <= MOST_PRODUCT


def on_host(func: Any, kwargs: Any, out: torch.Tensor | None) -> dict[str, Any]:
    """Options of the same op on the host: where it runs, of which type, and whose random numbers."""
    placed, typed = _options_of(func)
    own = dict(kwargs)
    if placed:
        own["device"] = torch.device("cpu")
    if out is not None and typed:
        own["dtype"] = out.dtype
    if own.get("generator") is not None:
        own["generator"] = torch.default_generator
    own.pop("pin_memory", None)
    return own


@per_op
def _options_of(func: Any) -> tuple[bool, bool]:
    """Whether an op takes a device, and a type that has to be given."""
    names = {name for name, _ in signature_of(func).arguments}
    return "device" in names, "dtype" in names and short_name(func) in MADE | RANDOM


def is_strided(t: torch.Tensor) -> bool:
    return t.layout is torch.strided


def repeats(values: np.ndarray[Any, Any]) -> tuple[int, int]:
    low = int(values.min())
    if int(values.max()) - low <= max(4 * values.size, 1 << 20):
        counts = np.bincount(values - low)
    else:
        counts = np.unique(values, return_counts=True)[1]
    return int(np.count_nonzero(counts)), int(counts.max())
