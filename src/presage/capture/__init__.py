"""A PyTorch training step as a Graph, captured on a machine with no GPU.

`Variant` can be had without torch; the rest imports it when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from presage.capture.variants import NotApplicable, Variant

if TYPE_CHECKING:
    from presage.capture.fake_device import load, load_cases
    from presage.capture.run import capture

__all__ = ["NotApplicable", "Variant", "capture", "load", "load_cases"]


def __getattr__(name: str) -> Any:
    if name not in ("capture", "load", "load_cases"):
        raise AttributeError(f"module 'presage.capture' has no attribute {name!r}")
    return getattr(import_module("presage.capture.run" if name == "capture" else "presage.capture.fake_device"), name)
