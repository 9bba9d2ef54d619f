"""While this lasts, Python code sees a CUDA device: `device="cuda"` works, `torch.cuda` answers, tensors say `cuda:0`.

Underneath, such tensors are fake tensors on the stand-in backend: PyTorch's C++ sees that backend, Python sees CUDA.
Everything replaced here is put back when the context ends.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from presage import usercode
from presage.capture import autocast
from presage.capture.backend import (
    CUDA,
    NAME,
    GpuAnswers,
    check_index,
    cuda_patches,
    leave_group,
    rank_patches,
    stand_in,
)
from presage.capture.compiled import compile_patches
from presage.capture.custom_ops import extension_patches
from presage.capture.higher_order import higher_order_patches
from presage.capture.streams import stream_patches

_device_of = torch.ops.prim.device.default
_DATA_SETTER: Any = vars(torch._C.TensorBase)["data"].__set__
_MISSING = object()
_PATCHES: list[tuple[Any, str, Any, Any]] = []  # owner, name, value before, value now


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; an attribute that was inherited is inherited again after."""
    before = vars(owner).get(name, _MISSING)
    _PATCHES.append((owner, name, before, value))
    setattr(owner, name, value)
    try:
        yield
    finally:
        _PATCHES.pop()
        _put_back(owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextmanager
def unpatched() -> Iterator[None]:
    """PyTorch as it is, in the midst of a capture, for modules that are loaded then."""
    from torch.utils._python_dispatch import _disable_current_modes

    for owner, name, before, _ in reversed(_PATCHES):
        _put_back(owner, name, before)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield
    finally:
        for owner, name, _, value in _PATCHES:
            setattr(owner, name, value)


@contextmanager
def fake_cuda(gpu: str = "h200") -> Iterator[GpuAnswers]:
    """Python code inside sees one GPU of this name."""
    answers = GpuAnswers(gpu)
    stand_in()
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    default = torch.get_default_device() if torch._GLOBAL_DEVICE_CONTEXT.__dict__ else None
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            stack.callback(leave_group)
        stack.callback(random.setstate, seeds[0])
        stack.callback(np.random.set_state, seeds[1])
        stack.callback(torch.set_rng_state, seeds[2])
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        for owner, name, value in [*_device_patches(), *_code_patches(), *answers.patches()]:
            stack.enter_context(patched(owner, name, value))
        stack.enter_context(_foreach_takes_fakes())
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        # A module moved to the GPU keeps its parameters' identity: tied weights stay tied, optimizers keep theirs.
        torch.__future__.set_swap_module_params_on_conversion(True)
        moves = "get_swap_module_params_on_conversion"
        stack.enter_context(patched(torch.__future__, moves, lambda: sys._getframe(1).f_code.co_name == "_apply"))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") builds on the host, then copies
        stack.callback(_restore_default_device, default)
        stack.callback(autocast.clear)
        stack.enter_context(Devices())
        yield answers


def _device_patches() -> list[tuple[Any, str, Any]]:
    return [*_fake_tensor_patches(), *_autocast_patches(), *cuda_patches(), *stream_patches()]


def _code_patches() -> list[tuple[Any, str, Any]]:
    return [*compile_patches(), *higher_order_patches(), *extension_patches(), *rank_patches()]


@contextmanager
def fake_tracing() -> Iterator[None]:
    """What runs is being read, by a CUDA graph or a compiler: code that asks is told so."""
    from torch.optim import Optimizer

    name = "_accelerator_graph_capture_health_check"
    name = name if hasattr(Optimizer, name) else "_cuda_graph_capture_health_check"
    with patched(torch.cuda, "is_current_stream_capturing", lambda: True), patched(Optimizer, name, lambda _: None):
        yield


def _restore_default_device(device: torch.device | None) -> None:
    if torch._GLOBAL_DEVICE_CONTEXT.__dict__ or device is not None:
        torch.set_default_device(device)


@contextmanager
def _foreach_takes_fakes() -> Iterator[None]:
    """Optimizers choose their foreach form only for plain tensors, which on a GPU these would be."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for taken in lists:
        taken.append(FakeTensor)
    try:
        yield
    finally:
        for taken in lists:
            taken.remove(FakeTensor)


class _NotFake:
    """Nothing is an instance of this."""


def _seen_from_cpp(tensor: FakeTensor, in_kernel: bool) -> torch.device:
    if in_kernel:
        return torch.device("meta")
    return stand_in() if tensor.fake_device.type == "cuda" else tensor.fake_device


def _normalized(device: torch.device) -> torch.device:
    return CUDA if device.type in ("cuda", NAME) else device


def _swap(one: Any, other: Any) -> None:
    """Two tensors change places. PyTorch's own refuses where weak references exist, as fake tensors' own do."""
    if (one.device, one.dtype, one.shape, one.stride()) == (other.device, other.dtype, other.shape, other.stride()):
        return  # a module that is moved to where it is
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _set_data(tensor: Any, value: Any) -> None:
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


def _fake_tensor_patches() -> list[tuple[Any, str, Any]]:
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
        args = tuple(stand_in() if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
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


def _autocast_patches() -> list[tuple[Any, str, Any]]:
    """`torch.autocast("cuda")` and the questions about it are led to the stand-in's autocast."""
    kind: Any = torch.amp.autocast_mode.autocast
    begin, enter, clear = kind.__init__, kind.__enter__, torch.clear_autocast_cache

    def init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, NAME if device_type == "cuda" else device_type, *args, **kwargs)

    def on_enter(self: Any) -> Any:
        self.device = NAME if self.device == "cuda" else self.device
        return enter(self)

    def forget() -> None:
        autocast.clear()
        clear()

    patches = [(kind, "__init__", init), (kind, "__enter__", on_enter), (torch, "clear_autocast_cache", forget)]
    for name in ("get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled", "is_autocast_enabled"):
        patches.append((torch, name, _for_cuda(getattr(torch, name))))
    patches.append((torch, "get_autocast_gpu_dtype", lambda: torch._C.get_autocast_dtype(NAME)))
    available = torch.amp.autocast_mode.is_autocast_available
    for owner in (torch.amp, torch.amp.autocast_mode):
        patches.append((owner, "is_autocast_available", lambda d: d == "cuda" or available(d)))
    return patches


def _for_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        # no device in a question about autocast means CUDA
        args = args if (args and isinstance(args[0], str)) or kwargs else (NAME, *args)
        args = tuple(NAME if a == "cuda" else a for a in args)
        kwargs = {k: NAME if v == "cuda" else v for k, v in kwargs.items()}
        return function(*args, **kwargs)

    return ask


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type in ("cuda", NAME)
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class Devices(TorchFunctionMode):
    """Leads every mention of CUDA in a call of PyTorch to the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return _to_cuda(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], bool | int | float) and args[0].is_cuda:
            # a number put into a CUDA tensor travels as a host scalar
            return func(args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
        if func == _DATA_SETTER and args[0].device != args[1].device and isinstance(args[1], FakeTensor):
            return _set_data(*args)
        if func is torch.Tensor.is_pinned:
            return False
        if func is torch.Tensor.pin_memory:
            return args[0]
        if _is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            check_index(kwargs["device"])
            kwargs = {**kwargs, "device": stand_in()}
        if func is torch.Tensor.to and len(args) > 1 and (_is_cuda(args[1]) or type(args[1]) is int):
            check_index(args[1])
            args = (args[0], stand_in(), *args[2:])
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _to_cuda(
    tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    check_index(device)
    return tensor.to(CUDA, non_blocking=non_blocking, memory_format=memory_format)


# ---- PyTorch's switches: read for the graph, and put back as they were.

_SWITCHES: list[tuple[Any, str]] = [
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
]
_SDP = ("flash", "mem_efficient", "math", "cudnn")


def torch_flags() -> dict[str, bool | str]:
    """What the step's kernels depend on."""
    out: dict[str, bool | str] = {
        "allow_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "deterministic_algorithms": bool(torch.are_deterministic_algorithms_enabled()),
        "float32_matmul_precision": str(torch.get_float32_matmul_precision()),
    }
    for name in ("allow_tf32", "benchmark", "deterministic", "enabled"):
        out[f"cudnn.{name}"] = bool(getattr(torch.backends.cudnn, name))
    return out


@contextmanager
def restore_settings() -> Iterator[None]:
    """Whatever is switched inside is switched back at the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _SWITCHES]
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    sdp = {n: getattr(torch._C, f"_get_{n}_sdp_enabled")() for n in _SDP}
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    # what fails on fake tensors is told once, as the user's error, and not also logged with a traceback of torch's
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        log.setLevel(level)
        torch.set_float32_matmul_precision(precision)
        for owner, name, value in before:
            setattr(owner, name, value)
        torch.set_default_dtype(dtype)
        if (deterministic, warn_only) != (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ):  # which loads the compiler's settings
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for n, on in sdp.items():
            getattr(torch._C, f"_set_sdp_use_{n}")(on)
        torch.set_rng_state(state)
        torch.set_grad_enabled(grad)


# ---- Finds the user's functions, their files imported with a CUDA device in sight.


def load(target: str, gpu: str = "h200") -> Callable[..., Callable[[], Any]]:
    """The function that `FILE.py:FUNCTION` names, its file imported where this GPU is."""
    return usercode.load(target, lambda: fake_cuda(gpu))


def load_cases(path: str | Path) -> dict[str, Callable[..., Callable[[], Any]]]:
    """The cases of a workloads file, `CASES[name] = (builder, arguments)`, each as a function of the device."""
    return usercode.load_cases(path, fake_cuda)


def load_value(path: str | Path, name: str) -> Any:
    """What a file calls so, or None."""
    return usercode.load_value(path, name, fake_cuda)
