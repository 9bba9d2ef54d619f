"""Deprecated since 0.2: the edits are in presage.edits."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from warnings import warn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    warn("presage.graph.edits is now presage.edits", DeprecationWarning, stacklevel=2)
    return getattr(import_module("presage.edits"), name)
