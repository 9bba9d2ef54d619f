"""Functions compiled by Numba on their first call and kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

__all__ = ["compiled", "inlined"]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    return cast(F, njit(cache=True, nogil=True)(function))


def inlined(function: F) -> F:
    """Compiled into its callers: a call that passes array slices costs more than what the small ones do."""
    return cast(F, njit(cache=True, forceinline=True)(function))
