"""Runs a step of the user's code and records it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from presage.capture.call_sites import Profile, profiled
from presage.capture.compiled import plain_name
from presage.capture.custom_ops import unreadable
from presage.capture.recorder import Recorder
from presage.capture.typical_step import FEW, MANY, StepWork, differ, largest, nearest, random_state, set_random_state
from presage.errors import PresageError
from presage.usercode import error_text, user_code_line

Step: TypeAlias = Callable[[], Any]
MOST_CALLS = 64  # between two steps of an optimizer


class RecordedStep(NamedTuple):
    profile: Profile
    steady: bool = True  # a step with other values where they are assumed runs the same ops
    largest: float = 1.0  # work of the largest step over this one's


def recorded_step(recorder: Recorder, step: Step, warm_up: int) -> RecordedStep:
    """One step; where steps differ at random, the one nearest to the mean of several."""
    before = random_state()
    step, profile = _recorded_once(recorder, step, warm_up)
    work = recorder.signature()
    steady = not recorder.assumptions.undecided or _work_again(recorder, step) == work
    if random_state() != before and recorder.groups.ranks == 1:
        return _typical(recorder, step, profile, work)._replace(steady=steady)
    return RecordedStep(profile, steady)


def _typical(recorder: Recorder, step: Step, profile: Profile, work: StepWork) -> RecordedStep:
    """The step nearest to the mean of several, for this one drew numbers on the host."""
    looked, states = [work], [random_state()]
    try:
        while len(looked) < (MANY if differ(looked) else 1 + FEW):
            states.append(random_state())
            looked.append(_work_again(recorder, step))
        chosen = nearest(looked)
    except PresageError:  # it has no data for more steps
        chosen, recorder.failure = 0, None
    if chosen:
        set_random_state(states[chosen])
        recorder.assumptions.recorded = False
        with recorded(recorder) as profile:
            users(recorder, step)
        work = recorder.signature()
    if how := differ(looked):
        which = "the one nearest to their mean" if work == looked[chosen] else "another"
        text = (
            f"{len(looked)} steps differ by numbers drawn at random ({how}): this is {which}; memory is the largest's"
        )
        recorder.notes[text] = None
    return RecordedStep(profile, largest=max(1.0, largest(looked, work)))


def _recorded_once(recorder: Recorder, step: Step, warm_up: int) -> tuple[Step, Profile]:
    """The step, and its profile: one call, or, where the optimizer steps in some calls only (gradients are added up by
    a counter of the code's own), all calls from one of its steps to the next."""
    for _ in range(warm_up):
        first = _stepped(recorder, step)
    recorder.signature()
    with recorded(recorder) as profile:
        second = _stepped(recorder, step)
    if not warm_up or first == second != 0 or not _has_optimizer(recorder):
        return step, profile
    if not second and not any(_stepped(recorder, step) for _ in range(MOST_CALLS)):
        return step, profile
    recorder.signature()
    with recorded(recorder) as profile:
        calls = next((n for n in range(1, MOST_CALLS + 1) if _stepped(recorder, step)), MOST_CALLS)
        if calls > 1:
            recorder.note(f"the optimizer steps once in {calls} calls: the step is {calls} calls")

    def whole() -> None:
        for _ in range(calls):
            step()

    return whole, profile


def _stepped(recorder: Recorder, step: Step) -> int:
    """Run a call; returns the steps of optimizers in it."""
    before = recorder.places.stepped
    users(recorder, step)
    return recorder.places.stepped - before


def _has_optimizer(recorder: Recorder) -> bool:
    return bool(recorder.places.optimizers) or any(isinstance(x, torch.optim.Optimizer) for x in gc.get_objects())


def _work_again(recorder: Recorder, step: Step) -> StepWork:
    """What one more step runs, with other values where they are assumed."""
    notes = dict(recorder.notes)
    recorder.assumptions.recorded = True
    users(recorder, step)
    recorder.notes = notes
    return recorder.signature()


@contextmanager
def recorded(recorder: Recorder) -> Iterator[Profile]:
    """What runs inside becomes the graph; the profile is filled in at the end."""
    recorder.settle()
    elsewhere = recorder.elsewhere
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    recorder.places.forget()
    _name_memory(recorder)
    recorder.places.before_step = [lambda _: _name_gradients(recorder)]
    try:
        with profiled() as profile, recorder.listening():
            yield profile
            recorder.settle()
            if recorder.elsewhere > elsewhere:
                recorder.note(
                    f"{recorder.elsewhere - elsewhere:,} ops of other threads run among the main one's, "
                    "in an order that may change from capture to capture"
                )
        _name_memory(recorder)
    finally:
        if was_on:
            gc.enable()


def users(recorder: Recorder, run: Callable[[], Any]) -> Any:
    """Run the user's code; what goes wrong in it is told with the user's line."""
    try:
        out = run()
        if recorder.failure is not None:
            raise recorder.failure
        return out
    except PresageError:
        raise
    except Exception as error:
        e = recorder.failure or error
        if isinstance(e, PresageError):
            raise e from error
        where = user_code_line(e) or user_code_line(error) or "the step"
        raise PresageError(f"{where}: {unreadable(e) or error_text(e)}") from e


def _name_memory(recorder: Recorder) -> None:
    memory, places = recorder.memory, recorder.places
    for root in places.roots:
        for name, p in _named(root.named_parameters()):
            memory.name(p, "parameter", name, name.rpartition(".")[0])
        for name, b in _named(root.named_buffers()):
            memory.name(b, "buffer", name, name.rpartition(".")[0])
    for optimizer in places.optimizers.values():
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    memory.name(value, "optimizer", str(key))
    _name_gradients(recorder)


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((plain_name(name), tensor) for name, tensor in tensors)


def _name_gradients(recorder: Recorder) -> None:
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for root in recorder.places.roots:
        seen |= {id(p): (name, p) for name, p in _named(root.named_parameters())}
    for optimizer in recorder.places.optimizers.values():
        for group in optimizer.param_groups:
            for p in group["params"]:
                seen.setdefault(id(p), ("", p))
    for name, p in seen.values():
        recorder.memory.name(p.grad, "gradient", name, name.rpartition(".")[0])
