"""How long a step takes on the GPU, back to back with others like it, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from presage.errors import PresageError

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
