"""`presage trace` of an execution graph file (PyTorch ET or Chakra): what it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from presage.cli.output import console, emit, print_answer


def show(path: Path, top: int, json: str | None) -> None:
    """Sum up one graph file."""
    from presage.report.tables import count_table
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
    if not emit(json, found):
        return
    out = console()
    rank = "not stated" if graph.rank is None else str(graph.rank)
    print_answer(f"execution graph, schema {graph.schema}, rank {rank}, {len(graph.nodes)} nodes")
    out.print()
    out.print(count_table("Nodes by kind", kinds.most_common()))
    out.print()
    out.print(count_table("Most frequent", names.most_common(top)))
    if graph.dropped_deps:
        out.print(f"\n{graph.dropped_deps} control dependencies point nowhere or in a circle and were left out")
