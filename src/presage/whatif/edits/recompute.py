"""Blocks of a forward pass that run again in the backward pass, to have what they did not keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec.structs import replace

from presage.graph.graph import Graph, Op, Ref
from presage.whatif.edits.copies import Copies
from presage.whatif.edits.saved import Saved

__all__ = ["Block", "Run", "block", "run_again"]

ENGINE = "autograd::engine::evaluate_function: "
DETACH = ("aten::detach", "detach", "aten::detach")


@dataclass(frozen=True)
class Block:
    """Ops of the forward pass, how many of them run again, and the op of the backward pass before which they do."""

    ops: tuple[int, ...]
    count: int
    numbers: frozenset[int]  # autograd's, of its ops
    before: int

    @property
    def again(self) -> tuple[int, ...]:
        return self.ops[: self.count]


def block(graph: Graph, ops: tuple[int, ...], saved: Saved) -> Block | None:
    """The block of some ops, if they make anything that the backward pass needs, and do not run again already."""
    numbers = frozenset(graph.ops[i].sequence for i in ops if graph.ops[i].sequence >= 0)
    keeping = [n for n in numbers if saved.kept(n)]
    if not keeping or saved.again & {graph.ops[i].module for i in ops}:
        return None
    found = Block(ops, _count(graph, ops, max(keeping), saved), numbers, min(saved.nodes[n][0] for n in keeping))
    needed = {graph.tensors[t].storage for n in keeping for t in saved.kept(n)}
    return found if any(saved.allocated.get(s) in found.again for s in needed) else None


def _count(graph: Graph, ops: tuple[int, ...], last: int, saved: Saved) -> int:
    """Ops until the last node that keeps something has it: before it runs, or after if it keeps a result."""
    own = [k for k, i in enumerate(ops) if graph.ops[i].sequence == last]
    keeps_result = not saved.results(last, [ops[k] for k in own]).isdisjoint(saved.kept(last))
    return own[-1] + 1 if keeps_result else own[0]


@dataclass
class Run:
    """A block's second run: its ops, the storages it has in place of the first run's, and where copies begin."""

    block: Block
    where: dict[int, int]
    ops: list[Op] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # by place in the forward pass, a place in `ops`

    def start(self, place: int) -> int:
        """Where the copy of an op is; the end for what does not run again."""
        return self.starts.get(place, len(self.ops))


def run_again(copies: Copies, saved: Saved, what: Block, number: int) -> Run:
    """The block's ops within the backward node that first needs what they make, numbered from `number` on.

    What a node keeps is detached when it is kept, if a gradient could flow to it.
    """
    graph, again = copies.source, set(what.again)
    run = Run(what, {s: copies.storage(s) for s, place in saved.allocated.items() if place in again})
    shift = number - min(what.numbers)
    ends = {graph.ops[i].sequence: i for i in what.ops}
    begun = {-1}
    for i in what.ops[: what.count + 1]:
        op = _placed(graph, what, i, shift)
        run.starts[i] = len(run.ops)
        if (old := graph.ops[i].sequence) not in begun:
            begun.add(old)
            run.ops += _detached(copies, saved, run, op, old, results=False)
        if i in again:
            run.ops.append(copies.op(op, run.where))
            run.ops += _detached(copies, saved, run, op, old, results=True) if i == ends[old] and old >= 0 else []
    return run


def _placed(graph: Graph, what: Block, place: int, shift: int) -> Op:
    op, node = graph.ops[place], graph.ops[what.before].within[0].removeprefix(ENGINE)
    number = op.sequence + shift if op.sequence >= 0 else -1
    within = (ENGINE + node, node, *op.within)
    return replace(op, phase="backward", thread="autograd", sequence=number, within=within)


def _detached(copies: Copies, saved: Saved, run: Run, op: Op, old: int, results: bool) -> Iterator[Op]:
    """What keeps a node's inputs (before it runs) or its results (after)."""
    graph = copies.source
    made, within = saved.results(old, run.block.ops), (*op.within[:2], *_called(graph, run.block, old), *DETACH)
    for t in saved.distinct(old):
        if (t in made) == results and saved.needs_gradient(t):
            own = copies.tensor(t, run.where)
            yield replace(
                op, name="detach", overload="", inputs=(Ref(own),), outputs=(own,), names=(), writes=(), kernels=False,
                within=within, sync=False, opaque=False,
            )  # fmt: skip


def _called(graph: Graph, what: Block, number: int) -> tuple[str, ...]:
    """The op that autograd saw, with those around it: what all ops of one number have around them."""
    ops = [graph.ops[i] for i in what.ops if graph.ops[i].sequence == number]
    if len(ops) == 1 and not (ops[0].within and ops[0].within[-1].startswith("aten::_")):
        return (*ops[0].within, ops[0].name)
    same = takewhile(lambda names: len(set(names)) == 1, zip(*(op.within for op in ops), strict=False))
    return tuple(names[0] for names in same)
