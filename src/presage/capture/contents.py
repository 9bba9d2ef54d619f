"""What a storage holds, as the ops that put it there: nothing is computed unless somebody asks for the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch

MOST_ELEMENTS = 1 << 24  # of one tensor
MOST_BYTES = 1 << 29  # in memory at once
MOST_WORK = 1 << 32  # bytes of results of one capture, one after the other
MOST_KEPT = 1 << 20  # elements of a result that is kept as long as its tensor lives
MOST_DEPTH = 100  # ops one after the other
SMALL = (
    1 << 14
)  # elements: tensors up to this size are computed when they are made, larger ones when they are asked for


_PINNED: WeakSet[Any] = WeakSet()  # storages in pinned host memory; all other host memory is pageable


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose host memory counts as pinned from now on."""
    if tensor.layout == torch.strided:
        _PINNED.add(tensor.untyped_storage())
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage() in _PINNED


T = TypeVar("T")


def per_op(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remember what was asked about an op, by its identity: its own hash takes longer than most questions."""
    known: dict[int, tuple[Any, T]] = {}

    def answer(func: Any) -> T:
        found = known.get(id(func))
        if found is None:
            found = known[id(func)] = func, ask(func)
        return found[1]

    return answer


def leaves(value: Any) -> list[Any]:
    """What is in lists of lists (arguments of ops are no deeper nests than that)."""
    if not isinstance(value, (list, tuple)):
        return [value]
    out: list[Any] = []
    for v in value:
        if isinstance(v, (list, tuple)):
            out += leaves(v)
        else:
            out.append(v)
    return out


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    given = leaves([args, *kwargs.values()]) if kwargs else leaves(args)
    return [x for x in given if isinstance(x, torch.Tensor)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same lists with other leaves."""
    return [mapped(function, v) for v in value] if isinstance(value, (list, tuple)) else function(value)


@cache
def is_made_of_tensors(kind: Any) -> bool:
    """Whether tensors of a class hold plain ones and run their ops on those: DTensor, float8, quantised weights."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that one is made of: as a rule, itself."""
    if not is_made_of_tensors(type(tensor)):
        return [tensor]
    held: Any = tensor
    inner = [getattr(tensor, name) for name in held.__tensor_flatten__()[0]]
    return [x for part in inner if isinstance(part, torch.Tensor) for x in parts(part)]


@dataclass(frozen=True)
class Blank:
    """A tensor of which only the shape matters."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Copy:
    """A host tensor as it was: its bytes from the first element to the last."""

    data: bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).as_strided(self.shape, self.strides)


@dataclass(eq=False, slots=True)
class Content:
    """All of one storage: an op's output, or what an op that works in place made of `base`. Without an op: zeros."""

    dtype: torch.dtype
    elements: int
    op: Any = None
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: View | None = None  # where in the storage the output lies
    place: int = 0  # which of the op's outputs it is
    base: Content | None = None
    seed: int | None = None  # of an op that draws random numbers
    data: torch.Tensor | None = None  # the numbers themselves, where they are computed already
    assumed: bool = False  # some of the numbers it follows from are not known and drawn at random
    depth: int = field(init=False, default=1)  # ops that have to run one after the other

    def __post_init__(self) -> None:
        below = [v.content for v in self._given() if isinstance(v, View)]
        if self.base is not None:
            below.append(self.base)
        for content in below:
            self.depth = max(self.depth, 1 + content.depth)
            self.assumed = self.assumed or content.assumed

    def _given(self) -> list[Any]:
        if self.op is None:
            return []
        return leaves([self.args, *self.kwargs.values()]) if self.kwargs else leaves(self.args)

    def small(self) -> bool:
        """Whether it was made of small tensors alone, so that computing it at once costs next to nothing."""
        views = [v for v in self._given() if isinstance(v, View)]
        given = [max(v.content.elements, prod(v.shape)) for v in views]  # an expanded tensor is larger than its storage
        given += [self.base.elements] if self.base is not None else []
        return max(given, default=0) <= SMALL and self.elements <= SMALL


@dataclass(eq=False, slots=True)
class View:
    """A tensor in a storage."""

    content: Content
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def once(self, dim: int) -> View:
        """Without what repeats by a stride of 0 in other dimensions: such an index picks whole rows along `dim`."""
        kept = dim % max(len(self.shape), 1)
        sizes = enumerate(zip(self.shape, self.strides, strict=True))
        return replace(self, shape=tuple(min(n, 1) if s == 0 and d != kept else n for d, (n, s) in sizes))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        flat = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return flat.as_strided(self.shape, self.strides, self.offset)


def drawn(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers for a tensor of which nothing is known: standard normal ones, but positive where it is a single one (a
    loss, a norm, a scale); half of all truth values true; whole numbers 0."""
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(elements, generator=source) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(elements, dtype=dtype)
    if elements == 1:
        return (torch.rand(1, generator=source) + 0.5).to(dtype)
    return torch.randn(elements, generator=source).to(dtype)


class unprofiled:
    """What runs inside is in no profile of the step."""

    __slots__ = ()
    depth = 0

    def __enter__(self) -> None:
        unprofiled.depth += 1
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *error: object) -> None:
        unprofiled.depth -= 1
        if not unprofiled.depth:
            torch._C._autograd._enable_record_function(True)


def current_recorder() -> Any:
    """The recorder that ops come by now, or None."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((m for m in reversed(modes) if hasattr(m, "record_kernel")), None)


@contextmanager
def unrecorded() -> Iterator[Any]:
    """The recorder, if there is one; ops that run inside are no part of the step."""
    recorder = current_recorder()
    if recorder is None:
        yield None
        return
    before, recorder.recording = recorder.recording, False
    try:
        with unprofiled(), torch.no_grad():
            yield recorder
    finally:
        recorder.recording = before


class TooMuch(Exception):
    """More work or memory than the answer is worth."""


class Worker:
    """Runs the ops behind contents, on the host."""

    def __init__(self) -> None:
        self.work, self.room = MOST_WORK, MOST_BYTES
        self._made: dict[int, torch.Tensor] = {}

    def tensor(self, view: View) -> torch.Tensor | None:
        """A tensor's numbers, or None where they cannot be had."""
        if prod(view.shape) > MOST_ELEMENTS:
            return None
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), unprofiled():
                return self._read(view)
        except Exception:  # the user's ops, on values that are ours: whatever goes wrong, there is just no answer
            return None

    def numbers(self, view: View) -> np.ndarray[Any, Any] | None:
        """The same as an array."""
        found = self.tensor(view)
        return None if found is None else found.numpy()

    def computed(self, content: Content) -> Content | None:
        """The same content with its numbers, and without the ops that led to them."""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=content.seed is not None), unprofiled():
                return Content(content.dtype, content.elements, data=self._whole(content), assumed=content.assumed)
        except Exception:
            return None

    def forget(self) -> None:
        """Give back the memory of what has been computed so far."""
        self._made.clear()
        self.room = MOST_BYTES

    def _read(self, view: View) -> torch.Tensor:
        return view.of(self._whole(view.content))

    def _whole(self, content: Content) -> torch.Tensor:
        if content.data is not None:
            return content.data
        if id(content) not in self._made:
            self._spend(content.elements * content.dtype.itemsize)
            self._made[id(content)] = self._computed(content)
            if content.elements <= MOST_KEPT:  # the next question need not go back as far
                content.data = self._made[id(content)]
        return self._made[id(content)]

    def _spend(self, nbytes: int) -> None:
        self.work -= nbytes
        self.room -= nbytes
        if self.work < 0 or self.room < 0:
            raise TooMuch

    def _computed(self, c: Content) -> torch.Tensor:
        if c.op is None and c.assumed:
            return drawn(c.elements, c.dtype, c.seed or 0)
        if c.op is None:
            return torch.zeros(c.elements, dtype=c.dtype, device="cpu")
        if c.base is not None:
            whole = self._whole(c.base).clone()
            self._run(c, whole)
            return whole
        out = leaves(self._run(c, None))[c.place]
        if out.numel() == c.elements and out.is_contiguous() and c.output is None:
            return out.reshape(-1).to(c.dtype)  # type: ignore[no-any-return]
        whole = torch.zeros(c.elements, dtype=c.dtype, device="cpu")
        assert c.output is not None
        c.output.of(whole).copy_(out)
        return whole

    def _run(self, c: Content, changed: torch.Tensor | None) -> Any:
        """The op itself; tensors in the storage it changes are views of `changed`."""

        def real(x: Any) -> Any:
            if isinstance(x, View):
                if prod(x.shape) > MOST_ELEMENTS:
                    raise TooMuch
                return x.of(changed) if changed is not None and x.content is c.base else self._read(x)
            if isinstance(x, Blank):
                return torch.empty((), dtype=x.dtype, device="cpu").expand(x.shape)
            return x.tensor() if isinstance(x, Copy) else x

        args, kwargs = mapped(real, c.args), {k: mapped(real, v) for k, v in c.kwargs.items()}
        if c.seed is not None:
            torch.default_generator.manual_seed(c.seed)
        return c.op(*args, **kwargs)
