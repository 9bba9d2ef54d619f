"""CUDA's autocast, op by op, for the stand-in: what runs in low precision, in float32, or in the widest type.

The lists are those of CUDA in PyTorch 2.11. Casts of float32 leaves that need a gradient (the weights) are kept until
the outermost autocast region ends, as CUDA's autocast keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["clear", "register"]

LOW = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv1d.padding",
    "conv2d",
    "conv2d.padding",
    "conv3d",
    "conv3d.padding",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]
FULL = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "upsample_nearest1d.vec",
    "upsample_nearest2d.vec",
    "upsample_nearest3d.vec",
    "upsample_linear1d.vec",
    "upsample_bilinear2d.vec",
    "upsample_trilinear3d.vec",
    "upsample_bicubic2d.vec",
]
FULL_OUTPUT = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

_library: list[Any] = []  # lives as long as the process: dropping it would undo the registrations
_cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
_Op = Callable[..., Any]
_KEY: Any = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009


def clear() -> None:
    """Forget the kept casts: the outermost autocast region has ended."""
    _cache.clear()


def register() -> None:
    fallback = _library_of("_")
    fallback.fallback(torch.library.fallthrough_kernel)
    lists = _library_of("aten")
    for names, policy in ((LOW, _low), (FULL, _full), (FULL_OUTPUT, _full_output), (WIDEST, _widest)):
        for name in names:
            if (op := _find(name)) is not None:
                lists.impl(name, partial(policy, op))
    for name, typed in NORMS.items():
        lists.impl(name, partial(_append_full, _find(name), getattr(torch.ops.aten.norm, typed)))
    _library.extend([fallback, lists])


def _library_of(space: str) -> Any:
    make: Any = torch.library.Library
    return make(space, "IMPL", "AutocastPrivateUse1")


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _past_autocast() -> Any:
    keys = torch._C.DispatchKeySet(_KEY)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _eligible(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and x.dtype != torch.float64
        and (x.device.type in ("cuda", "presage"))
    )


def _low(op: _Op, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("presage")
    with _past_autocast():
        return _run(op, args, kwargs, dtype)


def _run(op: _Op, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    # The casts run from the last argument to the first, as the compiler of PyTorch's C++ has it.
    cast = [tree_map(lambda x: _cast(x, dtype), a) for a in reversed(args)]
    return op(*reversed(cast), **tree_map(lambda x: _cast(x, dtype), kwargs))


def _full(op: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        return _run(op, args, kwargs, torch.float32)


def _full_output(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        if _eligible(args[0]) and given.get("dtype") is None:
            place = [a.name for a in op._schema.arguments].index("dtype")
            if len(args) > place:
                args = (*args[:place], torch.float32, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)


def _append_full(op: _Op, typed: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        if not _eligible(args[0]):
            return op(*args, **kwargs)
        rest = args if len(args) > 1 else (*args, 2)
        return typed(*rest, **kwargs, dtype=torch.float32)


def _widest(op: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        seen = [x.dtype for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _eligible(x)]
        low = torch.get_autocast_dtype("presage")
        dtype = torch.float32 if torch.float32 in seen else low
        return _run(op, args, kwargs, dtype)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if not _eligible(x) or x.dtype == dtype:
        return x
    low = torch.get_autocast_dtype("presage")
    keep = (
        dtype == low
        and x.dtype == torch.float32
        and x.requires_grad
        and x.is_leaf
        and not x._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not keep:
        return x.to(dtype)
    if id(x) not in _cache:
        _cache[id(x)] = (x, x.to(dtype))
    return _cache[id(x)][1]
