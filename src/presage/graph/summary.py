"""What a graph holds, module by module: ops, FLOPs, bytes, parameters, activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from presage.graph import work
from presage.graph.graph import Graph, Op, Phase

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "other")
_OUTSIDE = {"optimizer": "(optimizer)", "other": "(other)"}
_TOP = "(top level)"


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """Sums over a module and all modules in it, or over any other set of ops. Rows add with `+`."""

    name: str
    depth: int = 0
    alike: int = 1  # how many modules of the same figures this row stands for
    ops: int = 0
    kernels: int = 0  # ops that launch at least one kernel
    flops_forward: int = 0
    flops_backward: int = 0
    flops_other: int = 0
    useful_flops: int = 0  # all phases, without the attention scores a causal mask throws away
    read: int = 0
    written: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0  # activations that its forward leaves for the backward

    @property
    def flops(self) -> int:
        return self.flops_forward + self.flops_backward + self.flops_other

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def figures(self) -> tuple[int, ...]:
        result: tuple[int, ...] = _figures(self)
        return result

    def __add__(self, other: SummaryRow) -> SummaryRow:
        sums = [a + b for a, b in zip(self.figures, other.figures, strict=True)]
        return SummaryRow(self.name, self.depth, self.alike, *sums)


# The fields that add up, in the order of the class.
_figures = attrgetter(
    "ops", "kernels", "flops_forward", "flops_backward", "flops_other", "useful_flops", "read", "written",
    "parameters", "parameter_bytes", "saved_bytes",
)  # fmt: skip


def total(graph: Graph) -> SummaryRow:
    return sum((row for _, row in _contributions(graph)), SummaryRow("total"))


def by_phase(graph: Graph) -> list[SummaryRow]:
    """A row a phase: its ops only, without parameters and activations."""
    rows = {p: SummaryRow(p) for p in PHASES}
    for op in graph.ops:
        rows[op.phase] += _op_row(graph, op)
    return [r for r in rows.values() if r.ops]


def by_family(graph: Graph) -> list[SummaryRow]:
    """A row a family of ops, most bytes first."""
    rows: dict[str, SummaryRow] = {}
    for op in graph.ops:
        if op.kernels:
            name = work.family(op.name)
            rows[name] = rows.get(name, SummaryRow(name)) + _op_row(graph, op)
    return sorted(rows.values(), key=lambda r: (-r.flops, -r.moved))


def by_module(graph: Graph, depth: int = 2) -> list[SummaryRow]:
    """A row for every module down to this depth, with all that is inside it, parents first, in the order they ran."""
    rows: dict[tuple[str, ...], SummaryRow] = {}
    for path, row in _contributions(graph):
        for n in range(1, min(depth, len(path)) + 1):
            key = path[:n]
            rows[key] = rows.get(key, SummaryRow(".".join(key), n - 1)) + row
    first = {key: i for i, key in enumerate(rows)}
    return [rows[key] for key in sorted(rows, key=lambda k: [first[k[:n]] for n in range(1, len(k) + 1)])]


def collapsed(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Modules that differ only in their number and have the same figures, all the way down, become one row."""
    out: list[tuple[SummaryRow, list[SummaryRow]]] = []  # a row and those inside it
    for row in rows:
        if out and row.depth > out[-1][0].depth:
            out[-1][1].append(row)
        else:
            out.append((row, []))
    groups: list[list[tuple[SummaryRow, list[SummaryRow]]]] = []
    for branch in out:
        if groups and _alike(groups[-1][-1], branch):
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return [row for group in groups for row in _merged(group)]


def _alike(a: tuple[SummaryRow, list[SummaryRow]], b: tuple[SummaryRow, list[SummaryRow]]) -> bool:
    stem, number = _numbered(a[0].name)
    other, next_number = _numbered(b[0].name)
    if number < 0 or next_number != number + 1 or stem != other:
        return False
    inside = [(r.name.removeprefix(a[0].name), r.figures) for r in a[1]]
    return a[0].figures == b[0].figures and inside == [(r.name.removeprefix(b[0].name), r.figures) for r in b[1]]


def _merged(group: list[tuple[SummaryRow, list[SummaryRow]]]) -> Iterator[SummaryRow]:
    first, inside = group[0]
    if len(group) == 1:
        yield first
        yield from collapsed(inside)
        return
    name = f"{first.name}-{_numbered(group[-1][0].name)[1]}"
    yield _times(first, len(group), name)
    for row in collapsed(inside):
        yield _times(row, len(group), name + row.name.removeprefix(first.name))


def _times(row: SummaryRow, n: int, name: str) -> SummaryRow:
    return SummaryRow(name, row.depth, row.alike * n, *(v * n for v in row.figures))


def _numbered(name: str) -> tuple[str, int]:
    """A name without the number at its end, and the number; -1 where it has none."""
    stem, dot, last = name.rpartition(".")
    return (stem + dot, int(last)) if last.isdecimal() else (name, -1)


def module_path(name: str) -> tuple[str, ...]:
    """The parts of a module's name. A number belongs to the list it counts: 'layer.0' is one part."""
    parts: list[str] = []
    for part in name.split(".") if name else ():
        if part.isdecimal() and parts and not parts[-1].rpartition(".")[2].isdecimal():
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return tuple(parts)


def _contributions(graph: Graph) -> Iterator[tuple[tuple[str, ...], SummaryRow]]:
    """All that adds up to the whole: each op, each parameter, each activation kept, with the module it belongs to."""
    for op in graph.ops:
        yield module_path(op.module) or (_OUTSIDE.get(op.phase, _TOP),), _op_row(graph, op)
    for name, count, nbytes in _parameters(graph):
        yield module_path(name) or (_TOP,), SummaryRow("", parameters=count, parameter_bytes=nbytes)
    for module, nbytes in saved_bytes(graph).items():
        yield module_path(module) or (_TOP,), SummaryRow("", saved_bytes=nbytes)


def _op_row(graph: Graph, op: Op) -> SummaryRow:
    flops, moved = work.flops(graph, op), work.bytes_moved(graph, op)
    return SummaryRow(
        "",
        ops=1,
        kernels=int(op.kernels),
        flops_forward=flops if op.phase == "forward" else 0,
        flops_backward=flops if op.phase == "backward" else 0,
        flops_other=flops if op.phase not in ("forward", "backward") else 0,
        useful_flops=work.useful_flops(graph, op) if flops else 0,
        read=moved.read,
        written=moved.written,
    )


def _parameters(graph: Graph) -> Iterator[tuple[str, int, int]]:
    """(module, elements, bytes) of each parameter's storage; a parameter that two modules share counts once."""
    itemsize = {t.storage: t.itemsize for t in graph.tensors}
    for s in graph.storages:
        if s.role == "parameter":
            yield s.module or s.name.rpartition(".")[0], s.nbytes // itemsize.get(s.id, 4), s.nbytes


def saved_bytes(graph: Graph) -> dict[str, int]:
    """Bytes of activations, by module, that a forward allocates and that the next backward still finds there."""
    backward = _next_backward(graph)
    freed = {e.storage: e.op for e in graph.events if not e.allocates}
    out: dict[str, int] = {}
    for e in graph.events:
        if not e.allocates or e.op >= len(graph.ops) or graph.storages[e.storage].role != "activation":
            continue
        op, begins = graph.ops[e.op], backward[e.op]
        if op.phase == "forward" and begins < len(graph.ops) and freed.get(e.storage, len(graph.ops)) > begins:
            out[op.module] = out.get(op.module, 0) + graph.storages[e.storage].nbytes
    return out


def _next_backward(graph: Graph) -> list[int]:
    """For each op, the number of the next backward op; the number of ops where there is none."""
    out, at = [], len(graph.ops)
    for i in range(len(graph.ops) - 1, -1, -1):
        at = i if graph.ops[i].phase == "backward" else at
        out.append(at)
    return out[::-1]
