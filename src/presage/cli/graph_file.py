"""`presage trace` of an execution graph file (PyTorch ET or Chakra): what it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from presage.cli.output import show_answer


def show(path: Path, top: int, json: str | None) -> None:
    """Sum up one graph file."""
    from presage.report.graph_answer import execution_graph_answer
    from presage.traces.sniff import read_graph

    graph = read_graph(path)
    kinds = Counter(n.kind for n in graph.nodes)
    names = Counter(n.name for n in graph.nodes if n.kind in ("op", "kernel", "collective"))
    found = {
        "kind": "graph",
        "path": str(path),
        "schema": graph.schema,
        "rank": graph.rank,
        "nodes": len(graph.nodes),
        "dropped_deps": graph.dropped_deps,
        "nodes_by_kind": dict(kinds.most_common()),
        "top_names": dict(names.most_common(top)),
    }
    rank = "not stated" if graph.rank is None else str(graph.rank)
    headline = f"execution graph, schema {graph.schema}, rank {rank}, {len(graph.nodes)} nodes"
    counts = {"Nodes by kind": kinds.most_common(), "Most frequent": names.most_common(top)}
    dropped = [f"{graph.dropped_deps} control dependencies point nowhere or in a circle and were left out"]
    show_answer(execution_graph_answer(headline, counts, dropped if graph.dropped_deps else [], lambda: found), json)
