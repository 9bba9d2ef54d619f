"""Host time terms of a step: its ops in units (what a profiler shows as one outermost op), and the terms of each.

An op's host time is a sum of a few small terms, each with a key: `gap`s between units, ops around it (`wrap`) that it
is the first to run in, the op itself (`leaf`), tensors in its lists, launches beyond the first. A key is a class
(`leaf forward kernel`), or a class and a name (`leaf forward kernel: aten::mm`) for how that name differs from its
class. A sum of terms carries over to steps that were never traced: what is new there is the order, seldom the ops.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from presage.costs.host_constants import COMPILED_CALL, COMPILED_KERNEL, compiled_graph, is_compiled
from presage.graph.families import family
from presage.graph.graph import Graph, Op, Ref, Thread

Role: TypeAlias = Literal["forward", "backward", "optimizer"]
Term: TypeAlias = tuple[str, float]  # a key, and how many times

ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "AccumulateGrad"
NODE = 2  # a backward node is two ops of the profiler's: the engine's call and the node itself


@dataclass(frozen=True, slots=True)
class HostUnit:
    """Ops that one outermost op of the profiler's holds: their places in the graph, first to last."""

    name: str
    thread: str
    ops: tuple[int, ...]


def role(op: Op) -> Role:
    """Where an op runs: on autograd's thread, in the optimizer (no gradients, tight loops), or in the user's code."""
    if op.thread == "autograd":
        return "backward"
    return "optimizer" if op.phase == "optimizer" else "forward"


def named(key: str) -> bool:
    """Whether a key is of one name and not of a class."""
    return ": " in key


def host_units(graph: Graph) -> list[HostUnit]:
    """The graph's ops in the profiler's outermost ops, in order."""
    out: list[list[int]] = []
    in_backward = _made_in_backward(graph)
    for i, op in enumerate(graph.ops):
        if out and _goes_on(graph.ops, out[-1], op, in_backward[i] or in_backward[out[-1][-1]]):
            out[-1].append(i)
        else:
            out.append([i])
    return [HostUnit(_outermost(graph.ops[u[0]]), graph.ops[u[0]].thread, tuple(u)) for u in out]


def _made_in_backward(graph: Graph) -> list[bool]:
    """Which ops autograd numbered in a backward pass: higher than all of the forward before it."""
    newest, out = -1, []
    for op in graph.ops:
        newest = max(newest, op.sequence) if op.thread == "main" else newest
        out.append(op.thread == "autograd" and 0 <= newest < op.sequence)
    for i in range(len(out) - 2, -1, -1):  # a node recomputes before all else: what is ahead of it there is part of it
        op, after = graph.ops[i], graph.ops[i + 1]
        out[i] |= out[i + 1] and op.thread == "autograd" and op.within[:NODE] == after.within[:NODE]
    return out


def _outermost(op: Op) -> str:
    return op.within[0] if op.within else op.name


def _goes_on(ops: Sequence[Op], unit: Sequence[int], op: Op, in_backward: bool) -> bool:
    """Whether an op belongs to the unit that was last; `in_backward`: it or the op before is numbered in a
    backward pass."""
    first, last = ops[unit[0]], ops[unit[-1]]
    if is_compiled(op) or is_compiled(last):
        return (op.within, op.compiled) == (last.within, last.compiled)
    if not op.within or _outermost(first) != op.within[0] or (op.phase, op.thread) != (first.phase, first.thread):
        return False
    if op.thread == "autograd":
        apart = _nested(last) and not _nested(op)  # a node that recomputes runs its own backward last
        return not op.within[0].endswith(ACCUMULATE) and not apart and (in_backward or op.sequence == last.sequence)
    if (op.module, op.line) != (first.module, first.line):
        return False
    if not first.within or op.within[0].startswith("aten::_foreach"):
        return True
    # the first thing inside comes again after others: the same op is called anew
    return not _second(op) == _second(first) != _second(last)


def _nested(op: Op) -> bool:
    """Whether a backward pass runs it that itself runs within a backward node."""
    return any(name.startswith(ENGINE) for name in op.within[1:])


def _second(op: Op) -> str:
    return op.within[1] if len(op.within) > 1 else op.name


def host_terms(graph: Graph, host_units: Sequence[HostUnit]) -> Iterator[tuple[int, list[Term], list[Term]]]:
    """For each op in order: its index, the terms of the gap before it, and its own terms.

    Launches beyond an op's first are not included: the kernel model gives their number.
    """
    skipped, recomputed = _Empty(graph), _recomputed(graph)
    checkpointed = checkpoints(graph, recomputed)
    parameters = sum(s.role == "parameter" for s in graph.storages)
    before, module, nodes, compiled = None, "", set[int](), set[str]()
    for unit in host_units:
        first = graph.ops[unit.ops[0]]
        gap = [*_between(before, first, unit, parameters, len(nodes), _list(graph, unit))]
        if first.thread == "autograd":
            gap.append(("empty backward node", skipped.before(first.sequence)))
        else:
            skipped.begin()
            nodes = nodes if before is not None and before.thread == "main" else set()
            nodes |= {graph.ops[i].sequence for i in unit.ops if graph.ops[i].sequence >= 0}
        if is_compiled(first):
            own = [graph.ops[i] for i in unit.ops]
            gap.append((compiled_graph(own, first.thread not in compiled), 1.0))
            compiled.add(first.thread)
        elif role(first) == "forward":
            gap.append(("module border", _borders(module, first.module)))
            module = first.module
        last = None
        for i in unit.ops:
            op = graph.ops[i]
            again = recomputed[i]
            start = [(checkpointed.begins[i], 1.0)] if i in checkpointed.begins else []
            gap, inside = (gap, start) if again else (gap + start, [])
            hooks = [("kept tensor", checkpointed.hooks[i])] if i in checkpointed.hooks else []
            yield i, gap, [*inside, *_inside(last, op, again), *_own(op, last, again), *hooks]
            gap, last = [], op
        before = first


def step_end_terms(host_units: Sequence[HostUnit]) -> list[Term]:
    """The terms after the last op: what the step made is given back."""
    return [("step end", 1.0), ("step end, a unit", float(len(host_units)))]


def _between(before: Op | None, first: Op, unit: HostUnit, parameters: int, nodes: int, tensors: int) -> Iterator[Term]:
    """From the end of the last unit to the start of this one."""
    where = role(first)
    if where == "optimizer" and (before is None or role(before) != "optimizer"):
        yield "optimizer begins", 1.0
        yield "optimizer begins, a parameter", float(parameters)
    if before is None:
        yield "step begins", 1.0
        yield "step begins, a parameter", float(parameters)
    elif before.thread != first.thread:
        yield f"to the {first.thread} thread", 1.0
        yield f"to the {first.thread} thread, a node", float(nodes)
    else:
        yield f"gap {where}", 1.0
        yield f"gap {where}: {unit.name.removeprefix(ENGINE)}", 1.0
        if where == "optimizer":
            yield "gap optimizer, a tensor", float(tensors)


def _recomputed(graph: Graph) -> list[bool]:
    """Which ops a backward node runs as forward code, to have again what a checkpoint did not keep."""
    return [
        in_backward and not _nested(op) for op, in_backward in zip(graph.ops, _made_in_backward(graph), strict=True)
    ]


def _inside(last: Op | None, op: Op, again: bool) -> Iterator[Term]:
    """Gaps within a unit: between recomputed ops, which are Python's, and between the nodes of a backward in it."""
    if again:
        inner = op.within[NODE:]
        if last is None or not inner or _shared(last, op) <= NODE:
            yield "gap forward", 1.0
            yield f"gap forward: {inner[0] if inner else op.name}", 1.0
            yield "module border", _borders(last.module if last else "", op.module)
    elif last is not None and _nested(op) and op.sequence != last.sequence:
        yield "gap backward", 1.0


def _own(op: Op, last: Op | None, again: bool) -> Iterator[Term]:
    """What the op itself takes, with the ops around it that it is the first to run in."""
    where = "forward" if again else role(op)
    if is_compiled(op) and op.name.startswith("triton::"):
        yield COMPILED_KERNEL, 1.0
        return
    if is_compiled(op):
        yield COMPILED_CALL, 1.0
        last = op
    for depth in range(_shared(last, op) if last else 0, len(op.within)):
        name = op.within[depth].removeprefix(ENGINE)
        if not depth or name != op.within[depth - 1].removeprefix(ENGINE):
            around = "backward" if again and depth < NODE else where
            yield f"wrap {around}", 1.0
            yield f"wrap {around}: {name}", 1.0
    kind = "kernel" if op.kernels else "plain"
    yield f"leaf {where} {kind}", 1.0
    yield f"leaf {where} {kind}: {op.name}", 1.0
    if tensors := longest_list(op):
        yield "listed tensor", float(tensors)
        yield f"listed tensor: {op.name}", float(tensors)


def _shared(last: Op, op: Op) -> int:
    """How many of the ops around it were around the last op too; from another line, only a backward node."""
    same = _common(last.within, op.within)
    moved = op.thread == "autograd" and (last.module, last.line) != (op.module, op.line)
    return min(same, NODE) if moved else same


def extra_launches(name: str, launches: int, ops: int = 1) -> Iterator[Term]:
    """Terms of launches beyond one per op: the second, and further ones (a loop in C++)."""
    if launches > ops:
        yield "second launch", float(min(launches - ops, ops))
        yield f"second launch: {name}", float(min(launches - ops, ops))
    if launches > 2 * ops:
        yield "further launch recurrent" if family(name) == "recurrent" else "further launch", float(launches - 2 * ops)
        yield f"further launch: {name}", float(launches - 2 * ops)


def longest_list(op: Op) -> int:
    """The number of tensors in the longest list among an op's inputs."""
    return max((sum(isinstance(x, Ref) for x in a) for a in op.inputs if isinstance(a, list)), default=0)


def _list(graph: Graph, unit: HostUnit) -> int:
    return max(longest_list(graph.ops[i]) for i in unit.ops)


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


def _borders(a: str, b: str) -> float:
    """How many modules are left and entered on the way from one to another."""
    here, there = a.split(".") if a else [], b.split(".") if b else []
    return float(len(here) + len(there) - 2 * _common(here, there))


class _Empty:
    """Backward nodes that run no op, which the graph does not hold: numbers of forward ops that no backward op has."""

    def __init__(self, graph: Graph) -> None:
        forward = {op.sequence for op in graph.ops if role(op) == "forward" and op.sequence >= 0}
        self.numbers = sorted(forward - {op.sequence for op in graph.ops if op.thread == "autograd"})
        self.last = -1

    def begin(self) -> None:
        self.last = -1

    def before(self, sequence: int) -> float:
        """Empty nodes between the lowest node so far and this one: autograd runs from the highest down."""
        if sequence < 0 or sequence > self.last >= 0:
            return 0.0
        since, self.last = self.last, sequence
        if since < 0:
            return 0.0
        return float(max(0, bisect_left(self.numbers, since) - bisect_right(self.numbers, sequence)))


# ---- Activation checkpoints of a step, as the host has them: where they begin, and how often their hooks run.

Call: TypeAlias = tuple[str, str]  # of an op: its module, its name

KEPT = "detach"  # what a recomputation does with a tensor that it keeps
ENOUGH = 16  # ops that have to be the same for one stretch to repeat another


@dataclass(frozen=True)
class Checkpoints:
    """By place of an op: what begins with it, and for how many tensors hooks run with it."""

    begins: dict[int, str] = field(default_factory=dict)
    hooks: dict[int, float] = field(default_factory=dict)


def checkpoints(graph: Graph, recomputed: Sequence[bool]) -> Checkpoints:
    """Those of a graph; `recomputed`: which ops a backward node runs as forward ops."""
    out = Checkpoints()
    if not any(recomputed):
        return out
    main = [i for i, op in enumerate(graph.ops) if op.thread == "main"]
    calls = defaultdict[Call, list[int]](list)
    for k, i in enumerate(main):
        calls[_call(graph.ops[i])].append(k)
    nodes = [_first_of_number(graph, thread) for thread in ("main", "autograd")]
    for run in _runs(recomputed):
        out.begins[run.start] = "recomputation begins"
        first = _repeated(graph, run, main, calls)
        if first is not None:
            out.begins[first] = "checkpoint begins"
            _note_hooks(graph, run, first, nodes, out.hooks)
    return out


def _first_of_number(graph: Graph, thread: Thread) -> dict[int, int]:
    return {op.sequence: i for i, op in reversed([*enumerate(graph.ops)]) if op.thread == thread and op.sequence >= 0}


def _runs(recomputed: Sequence[bool]) -> Iterator[range]:
    start = 0
    for i, yes in enumerate([*recomputed, False]):
        if not yes:
            if start < i:
                yield range(start, i)
            start = i + 1


def _repeated(graph: Graph, run: range, main: Sequence[int], calls: Mapping[Call, list[int]]) -> int | None:
    """The forward op that a recomputed run starts from: the last one followed by the same ops that the backward pass
    has not yet passed."""
    again = [_call(graph.ops[i]) for i in run if graph.ops[i].name != KEPT][:ENOUGH]
    reached = graph.ops[run.stop].sequence if run.stop < len(graph.ops) else -1
    for k in reversed(calls.get(again[0], []) if again else []):
        before = main[k] < run.start and graph.ops[main[k]].sequence <= reached
        if before and [_call(graph.ops[i]) for i in main[k : k + len(again)]] == again:
            return main[k]
    return None


def _call(op: Op) -> Call:
    return op.module, op.name


def _note_hooks(graph: Graph, run: range, first: int, nodes: Sequence[dict[int, int]], hooks: dict[int, float]) -> None:
    """Count saved-tensor hooks of a run: in the run itself, and at the ops of the forward and the backward pass."""
    kept = Counter(graph.ops[i].sequence for i in run if graph.ops[i].name == KEPT)
    hooks |= {i: 1.0 for i in run if graph.ops[i].name == KEPT}
    numbers = [graph.ops[i].sequence for i in run if graph.ops[i].sequence >= 0]
    old = next((op.sequence for op in graph.ops[first:] if op.sequence >= 0), -1)
    for number, count in kept.items():
        for places in nodes:
            if (place := places.get(number - min(numbers) + old)) is not None:
                hooks[place] = float(count)
