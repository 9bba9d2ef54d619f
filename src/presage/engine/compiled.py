"""Functions compiled by Numba on their first call and kept on disk for the next process.

What is on disk is only ever a shortcut: where it cannot be written, was damaged, or belongs to another call, functions
are compiled as if nothing were there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import njit

__all__ = ["compiled", "inlined"]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    return cast(F, _kept(function, nogil=True))


def inlined(function: F) -> F:
    """Compiled into its callers: a call that passes array slices costs more than what the small ones do."""
    return cast(F, _kept(function, forceinline=True))


def _kept(function: Callable[..., object], **options: Any) -> Any:
    try:
        made = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written to, not even the user's own
        return njit(**options)(function)
    made._cache = _Forgiving(made._cache)
    return made


class _Forgiving:
    """Numba's cache of one function, with failures of the disk as misses."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def load_overload(self, call: Any, context: Any) -> Any:
        """Of two processes that keep a function for two kinds of arguments at once, one may find the other's code."""
        try:
            found = self.cache.load_overload(call, context)
            if found is None or found.signature.args == tuple(getattr(call, "args", call)):
                return found
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
