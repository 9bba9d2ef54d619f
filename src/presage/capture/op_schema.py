"""What an op's schema and its arguments say about where and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from presage.capture.composite import OVERRIDES, WHOLE
from presage.capture.contents import per_op
from presage.capture.custom_ops import KNOWN, own_code
from presage.capture.fake_outputs import ON_BOTH, SPARSE_OPS, is_sparse

aten = torch.ops.aten
_INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}  # fmt: skip
_OVERRIDES = {
    getattr(getattr(aten, n.partition(".")[0]), n.partition(".")[2] or "default"): f for n, f in OVERRIDES.items()
}
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


@per_op
def signature_of(func: Any) -> OpSignature:
    schema = func._schema
    arguments = tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments)
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    writes = tuple((i, arguments[i][0]) for i, w in enumerate(written) if w)
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return OpSignature(schema.name, schema.overload_name, arguments, writes, bool(schema.returns), view)


def on_gpu(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"
    return isinstance(x, torch.device) and x.type in ("cuda", NAME)


def is_host_index(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not on_gpu(x)


def is_real(x: Any) -> bool:
    return not isinstance(x, FakeTensor) and isinstance(x, torch.Tensor)


def led_to_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
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


@per_op
def is_composite(func: Any) -> bool:
    """It reaches the recorder only where autograd is off (inference mode), and is still to be taken apart."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(composite) and func._schema.name.removeprefix("aten::") not in WHOLE


@per_op
def _is_taken_apart(func: Any) -> bool:
    return (
        func in _OVERRIDES
        or func in SPARSE_OPS
        or func in _INDEXING
        or is_composite(func)
        or func.namespace not in KNOWN
    )


def ops_instead(func: Any, args: Any, given: list[Any] | None, record: Callable[..., None]) -> Any:
    """What runs the other ops that CUDA's code for an op is made of, if any. `given`: the arguments, where the GPU is
    reached; `record` records kernels."""
    if not _is_taken_apart(func):
        return None
    if func in _OVERRIDES or given is None:
        return _OVERRIDES.get(func)
    if func in SPARSE_OPS and (func not in ON_BOTH or any(map(is_sparse, given))):
        return partial(SPARSE_OPS[func], record)
    if func in _INDEXING and any(map(is_host_index, args[1])):
        return partial(_with_indices_copied, func)
    return func.decompose if is_composite(func) else own_code(func)


def _with_indices_copied(func: Any, x: Any, indices: Any, *rest: Any, **options: Any) -> Any:
    """As on CUDA: indices that lie on the host are copied over first."""
    return func(x, [i.to(CUDA) if is_host_index(i) else i for i in indices], *rest, **options)


@contextmanager
def explained(func: Any) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        raise
    except Exception as e:
        # Some of PyTorch's own exceptions cannot be carried from autograd's thread to the caller's.
        raise RuntimeError(f"{func._schema.name}: {e}") from e
