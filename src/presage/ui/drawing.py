"""Draws in threads of their own: two at a time, a few that wait, and others are told to come again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from presage.errors import PresageError

AT_ONCE, WAITING = 2, 14  # all others are turned away, so that threads are left for answers that need no draws
ADMITTED = threading.BoundedSemaphore(AT_ONCE + WAITING)
T = TypeVar("T")


class BusyError(PresageError):
    """Too many draws wait already: ask again in a moment."""


def draw(work: Callable[[], T]) -> T:
    """What `work` returns, when its turn has come."""
    if not ADMITTED.acquire(blocking=False):
        raise BusyError(f"{AT_ONCE + WAITING} draws are waiting: this one is asked for again in a moment")
    try:
        return _threads().submit(work).result()
    finally:
        ADMITTED.release()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="draw")
