"""Where in the user's program an op comes from: module, line, phase and thread."""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch._C import _profiler
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _pop_mode, _push_mode

from presage.capture import compiled, streams
from presage.capture.calls import RecordedCall
from presage.graph.graph import Thread

_OURS = str(Path(__file__).parent)
_NOWHERE = ("", "", "", "")
_NO_NUMBER = 1 << 62  # nodes that accumulate gradients have a number above it
_TORCH = str(Path(torch.__file__).parent) + os.sep


def host_thread() -> Thread:
    """The thread a GPU run would be on: autograd has one of its own, though while capturing it borrows the caller's."""
    return "main" if torch._C._current_autograd_node() is None else "autograd"


@contextmanager
def entering_threads(recorder: Any, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Threads that start while this lasts see the recorder and what is `around` their code, which PyTorch keeps apart
    for each thread. They end with the next op that they run after it."""
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run(thread: Any) -> None:
        report = thread._invoke_excepthook
        # what the recorder has heard of is told in the main thread
        thread._invoke_excepthook = lambda t: None if sys.exc_info()[1] is recorder.failure else report(t)
        _push_mode(recorder)
        try:
            with around(), torch.autograd.set_multithreading_enabled(False):
                begin(thread)
        finally:
            _pop_mode()

    threading.Thread._bootstrap_inner = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        threading.Thread._bootstrap_inner = begin  # type: ignore[attr-defined]
        recorder.ended = True


class CallSites:
    """Follows modules and optimizers through global hooks, which `following` sets and removes."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.roots: list[torch.nn.Module] = []
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.in_optimizer = False
        self.stepped = 0  # steps of optimizers so far
        self._stepping = 0  # the thread an optimizer steps in
        self._backward = -1  # the backward pass that an optimizer steps in, from a hook
        self._stacks: dict[tuple[int, Thread], list[str]] = {}
        self._forward: dict[int, tuple[str, str, str, str]] = {}  # by autograd's number: module, line, call, stream
        self.before_step: list[Any] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._step_begins),
            optimizer_hooks.register_optimizer_step_post_hook(self._step_ends),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def forget(self) -> None:
        """A new step: autograd's numbers of the last one mean nothing any more."""
        self._forward.clear()
        compiled.calls.restart()

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        del inputs
        if id(module) not in self.names:
            own = module._orig_mod if isinstance(module, compiled.OptimizedModule) else module
            prefix = type(own).__name__ if self.roots else ""
            self.roots.append(module)
            for name, child in module.named_modules(prefix=prefix):
                self.names.setdefault(id(child), compiled.plain_name(name))
        self._stacks.setdefault((get_ident(), host_thread()), []).append(self.names[id(module)])

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        stack = self._stacks.get((get_ident(), host_thread()))
        if stack:
            stack.pop()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.in_optimizer, self._backward = True, torch._C._current_graph_task_id()
        self._stepping = get_ident()
        self.optimizers[id(optimizer)] = optimizer
        for listener in self.before_step:
            listener(optimizer)

        def in_closure(closure: Any) -> Any:
            self.in_optimizer = False
            out = closure()
            self.in_optimizer = True
            for listener in self.before_step:
                listener(optimizer)
            return out

        return with_closure(args, kwargs, in_closure)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self.in_optimizer, self._backward = False, -1
        self.stepped += 1

    def fill(self, call: RecordedCall) -> None:
        """Write down where a call comes from."""
        node = torch._C._current_autograd_node()
        call.thread = "main" if node is None else "autograd"
        stack = self._stacks.get((get_ident(), call.thread))
        if node is not None and not stack:
            number = node._sequence_nr()
            call.sequence = number if number < _NO_NUMBER else -1
            call.module, call.line, call.compiled, call.stream = self._forward.get(call.sequence, _NOWHERE)
            call.stream = streams.current_stream().name or call.stream  # what a hook asks for
            call.compiled = compiled.calls.label if compiled.calls.apart else call.compiled
            in_hook = self._backward != -1 and self._backward == torch._C._current_graph_task_id()
            call.phase = "optimizer" if in_hook else "backward"
            return
        call.module, call.line = stack[-1] if stack else "", self.line()
        call.compiled, call.stream = compiled.calls.label, streams.current_stream().name
        if node is not None and not (call.compiled or compiled.calls.apart):  # a checkpoint's forward pass, run again
            call.compiled = self._forward.get(node._sequence_nr(), _NOWHERE)[2]
        call.phase = self._phase(call.thread == "autograd" or node is not None, bool(stack))
        if torch.is_grad_enabled():
            call.sequence = torch._C._autograd._get_sequence_nr() - 1
            self._forward.setdefault(call.sequence, (call.module, call.line, call.compiled, call.stream))

    def _phase(self, backward: bool, in_module: bool) -> Any:
        if backward:
            return "backward"
        if self.in_optimizer and get_ident() == self._stepping:
            return "optimizer"
        return "forward" if in_module or torch.is_grad_enabled() else "other"

    def line(self) -> str:
        """The innermost line that is neither PyTorch's nor ours."""
        frame = _users_frame(sys._getframe(1))
        return "" if frame is None else f"{_name_of(frame.f_code.co_filename)}:{frame.f_lineno}"

    def reader(self) -> tuple[str, tuple[int, int]]:
        """That line, with the identities of its frame and of the user's frame that called it."""
        inner = _users_frame(sys._getframe(1))
        outer = None if inner is None else _users_frame(inner.f_back)
        return self.line(), (id(inner), id(outer))


def _users_frame(frame: Any) -> Any:
    """The innermost frame from here outwards that is neither PyTorch's nor ours."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@cache
def _is_users(path: str) -> bool:
    return not path.startswith((_TORCH, _OURS, "<")) and "contextlib" not in path


@cache
def _name_of(path: str) -> str:
    return Path(path).name


def with_closure(args: Any, kwargs: Any, around: Callable[[Any], Any]) -> Any:
    """The arguments of an optimizer's step, its closure (forward and backward pass, in Lightning) run by `around`; None
    where it has none, as a hook before the step returns it."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": partial(around, closure)}
    return (args[0], partial(around, closure), *args[2:]), kwargs


_MEMORY_HANDLERS = {"OutOfMemoryError", "is_oom_error", "should_reduce_batch_size"}


def expects_out_of_memory() -> bool:
    """Whether a function that runs now is ready to run out of memory (a search for a batch size), in a `try` of it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        told = any(isinstance(c, str) and "out of memory" in c for c in code.co_consts)
        if (told or not _MEMORY_HANDLERS.isdisjoint(code.co_names)) and not code.co_filename.startswith(_OURS):
            entries: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
            if any(entry.start <= frame.f_lasti < entry.end for entry in entries):
                return True
        frame = frame.f_back
    return False


# ---- What each call was nested in, as PyTorch's own profiler saw it.

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


@dataclass
class Profile:
    nested: list[Nested] = field(default_factory=list)


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile what runs inside; the result is filled in at the end."""
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO, False, False, False, False, False,  # with shapes it is three times as slow
        _profiler._ExperimentalConfig(profile_all_threads=True),
    )  # fmt: skip
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
        name: str = event.name
        if name.startswith(_GPU):
            yield Nested(event.start_time_ns, int(name[len(_GPU) :]), "", within, sequence, event.start_tid)
            continue
        number = getattr(event.extra_fields, "sequence_number", -1)
        number = number if 0 <= number < _NO_NUMBER else sequence
        children = event.children
        if name.startswith(_HOST):
            yield Nested(event.start_time_ns, int(name[len(_HOST) :]), "", within, sequence, event.start_tid)
            # what a host op runs inside is real: a foreach over host tensors is one op for each
            todo += [(c, within, number) for c in reversed(children)]
            continue
        if not children and name.startswith("aten::"):
            yield Nested(event.start_time_ns, -1, name, within, number, event.start_tid)
            continue
        if name.startswith(_ENGINE) and not any(outer.startswith(_ENGINE) for outer in within):
            within = ()  # autograd has a thread of its own on a GPU: nothing of the caller's is around it
        inner = within if name.startswith(_REGIONS) else (*within, name)
        todo += [(c, inner, number) for c in reversed(children)]
