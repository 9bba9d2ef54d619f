"""Fake tensors that pass for plain tensors on a CUDA device: what PyTorch's own classes are given for it."""

from __future__ import annotations

import copyreg
import inspect
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from presage.capture.backend import (
    CUDA,
    NAME,
    stand_in,
)
from presage.capture.contents import parts

_device_of = torch.ops.prim.device.default
_DATA_SETTER: Any = vars(torch._C.TensorBase)["data"].__set__


def is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type in ("cuda", NAME)
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class _NotFake:
    """Nothing is an instance of this."""


def _seen_from_cpp(tensor: FakeTensor, in_kernel: bool) -> torch.device:
    if in_kernel:
        return torch.device("meta")
    return stand_in() if tensor.fake_device.type == "cuda" else tensor.fake_device


def _normalized(device: torch.device) -> torch.device:
    return CUDA if device.type in ("cuda", NAME) else device


def _laid_out(x: Any) -> tuple[Any, ...]:
    return x.device, x.dtype, x.shape, x.stride()


def _swap(one: Any, other: Any) -> None:
    """Two tensors change places. PyTorch's own refuses where weak references exist, as fake tensors' own do."""
    if [_laid_out(x) for x in parts(one)] == [_laid_out(x) for x in parts(other)]:
        return  # a module that is moved to where it is
    for slot in {*copyreg._slotnames(type(one))} & {*copyreg._slotnames(type(other))}:  # type: ignore[attr-defined]
        mine, theirs = getattr(one, slot), getattr(other, slot)
        setattr(one, slot, theirs)
        setattr(other, slot, mine)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def set_data(tensor: Any, value: Any) -> None:
    """`tensor.data = value` where one is on the host and the other on the GPU, which PyTorch allows plain tensors."""
    kind: Any = type(tensor)
    fresh, wanted = value.detach(), tensor.requires_grad
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=False)
    own = {k: v for k, v in vars(tensor).items() if k not in vars(fresh)}
    _swap(tensor, fresh)
    vars(tensor).update(own)
    if kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) and isinstance(tensor, FakeTensor):
        tensor.__class__ = _faked_class(kind)
    tensor.requires_grad_(wanted)


def moved_lazy(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """A lazy module's parameter, which has no size yet, stays on the host until it has one."""
    given = [*args, *kwargs.values()]
    if func is not torch.Tensor.cuda and not any(is_cuda(x) for x in given):
        return torch.Tensor.__torch_function__(func, (), (tensor, *args), kwargs)  # type: ignore[no-untyped-call]
    vars(tensor)["_on_gpu"] = True
    for dtype in given:
        if isinstance(dtype, torch.dtype):
            tensor.data = tensor.data.to(dtype)
    return tensor


def _materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    device = device or (CUDA if vars(tensor).get("_on_gpu") else tensor.data.device)
    made = torch.empty(shape, device=device, dtype=dtype or tensor.data.dtype)
    tensor.__class__ = tensor.cls_to_become
    tensor.data = made


def _deepcopied(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy with memory of its own. PyTorch's copies the storage, and a fake tensor's views then do not share it."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        else:
            copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = deepcopy(tensor.grad, memo)
        memo[id(tensor)] = copy
    return memo[id(tensor)]


@cache
def _faked_class(kind: Any) -> Any:
    """A class of tensors whose tensors are fake ones, under its own name."""
    if issubclass(kind, FakeTensor):
        return kind
    faked: Any = type(kind)(kind.__name__, (kind, FakeTensor), {})
    faked.__torch_function__ = inspect.getattr_static(kind, "__torch_function__")  # which fake tensors have none of
    if issubclass(kind, torch.nn.Parameter):  # a module's parameters are moved by a detached copy
        faked.detach = _detached_parameter
    faked.__module__, faked.__qualname__ = kind.__module__, kind.__qualname__
    return faked


def _detached_parameter(parameter: Any) -> Any:
    out = torch.Tensor.detach(parameter)
    vars(out).update({k: v for k, v in vars(parameter).items() if k not in vars(out)})
    out.__class__ = type(parameter)
    return out


def _as_subclass(tensor: Any, kind: Any) -> Any:
    """A fake tensor as one of a class of the user's or a library's, which stays a fake one."""
    if issubclass(FakeTensor, kind):
        return tensor
    out = tensor.view_as(tensor)
    out.__class__ = _faked_class(kind)
    return out


def _pickled(tensor: Any, protocol: Any) -> Any:
    """Its numbers are not known: what is read back has its shape, type and place."""
    del protocol
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else None
    return _unpickled, (tensor.shape, tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad, kind)


def _unpickled(shape: Any, stride: Any, dtype: Any, device: str, trained: bool, kind: Any) -> Any:
    out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return kind(out, trained) if kind else out.requires_grad_(trained)


def _ragged_size(tensor: Any, *, coeff: int = 1) -> Any:
    """The symbol for the ragged dimension of a nested tensor with these offsets, as plain tensors have one."""
    import torch.nested._internal.nested_tensor

    nested: Any = torch.nested._internal.nested_tensor
    known = nested._tensor_symint_registry
    if tensor not in known:
        symbol: Any = torch.SymInt
        known[tensor] = symbol(nested.NestedIntNode(nested._tensor_id_counter, coeff))
        nested._tensor_id_counter += 1
    return known[tensor]


def _set_ragged_size(tensor: Any, size: Any) -> None:
    if size is not None:
        from torch.nested._internal import nested_tensor as nested

        nested._tensor_symint_registry[tensor] = size


def _formatted(tensor: Any, spec: str) -> str:
    """As of a plain tensor: a scalar's is its number's."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def fake_tensor_patches() -> list[tuple[Any, str, Any]]:
    device_of: Any = torch.Tensor.device.__get__
    subclass, wrapper, tensor_dispatch, mode_dispatch = (
        torch.Tensor._make_subclass,
        torch.Tensor._make_wrapper_subclass,
        FakeTensor.__torch_dispatch__.__func__,  # type: ignore[attr-defined]
        FakeTensorMode.dispatch,
    )

    def make_subclass(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        device = kwargs.get("device_for_backend_keys")
        if device is not None and device.type == "cuda":
            kwargs["device_for_backend_keys"] = stand_in()
        if isinstance(data, FakeTensor) and not issubclass(FakeTensor, cls) and "__torch_dispatch__" not in vars(cls):
            return _as_subclass(data.detach(), cls).requires_grad_(require_grad)
        return subclass(cls, data, require_grad, **kwargs)

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(stand_in() if is_cuda(a) else a for a in args)
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = stand_in()
        return wrapper(cls, *args, **kwargs)

    def dispatch_tensor(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:
            return _seen_from_cpp(args[0], args[0].fake_mode.in_kernel_invocation)
        return tensor_dispatch(cls, func, types, args, kwargs or {})

    def dispatch_mode(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of:
            return _seen_from_cpp(args[0], self.in_kernel_invocation)
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and device.type == NAME:
            kwargs = {**kwargs, "device": CUDA}
        return mode_dispatch(self, func, types, args, kwargs)

    return [
        (torch.Tensor, "_make_subclass", staticmethod(make_subclass)),
        (torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)),
        (torch.Tensor, "device", property(lambda t: _normalized(device_of(t)))),
        (FakeTensor, "__torch_dispatch__", classmethod(dispatch_tensor)),
        (FakeTensorMode, "dispatch", dispatch_mode),
        (FakeTensor, "is_cuda", property(lambda t: t.fake_device.type == "cuda")),
        (FakeTensor, "get_device", lambda t: 0 if t.fake_device.type == "cuda" else -1),
        # Libraries take fake tensors for a sign that a compiler is at work, and run other code then.
        (torch._subclasses, "FakeTensor", _NotFake),
        (vars(torch.nn.parameter)["UninitializedTensorMixin"], "materialize", _materialize),
        (torch.utils, "swap_tensors", _swap),
        (FakeTensor, "__deepcopy__", _deepcopied),
        (FakeTensor, "__reduce_ex__", _pickled),
        (FakeTensor, "get_nested_int", _ragged_size),
        (FakeTensor, "nested_int_memo", property(_ragged_size, _set_ragged_size)),
        (torch.Tensor, "nested_int_memo", property(_ragged_size, _set_ragged_size)),
        (FakeTensor, "__format__", _formatted),
        (FakeTensor, "record_stream", lambda _tensor, _stream: None),
        (FakeTensor, "as_subclass", _as_subclass),
        (FakeTensor, "_normalize_fake_device", staticmethod(_normalized)),
        (fake_tensor, "init_gpu_context", lambda device: None),  # noqa: ARG005
    ]
