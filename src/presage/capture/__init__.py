"""A PyTorch training step as a Graph, captured on a machine with no GPU.

`Variant` can be had without torch; the rest imports it when first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from presage.capture.variants import NotApplicable, Variant

if TYPE_CHECKING:
    from presage.capture.custom_ops import register_op
    from presage.capture.fake_device import load, load_cases
    from presage.capture.model_step import ModelStep
    from presage.capture.run import capture
    from presage.capture.script import capture_script

__all__ = ["ModelStep", "NotApplicable", "Variant", "capture", "capture_script", "load", "load_cases", "register_op"]
_HOMES = {
    "ModelStep": "presage.capture.model_step",
    "capture": "presage.capture.run",
    "capture_script": "presage.capture.script",
    "load": "presage.capture.fake_device",
    "load_cases": "presage.capture.fake_device",
    "register_op": "presage.capture.custom_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'presage.capture' has no attribute {name!r}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's C++ code warns that it does not time this device
    return getattr(import_module(_HOMES[name]), name)
