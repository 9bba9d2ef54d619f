"""While this lasts, Python code sees a CUDA device: `device="cuda"` works, `torch.cuda` answers, tensors say `cuda:0`.

Underneath, such tensors are fake tensors on the stand-in backend: PyTorch's C++ sees that backend, Python sees CUDA.
Everything replaced here is put back when the context ends.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from presage import usercode
from presage.capture import autocast
from presage.capture.backend import (
    CUDA,
    NAME,
    GpuAnswers,
    check_index,
    cuda_patches,
    legacy_dtype,
    legacy_name,
    own_numbers,
    stand_in,
)
from presage.capture.compiled import compile_patches
from presage.capture.contents import is_pinned, leaves, pin
from presage.capture.custom_ops import extension_patches
from presage.capture.fake_tensors import fake_tensor_patches, is_cuda, moved_lazy, set_data
from presage.capture.higher_order import higher_order_patches
from presage.capture.process_groups import ProcessGroups, environment, group_patches, leave_group
from presage.capture.streams import stream_patches
from presage.capture.variants import AS_WRITTEN, Variant

_device_of = torch.ops.prim.device.default
_DATA_SETTER: Any = vars(torch._C.TensorBase)["data"].__set__
_MISSING = object()
# What PyTorch warns of because code is captured, and not because of what it does on a GPU.
_OWN_DOING = ("flex_attention called without torch.compile", "Accessing the data pointer of FakeTensor")
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
def fake_cuda(gpu: str = "h200", groups: ProcessGroups | None = None) -> Iterator[GpuAnswers]:
    """Python code inside sees one GPU of this name, and runs as one rank of `groups`."""
    answers, groups = GpuAnswers(gpu), groups or ProcessGroups()
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
        stack.enter_context(environment(groups))
        stack.callback(own_numbers.clear)
        own_numbers.update((groups.rank, groups.rank % groups.per_node))
        for owner, name, value in [*_device_patches(groups), *_code_patches(groups), *answers.patches()]:
            stack.enter_context(patched(owner, name, value))
        stack.enter_context(_foreach_takes_fakes())
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        # A module moved to the GPU keeps its parameters' identity: tied weights stay tied, optimizers keep theirs.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(patched(torch.__future__, "get_swap_module_params_on_conversion", _moves_parameters))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") builds on the host, then copies
        stack.callback(_restore_default_device, default)
        stack.callback(autocast.clear)
        stack.enter_context(Devices())
        yield answers


def _moves_parameters() -> bool:
    """Whether a module is being moved, all of whose parameters have sizes."""
    frame = sys._getframe(1)
    return frame.f_code.co_name == "_apply" and not any(map(is_lazy, frame.f_locals["self"].parameters(recurse=False)))


def _device_patches(groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    count = min(groups.ranks, groups.per_node)
    return [*fake_tensor_patches(), *_autocast_patches(), *cuda_patches(count), *stream_patches()]


def _code_patches(groups: ProcessGroups) -> list[tuple[Any, str, Any]]:
    return [*compile_patches(), *higher_order_patches(), *extension_patches(), *group_patches(groups)]


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


class Devices(TorchFunctionMode):
    """Leads every mention of CUDA in a call of PyTorch to the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda and not is_lazy(args[0]):
            return _to_cuda(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], bool | int | float) and args[0].is_cuda:
            # a number put into a CUDA tensor travels as a host scalar
            return func(args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
        if func == _DATA_SETTER and args[0].device != args[1].device and isinstance(args[1], FakeTensor):
            return set_data(*args)
        if func in (torch.Tensor.to, torch.Tensor.cuda) and is_lazy(args[0]):
            return moved_lazy(func, *args, **kwargs)
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            on_gpu = [x for x in leaves(args[0]) if isinstance(x, FakeTensor)]
            if on_gpu:  # each number is read by itself
                kwargs.setdefault("dtype", on_gpu[0].dtype)
                args = (_as_numbers(args[0]), *args[1:])
        if func is torch.Tensor.type:
            return _typed(*args, **kwargs)
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0] if is_pinned(args[0]) else pin(args[0].clone())
        if is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            check_index(kwargs["device"])
            kwargs = {**kwargs, "device": stand_in()}
        if func is torch.Tensor.to and len(args) > 1 and (is_cuda(args[1]) or type(args[1]) is int):
            check_index(args[1])
            args = (args[0], stand_in(), *args[2:])
        if kwargs.get("pin_memory"):
            return pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def _as_numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_numbers(x) for x in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _to_cuda(
    tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    check_index(device)
    return tensor.to(CUDA, non_blocking=non_blocking, memory_format=memory_format)


def _typed(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """`tensor.type()` and `tensor.type(torch.cuda.FloatTensor)`."""
    if dtype is None:
        return legacy_name(tensor.dtype) if tensor.is_cuda else torch.Tensor.type(tensor)
    if (of := legacy_dtype(dtype)) is not None:
        return tensor.to(device=CUDA, dtype=of, non_blocking=non_blocking)
    return tensor.to(dtype) if isinstance(dtype, torch.dtype) else torch.Tensor.type(tensor, dtype)


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
            for words in _OWN_DOING:
                warnings.filterwarnings("ignore", words)
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


def load(target: str, variant: Variant = AS_WRITTEN) -> Callable[..., Callable[[], Any]]:
    """The function that `FILE.py:FUNCTION` names, its file imported where this GPU is."""
    return usercode.load(target, lambda: fake_cuda(variant.gpu, ProcessGroups(*variant.place)))


def load_cases(path: str | Path) -> dict[str, Callable[..., Callable[[], Any]]]:
    """The cases of a workloads file, `CASES[name] = (builder, arguments)`, each as a function of the device."""
    return usercode.load_cases(path, fake_cuda)


def load_value(path: str | Path, name: str) -> Any:
    """What a file calls so, or None."""
    return usercode.load_value(path, name, fake_cuda)
