"""A Ray cluster as a pool: items go out as tasks, a few for each CPU at a time; one whose worker dies is done again.

A cluster that goes away is noticed within seconds. Ray itself would wait for a minute, then end this process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from threading import Thread, current_thread
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.pool.pool import Pool, map_in_order
from presage.pool.processes import call_pickled_in

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # tasks for each CPU that wait or run
RETRIES = 5  # of a task whose worker or node is lost
CONNECT = 5.0  # seconds to wait for an answer
LOOK = 2.0  # seconds after which the cluster is looked at, where no result comes
GONE = 6.0  # seconds that it may be out of reach
LEAVE = 3.0  # seconds to leave it


class _Cluster:
    def __init__(self, ray: Any, address: str) -> None:
        self.ray, self.address = ray, address
        self.most = max(4, AHEAD * int(ray.cluster_resources().get("CPU", 1)))
        self.gone = False

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        task, folder = self.ray.remote(max_retries=RETRIES)(call_pickled_in), os.getcwd()
        shared = self.ray.put(self.ray.cloudpickle.dumps(function))
        return map_in_order(items, self.most, lambda item: task.remote(folder, shared, item), self._result, self._drop)

    def _result(self, waiting: deque[Any]) -> Any:
        errors = self.ray.exceptions
        try:
            return self._waited(waiting.popleft())
        except errors.RayTaskError as e:
            if isinstance(e.cause, errors.RaySystemError | ImportError):
                what = f"{_line(e.cause)}; its nodes need presage and what it needs, as installed here"
                raise PresageError(f"a part of the work cannot run on the Ray cluster: {what}") from e
            raise e.cause from None
        except errors.RayError as e:
            raise PresageError(f"the Ray cluster lost a part of the work for good: {_line(e)}") from e
        except ConnectionError as e:
            raise self._lost() from e

    def _drop(self, reference: Any) -> None:
        if not self.gone:
            self.ray.cancel(reference, force=False)

    def _waited(self, reference: Any) -> Any:
        seen = time.monotonic()
        while True:
            try:
                return self.ray.get(reference, timeout=LOOK)
            except self.ray.exceptions.GetTimeoutError:
                if self._there():
                    seen = time.monotonic()
                elif time.monotonic() - seen > GONE:
                    raise self._lost() from None

    def _there(self) -> bool:
        """Whether the head answers and a node works."""
        if "://" in self.address:
            return True  # a client is told by its own connection
        try:
            _reached(self.ray.get_runtime_context().gcs_address)
        except PresageError:
            return False
        return any(n["Alive"] for n in self.ray.nodes())

    def _lost(self) -> PresageError:
        self.gone = True
        return PresageError(f"the Ray cluster at {self.address!r} went away; start it anew, or leave --ray out")


@contextmanager
def ray_cluster(address: str) -> Iterator[Pool]:
    """The Ray cluster at an address, or with `auto` the local one. Its nodes need presage installed."""
    try:
        import ray
    except ImportError:
        raise PresageError("Ray is not installed: pip install 'presage[ray]'") from None
    ours = not ray.is_initialized()
    with redirect_stdout(_Quiet(sys.stdout)):
        if ours:
            _joined(ray, address)
        pool = _Cluster(ray, address)
        try:
            yield pool
        finally:
            if ours:
                _left(ray)


class _Quiet:
    """A stream that drops messages of Ray's own threads about dead workers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if current_thread().name.startswith("ray_"):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _joined(ray: Any, address: str) -> None:
    try:
        _reached(_place(address))
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as e:
        token = "" if address == "auto" else "; one that asks for a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise PresageError(_none_at(address, _line(e)) + token) from e


def _place(address: str) -> str:
    """The address of `auto` as Ray finds it, possibly of a cluster that no longer runs."""
    if address != "auto":
        return address
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # of another Ray
        return address
    return str(canonicalize_bootstrap_address(address) or address)


def _left(ray: Any) -> None:
    """Disconnect without waiting: a cluster that is gone cannot be left in good order."""
    leaving = Thread(target=ray.shutdown, name="ray_left", daemon=True)
    leaving.start()
    leaving.join(LEAVE)


def _reached(address: str) -> None:
    """Raise if nothing listens at the address: Ray itself would try for minutes."""
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
    """The first sentence of an error."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0].partition(". ")[0]
