"""A Ray cluster as a pool: items go out as tasks, a few for each CPU at a time; one whose worker dies is done again."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.plan.layouts.pool import Pool

__all__ = ["ray_cluster"]

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # tasks for each CPU that wait or run
RETRIES = 5  # of a task whose worker or node is lost
CONNECT = 5.0  # seconds to wait for an answer


class _Cluster:
    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.most = max(4, AHEAD * int(ray.cluster_resources().get("CPU", 1)))

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        task = self.ray.remote(max_retries=RETRIES)(_called)
        shared, waiting = self.ray.put(function), deque[Any]()
        for item in items:
            waiting.append(task.remote(shared, item))
            if len(waiting) >= self.most:
                yield self._result(waiting.popleft())
        while waiting:
            yield self._result(waiting.popleft())

    def _result(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as e:
            if isinstance(e.cause, errors.RaySystemError):
                what = f"{_line(e.cause)}; presage must be installed on its nodes"
                raise PresageError(f"a part of the search cannot run on the Ray cluster: {what}") from e
            raise e.cause from None
        except errors.RayError as e:
            raise PresageError(f"the Ray cluster lost a part of the search for good: {_line(e)}") from e


def _called(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)


@contextmanager
def ray_cluster(address: str) -> Iterator[Pool]:
    """The cluster at an address, or with `auto` the one that is running here. Its nodes need presage installed."""
    try:
        import ray
    except ImportError:
        raise PresageError("Ray is not installed: pip install 'presage[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        _reached(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise PresageError(_none_at(address, _line(e))) from e
    try:
        yield _Cluster(ray)
    finally:
        if ours:
            ray.shutdown()


def _reached(address: str) -> None:
    """Raises where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT).close()
    except (OSError, OverflowError) as e:
        raise PresageError(_none_at(address, _line(e))) from e


def _none_at(address: str, why: str) -> str:
    return f"no Ray cluster at {address!r}: {why}; `ray start --head` makes one"


def _line(e: Exception) -> str:
    """The first one of what an error says."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
