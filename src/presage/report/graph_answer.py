"""The answers of `presage graph`, and of `presage trace` for execution graphs: what a step runs, without times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from presage.graph import summary
from presage.graph.diff import KINDS, GraphDiff, lines
from presage.graph.graph import Graph
from presage.graph.summary import SummaryRow, collapsed
from presage.graph.work import collective, collective_bytes
from presage.hardware import Gpu
from presage.memory.step_memory import MemoryProfile
from presage.report.answer import Answer, DataTable, Section, data_table
from presage.report.step_sections import peak_table, role_table
from presage.report.terms import NO_MEMORY, family_name, memory_fit
from presage.text import amount, shorten, size
from presage.traces.execution_graph import ExecutionGraph


def graph_answer(
    graphs: Sequence[Graph], memory: MemoryProfile, depth: int, diff: GraphDiff | None, gpu: Gpu | None = None
) -> Answer:
    """Everything `presage graph` shows of the first graph, and the traffic of all, which are steps of different ranks;
    `gpu`: and whether it fits in its memory."""
    graph = graphs[0]
    total = summary.total(graph)
    given = ", ".join(f"{k}={v}" for k, v in graph.arguments.items())
    name = graph.source or "graph"
    where = graph.ops[memory.peak_op].name if 0 <= memory.peak_op < len(graph.ops) else ""
    left = 0 if gpu is None else gpu.memory - memory.peak_allocated
    tables = (
        module_table(summary.by_module(graph, depth), total),
        _work_table("Phases", "phase", [*summary.by_phase(graph), total], total),
        _work_table("Op families (those that launch kernels)", "family", summary.by_family(graph), total),
        *((peak_table(memory, where), role_table(memory)) if graph.memory_known else ()),
    )
    groups = (Section("Process groups", (traffic_table(graphs),)),) if graph.groups else ()
    notes = list(graph.notes)
    if total.useful_flops != total.flops:
        hidden = 1 - total.useful_flops / total.flops
        notes.insert(0, f"{100 * hidden:.1f}% of the FLOPs are attention scores that a causal mask discards")
    changed = (Section("Difference", text="\n".join(("Difference", *lines(diff)))),) if diff is not None else ()
    return Answer(
        title=name,
        subject=f"{name}{f' ({given})' if given else ''}",
        headline=f"{total.ops:,} ops, {amount(total.flops)} FLOPs, {size(total.moved)} moved, "
        f"peak memory {size(memory.peak_allocated) if graph.memory_known else 'not known'} per step.",
        verdict=""
        if gpu is None
        else f"{_sentence(memory_fit(left) if graph.memory_known else NO_MEMORY)} ({size(gpu.memory)} of {gpu.name}).",
        verdict_tone="" if gpu is None else "good" if left >= 0 else "bad",
        sections=(*groups, Section("Graph", tables), *changed),
        notes=tuple(notes),
        to_data=partial(graph_data, graphs, memory, depth, diff, gpu),
    )


@dataclass(frozen=True)
class GroupTraffic:
    """Collectives or messages of one kind that a rank issues in a process group, in a step."""

    rank: int  # the first of those that run this step
    ranks: int  # how many do
    group: str
    members: tuple[int, ...]
    kind: str
    calls: int
    bytes: int  # of all of them


def traffic(graphs: Sequence[Graph]) -> list[GroupTraffic]:
    """By step, process group and kind, in the order in which they come."""
    out = []
    for graph in graphs:
        calls: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for op in graph.ops:
            kind = collective(op)
            if kind is not None and op.group in graph.groups:
                calls[op.group, kind] += 1
                nbytes[op.group, kind] += collective_bytes(graph, op)
        holders = graph.ranks[0], len(graph.ranks)
        for (group, kind), n in calls.items():
            out.append(GroupTraffic(*holders, group, graph.groups[group], kind, n, nbytes[group, kind]))
    return out


def traffic_table(graphs: Sequence[Graph]) -> DataTable:
    """Process groups with their ranks, and what a rank sends or receives in them in a step."""
    columns = ("rank", "runs on", "group", "its ranks", "kind", "calls", "bytes", "each")
    rows = [
        (
            str(t.rank), f"{t.ranks:,} rank{'s' if t.ranks > 1 else ''}", t.group, _numbers(t.members), t.kind,
            str(t.calls), size(t.bytes), size(t.bytes / t.calls),
        )
        for t in traffic(graphs)
    ]  # fmt: skip
    return data_table("Process groups and their traffic, per rank and step", columns, rows)


def _numbers(ranks: Sequence[int], most: int = 4) -> str:
    """0-7; 0, 2, 4; 0, 8 ... 56."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ranks if len(ranks) <= most else ranks[:2]
    return ", ".join(map(str, shown)) + (f" ... {ranks[-1]}" if len(ranks) > most else "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def module_table(modules: Sequence[SummaryRow], total: SummaryRow) -> DataTable:
    """Modules with all they contain; equal neighbours ('layer.0' to 'layer.11') share a row with their sum."""
    columns = ("module", "ops", "kernels", "FLOPs fwd", "FLOPs bwd", "bytes moved", "parameters", "activations")
    above: list[str] = []  # names of the enclosing rows
    rows = []
    for row in collapsed(modules):
        above = [*above[: row.depth], row.name]
        rows.append(("  " * row.depth + _label(row, above), *_module_cells(row)))
    return data_table("Modules", columns, [*rows, ("total", *_module_cells(total))], bold=(-1,))


def _label(row: SummaryRow, above: Sequence[str]) -> str:
    """The module's own name: its parent stands above it."""
    name = row.name.removeprefix(f"{above[row.depth - 1]}.") if row.depth else row.name
    return f"{name}  ({row.alike} alike)" if row.alike > 1 else name


def _module_cells(row: SummaryRow) -> list[str]:
    return [
        str(row.ops), str(row.kernels), amount(row.flops_forward), amount(row.flops_backward), size(row.moved),
        amount(row.parameters), size(row.saved_bytes),
    ]  # fmt: skip


def _work_table(title: str, first: str, work: Sequence[SummaryRow], total: SummaryRow) -> DataTable:
    columns = (first, "ops", "kernels", "FLOPs", "share", "read", "written", "share", "FLOPs/byte")
    rows = [
        (
            family_name(r.name), str(r.ops), str(r.kernels), amount(r.flops), _share(r.flops, total.flops),
            size(r.read), size(r.written), _share(r.moved, total.moved),
            f"{r.flops / r.moved:.4g}" if r.moved and r.flops else "-",
        )
        for r in work
    ]  # fmt: skip
    return data_table(title, columns, rows, bold=[i for i, r in enumerate(work) if r is total])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if part and whole else "-"


def execution_graph_answer(graph: ExecutionGraph, path: Path, top: int) -> Answer:
    """Counts of an execution trace or Chakra graph, which have no times."""
    kinds = Counter(n.kind for n in graph.nodes)
    names = Counter(n.name for n in graph.nodes if n.kind in ("op", "kernel", "collective"))
    rank = "not stated" if graph.rank is None else str(graph.rank)
    counts = {"Nodes by kind": kinds.most_common(), "Most frequent": names.most_common(top)}
    tables = tuple(
        data_table(title, ("what", "count"), [(shorten(name), str(n)) for name, n in rows], wrap=True)
        for title, rows in counts.items()
    )
    dropped = f"{graph.dropped_deps} control dependencies point nowhere or in a circle and were left out"
    data = {
        "kind": "graph", "path": str(path), "schema": graph.schema, "rank": graph.rank, "nodes": len(graph.nodes),
        "dropped_deps": graph.dropped_deps, "nodes_by_kind": dict(kinds.most_common()),
        "top_names": dict(names.most_common(top)),
    }  # fmt: skip
    return Answer(
        "execution graph",
        f"execution graph, schema {graph.schema}, rank {rank}, {len(graph.nodes)} nodes",
        sections=(Section("Nodes", tables),),
        notes=(dropped,) if graph.dropped_deps else (),
        to_data=lambda: data,
    )


# ---- JSON


def graph_data(
    graphs: Sequence[Graph], memory: MemoryProfile, depth: int, diff: GraphDiff | None, gpu: Gpu | None = None
) -> dict[str, Any]:
    """Plain values of a step's graph."""
    graph = graphs[0]

    def row(r: SummaryRow) -> dict[str, Any]:
        return {k: v for k, v in asdict(r).items() if k not in ("depth", "alike")} | {"flops": r.flops}

    value: dict[str, Any] = {
        "kind": "graph",
        "source": graph.source,
        "arguments": graph.arguments,
        "torch": str(graph.torch),
        "flags": graph.flags,
        "notes": list(graph.notes),
        "total": row(summary.total(graph)),
        "phases": [row(r) for r in summary.by_phase(graph)],
        "modules": [{**row(r), "depth": r.depth} for r in summary.by_module(graph, depth)],
        "families": [row(r) for r in summary.by_family(graph)],
    }
    if graph.memory_known:
        value["memory"] = {
            "peak_allocated_bytes": memory.peak_allocated,
            "peak_reserved_bytes": memory.peak_reserved,
            "peak_op": memory.peak_op,
            "at_peak_by_role": memory.by_role(),
        }
    if graph.groups:
        value["traffic"] = [asdict(t) for t in traffic(graphs)]
    if gpu is not None and graph.memory_known:
        left = gpu.memory - memory.peak_allocated
        value |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.memory, "fits": left >= 0, "memory_left_bytes": left}
    if diff is not None:
        counts = {kind: diff.count(kind) for kind in KINDS}
        value["diff"] = {"same": diff.same, **counts, "changes": [asdict(c) for c in diff.changes]}
    return value
