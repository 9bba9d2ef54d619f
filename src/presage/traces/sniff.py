"""What kind of trace file this is, by its first bytes."""

from __future__ import annotations

import re
from pathlib import Path

from presage.files.reading import open_bytes
from presage.traces.graphs.chakra import read_chakra
from presage.traces.graphs.et import read_et
from presage.traces.graphs.graphfile import ExecutionGraph

__all__ = ["is_graph", "read_graph"]

HEAD = 1 << 16


def kind(path: Path) -> str:
    """'kineto', 'et' (PyTorch execution trace), 'chakra', or 'unknown'."""
    with open_bytes(path) as stream:
        head = stream.read(HEAD)
    start = head.lstrip()[:1]
    if start == b"[" or b'"traceEvents"' in head:
        return "kineto"
    if start != b"{":
        return "chakra" if path.name.removesuffix(".gz").endswith(".et") else "unknown"
    if re.search(rb'"(GlobalMetadata|global_metadata|Id|dataDeps|data_deps)"', head):
        return "chakra"
    return "et" if re.search(rb'"nodes"', head) else "unknown"


def is_graph(path: Path) -> bool:
    """Whether the file is an execution graph: ops and tensors, but (mostly) no times."""
    return kind(path) in ("et", "chakra")


def read_graph(path: Path) -> ExecutionGraph:
    return read_chakra(path) if kind(path) == "chakra" else read_et(path)
