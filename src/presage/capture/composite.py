"""Ops that PyTorch takes apart differently on CUDA than elsewhere, taken apart as CUDA does, for the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from presage.capture.attention import attention
from presage.capture.backend import GPU

aten = torch.ops.aten
INT_MAX = 2**31 - 1
_library: list[Any] = []


def _cudnn_batch_norm_takes(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None,
    var: torch.Tensor | None, training: bool, eps: float, enabled: bool,
) -> bool:  # fmt: skip
    if not enabled or weight is None or bias is None or x.dtype == torch.bfloat16 or weight.dtype == torch.bfloat16:
        return False
    statistics = (mean is not None and var is not None) or (mean is None and var is None and training)
    return (
        statistics
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and x.dim() >= 3
        and x.shape[0] <= (880801 if training else 65535)
        and eps >= 1e-5 - 1e-12
        and x.numel() <= INT_MAX
    )


def _layout(x: torch.Tensor) -> torch.memory_format:
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


def batch_norm_impl_index(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None,
    var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:  # fmt: skip
    if x.numel() and _cudnn_batch_norm_takes(x, weight, bias, mean, var, training, eps, cudnn_enabled):
        whole = x.contiguous(memory_format=_layout(x))
        out, save_mean, save_var, reserve = aten.cudnn_batch_norm(
            whole, weight, bias, mean, var, training, momentum, eps
        )
        return out, save_mean, save_var, reserve, 1
    reserve = torch.empty(0, dtype=torch.uint8, device=x.device)
    out, save_mean, save_var = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return out, save_mean, save_var, reserve, 0


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]
    if p == 0 or not train or not x.numel():
        return x
    return x.mul(torch.zeros([], device=x.device))


def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    del cudnn_enabled
    batch, channels = x.shape[:2]
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    rest = x.numel() // max(batch * channels, 1)
    return aten.native_group_norm(x.contiguous(), weight, bias, batch, channels, rest, groups, eps)[0]  # type: ignore[no-any-return]


def _softmax_of(op: Any) -> Callable[..., torch.Tensor]:
    """Half precision goes in and float32 comes out of one kernel; other types are converted first."""

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)  # type: ignore[no-any-return]
        return op(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]

    return run


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The lengths go to the host first."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)  # type: ignore[no-any-return]


# ---- cuDNN's recurrent layers: on CUDA a whole LSTM, GRU or RNN is one op.

DROPOUT_STATE = GPU.sms * GPU.threads_per_sm * 24  # bytes of random state: one per resident thread
RELU, TANH, LSTM, GRU = 0, 1, 2, 3  # cuDNN's modes


def _run(
    mode: int, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None, weights: Sequence[torch.Tensor],
    biased: bool, layers: int, dropout: float, train: bool, both_ways: bool, batch_first: bool,
    batches: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    size = cell.shape[2] if cell is not None else hidden.shape[2]
    projected = hidden.shape[2] if cell is not None and cell.shape[2] != hidden.shape[2] else 0
    per_layer = (4 if biased else 2) + (1 if projected else 0)
    state = torch.empty(1, dtype=torch.uint8, device=x.device).expand(DROPOUT_STATE) if train and dropout > 0 else None
    # The weights lie in one buffer already; a stand-in of its shape must not count as memory.
    buffer = torch.empty(1, dtype=x.dtype, device=x.device).expand(sum(w.numel() for w in weights))
    out = aten._cudnn_rnn(
        x, list(weights), per_layer, buffer, hidden, cell, mode, size, projected, layers, batch_first,
        float(dropout), train, both_ways, list(batches), state,
    )  # fmt: skip
    return out[0], out[1], out[2]


def lstm(x: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *how: Any) -> tuple[Any, ...]:
    return _run(LSTM, x, hx[0], hx[1], params, *how)


def lstm_packed(data: torch.Tensor, batches: torch.Tensor, hx: Any, params: Any, *how: Any) -> tuple[Any, ...]:
    return _run(LSTM, data, hx[0], hx[1], params, *(*how, False, batches.tolist()))


def _gated(mode: int) -> Any:
    return lambda x, hx, params, *how: _run(mode, x, hx, None, params, *how)[:2]


def gru_packed(data: torch.Tensor, batches: torch.Tensor, hx: Any, params: Any, *how: Any) -> tuple[Any, ...]:
    return _run(GRU, data, hx, None, params, *(*how, False, batches.tolist()))[:2]


gru, rnn_tanh, rnn_relu = _gated(GRU), _gated(TANH), _gated(RELU)


# ---- products: where no factor is zero, their gradient is a quotient. PyTorch looks for zeros first, but not for
# subclasses of tensors, which fake tensors are: for these it spells all products out, with a loop over the dimension.


class Prod(torch.autograd.Function):
    """The product of all elements, or along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: tuple[int, bool] | None, dtype: torch.dtype | None) -> torch.Tensor:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = aten.prod.dim_int(x, *along, dtype=dtype) if along else aten.prod(x, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.along = along
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, out = ctx.saved_tensors
        x = x.to(grad.dtype)
        zeros = x == 0
        if ctx.along is None:
            zeros.nonzero()
        else:
            dim, keeps = ctx.along
            zeros.sum(dim, True).sum().item()
            grad, out = (grad, out) if keeps else (grad.unsqueeze(dim), out.unsqueeze(dim))
        return grad * (out / x), None, None


class Cumprod(torch.autograd.Function):
    """The products of all elements up to each along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = aten.cumprod(x, dim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, out = ctx.saved_tensors
        weighted = out * grad.to(x.dtype)
        (x == 0).any().item()
        return weighted.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim).div(x), None, None


def _hooked(op: Any, function: Any, arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., torch.Tensor]:
    """The op, by its function where it has a gradient."""

    def run(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad and x.dim():
            return function.apply(x, *arguments(*args), dtype)  # type: ignore[no-any-return]
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, *args, dtype=dtype)  # type: ignore[no-any-return]

    return run


PRODUCTS = {
    "prod": _hooked(aten.prod.default, Prod, lambda: (None,)),
    "prod.dim_int": _hooked(aten.prod.dim_int, Prod, lambda dim, keepdim=False: ((dim, keepdim),)),
    "cumprod": _hooked(aten.cumprod.default, Cumprod, lambda dim: (dim,)),
}


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the ops that run; while it is active all tensors count as subclasses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def spelled_out() -> dict[str, Callable[..., Any]]:
    """The products whose gradient this PyTorch spells out for subclasses."""
    found = {}
    for name, function in PRODUCTS.items():
        x = torch.ones(3, requires_grad=True)
        y = getattr(aten, name.partition(".")[0])(x, *(() if name == "prod" else (0,))).sum()
        with _Ops() as ops:
            y.backward()
        if ops.ran & {aten.prod, aten.cumprod}:
            found[name] = function
    return found


def one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Zeros, and a scatter into them; for subclasses PyTorch compares every class."""
    count = num_classes if num_classes >= 0 else int(x.max().item()) + 1
    return x.new_zeros((*x.shape, count)).scatter_(-1, x.unsqueeze(-1), 1)


# ---- registration

WHOLE = ("silu_backward", "mish_backward", "native_channel_shuffle", "_fused_rms_norm", "_fused_rms_norm_backward")
OVERRIDES: dict[str, Callable[..., Any]] = {
    "_batch_norm_impl_index": batch_norm_impl_index,
    "dropout": dropout,
    "group_norm": group_norm,
    "softmax.int": _softmax_of(aten._softmax),
    "log_softmax.int": _softmax_of(aten._log_softmax),
    "scaled_dot_product_attention": attention,
    "ctc_loss.Tensor": ctc_loss,
    "one_hot": one_hot,
    "lstm.input": lstm,
    "lstm.data": lstm_packed,
    "gru.input": gru,
    "gru.data": gru_packed,
    "rnn_tanh.input": rnn_tanh,
    "rnn_relu.input": rnn_relu,
}


def register_composites() -> None:
    make: Any = torch.library.Library
    library = make("aten", "IMPL", "AutogradPrivateUse1")
    for name, function in (OVERRIDES | spelled_out()).items():
        library.impl(name, function)
    _library.append(library)
    backend = make("aten", "IMPL", "PrivateUse1")
    for name in WHOLE:
        backend.impl(name, _never_reached)
    _library.append(backend)


def _never_reached(*args: Any, **kwargs: Any) -> Any:
    """Registered so that the op counts as the backend's own and is not taken apart; the recorder comes before it."""
    raise NotImplementedError
