"""Follows the numbers of tensors on the fake GPU: what code reads back, counts, indexes and branches on comes out true.

Small tensors are computed on the host as soon as they are made. Larger ones are written down as the ops that make them
(see `contents`) and computed when somebody asks. Where a number follows from something that is not known (a large
matrix product, a weight that was never allocated), that is drawn at random, and what follows from it is `assumed`.

How long a lookup takes depends on how often rows repeat, which no shape tells: of index tensors that lookups of the
step use, two facts are kept: how many values are distinct, and how often the most frequent one comes.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from ctypes import string_at
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from presage.capture.contents import (
    MOST_BYTES,
    MOST_DEPTH,
    MOST_ELEMENTS,
    SMALL,
    Blank,
    Content,
    Copy,
    View,
    Worker,
    leaves,
    mapped,
    tensors_in,
    unprofiled,
)
from presage.capture.op_schema import signature_of
from presage.capture.value_ops import (
    EMPTY,
    FILLS,
    FINITE,
    MOST_ASSUMED,
    MOST_COPIED,
    NEXT_SEED,
    RANDOM,
    SEED,
    SHAPED,
    UNKNOWN_ARE,
    WHOLE_NUMBERS,
    index_arguments,
    is_cheap,
    is_known,
    is_strided,
    on_host,
    repeats,
    short_name,
    written_tensors,
)


class Numbers(NamedTuple):
    """A tensor's numbers, on the host."""

    data: torch.Tensor
    assumed: bool  # not known: drawn at random, or computed from what was


class TensorValues:
    """Contents of storages that are alive, and what lookups asked for."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Content, Any]] = {}  # by the storage's address
        self._asked: dict[int, View] = {}  # by the tensor's number
        self._draws: Counter[int] = Counter()  # by the generator's seed
        self._copied = 0  # bytes of host tensors

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """After an op: what its outputs hold, or what became of the tensors it changed."""
        signature = signature_of(func)
        if signature.view:
            return
        if signature.writes:
            written = written_tensors(func, args, kwargs)
            if short_name(func) in FINITE:
                written = written[:-1]
            elif self._run_small(func, args, kwargs, out, written):
                return
            known = len(written) == 1 and is_known(func)
            content = self._changed(func, args, kwargs, written[0]) if known else None
            for t in written:
                self._hold(t, content)
        elif is_known(func) or (
            not self._run_small(func, args, kwargs, out, []) and self._all_known(func, args, kwargs)
        ):
            self._outputs(func, args, kwargs, out)

    def _all_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op of any kind could be run on the host if somebody asked."""
        given = tensors_in(args, kwargs)
        views = [self._view(x) for x in given if isinstance(x, FakeTensor)]
        known = bool(views) and all(v is not None and not v.content.assumed for v in views)
        return known and func.namespace == "aten" and func not in _FAILED and is_cheap(func, given)

    def numbers(self, t: torch.Tensor) -> Numbers | None:
        """What a tensor holds, drawn at random where nothing is known; None where it is too large to say."""
        if not isinstance(t, FakeTensor):
            return Numbers(t.detach(), False)
        if not is_strided(t):
            return None
        view = self._view(t) or self._drawn(t)
        found = None if view is None else Worker().tensor(view)
        if found is None and view is not None and (view := self._drawn(t)) is not None:
            found = Worker().tensor(view)
        return None if found is None or view is None else Numbers(found, view.content.assumed)

    def set(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        """Say what a tensor that fills its storage holds."""
        if isinstance(t, FakeTensor) and is_strided(t) and numbers.numel() == t.numel():
            flat = torch.zeros(_elements(t), dtype=t.dtype)
            flat.as_strided(t.shape, t.stride(), int(t.storage_offset())).copy_(numbers)
            self._hold(t, Content(t.dtype, flat.numel(), data=flat))

    def is_new(self, t: torch.Tensor) -> bool:
        """Whether nothing was written to a tensor yet."""
        view = self._view(t)
        return view is not None and (view.content.op, view.content.data, view.content.assumed) == (None, None, False)

    def share(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        """Say that a host tensor that fills its storage holds whatever is written to these."""
        if is_strided(t) and t.is_contiguous() and numbers.numel() == _elements(t):
            self._hold(t, Content(t.dtype, numbers.numel(), data=numbers.view(-1)))

    def _run_small(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> bool:
        """Run an op of any kind on small tensors whose numbers are known, on the host."""
        given = tensors_in(args, kwargs)
        if func in _FAILED or not given or not all(self._is_at_hand(x) for x in given) or not is_cheap(func, given):
            return False
        own: dict[int, torch.Tensor] = {}  # numbers of the storages, copied where they are written to
        changed = {t.untyped_storage()._cdata for t in written}
        keys = {x.untyped_storage()._cdata for x in given if isinstance(x, FakeTensor)}
        at_hand: dict[int, Any] = {key: self._held[key][0] for key in keys}

        def real(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu")
            if not isinstance(x, FakeTensor):
                return x
            key = x.untyped_storage()._cdata
            if key not in own:
                own[key] = at_hand[key].data.clone() if key in changed else at_hand[key].data
            return _placed(at_hand[key], x).of(own[key])

        options = {k: mapped(real, v) for k, v in on_host(func, kwargs, None).items()}
        try:
            with torch.no_grad(), unprofiled():
                result = leaves(func(*mapped(real, args), **options))
        except Exception:  # a kernel of CUDA's alone, mostly
            _FAILED.add(func)
            return False
        for t in written:
            if (key := t.untyped_storage()._cdata) in own:
                self._hold(t, Content(own[key].dtype, own[key].numel(), data=own[key]))
        for made, numbers in zip(leaves(out), result, strict=False):
            both = isinstance(made, FakeTensor) and is_strided(made) and isinstance(numbers, torch.Tensor)
            if both and made.untyped_storage()._cdata not in own:
                self.set(made, numbers)
        return True

    def _is_at_hand(self, x: torch.Tensor) -> bool:
        """Small, and its numbers are there."""
        if not isinstance(x, FakeTensor):
            return x.numel() <= SMALL and is_strided(x)
        held = self._held.get(x.untyped_storage()._cdata) if is_strided(x) else None
        if held is None or held[0].data is None or held[0].assumed:
            return False
        return x.numel() <= max(SMALL, held[0].elements)  # not an expanded one, of which an op would make a large one

    def _drawn(self, t: torch.Tensor) -> View | None:
        """A tensor of which nothing is known."""
        elements = _elements(t)
        if elements > MOST_ELEMENTS:
            return None
        self._draws[-1] += 1
        seed = (SEED + self._draws[-1] * NEXT_SEED) % (1 << 63)
        content = Content(t.dtype, elements, seed=seed, assumed=True)
        self._hold(t, content)
        return _placed(content, t)

    def ask(self, func: Any, args: Any, kwargs: Any, memory: Any) -> None:
        """Before an op of the step: if it looks something up, its index is worth knowing."""
        for place, name in index_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            found = [x for x in leaves(value) if isinstance(x, torch.Tensor)]
            if len(found) == 1 and found[0].dtype in WHOLE_NUMBERS and (view := self._view(found[0])) is not None:
                dim = args[1] if name == "index" and len(args) > 1 and type(args[1]) is int else None
                if not view.content.assumed:
                    self._asked.setdefault(memory.tensor(found[0]), view if dim is None else view.once(dim))

    def lose(self, tensors: list[torch.Tensor]) -> None:
        """What is in these tensors is not known any more."""
        for t in tensors:
            if isinstance(t, FakeTensor):
                self._hold(t, None)

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
                    out[number] = repeats(values.ravel())
            worker.forget()
        return out

    def _view(self, t: torch.Tensor) -> View | None:
        held = self._held.get(t.untyped_storage()._cdata) if isinstance(t, FakeTensor) and is_strided(t) else None
        return None if held is None else _placed(held[0], t)

    def _hold(self, t: torch.Tensor, content: Content | None) -> None:
        if not is_strided(t):
            return
        handle = t.untyped_storage()
        key = handle._cdata
        self._held.pop(key, None)
        if content is None or (content.assumed and content.elements > MOST_ASSUMED):
            return
        long = content.base is not None and content.elements <= SMALL and content.depth > MOST_DEPTH  # a small buffer
        if content.data is None and (long or (not content.assumed and content.small())):
            content = Worker().computed(content)
        if content is not None and content.depth <= MOST_DEPTH:
            self._held[key] = (content, weakref.ref(handle, partial(self._ended, key)))

    def _ended(self, key: int, ref: Any) -> None:
        if key in self._held and self._held[key][1] is ref:
            del self._held[key]

    def _outputs(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = tensors_in(args, kwargs)
        given = {x.untyped_storage()._cdata for x in inputs if is_strided(x)}
        made = [(i, o) for i, o in enumerate(leaves(out)) if isinstance(o, FakeTensor) and is_strided(o)]
        empty = short_name(func) in EMPTY  # of any size: a file may be read into it
        fresh = [(i, o) for i, o in made if o.untyped_storage()._cdata not in given]
        fresh = [(i, o) for i, o in fresh if empty or o.numel() <= MOST_ELEMENTS]
        if not fresh:
            return
        if empty:
            for _, o in fresh:
                self._hold(o, _zeros(o))
        elif (known := self._known(func, args, kwargs, fresh[0][1])) is None or self._is_finite(func, known):
            likely = UNKNOWN_ARE.get(short_name(func))
            for _, o in fresh if likely is not None else ():
                n = _elements(o)
                self._hold(o, Content(o.dtype, n, _full, ([n], likely), {"dtype": o.dtype}, assumed=True))
        else:
            seed = self._seed(func, kwargs)
            for i, o in fresh:
                n = _elements(o)
                where = None if n == o.numel() and o.is_contiguous() else _placed(_zeros(o), o)
                self._hold(o, Content(o.dtype, n, func, *known, where, i, None, seed))

    def _is_finite(self, func: Any, known: tuple[Any, Any]) -> bool:
        """A check for infinities of numbers that are not known."""
        drawn = any(isinstance(x, View) and x.content.assumed for x in leaves(known[0]))
        return drawn and short_name(func) in ("isnan", "isinf", "isfinite")

    def _changed(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> Content | None:
        if not isinstance(target, FakeTensor) or not is_strided(target) or target.numel() > MOST_ELEMENTS:
            return None
        if short_name(func) in FILLS and _elements(target) == target.numel():
            self._hold(target, _zeros(target))  # what was there does not matter
        view = self._view(target)
        known = self._known(func, args, kwargs, target)
        if view is None or known is None:
            return None
        base, seed = view.content, self._seed(func, kwargs)
        return Content(base.dtype, base.elements, func, *known, base=base, seed=seed)

    def _known(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[Any, Any] | None:
        """The op's arguments with contents in the place of fake tensors; None where one is too large."""
        shaped = short_name(func) in SHAPED

        def number(x: Any) -> Any:
            if isinstance(x, FakeTensor):
                if shaped:
                    return Blank(tuple(x.shape), x.dtype)
                if not is_strided(x):
                    return _UNKNOWN
                return self._view(x) or (self._drawn(x) if x.numel() <= MOST_ASSUMED else None) or _UNKNOWN
            if isinstance(x, torch.Tensor):
                return self._copy(x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        options = {k: mapped(number, v) for k, v in on_host(func, kwargs, out).items()}
        found = mapped(number, args), options
        return None if any(x is _UNKNOWN for x in leaves([found[0], *options.values()])) else found

    def _copy(self, x: torch.Tensor) -> Any:
        """A host tensor as it is now, read without any op: a profile of the step would show it."""
        most = MOST_COPIED if x.dtype.is_floating_point else MOST_ELEMENTS
        if not is_strided(x) or x.numel() > most or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return _UNKNOWN
        steps = zip(x.shape, x.stride(), strict=True)
        span = 1 + sum((n - 1) * s for n, s in steps) if x.numel() else 0
        nbytes = span * x.element_size()
        if span > MOST_ELEMENTS or self._copied + nbytes > MOST_BYTES:
            return _UNKNOWN
        copy = Copy(string_at(x.data_ptr(), nbytes) if span else b"", tuple(x.shape), tuple(x.stride()), x.dtype)
        self._copied += nbytes
        weakref.finalize(copy, self._forget, nbytes)
        return copy

    def _forget(self, nbytes: int) -> None:
        self._copied -= nbytes

    def _seed(self, func: Any, kwargs: Any) -> int | None:
        """A generator's own seed the first time it is used, others after; without a generator, ours."""
        if short_name(func) not in RANDOM:
            return None
        generator = kwargs.get("generator")
        own = SEED if generator is None else generator.initial_seed()
        self._draws[own] += 1
        return int((own + (self._draws[own] - 1) * NEXT_SEED) % (1 << 63))


class _Unknown:
    """In the place of a tensor whose numbers are not known."""


_UNKNOWN = _Unknown()


def _zeros(t: torch.Tensor) -> Content:
    return Content(t.dtype, _elements(t))


def _elements(t: torch.Tensor) -> int:
    """Those of its storage."""
    return t.untyped_storage().nbytes() // t.dtype.itemsize


def _placed(content: Content, t: torch.Tensor) -> View:
    return View(content, t.shape, t.stride(), int(t.storage_offset()), t.dtype)


_full = torch.ops.aten.full.default
_FAILED: set[Any] = set()  # ops that do not run on the host
