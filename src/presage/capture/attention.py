"""Which attention an H200 runs (PyTorch 2.11, cuDNN 9.19): cuDNN, flash, memory-efficient or math."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
Choice: TypeAlias = Literal["cudnn", "flash", "efficient", "math"]
LOW = (torch.float16, torch.bfloat16)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    choice = choose(q, k, v, mask, causal, enable_gqa)
    if choice == "math":
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]
    if mask is not None and mask.dtype == torch.bool:
        mask = _as_bias(mask, q.dtype)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if choice == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            q, k, v, mask, needs_grad, dropout, causal, False, scale=scale
        )[0]
    if choice == "flash":
        return _flash(q, k, v, dropout, causal, scale)
    if mask is not None:
        mask = _aligned(mask)
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        q, k, v, mask, needs_grad, dropout, causal, scale=scale
    )[0]


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    gqa: bool,
) -> Choice:
    """The first of CUDA's backends, in its order of preference, that takes these tensors and is not switched off."""
    if mask is not None and mask.shape[-1] > 1 and mask.stride(-1) != 1:
        return "math"
    if q.dim() != 4 or q.dtype != k.dtype or q.dtype != v.dtype or 0 in (*q.shape, *k.shape):
        return "math"
    if _cudnn_takes(q, k, v, mask, causal, gqa):
        return "cudnn"
    if _flash_takes(q, k, v, mask, causal, gqa):
        return "flash"
    if _efficient_takes(q, k, v, mask, gqa):
        return "efficient"
    return "math"


def _on(name: str) -> bool:
    return bool(getattr(torch._C, f"_get_{name}_sdp_enabled")())


def _same_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gqa: bool) -> bool:
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
        return False
    if q.shape[1] == k.shape[1] == v.shape[1]:
        return True
    return gqa and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0


def _rows_whole(*tensors: torch.Tensor) -> bool:
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)


def _cudnn_takes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, gqa: bool
) -> bool:
    if not _on("cudnn") or q.dtype not in LOW or not _same_heads(q, k, v, gqa) or not _rows_whole(q, k, v):
        return False
    if mask is not None and (mask.requires_grad or causal):
        return False
    depth_qk, depth_v = q.shape[-1], v.shape[-1]
    if depth_qk % 8 or depth_v % 8 or max(depth_qk, depth_v) > 256:
        return False
    if causal and q.shape[2] != k.shape[2]:
        return False
    return k.shape[2] > 1 and q.shape[2] > 1


def _flash_takes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, gqa: bool
) -> bool:
    return (
        _on("flash")
        and mask is None
        and q.dtype in LOW
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[-1] <= 256
        and _same_heads(q, k, v, gqa)
        and _rows_whole(q, k, v)
        and not (causal and q.shape[2] != k.shape[2])
    )


def _efficient_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, gqa: bool) -> bool:
    if not _on("mem_efficient") or q.dtype not in (*LOW, torch.float32) or (gqa and q.shape[1] != k.shape[1]):
        return False
    alignment = 4 if q.dtype == torch.float32 else 8
    return (
        _same_heads(q, k, v, gqa=False)
        and _rows_whole(q, k, v)
        and q.shape[-1] % alignment == 0
        and v.shape[-1] % alignment == 0
        and (mask is None or (mask.dim() in (2, 4)))
    )


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    off = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    on = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, on, off)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The kernel reads rows of 8 elements: a mask whose rows do not fill them is copied into one whose rows do."""
    keys = mask.shape[-1]
    if keys % 8 == 0:
        return mask
    wide: Any = torch.nn.functional.pad(mask, (0, 8 - keys % 8))
    return wide[..., :keys]  # type: ignore[no-any-return]


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    depth = q.shape[-1]
    if depth % 8:
        scale = scale if scale is not None else depth**-0.5
        q, k, v = (torch.nn.functional.pad(t, (0, 8 - depth % 8)) for t in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
    return out[..., :depth] if depth % 8 else out  # type: ignore[no-any-return]


# ---- Attention that the user's code writes out, run as `scaled_dot_product_attention` while the step is captured.

PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}
TURNS = {torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes}
SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}
CASTS = {"to", "float", "half", "bfloat16", "type_as", "type", "contiguous"}
GETTERS = {"__get__", "size", "dim", "stride", "numel", "is_floating_point", "__len__"}


@contextmanager
def intercepted() -> Iterator[None]:
    """Written-out attention inside is fused."""
    with _Fusing():
        yield


@dataclass(frozen=True, eq=False)
class _Chain:
    """Work put off: the product of queries and keys, and what was done to it since."""

    q: Any
    k: Any  # [..., width, keys]: as the product takes it
    run: tuple[Any, Any, Any]  # function, arguments, keyword arguments of the last call
    scale: float = 1.0
    mask: Any = None
    keeps: bool = False  # a boolean mask's True lets through
    softmax: bool = False
    dropout: float = 0.0
    results: list[Any] = field(default_factory=list)  # of the last call, once it has run


class _Scores(torch.Tensor):
    """A tensor that is not there yet."""

    chain: _Chain

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_real, (args, kwargs or {}))
        return func(*args, **kwargs)

    @staticmethod
    def of(chain: _Chain, shape: Any, dtype: Any) -> _Scores:
        out = torch.Tensor._make_wrapper_subclass(_Scores, shape, dtype=dtype, device=torch.device("meta"))
        out.chain = chain
        return out


class _Fusing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.turned: Any = WeakIdKeyDictionary()  # matrices that were transposed, by the result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waiting = [a for a in tree_leaves((args, kwargs)) if isinstance(a, _Scores)]
        if not waiting:
            if func in PRODUCTS and not kwargs:
                return self._product(func, args)
            out = func(*args, **kwargs)
            if func in TURNS and {d % max(out.dim(), 1) for d in args[1:]} == {out.dim() - 1, out.dim() - 2}:
                self.turned[out] = args[0]
            return out
        name = getattr(func, "__name__", "")
        if name in GETTERS:
            return self._got(func, name, args, kwargs)
        if waiting[0] is args[0] and func in PRODUCTS and waiting[0].chain.softmax and len(waiting) == 1:
            return self._attention(waiting[0].chain, args[1])
        after = _followed(waiting[0], func, name.strip("_"), args, kwargs) if len(waiting) == 1 else None
        if after is None:
            args, kwargs = tree_map(_real, (args, kwargs))
            return func(*args, **kwargs)
        dtype = _dtype(waiting[0], name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            out = _Scores.of(after, waiting[0].shape, dtype)
        if name.endswith("_") and not name.startswith("__"):
            waiting[0].chain = after
            return waiting[0]
        return out

    def _attention(self, chain: _Chain, v: Any) -> Any:
        k = self.turned.get(chain.k)
        return _attention(chain.q, chain.k.transpose(-1, -2) if k is None else k, v, chain)

    def _product(self, func: Any, args: Any) -> Any:
        q, k = args
        alike = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() in (3, 4)
        if not (alike and q.is_cuda and q.is_floating_point() and q.shape[-1] == k.shape[-2]):
            return func(q, k)
        shape = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-1])  # type: ignore[no-untyped-call]
        return _Scores.of(_Chain(q, k, (func, args, {})), shape, q.dtype)

    def _got(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__get__" and func in (torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__):  # type: ignore[attr-defined]
            return func(args[0].chain.q)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _dtype(scores: _Scores, name: str, args: Any, kwargs: Any) -> Any:
    """The type of a result, as far as the code that follows may look at it."""
    wanted = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}.get(name)
    given = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
    with torch._C.DisableTorchFunctionSubclass():
        return wanted or (given[0] if given else scores.dtype)


def _real(value: Any) -> Any:
    """What was put off, run now; once for all who ask."""
    if not isinstance(value, _Scores):
        return value
    if not value.chain.results:
        func, args, kwargs = value.chain.run
        args, kwargs = tree_map(_real, (args, kwargs))
        value.chain.results.append(func(*args, **kwargs))
    return value.chain.results[0]


def _followed(scores: _Scores, func: Any, name: str, args: Any, kwargs: Any) -> _Chain | None:
    """The chain with one call more; None where attention does not go on so."""
    with torch._C.DisableTorchFunctionSubclass():
        before = _Scores.of(scores.chain, scores.shape, scores.dtype)
    run = (func, tuple(before if a is scores else a for a in args), kwargs)
    chain = replace(scores.chain, run=run, results=[])
    if name in CASTS:
        return chain
    if func in SOFTMAX:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return replace(chain, softmax=True) if dim in (-1, len(chain.q.shape) - 1) and not chain.softmax else None
    if name == "dropout" and chain.softmax:
        p, on = _options(args[1:], kwargs, p=0.5, training=True)
        return replace(chain, dropout=float(p) if on else 0.0)
    return None if chain.softmax else _before_softmax(chain, scores, name, args, kwargs)


def _options(args: Any, kwargs: Any, **names: Any) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, default) for name, default in names.items()]


def _before_softmax(chain: _Chain, scores: Any, name: str, args: Any, kwargs: Any) -> _Chain | None:
    """Scales and masks."""
    name = name.removeprefix("i") if name in ("itruediv", "imul", "iadd") else name
    other = next((a for a in args if a is not scores), None)
    if name in ("mul", "rmul", "multiply", "div", "truediv") and chain.mask is None and not kwargs:
        if isinstance(other, torch.Tensor) and other.dim() == 0:  # a number on the GPU: taken to be the usual one
            return replace(chain, scale=chain.q.shape[-1] ** -0.5)
        factor = float(other) if isinstance(other, int | float) else 0.0
        down = "div" in name
        return replace(chain, scale=chain.scale / factor if down else chain.scale * factor) if factor else None
    if not isinstance(other, torch.Tensor) or chain.mask is not None or other.requires_grad:
        return None
    if name in ("add", "radd") and not kwargs:
        return replace(chain, mask=other)
    if name == "masked_fill":
        return replace(chain, mask=args[1])
    if name == "where" and len(args) == 3 and args[1] is scores:
        return replace(chain, mask=args[0], keeps=True)
    return None


def _attention(q: Any, k: Any, v: Any, chain: _Chain) -> Any:
    """The fused kernel of keys [..., keys, width]."""
    mask, queries, keys = chain.mask, q.shape[-2], k.shape[-2]
    causal = (
        mask is not None and queries == keys and mask.shape[-2:] == (queries, keys)
        and all(n == 1 for n in mask.shape[:-2])
    )  # fmt: skip
    if mask is not None and not causal and mask.dtype == torch.bool and not chain.keeps:
        mask = ~mask
    flat = q.dim() == 3
    if flat:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    usual = isclose(chain.scale, q.shape[-1] ** -0.5, rel_tol=1e-3)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if causal else mask, dropout_p=chain.dropout, is_causal=causal,
        scale=None if usual else chain.scale,
    )  # fmt: skip
    return out.squeeze(0) if flat else out
