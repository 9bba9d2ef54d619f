"""How long a step takes on the GPU, back to back with others like it, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from presage.errors import PresageError
from presage.measure.activity import STEPS as PROFILED
from presage.measure.activity import Activity, start_profile
from presage.measure.saved_pack import PackRecorder

WARM_UP = 10
SECONDS, FEWEST, MOST = 2.5, 20, 400  # of timed steps in all, and how many those can be


def cuda_torch(doing: str, otherwise: str) -> Any:
    """torch, on a machine with a CUDA GPU; an error says what needs it and what to do otherwise."""
    try:
        import torch
    except ImportError as e:
        raise PresageError(f"{doing} needs torch, which is not installed here: pip install torch") from e
    if not torch.cuda.is_available():
        raise PresageError(f"no CUDA GPU on this machine{otherwise}")
    return torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Timed steps, in seconds and bytes."""

    seconds: float  # a step: wall time from the first one's start to the last one's end on the GPU, over their number
    each: tuple[float, ...]  # from step to step on the GPU; the first includes the restart
    issued: float  # a step, from the host's side: until all launches were made
    peak_allocated: int
    peak_reserved: int


def timed(torch: Any, build: Callable[[], Callable[[], Any]], steps: int | None = None) -> tuple[Timing, Any]:
    """Build a step, warm it up and time it; the step comes back too, to be run again."""
    torch.cuda.reset_peak_memory_stats()
    step = build()
    for _ in range(WARM_UP):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        once = time.perf_counter() - start
    count = steps or max(FEWEST, min(MOST, round(SECONDS / max(once, 1e-6))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    start = time.perf_counter()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    each = tuple(1e-3 * a.elapsed_time(b) for a, b in pairwise(marks))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Timing(total / count, each, issued / count, *peaks), step


def quantile(values: tuple[float, ...], q: float) -> float:
    """Between the two nearest, as NumPy does."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class StopScript(BaseException):
    """Ends a script whose steps have been timed."""


@dataclass
class ScriptTimer:
    """Listens to the steps of a script (see presage.scripts): warm-up, profiled steps, timed steps, then the end."""

    torch: Any
    wanted: int | None  # timed steps; None: about SECONDS of them
    pack: PackRecorder | None = None
    activity: Activity | None = None  # of a step
    done: bool = False
    issued: list[float] = field(default_factory=list)  # by timed step, on the host
    _marks: list[tuple[Any, Any]] = field(default_factory=list)
    _steps: int = 0
    _once: float = 0.0
    _start: float = 0.0
    _stop: Callable[[], Activity] | None = None

    def mark(self) -> None:
        """Parts of steps are not timed."""

    def begin(self, number: int) -> None:
        del number
        if self.done:
            raise StopScript
        if not self._steps:
            self.torch.cuda.reset_peak_memory_stats()
        if self._steps <= WARM_UP + PROFILED:
            self.torch.cuda.synchronize()
        if self._steps == WARM_UP:
            self._stop = start_profile(self.torch, self.pack)
        if self._timing:
            self._marks.append((self._mark(), None))
        self._start = time.perf_counter()

    def end(self, number: int, parts: int) -> None:
        del number, parts
        now = time.perf_counter()
        self._steps += 1
        if self._steps == WARM_UP:
            self.torch.cuda.synchronize()
            self._once = time.perf_counter() - self._start
        if self._steps == WARM_UP + PROFILED and self._stop is not None:
            self.activity = self._stop()
        if self._marks and self._marks[-1][1] is None:
            self._marks[-1] = self._marks[-1][0], self._mark()
            self.issued.append(now - self._start)
            most = self.wanted or max(FEWEST, min(MOST, round(SECONDS / max(self._once, 1e-6))))
            if len(self._marks) >= most:
                self.done = True
                raise StopScript

    @property
    def _timing(self) -> bool:
        return self._steps > WARM_UP + PROFILED  # the step after the profiled ones is not timed either

    def _mark(self) -> Any:
        mark = self.torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def timing(self) -> Timing:
        """The median step: others may evaluate the model, or save it."""
        self.torch.cuda.synchronize()
        each = tuple(1e-3 * a.elapsed_time(b) for a, b in self._marks if b is not None)
        if len(each) < 3:
            raise PresageError(
                f"the script ended after {self._steps} steps: measuring needs {WARM_UP + PROFILED + 4} or more"
            )
        peaks = self.torch.cuda.max_memory_allocated(), self.torch.cuda.max_memory_reserved()
        return Timing(median(each), each, median(self.issued), *peaks)
