"""A stand-in for PyTorch's compiler (`torch._dynamo`), which takes longer to load than PyTorch itself.

A capture only calls functions of PyTorch that switch the compiler off around themselves. For that a shell with two
plain functions is enough. Whoever asks it for anything else gets the real package, loaded at that moment with what the
capture replaces put back: its modules check the functions they find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

DYNAMO = "torch._dynamo"
LIGHT = (f"{DYNAMO}.config",)  # submodules that load by themselves
Unpatched = Callable[[], AbstractContextManager[None]]


class _Shell(ModuleType):
    """A module with some of its names, until another is asked for."""

    def __init__(self, name: str, unpatched: Unpatched, known: dict[str, Any], folder: str | None = None) -> None:
        super().__init__(name)
        self.__dict__.update(known)
        self._unpatched, self._real = unpatched, cast(Any, None)
        if folder is not None:
            self.__path__ = [folder]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> Any:
        """The real module, from now on in the shell's place."""
        if self._real is None:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            with self._unpatched():
                self._real = import_module(self.__name__)
        return self._real


class _Finder(MetaPathFinder, Loader):
    """Loads a real package before any of its submodules but the light ones."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        shell = sys.modules.get(DYNAMO) if fullname.startswith(f"{DYNAMO}.") else None
        if fullname in LIGHT or not isinstance(shell, _Shell):
            return None
        shell.load()
        return ModuleSpec(fullname, self) if fullname in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was loaded with its package."""


def install(unpatched: Unpatched) -> None:
    """Put a shell where the compiler is not loaded yet. `unpatched` undoes what a capture replaces for a while."""
    if DYNAMO not in sys.modules:
        sys.modules[DYNAMO] = _Shell(DYNAMO, unpatched, _compiler(), str(Path(torch.__file__).parent / "_dynamo"))
        sys.meta_path.insert(0, _Finder())


def _compiler() -> dict[str, Any]:
    def disable(fn: Any = None, recursive: bool = True, **_: Any) -> Any:  # noqa: ARG001
        return fn if fn is not None else lambda f: f

    def graph_break(*_: Any, **__: Any) -> None:
        """There is no graph to break."""

    return {"disable": disable, "graph_break": graph_break}
