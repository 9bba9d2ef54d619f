"""Where in the user's code something went wrong."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

__all__ = ["users_line"]

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_PYTHON = str(Path(traceback.__file__).parent)


def users_line(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame that is neither PyTorch's, Python's nor ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        installed = "site-packages" in frame.filename
        if not frame.filename.startswith((_TORCH, _OURS, "<")) and (
            installed or not frame.filename.startswith(_PYTHON)
        ):
            return f"{frame.filename}:{frame.lineno}"
    return ""
