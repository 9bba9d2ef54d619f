"""Finds the user's functions: `FILE.py:FUNCTION`, and the cases of a workloads file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from presage.capture import pretend
from presage.capture.explain import users_line
from presage.errors import InputError, PresageError

__all__ = ["load", "load_cases"]


def load(target: str) -> Callable[..., Callable[[], Any]]:
    """The function that `FILE.py:FUNCTION` names."""
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name:
        raise PresageError(f"{target}: say which function of which file builds the step, as FILE.py:FUNCTION")
    module = _imported(Path(path))
    function = getattr(module, name, None)
    if function is None:
        there = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:12])
        raise InputError(path, f"no function {name!r} in it; it has {there or 'none'}")
    if not callable(function):
        raise InputError(path, f"{name!r} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def load_cases(path: str | Path) -> dict[str, Callable[..., Callable[[], Any]]]:
    """The cases of a workloads file, `CASES[name] = (builder, arguments)`, each as a function of the device."""
    module = _imported(Path(path))
    cases = getattr(module, "CASES", None)
    if not isinstance(cases, dict):
        raise InputError(path, "no dictionary CASES in it, of names to (builder, arguments)")
    return {name: partial(builder, **arguments) for name, (builder, arguments) in cases.items()}


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(path, "no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(path, "not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        with pretend.cuda(), _neighbours_importable(path):
            spec.loader.exec_module(module)
    except PresageError:
        raise
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        raise PresageError(f"{users_line(e) or path}: {type(e).__name__}: {e}") from e
    return module


@contextmanager
def _neighbours_importable(path: Path) -> Iterator[None]:
    """Files beside the user's can be imported by it, as when it is run itself."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
