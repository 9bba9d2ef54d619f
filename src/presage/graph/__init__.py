"""What one rank runs in one training step, in program order: ops, tensors, storages and their lifetimes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from presage.graph.graph import Arg, Event, Graph, Op, Ref, Storage, Tensor

__all__ = ["Arg", "Event", "Graph", "Op", "Ref", "Storage", "Tensor"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: the families of ops are asked for on machines that have torch and numpy only."""
    if name in __all__:
        return getattr(import_module("presage.graph.graph"), name)
    raise AttributeError(f"module 'presage.graph' has no attribute {name!r}")
