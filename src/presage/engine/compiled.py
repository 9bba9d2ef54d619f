"""Functions compiled by Numba where that pays, and kept on disk for the next process.

Loading Numba takes longer than most small problems take in plain Python, so a function runs as it is written until a
process has passed `WORTH` array elements through such functions; both ways give the same bits. What is on disk is only
ever a shortcut: where it cannot be written, was damaged, or belongs to another call, functions are compiled as if
nothing were there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., object])
WORTH = 300_000  # array elements: beyond, Numba is loaded
_LOCK = threading.RLock()


class _Use(threading.local):
    """What a thread has put through functions that were not compiled."""

    elements = 0
    inside = False


_use = _Use()


def compiled(function: F) -> F:
    return cast(F, _Function(function, WORTH, nogil=True))


def compiled_at_once(function: F) -> F:
    """Compiled on the first call, for functions that are only ever given much to do."""
    return cast(F, _Function(function, 0, nogil=True))


def inlined(function: F) -> F:
    """Compiled into its callers: a call that passes array slices costs more than what the small ones do."""
    return cast(F, _Function(function, WORTH, forceinline=True))


class _Function:
    """A function, in Python and compiled."""

    def __init__(self, function: Any, worth: float, **options: Any) -> None:
        self.py_func: Any = function
        self.worth, self.options = worth, options
        self.native: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        if self.native is not None:
            return self.native(*args)
        if _use.inside:
            return self.py_func(*args)
        if _NUMBA not in sys.modules:
            _use.elements += _elements(args)
            if _use.elements <= self.worth:
                return self._in_python(args)
        return self.load()(*args)

    def _in_python(self, args: tuple[Any, ...]) -> Any:
        _use.inside = True
        try:
            return self.py_func(*args)
        finally:
            _use.inside = False

    def load(self) -> Any:
        """The compiled function; those that it calls are compiled too, for Numba knows no others."""
        with _LOCK:
            if self.native is None:
                with _without_linear_algebra():
                    self.native = _kept(self._with_compiled_callees(), **self.options)
        return self.native

    def _with_compiled_callees(self) -> Callable[..., Any]:
        f = self.py_func
        callees = {n: f.__globals__.get(n) for n in f.__code__.co_names}
        native = {n: c.load() for n, c in callees.items() if isinstance(c, _Function)}
        twin = FunctionType(f.__code__, {**f.__globals__, **native}, f.__name__, f.__defaults__, f.__closure__)
        return update_wrapper(twin, f)

    def __reduce__(self) -> str:
        return str(self.py_func.__qualname__)


_NUMBA = "numba"


def _elements(args: tuple[Any, ...]) -> int:
    sizes = (a.size if isinstance(a, np.ndarray) else _elements(a) if isinstance(a, tuple) else 0 for a in args)
    return sum(sizes)


@contextmanager
def _without_linear_algebra() -> Iterator[None]:
    """In a process of presage's own, Numba is loaded without its linear algebra, which loads all of SciPy's."""
    blas, math = "scipy.linalg.cython_blas", "numba.np.arraymath"
    if not getattr(sys.modules["presage"], "own_process", False) or blas in sys.modules or math in sys.modules:
        yield
        return
    sys.modules[blas] = None  # type: ignore[assignment]
    try:
        import numba.np.arraymath  # noqa: F401

        yield
    finally:
        del sys.modules[blas]


def _kept(function: Callable[..., object], **options: Any) -> Any:
    from numba import njit

    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written to, not even the user's own
        return njit(**options)(function)
    dispatcher._cache = _Forgiving(dispatcher._cache)
    return dispatcher


class _Forgiving:
    """Numba's cache of one function, with failures of the disk as misses."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def load_overload(self, call: Any, context: Any) -> Any:
        """Load compiled code, checked: another process may have left code of other argument types."""
        try:
            overload = self.cache.load_overload(call, context)
            if overload is None or overload.signature.args == tuple(getattr(call, "args", call)):
                return overload
        except Exception:
            pass  # cut off or overwritten: pickles of machine code can fail in any way
        with suppress(Exception):
            self.cache.flush()
        return None

    def save_overload(self, call: Any, data: Any) -> None:
        with suppress(OSError, EOFError):  # a full disk, somebody else's folder
            self.cache.save_overload(call, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)
