"""A Ray cluster as a pool: items go out as tasks, a few for each CPU at a time; one whose worker dies is done again."""

from __future__ import annotations

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
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as e:
            raise e.as_instanceof_cause() from None
        except self.ray.exceptions.RayError as e:
            raise PresageError(f"the Ray cluster lost a part of the search for good: {_first_line(e)}") from e


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
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise PresageError(f"no Ray cluster at {address!r}: {_first_line(e)}; `ray start --head` makes one") from e
    try:
        yield _Cluster(ray)
    finally:
        if ours:
            ray.shutdown()


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
