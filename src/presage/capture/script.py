"""Captures a step of a training script as it is: it runs on a fake GPU until one step is like another, and no further.

Data loaders run in this process, and what they take is measured beside the step.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from msgspec.structs import replace as with_fields

from presage.capture.assumptions import Assumptions
from presage.capture.call_sites import Profile
from presage.capture.fake_device import patched, torch_flags
from presage.capture.periodic import Key, Periods, extra_calls, keys_of, splits_compiled
from presage.capture.rank_objects import with_senders
from presage.capture.recorder import Recorder
from presage.capture.recording import recorded, users
from presage.capture.run import check_on_gpu, graph_of, on_fake_gpu
from presage.capture.script_files import Loading
from presage.capture.typical_step import FEW, StepWork, differ, is_near_mean, joined, largest, random_state
from presage.capture.variant_hooks import VariantHooks
from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.scripts import ScriptRun, StepWatch, TrainingScript, alarm, in_backward
from presage.usercode import user_code_line

STEPS = 8  # that are looked at for some alike, and as many again for one near their mean
DUE = (True, False, True)
USAGE = 2  # exit code of argparse where it cannot read the arguments


class _NotMean(BaseException):
    """What is due once in several steps cannot be told from what is usual."""


class _Stop(BaseException):
    """Ends the script: its step is recorded, or its time is up."""


class _ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Also stops a script that is to end."""

    def __init__(self, assumptions: Assumptions) -> None:
        super().__init__(assumptions)
        self.stopping = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stopping and not in_backward():
            raise _Stop
        return super().__torch_dispatch__(func, types, args, kwargs)

    def stop(self) -> None:
        """Now, or as soon as autograd is left, whose engine an exception must not cross."""
        self.stopping = True
        if not in_backward():
            raise _Stop


class _StepRecorder:
    """Records a script's steps, until one is like one before."""

    def __init__(
        self,
        script: TrainingScript,
        recorder: _ScriptRecorder,
        hooks: VariantHooks,
        loading: Loading,
        periods: Periods,
    ) -> None:
        self.script, self.recorder, self.hooks, self.loading = script, recorder, hooks, loading
        self.periods = periods
        self.ahead: list[bool] = []  # of the steps to come, whether what is due once in several of them is made due
        self.usual: list[Key] = []  # the calls of a step in which it is not
        self.due: int | None = None  # calls that only a step has in which it is, where there were any to look for
        self.batches = slice(0)  # of the step that is taken
        self.seen: list[StepWork] = []  # of each step
        self.largest = 1.0  # work of the largest step over that of the one that is taken, where none are alike
        self.profile: Profile | None = None  # of the step that is taken
        self.flags: dict[str, bool | str] = {}
        self.number = 0
        self._parts: list[StepWork] = []
        self._open = ExitStack()
        self._recording: Profile | None = None
        self._tried = 0

    def mark(self) -> None:
        self._parts.append(self.recorder.signature())

    def begin(self, number: int) -> None:
        self.close()
        self.hooks.between_steps()
        if self.script.step_at is not None and number != self.script.step_at:
            return
        if self.script.step_at is None and number == 1:
            return
        if not self._tried:
            gc.collect()
            gc.freeze()  # what the script has imported and built by now: later collections are quick
        self._tried += 1
        self.batches, self.loading.drawn = slice(len(self.loading.batches), None), random_state()
        self._recording = self._open.enter_context(recorded(self.recorder))

    def end(self, number: int, parts: int) -> None:
        if self.ahead:
            self._end_due(number)
            return
        work = joined(self._parts[-parts:])
        recording, again = self._recording, work in self.seen
        drew = random_state() != self.loading.drawn
        alike = again if not drew else len(self.seen) >= FEW and {*self.seen[-FEW:]} == {work}
        self.close()
        self.seen += [work] if number > 1 else []
        if recording is not None and again and self.periods.steps and self.script.step_at is None:
            self.ahead, self.periods.due, self.usual = list(DUE), True, keys_of(self.recorder.calls)
        elif recording is not None and (alike or self.script.step_at is not None):
            self._take(recording, number)
        elif recording is not None and self._is_mean(work):
            self.largest = largest(self.seen, work)
            self._take(recording, number)

    def _is_mean(self, work: StepWork) -> bool:
        """Whether none are alike, and this step is one of those nearest to their mean."""
        return self._tried >= STEPS and (self._tried == 2 * STEPS or is_near_mean(work, self.seen))

    def _end_due(self, number: int) -> None:
        """Go on after steps alike: one with what is due once in several, which may change the usual; a usual one; and
        once more one with it, which is taken (the usual one, where compiled code is in other pieces without it)."""
        recording, due, self.ahead = self._recording, self.ahead[0], self.ahead[1:]
        calls = self.recorder.calls
        extra = extra_calls(calls, self.usual) if due else []
        self.close()
        if due and splits_compiled(calls, extra):
            self.ahead = [False]
        if not due:
            self.usual = keys_of(calls)
        if self.ahead:
            self.periods.due = self.ahead[0]
        elif due and not extra:
            raise _NotMean
        elif recording is not None:
            for i in extra:
                calls[i].speed *= self.periods.steps
            self.due = len(extra)
            self._take(recording, number)

    def _take(self, recording: Profile, number: int) -> None:
        self.profile, self.number, self.flags = recording, number, torch_flags()
        self.batches = slice(self.batches.start, len(self.loading.batches))
        self.recorder.stop()

    def close(self) -> None:
        """Ends a recording, if there is one."""
        self._recording = None
        self._open.close()

    def notes(self) -> Iterator[str]:
        """How the step that was taken compares with the others."""
        if how := differ(self.seen):
            near = ", near their mean; memory is the largest's" if self.largest > 1 else ""
            yield f"the {len(self.seen)} steps looked at are not all alike ({how}): this is step {self.number}{near}"
        if self.due is not None:
            n, lines = self.periods.steps, ", ".join(f"{self.script.name}:{line}" for line in self.periods.lines)
            what = (
                f"the {self.due:,} ops that it adds count 1/{n} of their time" if self.due else "left out of the step"
            )
            yield f"{lines}: due once in {n} steps: {what}"


@with_senders
def capture_script(
    script: TrainingScript, *, variant: Variant = AS_WRITTEN, assume: Mapping[str, str] | None = None
) -> Graph:
    """One step of a script as it would run on an H200: the first that is like one before it.

    The script is run with its own argv, imports and working folder, and ended once its step is recorded.
    """
    graph, watch = _captured(script, variant, assume)
    if graph is None and watch.steps >= (1 if script.step else 2) and script.step_at is None:
        # it has too few steps for two to be compared: its last one is taken
        graph, _ = _captured(replace(script, step_at=watch.steps), variant, assume, watch.cycle.period)
    if graph is None:
        raise PresageError(_too_short(script, watch))
    check_on_gpu(graph, script.name, "does the script need --device cuda, or .cuda()?")
    return with_fields(graph, variant=variant.changes())


def _captured(
    script: TrainingScript,
    variant: Variant,
    assume: Mapping[str, str] | None,
    expected: int = 0,
    mean: bool = True,
) -> tuple[Graph | None, StepWatch]:
    """The step's graph, None where there is none; with `mean`, with what is due once in several steps."""
    loading = Loading()
    with (
        ScriptRun(script).prepared() as process,
        on_fake_gpu(lambda: _ScriptRecorder(Assumptions(assume)), variant) as (recorder, hooks),
        loading.in_process(),
        # a profile that ends inside a region that began in it would leave that region writing to freed memory
        patched(torch.autograd.profiler.record_function, "__enter__", lambda region: region),
        patched(torch.autograd.profiler.record_function, "__exit__", lambda *_: None),
    ):
        periods = Periods(lambda: recorder.places.in_optimizer, mean)
        steps = _StepRecorder(script, recorder, hooks, loading, periods)
        watch = StepWatch(script, steps, expected)
        with watch.following(), alarm(script.limit, recorder.stop), periods.watched():
            try:
                _run(process, recorder, steps, watch)
            except (_NotMean, PresageError):
                if not steps.usual:
                    raise
    if steps.profile is None and steps.usual:
        return _captured(script, variant, assume, expected, mean=False)
    if steps.profile is None:
        return None, watch
    steady = len(steps.seen) < 2 or steps.seen[-1] in steps.seen[:-1]
    graph = graph_of(recorder, steps.profile, script.target, script.arguments, steps.flags, steady)
    notes = (*steps.notes(), *watch.notes(), *graph.notes)
    return with_fields(graph, notes=notes, loading=loading.summary(steps.batches), largest=steps.largest), watch


def _run(process: ScriptRun, recorder: _ScriptRecorder, steps: _StepRecorder, watch: StepWatch) -> None:
    """Until it ends or is stopped; what it says as it is unwound does not matter."""
    script, line = process.script, ""
    hooks = steps.hooks
    try:
        with hooks.around_script():
            users(recorder, process.run)
    except _Stop as e:
        line = user_code_line(e)
    except SystemExit as e:
        if steps.profile is None and e.code not in (0, None):
            hint = f"; its own arguments go after --: {script.target} -- ARGUMENTS" if e.code == USAGE else ""
            words = process.last_words(e)
            raise PresageError(f"{script.name} ended before its step was captured: {words}{hint}") from e
    except BaseException:
        if steps.profile is None:
            raise
    finally:
        steps.close()
    if recorder.stopping and steps.profile is None:
        reached = f"reached {watch.stepped} optimizer steps" if watch.stepped else "did not reach optimizer.step()"
        raise PresageError(
            f"{script.name} {reached} in {script.limit:g} s{f' (it was at {line})' if line else ''}: give it more time "
            "(--limit SECONDS), or less to do before its first step"
            + ("" if watch.stepped else "; without an optimizer, name the step's function (--step)")
        )
    if steps.profile is None and not watch.stepped:
        raise PresageError(_no_step(process))


def _no_step(process: ScriptRun) -> str:
    name, target = process.script.name, process.script.target
    if process.script.step:
        return f"{name} ended without a call of {process.script.step}"
    for key, value in process.names.items():
        if inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == "device":
            return f"{name} ended without optimizer.step(): did you mean the step that {key} builds, {target}:{key}?"
    return (
        f"{name} ended without optimizer.step(): a step is what lies between two of them; does it need arguments to "
        "train (after --)? For a loop without an optimizer name the function that runs one step: --step FUNCTION"
    )


def _too_short(script: TrainingScript, watch: StepWatch) -> str:
    if script.step_at is not None:
        return f"{script.name} ended after {watch.steps} steps: there is no step {script.step_at} (--step-at)"
    return (
        f"{script.name} ended after {watch.stepped} optimizer step{'s' * (watch.stepped > 1)}: a step is what lies "
        f"between two of the same optimizer; let it run for {'more' if watch.stepped > 2 else '3 or more'}"
    )
