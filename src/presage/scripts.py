"""Training scripts as their users run them, and where in them one step ends and the next begins.

A step is what lies between two steps of the same optimizer. Where several take turns (a GAN's two, one for each
parameter) it is one round of all of them: the shortest cycle in the order in which they step.
"""

from __future__ import annotations

import os
import random
import runpy
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from presage.errors import PresageError, missing_file
from presage.usercode import FunctionCalls

MODULE = "-m "
LIMIT = 300.0  # seconds
ENOUGH = 16  # rounds of the same optimizers, after which one that has not stepped yet is no longer waited for
WARM_UPS = 12  # steps on another stream than the usual one that may come before a CUDA graph is captured
RARELY = 6  # the same of one that has stepped before: an outer optimizer, say, that steps every 30 rounds
_INSTALLED = (os.path.dirname(os.__file__), os.path.dirname(__file__))
QUIET = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}  # loggers that would call home


@dataclass(frozen=True)
class TrainingScript:
    """FILE.py or `-m MODULE` with its own arguments; how to tell its steps, and how long it may run."""

    target: str
    argv: tuple[str, ...] = ()
    step: str = ""  # a function: one call of it is a step
    step_at: int | None = None  # the step to take, counted from 1; by default the first that is like one before
    limit: float = LIMIT

    @staticmethod
    def of(target: str, arguments: Mapping[str, Any]) -> TrainingScript:
        """From the arguments of a step: argv (a list, or text as a shell takes it), step, step_at and limit."""
        values = dict(arguments)
        argv = values.pop("argv", ())
        words = shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]
        unknown = sorted(values.keys() - {"step", "step_at", "limit"})
        if unknown:
            raise PresageError(
                f"--arg {unknown[0]}: {target} is run as a script, whose arguments go after --, "
                f"as in: presage predict {target} -- --{unknown[0]} {values[unknown[0]]}"
            )
        return TrainingScript(target, tuple(words), **values)

    @property
    def arguments(self) -> dict[str, Any]:
        """What `of` makes the same script from."""
        out: dict[str, Any] = {"argv": shlex.join(self.argv)} if self.argv else {}
        out |= {"step": self.step} if self.step else {}
        return out | ({"step_at": self.step_at} if self.step_at is not None else {})

    @property
    def name(self) -> str:
        """As its own messages call it."""
        return self.target if self.is_module else Path(self.target).name

    @property
    def is_module(self) -> bool:
        return self.target.startswith(MODULE)

    def with_option(self, names: Sequence[str], value: Any) -> tuple[TrainingScript, Any]:
        """With another value of the first of these options that it is given, and the value it had."""
        argv = list(self.argv)
        for k, word in enumerate(argv):
            option, equals, before = word.partition("=")
            if option.lstrip("-").replace("-", "_") not in names:
                continue
            if equals:
                argv[k] = f"{option}={value}"
            elif k + 1 < len(argv):
                before, argv[k + 1] = argv[k + 1], str(value)
            return TrainingScript(self.target, tuple(argv), self.step, self.step_at, self.limit), before
        raise PresageError(
            f"{self.name} was given no {' or '.join(names[:2])}: name it after --, as in: -- --{names[-1]} {value}"
        )


def is_script(target: Any) -> bool:
    """Whether a step is named as a script is, and not FILE.py:FUNCTION."""
    return isinstance(target, str | Path) and (str(target).startswith(MODULE) or str(target).endswith(".py"))


# ---- running it


class ScriptRun:
    """A script in this process, as `python` would run it: its argv, imports and output (to stderr), seeded."""

    def __init__(self, script: TrainingScript) -> None:
        self.script = script
        self.names: dict[str, Any] = {}  # what it has defined, once it has ended
        self.printed = ""  # its last words on stderr

    def run(self) -> None:
        """SystemExit is the caller's, like any other exception."""
        target = self.script.target
        if self.script.is_module:
            self.names = runpy.run_module(target.removeprefix(MODULE), run_name="__main__", alter_sys=True)
        else:
            self.names = runpy.run_path(target, run_name="__main__")

    def last_words(self, exit_: SystemExit) -> str:
        """What it said as it gave up."""
        return exit_.code if isinstance(exit_.code, str) else self.printed or f"exit code {exit_.code}"

    @contextmanager
    def prepared(self) -> Iterator[ScriptRun]:
        """What it changes in the process (folder, environment, its modules) is put back at the end."""
        import numpy as np
        import torch

        script = self.script
        if not script.is_module and not Path(script.target).is_file():
            raise missing_file(script.target)
        first = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target))
        with ExitStack() as stack:
            stack.callback(_put_back, sys.argv, list(sys.path), dict(os.environ), os.getcwd(), set(sys.modules))
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            stack.callback(setattr, sys, "stdin", sys.stdin)
            sys.argv, sys.path[:] = [script.target, *script.argv], [first, *sys.path]
            sys.stdin = stack.enter_context(open(os.devnull))  # it must not wait for its user
            for name, value in QUIET.items():
                os.environ.setdefault(name, value)
            heard = _Overheard(sys.stderr, self)
            stack.enter_context(redirect_stderr(heard))
            stack.enter_context(redirect_stdout(heard))
            _forget_settings()
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            yield self


def _forget_settings() -> None:
    """accelerate (and so Hugging Face's Trainer) keeps the settings of a process's first run for all others."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)


class _Overheard:
    """stderr, of which the last line is kept: what a script says as it gives up."""

    def __init__(self, stream: Any, run: ScriptRun) -> None:
        self._stream, self._run = stream, run

    def write(self, text: str) -> int:
        words = text.strip()
        self._run.printed = words.rpartition("\n")[2] if words else self._run.printed
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _put_back(argv: list[str], path: list[str], environment: dict[str, str], folder: str, modules: set[str]) -> None:
    sys.argv, sys.path[:] = argv, path
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for name in set(sys.modules) - modules:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.endswith(".py") and not place.startswith(_INSTALLED) and "site-packages" not in place:
            del sys.modules[name]  # the script's own: another run imports them anew


@contextmanager
def alarm(seconds: float, ring: Callable[[], None]) -> Iterator[None]:
    """Calls `ring` after so many seconds, and again until this ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: ring())
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- where steps end


class StepListener(Protocol):
    """Is told of a script's steps."""

    def mark(self) -> None:
        """A part of a step has ended: an optimizer has stepped."""

    def begin(self, number: int) -> None:
        """Step `number` begins, counted from 1; one that has begun and not ended was none."""

    def end(self, number: int, parts: int) -> None:
        """Step `number` has ended, which consists of the last so many parts."""


@dataclass
class OptimizerCycle:
    """Finds the cycle in the order in which optimizers step."""

    order: list[int] = field(default_factory=list)
    expected: int = 0  # steps of optimizers in a cycle, where that is known from another run
    period: int = 0  # the same as found; 0 while there is none
    _due: int = 0

    @property
    def number(self) -> int:
        """Cycles that have ended so far."""
        return len(self.order) // self.period if self.period else 0

    def stepped(self, optimizer: int, others: set[int]) -> bool:
        """Whether a cycle ends with this step. `others`: the optimizers that there are."""
        self.order.append(optimizer)
        if len(self.order) == self.expected:
            self.period = self._due = self.expected
            return True
        if self.period and optimizer == self.order[-1 - self.period]:
            self._due -= 1
            if not self._due:
                self._due = self.period
            return self._due == self.period
        self.period = self._due = self._found(others | {optimizer})
        return bool(self.period)

    def _found(self, all_: set[int]) -> int:
        order, n = self.order, len(self.order)
        for p in range(1, n // 2 + 1):
            if order[-1 - p] != order[-1] or order[-2 * p : -p] != order[-p:]:
                continue
            whole = all_ <= set(order[-p:]) and (n % p == 0 or n > 4 * p)
            rounds = RARELY if all_ <= set(order) else ENOUGH
            if whole or order[-p * rounds :] == order[-p:] * rounds:
                return p
        return 0


def in_backward() -> bool:
    """Whether autograd's engine is at work on this thread."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _on_other_stream() -> bool:
    """Whether kernels go to another stream than the usual one now, as those of warm-ups for CUDA graphs do."""
    import torch

    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.current_stream() != torch.cuda.default_stream()


class StepWatch:
    """Tells a listener of the steps of a script: by its optimizers, or by calls of its `step` function."""

    def __init__(self, script: TrainingScript, listener: StepListener, expected: int = 0) -> None:
        self.script, self.listener = script, listener
        self.cycle = OptimizerCycle(expected=expected)
        self.stepped = 0  # steps of any optimizer, or calls of the function
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of optimizers that there are
        self._next = count()
        self._begun_at = -1
        self._later: list[Callable[[], None]] = []  # what is put off to the end of a backward pass
        self._graph: Any = None  # the CUDA graph that is being captured
        self._held: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # optimizers that step in CUDA graphs
        self._warm_ups = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """While the script runs."""
        with ExitStack() as stack:
            if self.script.step:
                watch = FunctionCalls(self.script.step, self._called, self._returned)
                stack.callback(watch.close)
                watch.open()
            else:
                self._follow_optimizers(stack)
            yield

    def _follow_optimizers(self, stack: ExitStack) -> None:
        import torch
        from torch.optim import Optimizer
        from torch.optim.optimizer import register_optimizer_step_post_hook

        begin = Optimizer.__init__

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            self._number(optimizer)

        backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            out = backward(*args, **kwargs)
            while self._later and not in_backward():
                self._later.pop(0)()
            return out

        stack.callback(setattr, Optimizer, "__init__", begin)
        Optimizer.__init__ = init  # type: ignore[assignment, method-assign]
        stack.callback(setattr, torch.autograd, "_engine_run_backward", backward)
        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
        stack.callback(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        self._follow_graphs(stack, torch.cuda.CUDAGraph)

    def _follow_graphs(self, stack: ExitStack, kind: Any) -> None:
        """An optimizer that steps in a CUDA graph steps when the graph is replayed, not when it is captured."""
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        def begun(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._graph = graph
            begin(graph, *args, **kwargs)

        def ended(graph: Any) -> None:
            self._graph = None
            end(graph)

        def replayed(graph: Any) -> None:
            replay(graph)
            for number in self._held.get(graph, ()):
                self._stepped(number)

        for name, followed in {"capture_begin": begun, "capture_end": ended, "replay": replayed}.items():
            stack.callback(setattr, kind, name, getattr(kind, name))
            setattr(kind, name, followed)

    @property
    def steps(self) -> int:
        """Whole steps so far."""
        return self.stepped if self.script.step else self.cycle.number

    def notes(self) -> Iterator[str]:
        """What a step leaves out, and what of it is not once in a step."""
        if self.script.step:
            return
        order, round_ = set(self.cycle.order), Counter(self.cycle.order[-self.cycle.period :])
        rare = sorted({type(o).__name__ for o, n in self._numbers.items() if n in order - round_.keys()})
        if rare:
            yield f"{' and '.join(rare)} stepped less often than the other optimizers: no part of this step"
        most = max(round_.values(), default=1)
        if most > 1:
            yield f"the step is one round of {len(round_)} optimizers, in which one of them steps {most} times"

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._graph is not None:
            self._held.setdefault(self._graph, []).append(self._number(optimizer))
            return
        self._warm_ups += _on_other_stream()
        if not _on_other_stream() or self._warm_ups > WARM_UPS:
            self._stepped(self._number(optimizer))

    def _stepped(self, number: int) -> None:
        self.stepped += 1
        self.listener.mark()
        if not self.cycle.stepped(number, set(self._numbers.values())):
            return
        if in_backward():  # a hook's step: profiles do not begin or end there
            self._later.append(self._step_ended)
        else:
            self._step_ended()

    def _step_ended(self) -> None:
        period, now = self.cycle.period, len(self.cycle.order)
        if self._begun_at < 0 or now - self._begun_at == period:
            self.listener.end(self.cycle.number, period)
        self._begun_at = now
        self.listener.begin(self.cycle.number + 1)

    def _number(self, optimizer: Any) -> int:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        return self._numbers[optimizer]

    def _called(self) -> None:
        self.listener.mark()
        self.listener.begin(self.stepped + 1)

    def _returned(self) -> None:
        self.stepped += 1
        self.listener.mark()
        self.listener.end(self.stepped, 1)
