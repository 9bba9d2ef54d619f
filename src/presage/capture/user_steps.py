"""Finds the user's functions, their files imported with a CUDA device in sight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from presage import usercode
from presage.capture import pretend

__all__ = ["load", "load_cases", "load_value"]


def load(target: str) -> Callable[..., Callable[[], Any]]:
    """The function that `FILE.py:FUNCTION` names."""
    return usercode.load(target, pretend.fake_cuda)


def load_cases(path: str | Path) -> dict[str, Callable[..., Callable[[], Any]]]:
    """The cases of a workloads file, `CASES[name] = (builder, arguments)`, each as a function of the device."""
    return usercode.load_cases(path, pretend.fake_cuda)


def load_value(path: str | Path, name: str) -> Any:
    """What a file calls so, or None."""
    return usercode.load_value(path, name, pretend.fake_cuda)
