"""What one rank runs in one training step, in program order: ops, tensors, storages and their lifetimes."""

from presage.graph.graph import Arg, Event, Graph, Op, Ref, Storage, Tensor

__all__ = ["Arg", "Event", "Graph", "Op", "Ref", "Storage", "Tensor"]
