"""What each call was nested in, as PyTorch's own profiler saw it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch._C import _profiler
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler

__all__ = ["Nested", "profiled"]

_ENGINE = "autograd::engine::evaluate_function"
_HOST, _GPU = "host#", "gpu#"
_REGIONS = ("Optimizer.", "ProfilerStep", "PyTorch Profiler", "PythonDispatchMode", "PythonSubclass")


@dataclass(frozen=True)
class Nested:
    """A recorded call (`call` >= 0) or an event of the host's alone, with the ops around it, outermost first."""

    start: int
    call: int
    name: str
    within: tuple[str, ...]
    sequence: int
    thread: int
    asked: tuple[Any, ...] = ()  # of a cast that did nothing: the tensor's shape and type


@dataclass
class Profile:
    nested: list[Nested] = field(default_factory=list)


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile what runs inside; the result is filled in at the end."""
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO, True, False, False, False, False, _profiler._ExperimentalConfig()
    )
    activities = {_profiler.ProfilerActivity.CPU}
    out = Profile()
    with _silent():
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities)
    try:
        yield out
    finally:
        with _silent():
            result = _disable_profiler()
    out.nested = sorted(_walk(result.experimental_event_tree()), key=lambda n: n.start)


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler's library announces its start and stop on the standard error's file, past Python."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _walk(roots: Any) -> Iterator[Nested]:
    todo: list[tuple[Any, tuple[str, ...], int]] = [(e, (), -1) for e in reversed(roots)]
    while todo:
        event, within, sequence = todo.pop()
        name = event.name
        number = getattr(event.extra_fields, "sequence_number", -1) if event.typed[0].name == "TorchOp" else -1
        number = number if 0 <= number < 1 << 62 else sequence
        children = event.children
        if name.startswith(_GPU):
            yield Nested(event.start_time_ns, int(name[len(_GPU) :]), "", within, sequence, event.start_tid)
            continue
        if name.startswith(_HOST):
            yield Nested(event.start_time_ns, int(name[len(_HOST) :]), "", within, sequence, event.start_tid)
            # what a host op runs inside is real: a foreach over host tensors is one op for each
            todo += [(c, within, number) for c in reversed(children)]
            continue
        if not children and name.startswith("aten::"):
            yield Nested(event.start_time_ns, -1, name, within, number, event.start_tid, _cast_arguments(event, within))
            continue
        if name.startswith(_ENGINE) and not any(outer.startswith(_ENGINE) for outer in within):
            within = ()  # autograd has a thread of its own on a GPU: nothing of the caller's is around it
        inner = within if _is_region(event) else (*within, name)
        todo += [(c, inner, number) for c in reversed(children)]


def _cast_arguments(event: Any, within: tuple[str, ...]) -> tuple[Any, ...]:
    """What a call of `to` with a type was about. Calls with a device alone look alike, but have more arguments."""
    if event.name != "aten::to":
        return ()
    given = event.extra_fields.inputs
    typed = len(given) in (5, 6) or within[-1:] == ("aten::type_as",)
    if not typed or not hasattr(given[0], "sizes"):
        return ()
    return (list(given[0].sizes), str(given[0].dtype).removeprefix("torch."))


def _is_region(event: Any) -> bool:
    return str(event.name).startswith(_REGIONS)
