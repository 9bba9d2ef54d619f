"""Autograd works in place on plain tensors where it may, and never on subclasses, as fake tensors are: undone here.

Whether it may depends on who else holds the tensor, which reference counts tell, here as there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

__all__ = ["as_on_plain_tensors"]

aten = torch.ops.aten
_IN_PLACE = {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
_INTO_ZEROS = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_OWN_NODES = {"BinaryCrossEntropyWithLogitsBackward0"}  # gradient formulas with an in-place form for plain tensors
_STORAGE_HOLDERS = 2  # the tensor, and the handle by which it was counted
_TENSOR_HOLDERS = 4  # autograd's buffer, and those of the call on its way here


def as_on_plain_tensors(func: Any, args: Any, node: Any) -> tuple[Any, Any]:
    """The op and arguments that autograd would have used in the place of `func` and `args`."""
    if func is aten.index_put.default and "Index" in node.name():
        return aten._index_put_impl_.default, (*args[:3], bool(args[3]) if len(args) > 3 else False, True)
    if func in _IN_PLACE and node.name() in _OWN_NODES and _only_here(args[0], None):
        return _IN_PLACE[func], args
    if func in _INTO_ZEROS and _only_here(args[0], None):
        return _INTO_ZEROS[func], args
    if func is aten.add.Tensor and len(args) == 2 and not _in_users_backward():
        one, other = args
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return func, args
        alike = one.layout == other.layout == torch.strided and one.shape == other.shape
        if alike and _only_here(one, _TENSOR_HOLDERS):
            return aten.add_.Tensor, (one, other)
    return func, args


def _in_users_backward() -> bool:
    """Whether an op was called by the backward of the user's own autograd function, and not by autograd's engine."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == "apply" and path.endswith("function.py") and "autograd" in path:
            return True
        if name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False


def _only_here(tensor: Any, holders: int | None) -> bool:
    """Nobody else holds the tensor or its memory, and its memory has no holes."""
    if not isinstance(tensor, torch.Tensor):
        return False
    if holders is not None and tensor._use_count() > holders:  # type: ignore[attr-defined]
        return False
    handle = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(handle._cdata)
    return count <= _STORAGE_HOLDERS and bool(is_dense(tensor))
