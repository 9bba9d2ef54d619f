"""Cases one after the other, told by name and place, so that whoever listens can show how many are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["Turn", "in_turn"]

T = TypeVar("T")


class Turn(str):
    """The name of a case, with how many are done and how many there are."""

    done: int
    total: int

    def __new__(cls, name: str, done: int, total: int) -> Turn:
        self = super().__new__(cls, name)
        self.done, self.total = done, total
        return self


def in_turn(items: Iterable[T], tell: Callable[[str], None], name: Callable[[T], str]) -> Iterator[T]:
    """Each item, after `tell` was told of it."""
    every = list(items)
    for done, item in enumerate(every):
        tell(Turn(name(item), done, len(every)))
        yield item
