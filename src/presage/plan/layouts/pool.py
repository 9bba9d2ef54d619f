"""Where the work of a search is done: here, in processes of this machine, or (`cluster`) on a Ray cluster.

A pool maps a pure function over items and gives results in their order, so that all pools find the same.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

__all__ = ["Pool", "Serial", "processes"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of their items."""
        ...


class Serial:
    """One after another, here."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


class _Processes:
    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        found: Iterator[Result] = self.pool.imap(function, items)
        return found


@contextmanager
def processes(workers: int) -> Iterator[Pool]:
    """So many processes, with all that this one knows where the system can fork."""
    if workers <= 1:
        yield Serial()
        return
    kind = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with multiprocessing.get_context(kind).Pool(workers) as pool:
        yield _Processes(pool)
