"""The arguments of ops in a profiler's trace: shapes, dtypes, strides and plain values, but no identities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

from presage.errors import InputError
from presage.graph.dtypes import DTYPES
from presage.graph.graph import DTYPE_BYTES
from presage.traces.execution_graph import Argument, TensorRef
from presage.traces.trace import Trace

LISTS = ("aten::_foreach_", "aten::_fused_")  # ops on lists of parameters; the profiler leaves out long lists
Event: TypeAlias = int  # a place among the host's events


class ProfiledArguments:
    """Reads the arguments of events. `parameters`, and `lists` of them by event, stand for lists that are left out."""

    def __init__(self, trace: Trace, names: Sequence[str]) -> None:
        self.trace, self.names = trace, names
        self.parameters: list[TensorRef] = []
        self.lists: Mapping[Event, list[TensorRef]] = {}
        self.dtypes: dict[tuple[int, ...], str] = {}  # of tensors by shape, as last seen: lists do not say theirs
        self._number = count(1)
        self._parsed: dict[tuple[int, int, int], Any] = {}

    def of(self, event: Event) -> tuple[Argument, ...]:
        host = self.trace.host
        if host.dims[event] < 0:
            return ()
        key = int(host.dims[event]), int(host.types[event]), int(host.details[event])
        if key not in self._parsed:
            strides, values = self.trace.details[key[2]]
            texts = (self.trace.shapes[key[0]], self.trace.shapes[key[1]] if key[1] >= 0 else b"[]", strides, values)
            self._parsed[key] = _columns(self.trace.path, texts)
        return tuple(self._argument(event, place, *each) for place, each in enumerate(self._parsed[key]))

    def _argument(self, event: Event, place: int, shape: Any, kind: str, strides: Any, value: Any) -> Argument:
        if kind == "TensorList":
            return self._list(event, place, shape, strides)
        if kind in DTYPES or "::" in kind:
            made = self.tensor(shape, DTYPES.get(kind, kind), strides)
            if made.elements:
                self.dtypes[made.shape] = made.dtype
            return made
        return _value(value)

    def _list(self, event: Event, place: int, shapes: Any, strides: Any) -> Argument:
        steps = strides if isinstance(strides, list) and len(strides) == len(shapes) else [None] * len(shapes)
        if shapes and all(isinstance(s, list) for s in shapes):
            kinds = {t.shape: t.dtype for t in self.parameters} if self.names[event].startswith(LISTS) else self.dtypes
            of = [kinds.get(tuple(s)) or self.dtypes.get(tuple(s), "float32") for s in shapes]
            return tuple(self.tensor(s, d, n) for s, d, n in zip(shapes, of, steps, strict=True))
        about = self.lists.get(event, [])
        if self._counts_steps(event, place):
            return tuple(self.tensor([], "float32", []) for _ in about)
        if place == 4 and self.names[event].startswith("aten::_fused_adam"):
            return ()  # only with amsgrad
        return tuple(self.tensor(list(t.shape), t.dtype, t.strides) for t in about)

    def _counts_steps(self, event: Event, place: int) -> bool:
        """Whether a list is that of the numbers of steps, one for each parameter."""
        name = self.names[event]
        if name.startswith("aten::_fused_adam"):
            return place == 5
        key = int(self.trace.host.details[event])
        return name == "aten::_foreach_add_" and json.loads(self.trace.details[key][1] or b"[]")[1:] == ["1"]

    def tensor(self, shape: Any, dtype: str, strides: Any) -> TensorRef:
        if not _whole(shape):
            problem = f"{shape!r:.40} is not the shape of a tensor"
            raise InputError(self.trace.path, problem, "traceEvents[].args.Input Dims")
        sizes = tuple(shape)
        steps = tuple(strides) if _whole(strides) and len(strides) == len(sizes) else None
        elements = 1
        for n in sizes:
            elements *= n
        number = next(self._number)
        return TensorRef(number, number, 0, elements, DTYPE_BYTES.get(dtype, 1), "cuda:0", sizes, dtype, steps)

    def fresh(self, t: TensorRef) -> TensorRef:
        number = next(self._number)
        return replace(t, id=number, storage=number)


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list | tuple) and all(type(n) is int for n in numbers)


def _columns(path: str, texts: Sequence[bytes]) -> list[tuple[Any, str, Any, Any]]:
    """Shape, type, strides and value of each argument, from JSON."""
    dims, types, strides, values = (json.loads(text) if text else [] for text in texts)
    if not all(isinstance(each, list) for each in (dims, types)):
        raise InputError(path, "shapes and types of inputs must be lists", "traceEvents[].args")
    out = []
    for i, shape in enumerate(dims):
        kind = types[i] if i < len(types) else ""
        if not isinstance(shape, list) or not isinstance(kind, str):
            raise InputError(path, f"{shape!r:.40} is not the shape of an input", "traceEvents[].args.Input Dims")
        steps = strides[i] if isinstance(strides, list) and i < len(strides) else None
        out.append((shape, kind, steps, values[i] if isinstance(values, list) and i < len(values) else ""))
    return out


def _value(text: Any) -> Argument:
    """A number, a list or a text as the profiler prints it; None where it prints nothing."""
    if not isinstance(text, str) or not text:
        return None
    plain = text.replace("True", "true").replace("False", "false")
    try:
        found = json.loads(plain[:-1] if plain[-1:] == "." else plain)
    except ValueError:
        return text
    return tuple(found) if isinstance(found, list) else found
