"""Loading user code: FILE.py:FUNCTION, the cases of a workloads file, `--arg K=V`."""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from presage.errors import InputError, PresageError, missing_file, near

Around = Callable[[], AbstractContextManager[Any]]  # what the file is imported in
_OURS = str(Path(__file__).parent)
_PYTHON = str(Path(traceback.__file__).parent)


def _example(path: str) -> str:
    """, e.g. train.py:build: the first function of a file that takes a device."""
    try:
        functions = [f for f in ast.parse(Path(path).read_bytes()).body if isinstance(f, ast.FunctionDef)]
    except (OSError, ValueError, SyntaxError):
        return ""
    taking = [f.name for f in functions if f.args.args and f.args.args[0].arg == "device"]
    return f", e.g. {path}:{taking[0]}" if taking else ""


def load(target: str, around: Around = nullcontext) -> Callable[..., Callable[[], Any]]:
    """The function given as `FILE.py:FUNCTION`."""
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name:
        raise PresageError(f"{target}: give the function that builds the step as FILE.py:FUNCTION{_example(target)}")
    module = _imported(Path(path), around)
    function = getattr(module, name, None)
    if function is None:
        there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:12])
        raise InputError(path, f"no function {name!r} in it; it has {there or 'none'}{near(name, vars(module))}")
    if not callable(function):
        raise InputError(path, f"{name!r} is not a function but {type(function).__name__}")
    return _with_own_argv(Path(path))(function)  # type: ignore[no-any-return]


@contextmanager
def _with_own_argv(path: Path) -> Iterator[None]:
    """The file's code sees a command line of its own, without arguments, not presage's."""
    before, refuse = sys.argv, argparse.ArgumentParser.error
    sys.argv = [str(path)]
    argparse.ArgumentParser.error = lambda self, message: sys.exit(message)  # type: ignore  # noqa: ARG005
    try:
        yield
    except SystemExit as e:
        raise PresageError(
            f"{user_code_line(e) or path}: the code reads a command line and ended itself ({e.code}): run the file as "
            f"a script, as in `presage predict {path} -- ARGS`"
        ) from e
    finally:
        sys.argv, argparse.ArgumentParser.error = before, refuse  # type: ignore[method-assign]


def load_cases(path: str | Path, around: Around = nullcontext) -> dict[str, Callable[..., Callable[[], Any]]]:
    """The cases of a workloads file, `CASES[name] = (builder, arguments)`, each as a function of the device."""
    module = _imported(Path(path), around)
    cases = getattr(module, "CASES", None)
    if not isinstance(cases, dict):
        raise InputError(path, "no dictionary CASES in it, of names to (builder, arguments)")
    for name, case in cases.items():
        if not isinstance(case, tuple) or len(case) != 2 or not callable(case[0]) or not isinstance(case[1], dict):
            raise InputError(path, "should be (builder, arguments)", f"CASES[{name!r}]")
    return {name: partial(builder, **arguments) for name, (builder, arguments) in cases.items()}


def load_value(path: str | Path, name: str, around: Around = nullcontext) -> Any:
    """The value of a name in a file, or None."""
    return getattr(_imported(Path(path), around), name, None)


def parse_arguments(items: Sequence[str]) -> dict[str, Any]:
    """`--arg K=V` as Python values."""
    out: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise PresageError(f"--arg {item}: should be NAME=VALUE")
        if name in out:
            raise PresageError(f"--arg {item}: {name} is given twice")
        out[name] = _value_of(name, text)
    return out


def check_arguments(function: Callable[..., Any], given: Iterable[str]) -> None:
    """Raise, before any work, if FUNCTION(device, **given) cannot be called."""
    try:
        every = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return
    if not every or every[0].kind is inspect.Parameter.KEYWORD_ONLY:
        named = getattr(function, "__name__", "build")
        file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "train.py")
        raise PresageError(
            f"{named}() should take the device first: def {named}(device): ... return step; a script is run as it is: "
            f"`presage predict {file} -- ARGS`"
        )
    every = every[1:]
    known = {p.name: p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    name, asked = getattr(function, "__name__", "it"), set(given)
    unknown = sorted(asked - known.keys())
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in every):
        there = f"it has {', '.join(known)}{near(unknown[0], known)}" if known else "it has none but the device"
        raise PresageError(f"--arg {unknown[0]}: {name} has no such argument; {there}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in asked]
    if missing:
        raise PresageError(f"{name} needs {', '.join(missing)}: give --arg {missing[0]}=VALUE")


# What other libraries' errors mean in a capture, by a pattern in their text; {0}, {1} are its groups.
_PLAIN_RANK = "build one rank's plain model, and let --ranks N --strategy ddp (or fsdp, zero1, ...) spread it"
SENTENCES: tuple[tuple[str, str], ...] = (
    (
        r"(_foreach_\w+)\S* got mixed torch\.Tensor and DTensor",
        "{0} got plain tensors and DTensors, where PyTorch fails on a GPU too: give the optimizer foreach=False, or "
        "parallelize all modules",
    ),
    (
        r"context_parallel: .*(?:broadcast a dimension|must match the size|padded)",
        "context_parallel cannot merge these lengths, where PyTorch fails on a GPU too: each rank's part of the "
        "sequence, halved, has to be a multiple of 32",
    ),
    (
        r"(\w+::\w+): Expected all tensors to be on the same device",
        "{0} is given tensors of the GPU and of the CPU, where PyTorch fails on a GPU too: move them to one device",
    ),
    (
        r"(\w+::_?sparse\w*): |(\w+::\w+): .*'Sparse\w*' backend",
        "{0} works on sparse tensors, which is not captured: use dense tensors, index_add or scatter for the capture",
    ),
    (
        r"(Sparse \w+) tensors do not have strides",
        "{0} tensors are not captured: use dense tensors, index_add or scatter for the capture",
    ),
    (
        r"(\w+::\w+): (?:Could not run|Found no NVIDIA driver|PyTorch is not linked with support for cuda)",
        "{0} cannot be run without a GPU: say what it costs with presage.register_op('{0}', cost=...)",
    ),
    (
        r"Found no NVIDIA driver|not linked with support for cuda|driver version is insufficient|not compiled with CUDA"
        r"|libcuda|_cuda_\w+|_CudaDeviceProperties",
        "this needs the driver of a real GPU: leave it out of the captured step, or say what its ops cost with "
        "presage.register_op(name, cost=...)",
    ),
    (
        r"No module named '((?:flash_attn|apex|transformer_engine|amp_C|fused_\w+_cuda)\b[\w.]*)'",
        "{0} is not installed here, as its kernels are built for a GPU: use what PyTorch has of it for the capture "
        "(scaled_dot_product_attention, nn.LayerNorm, nn.RMSNorm, AdamW(fused=True))",
    ),
    (
        r"No module named '([\w.]+)'",
        "{0} is not installed where presage runs: install it there (pip), or leave it out of the captured code",
    ),
    (
        r"no fake impl registered for <CustomOpDef\(([\w:]+)",
        "{0} has no fake implementation: give it one (torch.library.register_fake), or presage.register_op('{0}', "
        "cost=..., outputs=...)",
    ),
    (
        r"SyntaxError: (.{1,200})",
        f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read this line ({{0}}): if it is written for a "
        "newer Python, run presage with that one",
    ),
    (r"PrivateUse1HooksInterface", "pinned memory of this kind is not captured: allocate without pin_memory"),
    (
        r"rule registered for HigherOrderOperator (\w+)",
        "torch's higher-order op {0} is not captured: write it in plain PyTorch for the capture",
    ),
    (
        r"torch\.compile with fullgraph|found no compiled frames|non-infra torch dispatch mode|torch\._dynamo",
        "PyTorch's compiler cannot trace inside a capture: leave torch.compile out here and predict it with "
        "`presage whatif --apply compile`",
    ),
    (
        r"ProcessGroupNCCL|NCCL built in|DDP expects same model|Expects the parameter to already be moved to device"
        r"|init_process_group|process group has not been",
        f"the code spreads itself over ranks, which a capture of one does not have: {_PLAIN_RANK}",
    ),
    (
        r"KeyError: '(LOCAL_RANK|RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        "the script reads {0}, which torchrun sets: say how many processes there are (--ranks N, without --strategy)",
    ),
    (
        r"Creating a new Tensor subclass (\w+)",
        "tensors of class {0} cannot be made on a pretended GPU: use plain tensors for the capture",
    ),
    (
        r"HTTPError|ConnectionError|Max retries exceeded|name resolution|URLError|LocalEntryNotFound|couldn't connect"
        r"|offline mode is enabled|Connection refused",
        "it downloads something, and there is no network: download it before, or build the model from its config",
    ),
    (
        r"FileNotFoundError: \[Errno 2\] No such file or directory: (.+)$",
        "there is no {0}: paths of the code start in the folder where presage is run; run it where the script is run, "
        "or name another file in its arguments",
    ),
    (
        r"uninitialized parameter",
        "a lazy module's sizes are not known yet: call the model once on the host, before it is moved to the GPU",
    ),
)
MOST_LETTERS = 300


def error_text(error: BaseException) -> str:
    """What an error of the user's code means in a capture, or else its kind and the beginning of what it says."""
    told = f"{type(error).__name__}: {' '.join(str(error).partition(', but expected one of')[0].split())}"
    in_ring = any("_context_parallel" in f.filename for f in traceback.extract_tb(error.__traceback__))
    for pattern, sentence in SENTENCES:
        if found := re.search(pattern, f"context_parallel: {told}" if in_ring else told):
            return sentence.format(*(group for group in found.groups() if group))
    return told if len(told) <= MOST_LETTERS else f"{told[:MOST_LETTERS]} ..."


def user_code_line(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame in user code (not PyTorch, Python or presage)."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    not_users = ("<", _OURS, *([str(Path(torch).parent) + os.sep] if torch else []))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = "site-packages" in frame.filename
        if not frame.filename.startswith(not_users) and (installed or not frame.filename.startswith(_PYTHON)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _value_of(name: str, text: str) -> Any:
    """A number, true, false, none; JSON for a list, an object or a quoted text; else the text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in ("[", "{", '"'):
        try:
            return json.loads(text)
        except ValueError as e:
            raise PresageError(f"--arg {name}={text}: is not valid JSON: {e}") from e
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _imported(path: Path, around: Around) -> ModuleType:
    if not path.is_file():
        raise missing_file(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(path, "not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        with around(), _neighbours_importable(path), _with_own_argv(path):
            spec.loader.exec_module(module)
    except PresageError:
        raise
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        raise PresageError(f"{user_code_line(e) or path}: {type(e).__name__}: {e}") from e
    return module


@contextmanager
def _neighbours_importable(path: Path) -> Iterator[None]:
    """Let the user's file import files next to it, as when it is run directly."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def load_plugin(group: str, name: str, default: str, user: str) -> Callable[..., Any]:
    """The function of an entry point, or `default` (MODULE:FUNCTION) where no installed package declares it.

    `user` is named in the error where the package is absent: "presage accuracy needs the presage_validation package".
    """
    from importlib.metadata import entry_points

    target = next((e.value for e in entry_points(group=group, name=name)), default)
    module, _, function = target.partition(":")
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise PresageError(f"{user} needs the {package} package")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


_LED = "_presage_step"  # where a followed function finds what it is led to


class FunctionCalls:
    """Follows the calls of a function by its name, wherever it is defined: found when it is called for the first time,
    and from then on led past here."""

    def __init__(self, name: str, called: Callable[[], None], returned: Callable[[], None]) -> None:
        self.name, self.last = name, name.rpartition(".")[2]
        self.called, self.returned = called, returned
        self.depth = 0
        self._led: list[tuple[FunctionType, Any, Any, Any]] = []

    def open(self) -> None:
        sys.setprofile(self._profile)

    def close(self) -> None:
        sys.setprofile(None)
        for function, *before in self._led:
            function.__code__, function.__defaults__, function.__kwdefaults__ = before

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        del arg
        code = frame.f_code
        if code.co_name != self.last or event not in ("call", "return"):
            return
        if not f".{code.co_qualname}".endswith(f".{self.name}"):
            return
        if event == "call":
            self._enter()
        else:
            self._leave()
            self._lead(frame)

    def _enter(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.called()

    def _leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.returned()

    def _lead(self, frame: FrameType) -> None:
        """Further calls come by here without the profiler, which slows all others down. Closures stay as they are."""
        code = frame.f_code
        if self.depth or code.co_freevars:
            return
        holders = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code]
        if len(holders) != 1:
            return
        (function,) = holders
        own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__

        def run(args: Any, kwargs: Any) -> Any:
            self._enter()
            try:
                return own(*args, **kwargs)
            finally:
                self._leave()

        self._led.append((function, code, function.__defaults__, function.__kwdefaults__))
        function.__globals__[_LED] = {**function.__globals__.get(_LED, {}), self.last: run}
        source = f"def {self.last}(*args, **kwargs): return {_LED}[{self.last!r}](args, kwargs)"
        made: dict[str, Any] = {}
        exec(source, made)
        function.__code__, function.__defaults__, function.__kwdefaults__ = made[self.last].__code__, None, None
        with suppress(ValueError):
            sys.setprofile(None)
