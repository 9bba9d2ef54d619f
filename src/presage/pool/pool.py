"""A Pool maps a pure function over items and gives results in their order, so that all pools find the same.

What is random depends on the seed and the item alone, never on who does the item or when.
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
        """Results in the order of their items. Who stops asking leaves the rest undone."""
        ...


@dataclass(frozen=True)
class Serial:
    """One after another, here."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


@dataclass(frozen=True)
class Threads:
    """A few items beside each other, here: for work that is mostly NumPy's and the compiled recursion's."""

    many: int

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        with ThreadPoolExecutor(self.many) as pool:
            yield from pool.map(function, items)


SERIAL = Serial()
THREADS_2 = Threads(2)


def in_order(
    items: Iterable[Item],
    most: int,
    send: Callable[[Item], Sent],
    result: Callable[[deque[Sent]], Result],
    drop: Callable[[Sent], object],
) -> Iterator[Result]:
    """Items are sent, `most` of them ahead; `result` takes the first that was sent, and waits for it."""
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
