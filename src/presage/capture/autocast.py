"""CUDA's autocast, op by op, for the stand-in: what runs in low precision, in float32, or in the widest type.

Casts of float32 leaves that need a gradient (the weights) are kept until
the outermost autocast region ends, as CUDA's autocast keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from presage.capture.contents import leaves
from presage.graph.autocast import FULL, FULL_OUTPUT, LOW, WIDEST

NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

_library: list[Any] = []  # lives as long as the process: dropping it would undo the registrations
_cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
_Op = Callable[..., Any]
_KEY: Any = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009


def clear() -> None:
    """Forget the kept casts: the outermost autocast region has ended."""
    _cache.clear()


def register() -> None:
    fallback = _library_of("_")
    fallback.fallback(torch.library.fallthrough_kernel)
    lists = _library_of("aten")
    for names, policy in ((LOW, _low), (FULL, _full), (FULL_OUTPUT, _full_output), (WIDEST, _widest)):
        for name in names:
            if (op := _find(name)) is not None:
                lists.impl(name, partial(policy, op))
    for name, typed in NORMS.items():
        lists.impl(name, partial(_append_full, _find(name), getattr(torch.ops.aten.norm, typed)))
    _library.extend([fallback, lists])


def _library_of(space: str) -> Any:
    make: Any = torch.library.Library
    return make(space, "IMPL", "AutocastPrivateUse1")


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _past_autocast() -> Any:
    keys = torch._C.DispatchKeySet(_KEY)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _eligible(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and x.dtype != torch.float64
        and (x.device.type in ("cuda", "presage"))
    )


def _low(op: _Op, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("presage")
    with _past_autocast():
        return _run(op, args, kwargs, dtype)


def _run(op: _Op, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    # The casts run from the last argument to the first, as the compiler of PyTorch's C++ has it.
    low = torch.get_autocast_dtype("presage")
    cast = [_cast(a, dtype, low) for a in reversed(args)]
    return op(*reversed(cast), **{name: _cast(a, dtype, low) for name, a in kwargs.items()})


def _full(op: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        return _run(op, args, kwargs, torch.float32)


def _full_output(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        if _eligible(args[0]) and given.get("dtype") is None:
            place = [a.name for a in op._schema.arguments].index("dtype")
            if len(args) > place:
                args = (*args[:place], torch.float32, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)


def _append_full(op: _Op, typed: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        if not _eligible(args[0]):
            return op(*args, **kwargs)
        rest = args if len(args) > 1 else (*args, 2)
        return typed(*rest, **kwargs, dtype=torch.float32)


def _widest(op: _Op, *args: Any, **kwargs: Any) -> Any:
    with _past_autocast():
        seen = [x.dtype for x in leaves([args, *kwargs.values()]) if _eligible(x)]
        low = torch.get_autocast_dtype("presage")
        dtype = torch.float32 if torch.float32 in seen else low
        return _run(op, args, kwargs, dtype)


def _cast(x: Any, dtype: torch.dtype, low: torch.dtype) -> Any:
    if isinstance(x, list | tuple):
        return [_cast(y, dtype, low) for y in x]
    if not isinstance(x, torch.Tensor) or x.dtype == dtype or not _eligible(x):
        return x
    keep = (
        dtype == low
        and x.dtype == torch.float32
        and x.requires_grad
        and x.is_leaf
        and not x._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not keep:
        return x.to(dtype)
    if id(x) not in _cache:
        _cache[id(x)] = (x, x.to(dtype))
    return _cache[id(x)][1]
