"""A pool of worker processes. Work of a process that dies (killed, out of memory) is run again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.pool.pool import SERIAL, Pool, map_in_order

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 3  # items for each process that wait or run
RETRIES = 5  # times that the processes are started again


@dataclass
class _Sent:
    call: tuple[bytes, Any]
    future: Future[Any]


class _Processes:
    def __init__(self, workers: int, kind: str) -> None:
        self.workers, self.kind, self.deaths = workers, kind, 0
        self.executor = self._started()

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.workers, multiprocessing.get_context(self.kind), _begin)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        made = pickle.dumps(function)
        most = AHEAD * self.workers
        return map_in_order(
            items, most, lambda item: self._sent((made, item)), self._result, lambda s: s.future.cancel()
        )

    def _sent(self, call: tuple[bytes, Any]) -> _Sent:
        try:
            return _Sent(call, self.executor.submit(call_pickled, *call))
        except BrokenProcessPool as e:
            self._again(e, ())
            return _Sent(call, self.executor.submit(call_pickled, *call))

    def _result(self, waiting: deque[_Sent]) -> Any:
        while True:
            try:
                found = waiting[0].future.result()
            except BrokenProcessPool as e:
                self._again(e, waiting)
            else:
                waiting.popleft()
                return found

    def _again(self, e: Exception, waiting: Iterable[_Sent]) -> None:
        """Restart the processes and resubmit the lost work."""
        self.deaths += 1
        if self.deaths > RETRIES:
            raise PresageError(
                f"{self.deaths} times a worker process was killed, for want of memory perhaps: try fewer --workers"
            ) from e
        self.stop()
        self.executor = self._started()
        for sent in waiting:
            if _lost(sent.future):
                sent.future = self.executor.submit(call_pickled, *sent.call)

    def stop(self) -> None:
        """Stop at once, without waiting for running work."""
        alive = list((getattr(self.executor, "_processes", None) or {}).values())
        for process in alive:
            process.kill()
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in alive:
            process.join()

    def end(self) -> None:
        """Shut down after all results were taken."""
        self.executor.shutdown(cancel_futures=True)


def _lost(future: Future[Any]) -> bool:
    return not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool)


def _begin() -> None:
    """Ignore Ctrl-C in workers (the parent stops them) and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@contextmanager
def processes(workers: int, fresh: bool = False) -> Iterator[Pool]:
    """A pool of worker processes, forked where possible; `fresh` spawns them without inherited state, because threads
    of other libraries cannot be forked."""
    if workers <= 1:
        yield SERIAL
        return
    forks = "fork" in multiprocessing.get_all_start_methods() and not fresh
    pool = _Processes(workers, "fork" if forks else "spawn")
    try:
        yield pool
    except BaseException:
        pool.stop()
        raise
    pool.end()


# ---- pickled functions: unpickled once per process


def call_pickled(function: bytes, item: Any) -> Any:
    """Call a pickled function with the item. Both come from a process of the same user and program."""
    return _unpickled(function)(item)


def call_pickled_in(folder: str, function: bytes, item: Any) -> Any:
    """The same with `folder` as the working directory, if it exists here."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return call_pickled(function, item)


@lru_cache(2)
def _unpickled(function: bytes) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = pickle.loads(function)
    return found


# ---- workers end with their parent


def end_with_parent() -> None:
    """Exit when the parent process ends, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
