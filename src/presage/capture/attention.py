"""Which attention an H200 runs (PyTorch 2.11, cuDNN 9.19): cuDNN, flash, memory-efficient or math."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

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
