"""Processes of this machine as a pool. One that dies (killed, or out of memory) loses no work: it is done again."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.pool.orphans import end_with_parent
from presage.pool.pool import SERIAL, Pool, in_order
from presage.pool.sent import called

__all__ = ["processes"]

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
        return in_order(items, most, lambda item: self._sent((made, item)), self._result, lambda s: s.future.cancel())

    def _sent(self, call: tuple[bytes, Any]) -> _Sent:
        try:
            return _Sent(call, self.executor.submit(called, *call))
        except BrokenProcessPool as e:
            self._again(e, ())
            return _Sent(call, self.executor.submit(called, *call))

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
        """Processes anew, and with them all that was lost."""
        self.deaths += 1
        if self.deaths > RETRIES:
            raise PresageError(
                f"{self.deaths} times a worker process was killed, for want of memory perhaps: try fewer --workers"
            ) from e
        self.stop()
        self.executor = self._started()
        for sent in waiting:
            if _lost(sent.future):
                sent.future = self.executor.submit(called, *sent.call)

    def stop(self) -> None:
        """At once: what still runs has nobody to hear of it."""
        alive = list((getattr(self.executor, "_processes", None) or {}).values())
        for process in alive:
            process.kill()
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in alive:
            process.join()

    def end(self) -> None:
        """In good order, once all was heard of."""
        self.executor.shutdown(cancel_futures=True)


def _lost(future: Future[Any]) -> bool:
    return not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool)


def _begin() -> None:
    """Ctrl-C is told to the one that a user started, who stops the others; killed, it takes them along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@contextmanager
def processes(workers: int, fresh: bool = False) -> Iterator[Pool]:
    """So many, with all that this one knows where the system can fork; `fresh`: with nothing of it, as what other
    libraries' threads hold cannot be forked."""
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
