"""Outputs of ops on fake tensors, worked out once for each op and kind of arguments and built directly after that.

What an op returns depends on its arguments' shapes, strides, types and devices alone, so a second call with the same
needs no second look. An op is only remembered where that is certain: nothing about its arguments changed, and every
output is an argument, a new tensor in memory of its own, or a view of one argument's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from presage.capture.backend import CUDA, stand_in
from presage.capture.contents import per_op

aten = torch.ops.aten
_make_subclass: Callable[..., FakeTensor] = torch._C.TensorBase._make_subclass
_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex)
)
_LISTS = frozenset((list, tuple, torch.Size))
_UNSAFE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_SELECT, _SELECT_BACKWARD = aten.select.int, aten.select_backward.default
_INDEX = aten.index.Tensor  # its shape depends on data for masks alone, which fake tensors refuse


class _Unknown(Exception):
    """An argument or output that is not remembered."""


class _Output(NamedTuple):
    """A tensor to build. `place` is that of the argument whose memory it is in, or -1; `offset` counts from there."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


_KNOWN: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}  # of all captures, as PyTorch's own memory of such is


class _Number(NamedTuple):
    """An output that is no tensor: a size, or nothing."""

    value: int | None


class OutputMemo:
    """What ops returned, for tensors of one mode, whose own memory of it (slower to ask) is switched off."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        mode.cache_enabled = False
        # of every new fake tensor on a device: its attributes, and the device that its dispatch keys are of
        self._attributes: dict[torch.device, tuple[dict[str, Any], torch.device]] = {}

    def run(self, func: Any, args: Any, kwargs: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` returns for the op with these arguments."""
        if not _is_safe(func):
            return compute()
        tensors: list[Any] = []
        key: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        placed = _depends_on_offset(func)
        try:
            kept, offset = _without_place(func, args)
            self._add(key, kept, tensors)
            for name, value in kwargs.items():
                key.append(name)
                self._add(key, (value,), tensors)
            if placed:
                key += [t.storage_offset() for t in tensors]
        except _Unknown:
            return compute()
        found = tuple(key)
        if found not in _KNOWN:
            return self._first(found, tensors, compute)
        outputs = _KNOWN[found]
        if outputs is None:
            return compute()
        if offset is not None:
            outputs = FakeTensor, [outputs[1][0]._replace(offset=offset)]
        return self._built(outputs, tensors)

    def _add(self, key: list[Any], values: Sequence[Any], tensors: list[Any]) -> None:
        for x in values:
            kind = type(x)
            if kind is FakeTensor:
                tensors.append(x)
                key.append(self._metadata(x)[:-1])
            elif kind in _PLAIN:
                key.append(kind)
                key.append(x)
            elif kind in _LISTS:
                key.append(len(x))
                self._add(key, x, tensors)
            else:
                raise _Unknown

    def _metadata(self, t: FakeTensor) -> tuple[Any, ...]:
        if t.constant is not None or t.layout is not torch.strided or t.fake_mode is not self.mode:
            raise _Unknown
        signs = t.is_conj(), t.is_neg(), t.requires_grad
        return t.shape, t.stride(), t.dtype, t.fake_device, signs, t.storage_offset()

    def _first(self, key: tuple[Any, ...], tensors: list[Any], compute: Callable[[], Any]) -> Any:
        before = [(self._metadata(t), _storage(t)) for t in tensors]
        out = compute()
        try:
            if before != [(self._metadata(t), _storage(t)) for t in tensors] or len({*map(id, tensors)}) < len(tensors):
                raise _Unknown
            outputs = self._describe(out, tensors, [s for _, s in before])
            _check(self._built(outputs, tensors), out)
            _KNOWN[key] = outputs
        except _Unknown:
            _KNOWN[key] = None
        return out

    def _describe(self, out: Any, tensors: list[Any], storages: list[int]) -> tuple[Any, ...]:
        """How to build the outputs: each by its place among the argument tensors, a description or a number."""
        if type(out) not in (FakeTensor, tuple, list):
            raise _Unknown
        each: list[Any] = [out] if type(out) is FakeTensor else list(out)
        tensors_out = [x for x in each if x is not None and type(x) is not int]
        if any(type(x) is not FakeTensor or x.layout is not torch.strided for x in tensors_out):
            raise _Unknown
        places = {id(t): i for i, t in enumerate(tensors)}
        held = [_storage(x) for x in tensors_out if id(x) not in places]
        described: list[Any] = []
        for x in each:
            if type(x) is not FakeTensor:
                described.append(_Number(x))
            else:
                described.append(places[id(x)] if id(x) in places else self._describe_one(x, tensors, storages, held))
        return type(out), described

    def _describe_one(self, t: Any, tensors: list[Any], storages: list[int], held: list[int]) -> _Output:
        shape, strides, dtype, device, signs, offset = self._metadata(t)
        storage = _storage(t)
        of = [i for i, s in enumerate(storages) if s == storage]
        if any(signs) or len(of) > 1 or (not of and (offset or held.count(storage) > 1)):
            raise _Unknown
        offset -= tensors[of[0]].storage_offset() if of else 0
        return _Output(of[0] if of else -1, tuple(shape), tuple(strides), dtype, device, offset)

    def _built(self, outputs: tuple[Any, ...], tensors: list[Any]) -> Any:
        kind, described = outputs
        made = [
            self._tensor(d, tensors) if type(d) is _Output else d.value if type(d) is _Number else tensors[d]
            for d in described
        ]
        return made[0] if kind is FakeTensor else kind(made)

    def _tensor(self, d: _Output, tensors: list[Any]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if d.place < 0:
                data = torch.empty_strided(d.shape, d.strides, dtype=d.dtype, device="meta")
            else:
                base = tensors[d.place]
                storage: Any = base.untyped_storage()
                offset = base.storage_offset() + d.offset
                data = torch.empty(0, dtype=d.dtype, device="meta").set_(storage, offset, d.shape, d.strides)
        known = self._attributes.get(d.device)
        if known is None:
            out = FakeTensor(self.mode, data, d.device)
            self._attributes[d.device] = dict(vars(out)), stand_in() if d.device == CUDA else d.device
            return out
        attributes, backend = known
        out = _make_subclass(FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=backend)
        if self.mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(out)
        else:
            torch._C._set_throw_on_mutable_data_ptr(out)
        vars(out).update(attributes)
        return out


def _without_place(func: Any, args: Any) -> tuple[Any, int | None]:
    """The arguments without what says which part of a tensor is meant, as a loop over time takes one after the other;
    of a view, its distance from the start of the tensor."""
    if func is _SELECT and len(args) == 3 and type(args[0]) is FakeTensor:
        x, dim, index = args
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 0
        if -size <= index < size:
            return (x, dim), (index % size) * x.stride(dim)
    if func is _SELECT_BACKWARD:
        return args[:3], None
    return args, None


def _storage(t: Any) -> int:
    return int(t.untyped_storage()._cdata)


@per_op
def _is_safe(func: Any) -> bool:
    """An op of PyTorch's own whose outputs depend on its arguments' shapes alone."""
    return func.namespace in ("aten", "prims") and (func is _INDEX or not _UNSAFE & set(func.tags))


@per_op
def _depends_on_offset(func: Any) -> bool:
    """A view whose place in memory is given, or counted in elements of another type."""
    return _is_view(func) and func.overloadpacket not in _FROM_ARGUMENT


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


_FROM_ARGUMENT = {  # views that lie where their argument does, or a fixed distance from it
    aten.select, aten.slice, aten.unsqueeze, aten.squeeze, aten.transpose, aten.t, aten.permute, aten.expand,
    aten.detach, aten.alias, aten.view_as, aten.unbind, aten.split, aten.split_with_sizes, aten.narrow, aten.diagonal,
    aten.add_, aten.mul_, aten.sub_, aten.div_, aten.copy_, aten.zero_, aten.fill_, aten._unsafe_view,
}  # fmt: skip


def _check(built: Any, out: Any) -> None:
    """Raise `_Unknown` where what was built differs from what the op returned."""
    pairs = [(built, out)] if isinstance(out, torch.Tensor) else zip(built, out, strict=True)
    for one, other in pairs:
        if one is not other and (type(one) is not FakeTensor or _facts(one) != _facts(other)):
            raise _Unknown


def _facts(t: Any) -> tuple[Any, ...]:
    keys, handle = torch._C._dispatch_key_set(t), t.untyped_storage()
    layout = t.shape, t.stride(), t.storage_offset(), t.dtype, t.fake_device, handle.nbytes()
    return *layout, keys, t.requires_grad, t.is_inference(), vars(t)
