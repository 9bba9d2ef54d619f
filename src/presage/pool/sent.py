"""A function as it is sent to other processes: once with each item, but made once in each process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["called", "called_in"]


def called(function: bytes, item: Any) -> Any:
    """What the pickled function makes of the item. Both are of a process of the same user and the same program."""
    return _made(function)(item)


def called_in(folder: str, function: bytes, item: Any) -> Any:
    """The same where files are named as in that folder, if there is one here."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return called(function, item)


@lru_cache(2)
def _made(function: bytes) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = pickle.loads(function)
    return found
