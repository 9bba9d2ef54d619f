"""Compiled code during a capture: it runs as plain Python, and its ops say which compiled call they are part of.

`torch.compile` (models, functions, methods, an optimizer's step) marks ops for `presage.fusing`, which gives the step
as the compiler has it run. TorchScript's functions and modules stay as they were written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from presage.errors import PresageError
from presage.fusing.inductor import CUDA_GRAPHS, INDUCTOR

_compile, _disable = torch.compile, torch.compiler.disable
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that also record CUDA graphs
_AS_WRITTEN = ("eager", "aot_eager", "aot_eager_decomp_partition", "aot_eager_default_partitioner")


class CompiledCalls:
    """The call of a compiled function that is running, if any: the outermost one, which inlines those in it."""

    def __init__(self) -> None:
        self.label = ""
        self.apart = False  # a custom op's own code runs, of which the compiler knows nothing
        self.count = 0
        self.notes: dict[str, None] = {}

    def restart(self) -> None:
        self.count = 0
        self.notes.clear()

    @contextmanager
    def inside(self, how: str) -> Iterator[None]:
        before = self.label
        if not before:
            self.count += 1
            self.label = f"{how}#{self.count}"
        try:
            yield
        finally:
            self.label = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        before, self.label = self.label, ""
        try:
            yield
        finally:
            self.label = before

    @contextmanager
    def in_custom_op(self) -> Iterator[None]:
        """What the code of a custom op compiles is compiled by itself, in the backward pass too."""
        before, self.apart = self.apart, True
        try:
            with self.outside():
                yield
        finally:
            self.apart = before


calls = CompiledCalls()


def compile_patches() -> list[tuple[Any, str, Any]]:
    out: list[tuple[Any, str, Any]] = [
        (torch, "compile", compile_later),
        (torch.compiler, "disable", _disabled),
        (torch.compiler, "cudagraph_mark_step_begin", lambda: None),
        (torch.jit, "script", _as_python),
        (torch.jit, "load", _no_archive),
        (torch._C.ScriptFunction, "__call__", _run_script),
    ]
    out += _earlier_patches()
    return out + [(torch.jit, n, _as_python) for n in ("trace", "trace_module", "freeze", "optimize_for_inference")]


def _earlier_patches() -> list[tuple[Any, str, Any]]:
    """For code that was compiled before the capture: the compiler's switch, which its calls turn on and off."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None or not hasattr(compiler, "_maybe_set_eval_frame"):
        return []
    running: dict[int, Any] = {}  # by the frame of the call

    def switch(callback: Any) -> None:
        key = id(sys._getframe(1))
        if key in running:
            running.pop(key).__exit__(None, None, None)
        elif callback:
            running[key] = calls.inside(_how_before(callback))
            running[key].__enter__()

    out: list[tuple[Any, str, Any]] = [(compiler, "_maybe_set_eval_frame", switch)]
    counter = "set_fullgraph_compiled_frame_count"
    return out + ([(compiler, counter, lambda _: 0)] if hasattr(compiler, counter) else [])


def _how_before(callback: Any) -> str:
    """How code is compiled that the real torch.compile has wrapped."""
    backend = getattr(callback, "_torchdynamo_orig_backend", callback)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    return _how({"backend": name, "options": getattr(backend, "config", None)})


def compile_later(model: Any = None, **options: Any) -> Any:
    """As torch.compile; what it returns is compiled only where it is called outside a capture."""
    if model is None:
        return lambda function: compile_later(function, **options)
    if options.get("disable") or _is_own_wrapper(model):
        return model
    how = _how(options)
    return OptimizedModule(model, how, options) if isinstance(model, nn.Module) else _wrapped(model, how, options)


def _is_own_wrapper(function: Any) -> bool:
    """Whether PyTorch compiles it around one of its higher-order ops."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith("torch.") and getattr(function, "__name__", "").endswith("_wrapper")


def _how(options: dict[str, Any]) -> str:
    backend, mode = options.get("backend", INDUCTOR), options.get("mode")
    given = options.get("options") or {}
    if backend == "cudagraphs":
        return CUDA_GRAPHS
    if backend != INDUCTOR:
        return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    graphs = given.get("triton.cudagraphs", mode in _WITH_GRAPHS)
    return f"{INDUCTOR}, {CUDA_GRAPHS}" if graphs else INDUCTOR


def is_capturing() -> bool:
    return torch.compile is compile_later


def _wrapped(function: Callable[..., Any], how: str, options: dict[str, Any]) -> Callable[..., Any]:
    real: list[Any] = []
    optimizer = getattr(function, "__self__", None)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            real[:] = real or [_compile(function, **options)]
            return real[0](*args, **kwargs)
        if isinstance(optimizer, Optimizer) and INDUCTOR in how:
            _fuse_step(optimizer)
        with calls.inside(how):
            return function(*args, **kwargs)

    run._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return run


def _fuse_step(optimizer: Optimizer) -> None:
    """A compiled step reads and writes everything once, as a fused one does."""
    name = type(optimizer).__name__
    if all("fused" in group for group in optimizer.param_groups):
        calls.notes[f"the compiled step of {name} is modelled as its fused form (fused=True)"] = None
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor) and not state["step"].is_cuda:
                state["step"] = state["step"].to("cuda")
    else:
        calls.notes[f"the compiled step of {name} is modelled op by op where it works on lists of tensors"] = None


def as_graphs(callables: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch.cuda.make_graphed_callables: forward and backward of each call are a CUDA graph each."""
    if isinstance(callables, tuple):
        return tuple(as_graphs(c, *args, **kwargs) for c in callables)
    options = {"backend": "cudagraphs"}
    if isinstance(callables, nn.Module):
        callables.forward = _wrapped(callables.forward, CUDA_GRAPHS, options)
        return callables
    return _wrapped(callables, CUDA_GRAPHS, options)


class OptimizedModule(nn.Module):
    """As torch._dynamo.OptimizedModule: the module itself is `_orig_mod`, whose attributes this one has."""

    _orig_mod: nn.Module

    def __init__(self, module: nn.Module, how: str, options: dict[str, Any]) -> None:
        super().__init__()
        vars(self).update(_how=how, _options=options, _real=[])
        self._modules["_orig_mod"] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            self._real[:] = self._real or [_compile(self._orig_mod, **self._options)]
            return self._real[0](*args, **kwargs)
        with calls.inside(self._how):
            return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        modules = vars(self).get("_modules")
        if modules is None or "_orig_mod" not in modules:
            raise AttributeError(name)
        return modules["_orig_mod"] if name == "_orig_mod" else getattr(modules["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        modules = vars(self).get("_modules", {})
        if "_orig_mod" in modules and name not in ("_orig_mod", "forward", "training"):
            setattr(modules["_orig_mod"], name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self._orig_mod)  # type: ignore[arg-type]


def _disabled(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    if fn is None:
        return lambda f: _disabled(f, recursive, **options)
    if not callable(fn) or isinstance(fn, type | nn.Module):
        return fn
    real: list[Any] = []

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            real[:] = real or [_disable(fn, recursive, **options)]  # type: ignore[no-untyped-call]
            return real[0](*args, **kwargs)
        with calls.outside():
            return fn(*args, **kwargs)

    return run


# ---- names and notes


def plain_name(name: str) -> str:
    """A module's or a parameter's name without what compiled modules add to it."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name).lstrip(".")


def compile_notes(labels: Iterable[str]) -> Iterator[str]:
    """How the compiled calls of a step are modelled."""
    yield from calls.notes
    found: dict[str, set[str]] = {}
    for label in labels:
        how, _, number = label.rpartition("#")
        found.setdefault(how, set()).add(number)
    for how, numbers in found.items():
        if not how:
            continue
        what = f"{len(numbers)} call{'s' * (len(numbers) > 1)}"
        if how == CUDA_GRAPHS:
            yield f"{what} replayed as CUDA graphs, forward and backward"
            continue
        what = f"torch.compile: {what}"
        if INDUCTOR in how:
            replayed = ", replayed as CUDA graphs" if CUDA_GRAPHS in how else ""
            yield f"{what} compiled: modelled as Inductor fuses them (products not tuned){replayed}"
        elif how in _AS_WRITTEN:
            yield f"{what} with the backend {how}, which fuses nothing: modelled as eager code"
        else:
            yield f"{what} with the backend {how}, which is not known: modelled as eager code"


# ---- TorchScript


def _as_python(code: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What would be scripted or traced, as it is; a note is made where it runs."""
    del args, kwargs
    if code is None:
        return _as_python
    if isinstance(code, nn.Module):
        code.register_forward_pre_hook(_note_script)
    elif not isinstance(code, type) and callable(code):

        @wraps(code)
        def run(*args: Any, **kwargs: Any) -> Any:
            _note_script()
            return code(*args, **kwargs)

        return run
    return code


def _note_script(*_: Any) -> None:
    calls.notes["TorchScript code runs as plain Python: what its fuser would join are kernels of their own"] = None


def _no_archive(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise PresageError("torch.jit.load: a TorchScript archive cannot be captured; build the model from its Python code")


def _run_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    written = getattr(function, "_torchdynamo_inline", None)
    if written is None:
        raise PresageError(
            f"{getattr(function, 'name', 'a TorchScript function')}: its Python code is not known, and TorchScript "
            "cannot be captured; call the Python function"
        )
    _note_script()
    return written(*args, **kwargs)
