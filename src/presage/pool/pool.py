"""A Pool maps a pure function over items and yields results in order, so that all pools give the same result.

Random numbers depend on the seed and the item only, never on who processes the item or when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Sent = TypeVar("Sent")


class Pool(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of their items. Stopping the iteration leaves the rest undone."""
        ...


@dataclass(frozen=True)
class Serial:
    """One item after another, in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


@dataclass(frozen=True)
class Threads:
    """A few items at a time in threads, for work that is mostly NumPy and compiled code."""

    many: int

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        pool = ThreadPoolExecutor(self.many)
        try:
            yield from pool.map(function, items)
        finally:  # where the iteration is stopped, by Ctrl-C perhaps, without waiting for what is at work
            pool.shutdown(wait=False, cancel_futures=True)


SERIAL = Serial()
THREADS_2 = Threads(2)


def map_in_order(
    items: Iterable[Item],
    most: int,
    send: Callable[[Item], Sent],
    result: Callable[[deque[Sent]], Result],
    drop: Callable[[Sent], object],
) -> Iterator[Result]:
    """Submit items, up to `most` ahead, and yield their results in order."""
    waiting = deque[Sent]()
    try:
        for item in items:
            waiting.append(send(item))
            if len(waiting) >= most:
                yield result(waiting)
        while waiting:
            yield result(waiting)
    finally:
        for sent in waiting:
            drop(sent)
