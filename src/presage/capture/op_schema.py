"""What an op's schema and its arguments say about where and how it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)

from presage.capture.backend import CUDA, NAME
from presage.capture.calls import RecordedCall
from presage.capture.composite import WHOLE

REAL_ELEMENTS = 1 << 16  # host tensors up to this size hold real numbers; larger ones (weights, mostly) are fake too


def mark(call: RecordedCall) -> Any:
    """Shows up in PyTorch's own profile, which so tells what the call was nested in."""
    return torch._C._profiler._RecordFunctionFast(f"{'host' if call.host else 'gpu'}#{call.index}")


class OpSignature(NamedTuple):
    """What an op's schema says, which takes long to ask."""

    name: str
    overload: str
    arguments: tuple[tuple[str, Any], ...]  # name and default
    writes: tuple[tuple[int, str], ...]
    returns: bool
    view: bool


@cache
def signature_of(func: Any) -> OpSignature:
    schema = func._schema
    arguments = tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments)
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    writes = tuple((i, arguments[i][0]) for i, w in enumerate(written) if w)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return OpSignature(schema.name, schema.overload_name, arguments, writes, bool(schema.returns), view)


def on_gpu(x: Any) -> bool:
    if isinstance(x, FakeTensor):
        return x.fake_device.type == "cuda"
    return isinstance(x, torch.device) and x.type in ("cuda", NAME)


def is_host_index(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not on_gpu(x)


def is_real(x: Any) -> bool:
    return not isinstance(x, FakeTensor) and isinstance(x, torch.Tensor)


def led_to_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    device = kwargs.get("device")
    if device is not None and device.type == NAME:
        return {**kwargs, "device": CUDA}
    return kwargs


def is_large_factory(func: Any, args: Any) -> bool:
    """A factory of a large host tensor: weights on their way to the GPU."""
    if not args or not isinstance(args[0], list | tuple) or not all(type(n) is int for n in args[0]):
        return False
    size = 1
    for n in args[0]:
        size *= n
    return size > REAL_ELEMENTS and func._schema.returns and not any(isinstance(a, torch.Tensor) for a in args)


@cache
def is_composite(func: Any) -> bool:
    """It reaches the recorder only where autograd is off (inference mode), and is still to be taken apart."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(composite) and func._schema.name.removeprefix("aten::") not in WHOLE


@contextmanager
def explained(func: Any) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        raise
    except Exception as e:
        # Some of PyTorch's own exceptions cannot be carried from autograd's thread to the caller's.
        raise RuntimeError(f"{func._schema.name}: {e}") from e
