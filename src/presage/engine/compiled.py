"""Functions compiled by Numba where that pays, and kept on disk for the next process.

Loading Numba takes longer than most small problems take in plain Python, so a function runs as it is written, or as its
`plain` twin with faster means of Python's and NumPy's, until a process has spent about `WORTH` seconds so; both ways
give the same bits. What is on disk is only ever a shortcut: where it cannot be written, was damaged, or belongs to
another call, functions are compiled as if nothing were there.
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
WORTH = 0.5  # seconds in Python: beyond, Numba is loaded, which takes as long
ELEMENT = WORTH / 300_000  # seconds of Python for an array element, in a function that is written for Numba
ROW = 0.3e-6  # and for an array's row in one that is written for Python
_LOCK = threading.RLock()


class _Use(threading.local):
    """What a thread has put through functions that were not compiled."""

    seconds = 0.0
    inside = False


_use = _Use()


def numba_pays(seconds: float) -> bool:
    """Whether to use Numba for what takes so long without it. Short times add up, until it is loaded."""
    if _NUMBA in sys.modules:
        return True
    _use.seconds += seconds
    return _use.seconds > WORTH


def compiled(function: F) -> F:
    return cast(F, _Function(function, nogil=True))


def compiled_or(plain: F, where: Callable[..., bool]) -> Callable[[F], F]:
    """Compiled where that pays; elsewhere `plain`, which returns the same for arguments `where` it says so."""
    return lambda function: cast(F, _Function(function, plain, where, nogil=True))


def compiled_at_once(function: F) -> F:
    """Compiled on the first call, for functions that are only ever given much to do."""
    return cast(F, _Function(function, at_once=True, nogil=True))


def inlined(function: F) -> F:
    """Compiled into its callers: a call that passes array slices costs more than what the small ones do."""
    return cast(F, _Function(function, forceinline=True))


class _Function:
    """A function, in Python and compiled."""

    def __init__(
        self, function: Any, plain: Any = None, where: Any = None, *, at_once: bool = False, **options: Any
    ) -> None:
        self.py_func: Any = function
        self.plain, self.where = plain, where
        self.at_once, self.options = at_once, options
        self.native: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        if self.native is not None:
            return self.native(*args)
        if _use.inside:
            return self.py_func(*args)
        plain = self.plain if self.plain is not None and self.where(*args) else None
        seconds = ELEMENT * _sizes(args, np.size) if plain is None else ROW * _sizes(args, len)
        if self.at_once or numba_pays(seconds):
            return self.load()(*args)
        _use.inside = True
        try:
            return (plain or self.py_func)(*args)
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


def _sizes(args: tuple[Any, ...], size: Callable[[Any], int]) -> int:
    """All arrays among the arguments together."""
    return sum(size(a) if isinstance(a, np.ndarray) else _sizes(a, size) if isinstance(a, tuple) else 0 for a in args)


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
    if hasattr(dispatcher, "_cache"):  # with NUMBA_DISABLE_JIT it is the function itself
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
