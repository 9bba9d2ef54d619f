"""What is shown while one waits: bars with the time left, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from presage.cli.manners import manners

if TYPE_CHECKING:
    from presage.pool import Pool

__all__ = ["Bar", "bar", "progress", "status", "watched"]

T = TypeVar("T")
R = TypeVar("R")


class Bar(Protocol):
    """Told how far the work is: so much done, of so much (None: as before), on what, and a note beside it."""

    def __call__(self, done: float, total: float | None = None, what: str = "", note: str = "") -> None: ...


@contextmanager
def bar(message: str, total: float | None = None) -> Iterator[Bar]:
    """A bar with what is done, the time it took and the time left; nothing in a pipe."""
    if not manners().draws:
        yield _unseen
        return
    from presage.report.bars import bars

    with bars() as shown:
        task = shown.add_task(message, total=total, note="")

        def tell(done: float, total: float | None = None, what: str = "", note: str = "") -> None:
            told: dict[str, Any] = {"description": _short(what)} if what else {}
            shown.update(task, completed=done, total=total, note=note, **told)

        yield tell


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _unseen(done: float, total: float | None = None, what: str = "", note: str = "") -> None:
    """For a pipe."""


def progress(items: Iterable[T], message: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar that moves as they are taken."""
    count = len(items) if total is None and isinstance(items, Sequence) else total
    with bar(message, None if count == 1 else count) as tell:  # of one thing nobody knows how much is left
        for done, item in enumerate(items):
            yield item
            tell(done + 1)


@contextmanager
def status(message: str) -> Iterator[None]:
    """The same where nobody knows how much is left."""
    with bar(message):
        yield


@contextmanager
def watched(message: str, opened: AbstractContextManager[Pool]) -> Iterator[Pool]:
    """A pool, with a bar that moves as its work is done."""
    with bar(message) as tell, opened as pool:
        yield _Watched(pool, tell)


@dataclass
class _Watched:
    """Counts what a pool is asked for, and what it has done."""

    pool: Pool
    tell: Bar
    done: int = 0
    total: int = 0

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        every = list(items)
        self.total += len(every)
        for result in self.pool.map(function, every):
            self.done += 1
            self.tell(self.done, self.total)
            yield result
