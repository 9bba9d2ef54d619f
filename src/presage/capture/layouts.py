"""Strides that CUDA gives an op's outputs and a fake run does not."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_on_cuda"]

aten = torch.ops.aten


def as_on_cuda(func: Any, args: Any, out: Any) -> Any:
    """The outputs, laid out as CUDA lays them out. To be called where new tensors come out fake."""
    if func is aten.convolution.default:
        return _laid_out(out, _wants_channels_last(args[0], args[1], args[6], args[8]))
    if func is aten.convolution_backward.default:
        last = _wants_channels_last(args[1], args[2], args[7], args[9])
        return tuple(t if t is None or t.dim() < 4 else _laid_out(t, last) for t in out)
    return out


def _wants_channels_last(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    del transposed, groups
    return _is_channels_last(x) or _is_channels_last(weight)


def _is_channels_last(t: torch.Tensor) -> bool:
    return torch._prims_common.suggest_memory_format(t) in (torch.channels_last, torch.channels_last_3d)


def _laid_out(t: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if channels_last:
        order = torch.channels_last_3d if t.dim() == 5 else torch.channels_last
    else:
        order = torch.contiguous_format
    if t.dim() < 4 or t.is_contiguous(memory_format=order):
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device, memory_format=order)
