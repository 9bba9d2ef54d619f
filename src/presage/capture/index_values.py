"""Follows the numbers of tensors that are made without data of a model: indices, mostly, drawn or counted or loaded.

How long a lookup takes depends on how often rows repeat, which no shape tells. So ops that make, convert and rearrange
such tensors are written down (see `contents`), those that lookups of the step use are worked out after it, and of each
two facts are kept: how many values are distinct, and how often the most frequent one comes.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from ctypes import string_at
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture.contents import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_ELEMENTS,
    Blank,
    Content,
    Copy,
    View,
    Worker,
    leaves,
    mapped,
)

EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
FILLS_AT_RANDOM = {"random_", "uniform_", "normal_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
RANDOM = FILLS_AT_RANDOM | {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "bernoulli_",
}  # fmt: skip
FILLS = FILLS_AT_RANDOM | {"copy_", "fill_", "zero_"}
SHAPED = {  # like another tensor, whose numbers do not matter
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
    "new_full",
}  # fmt: skip
UNREAD = SHAPED | EMPTY
MADE = {
    "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "scalar_tensor",
}  # fmt: skip
PLAIN = {
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "exp", "exp2", "expm1", "log",
    "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "neg", "abs", "sign", "floor", "ceil", "round", "trunc",
    "frac", "square", "sin", "cos", "tanh", "sigmoid", "erf", "erfinv", "clamp", "clamp_min", "clamp_max", "minimum",
    "maximum", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
    "logical_and", "logical_or", "logical_not", "logical_xor", "eq", "ne", "lt", "le", "gt", "ge", "where", "isnan",
    "lerp", "masked_fill", "_to_copy", "clone", "cat", "stack", "repeat", "roll", "flip", "index", "index_select",
    "gather", "take", "index_put", "index_fill", "index_copy", "index_add", "scatter", "scatter_add", "sort", "argsort",
    "topk", "cumsum", "cumprod", "constant_pad_nd", "tril", "triu", "bucketize", "searchsorted", "max", "min", "amax",
    "amin", "argmax", "argmin", "sum", "mean", "copy",
}  # fmt: skip
INDICES = ("index", "indices")
WHOLE_NUMBERS = (torch.int64, torch.int32)
SMALL = 1 << 16  # elements of host tensors of any type that are copied; larger ones of numbers with a point are weights
SEED, NEXT_SEED = 0x5EED, 0x9E3779B97F4A7C15


class IndexValues:
    """Contents of storages that are alive, and what lookups asked for."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Content, Any]] = {}  # by the storage's address
        self._asked: dict[int, View] = {}  # by the tensor's number
        self._draws: Counter[int] = Counter()  # by the generator's seed
        self._copied = 0  # bytes of host tensors

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """After an op: what its outputs hold, or what became of the tensors it changed."""
        if _write_arguments(func):
            written = _written(func, args, kwargs)
            known = len(written) == 1 and _is_known(func)
            content = self._changed(func, args, kwargs, written[0]) if known else None
            for t in written:
                self._hold(t, content)
        elif _is_known(func) and (_short(func) in UNREAD or all(self._is_open(x) for x in args)):
            self._outputs(func, args, kwargs, out)

    def _is_open(self, x: Any) -> bool:
        """A quick look: whether the numbers may be known."""
        return not isinstance(x, FakeTensor) or (_is_strided(x) and x.untyped_storage()._cdata in self._held)

    def ask(self, func: Any, args: Any, kwargs: Any, memory: Any) -> None:
        """Before an op of the step: if it looks something up, its index is worth knowing."""
        for place, name in _index_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            found = [x for x in leaves(value) if isinstance(x, torch.Tensor)]
            if len(found) == 1 and found[0].dtype in WHOLE_NUMBERS and (view := self._view(found[0])) is not None:
                dim = args[1] if name == "index" and len(args) > 1 and type(args[1]) is int else None
                self._asked.setdefault(memory.tensor(found[0]), view if dim is None else view.once(dim))

    def forget(self) -> None:
        """A new step is recorded: what lookups of the last one asked for is not wanted any more."""
        self._asked.clear()

    def facts(self) -> dict[int, tuple[int, int]]:
        """Distinct values and the count of the most frequent one, by the numbers of the tensors asked for."""
        worker, out = Worker(), {}
        by_content: dict[int, list[tuple[int, View]]] = defaultdict(list)
        for number, view in self._asked.items():
            by_content[id(view.content)].append((number, view))
        for group in by_content.values():
            for number, view in group:
                if (values := worker.numbers(view)) is not None and values.size:
                    out[number] = _repeats(values.ravel())
            worker.forget()
        return out

    def _view(self, t: torch.Tensor) -> View | None:
        held = self._held.get(t.untyped_storage()._cdata) if isinstance(t, FakeTensor) and _is_strided(t) else None
        return None if held is None else _placed(held[0], t)

    def _hold(self, t: torch.Tensor, content: Content | None) -> None:
        if not _is_strided(t):
            return
        handle = t.untyped_storage()
        key = handle._cdata
        self._held.pop(key, None)
        if content is not None and content.depth <= MOST_DEPTH:
            self._held[key] = (content, weakref.ref(handle, partial(self._ended, key)))

    def _ended(self, key: int, ref: Any) -> None:
        if key in self._held and self._held[key][1] is ref:
            del self._held[key]

    def _outputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [x for x in leaves([args, *kwargs.values()]) if isinstance(x, torch.Tensor)]
        given = {x.untyped_storage()._cdata for x in inputs if _is_strided(x)}
        made = [(i, o) for i, o in enumerate(leaves(out)) if isinstance(o, FakeTensor) and _is_strided(o)]
        fresh = [(i, o) for i, o in made if o.untyped_storage()._cdata not in given and o.numel() <= MOST_ELEMENTS]
        if not fresh:
            return
        if _short(func) in EMPTY:
            for _, o in fresh:
                self._hold(o, _zeros(o))
        elif (known := self._known(func, args, kwargs, fresh[0][1])) is not None:
            seed = self._seed(func, kwargs)
            for i, o in fresh:
                blank = _zeros(o)
                where = None if o.is_contiguous() and blank.elements == o.numel() else _placed(blank, o)
                self._hold(o, Content(blank.dtype, blank.elements, func, *known, where, i, None, seed))

    def _changed(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> Content | None:
        if not isinstance(target, FakeTensor) or not _is_strided(target) or target.numel() > MOST_ELEMENTS:
            return None
        blank = _zeros(target)
        if _short(func) in FILLS and blank.elements == target.numel():
            self._hold(target, blank)  # what was there does not matter
        view = self._view(target)
        known = self._known(func, args, kwargs, target)
        if view is None or known is None:
            return None
        base, seed = view.content, self._seed(func, kwargs)
        return Content(base.dtype, base.elements, func, *known, base=base, seed=seed)

    def _known(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[Any, Any] | None:
        """The op's arguments with numbers in the place of fake tensors; None where one has none."""
        shaped = _short(func) in SHAPED

        def number(x: Any) -> Any:
            if isinstance(x, FakeTensor):
                if shaped:
                    return Blank(tuple(x.shape), x.dtype)
                return self._view(x) or _UNKNOWN
            if isinstance(x, torch.Tensor):
                return self._copy(x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        fakes = [x for x in leaves([args, *kwargs.values()]) if isinstance(x, FakeTensor)]
        if not shaped and any(self._view(x) is None for x in fakes):
            return None
        options = {k: mapped(number, v) for k, v in _on_host(func, kwargs, out).items()}
        found = mapped(number, args), options
        return None if any(x is _UNKNOWN for x in leaves([found[0], *options.values()])) else found

    def _copy(self, x: torch.Tensor) -> Any:
        """A host tensor as it is now, read without any op: a profile of the step would show it."""
        most = SMALL if x.dtype.is_floating_point else MOST_ELEMENTS
        if x.requires_grad or not _is_strided(x) or x.numel() > most:
            return _UNKNOWN
        steps = zip(x.shape, x.stride(), strict=True)
        span = 1 + sum((n - 1) * s for n, s in steps) if x.numel() else 0
        self._copied += span * x.element_size()
        if span > MOST_ELEMENTS or self._copied > MOST_BYTES:
            return _UNKNOWN
        data = string_at(x.data_ptr(), span * x.element_size()) if span else b""
        return Copy(data, tuple(x.shape), tuple(x.stride()), x.dtype)

    def _seed(self, func: Any, kwargs: Any) -> int | None:
        """A generator's own seed the first time it is used, others after; without a generator, ours."""
        if _short(func) not in RANDOM:
            return None
        generator = kwargs.get("generator")
        own = SEED if generator is None else generator.initial_seed()
        self._draws[own] += 1
        return int((own + (self._draws[own] - 1) * NEXT_SEED) % (1 << 63))


class _Unknown:
    """In the place of a tensor whose numbers are not known."""


_UNKNOWN = _Unknown()


def _repeats(values: np.ndarray[Any, Any]) -> tuple[int, int]:
    low = int(values.min())
    if int(values.max()) - low <= max(4 * values.size, 1 << 20):
        counts = np.bincount(values - low)
    else:
        counts = np.unique(values, return_counts=True)[1]
    return int(np.count_nonzero(counts)), int(counts.max())


def _is_strided(t: torch.Tensor) -> bool:
    return t.layout == torch.strided


def _zeros(t: torch.Tensor) -> Content:
    return Content(t.dtype, t.untyped_storage().nbytes() // t.dtype.itemsize)


def _placed(content: Content, t: torch.Tensor) -> View:
    return View(content, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype)


@cache
def _short(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


@cache
def _is_known(func: Any) -> bool:
    """Whether the op may be run for real; forms that work in place go by the name of the one that does not."""
    name = _short(func)
    known = EMPTY | RANDOM | SHAPED | FILLS | MADE | PLAIN
    return func.namespace == "aten" and (name in known or name.removesuffix("_") in PLAIN)


@cache
def _index_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if a.name in INDICES)


@cache
def _write_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def _names(func: Any) -> frozenset[str]:
    return frozenset(a.name for a in func._schema.arguments)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_arguments(func)]
    return [x for x in leaves(values) if isinstance(x, torch.Tensor)]


def _on_host(func: Any, kwargs: Any, out: torch.Tensor) -> dict[str, Any]:
    """Options of the same op on the host: where it runs, of which type, and whose random numbers."""
    names = _names(func)
    own = dict(kwargs)
    if "device" in names:
        own["device"] = torch.device("cpu")
    if "dtype" in names and _short(func) in MADE | RANDOM:
        own["dtype"] = out.dtype
    if own.get("generator") is not None:
        own["generator"] = torch.default_generator
    own.pop("pin_memory", None)
    return own
