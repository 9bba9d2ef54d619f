"""Activation checkpointing: blocks keep only their inputs, and run again in the backward pass."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from presage.graph.graph import Event, Graph, Op
from presage.whatif.edits.blocks import calls, matching, repeated
from presage.whatif.edits.copies import Copies, users
from presage.whatif.edits.edit import Change, NotApplicable, valued
from presage.whatif.edits.recompute import Block, Run, block, run_again
from presage.whatif.edits.saved import Saved

__all__ = ["EDITS", "checkpoint"]

CAST = ("aten::to", "aten::_to_copy")


def checkpoint(pattern: str = "") -> Change:
    """Checkpoints of the modules whose names match; of the repeated blocks where nothing is said."""

    def change(graph: Graph) -> Graph:
        modules = matching(graph, pattern) if pattern else repeated(graph)
        saved = Saved(graph)
        blocks = [b for ops in calls(graph, modules) if (b := block(graph, ops, saved))]
        if not blocks:
            raise NotApplicable(_missing(pattern, modules))
        return _recomputed(graph, sorted(blocks, key=lambda b: b.before), saved)

    return change


def _missing(pattern: str, modules: Sequence[str]) -> str:
    if modules:
        return f"nothing that {modules[0]} makes for the backward pass could be computed again there"
    return f"no module called {pattern}" if pattern else "no repeated blocks: no numbered modules that hold others"


def _recomputed(graph: Graph, blocks: Sequence[Block], saved: Saved) -> Graph:
    copies, runs = Copies(graph), list[Run]()
    number = max(op.sequence for op in graph.ops) + 1
    for b in blocks:
        runs.append(run_again(copies, saved, b, number))
        number += max(b.numbers) - min(b.numbers) + 1
    by_node = {n: run for run in runs for n in run.block.numbers}
    at = {run.block.before: run for run in runs}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        ops += at[i].ops if i in at else []
        run = by_node.get(op.sequence) if op.thread == "autograd" else None
        ops.append(copies.op(op, run.where) if run else op)
    return copies.graph(ops, _Lifetimes(graph, runs, saved).events())


class _Lifetimes:
    """When memory is allocated and freed once blocks run again."""

    def __init__(self, graph: Graph, runs: Sequence[Run], saved: Saved) -> None:
        self.graph, self.runs, self.users = graph, runs, users(graph)
        self.freed = {e.storage: e.op for e in graph.events if not e.allocates}
        self.befores = [run.block.before for run in runs]
        self.lengths = [0, *accumulate(len(run.ops) for run in runs)]
        self.casts = _casts(graph, saved)
        self.nodes = {i: n for n, places in saved.nodes.items() for i in places}

    def events(self) -> Iterator[Event]:
        run_of = {s: run for run in self.runs for s in run.where}
        ends = {s: self._first_end(s, run) for s, run in run_of.items()}
        for s, end in ends.items():
            if end is not None:
                yield Event(self._after(end), s, False)
        for run in self.runs:
            yield from self._second(run)
        for e in self.graph.events:
            if e.allocates:
                yield Event(self._place(e.op), e.storage, True)
            elif ends.get(e.storage) is None:
                yield Event(self._after(e.op), e.storage, False)

    def _place(self, op: int) -> int:
        """Where an op now is."""
        return op + self.lengths[bisect_right(self.befores, op)]

    def _after(self, op: int) -> int:
        """Right after the op before this one."""
        return op + self.lengths[bisect_left(self.befores, op)]

    def _split(self, storage: int, run: Run) -> tuple[list[int], list[int]]:
        """The ops that use a storage: nodes of the block, which now use the second run's, and all others."""
        mine = [i for i in self.users.get(storage, ()) if self.nodes.get(i) in run.block.numbers]
        return mine, [i for i in self.users.get(storage, ()) if i not in set(mine)]

    def _first_end(self, storage: int, run: Run) -> int | None:
        """When the first run's storage is freed, if that is sooner than it was."""
        mine, others = self._split(storage, run)
        if not mine or not others or storage not in self.freed or others[-1] > mine[-1]:
            return None
        return min(self.freed[storage], max(others[-1] + 1, self.casts.get(storage, 0)))

    def _second(self, run: Run) -> Iterator[Event]:
        """The lifetimes of the second run's storages."""
        begin = self._place(run.block.before) - len(run.ops)
        for e in self.graph.events:
            if e.storage in run.where and e.allocates:
                yield Event(begin + run.start(e.op), run.where[e.storage], True)
        for s, own in run.where.items():
            mine, _ = self._split(s, run)
            if not mine:
                yield Event(begin + run.start(self.freed.get(s, -1)), own, False)
            else:
                yield Event(self._after(self._given_back(mine[-1])), own, False)

    def _given_back(self, last: int) -> int:
        """The end of a node's own code, after its last use of what was kept; what autograd does then comes after."""
        ops, around = self.graph.ops, self.graph.ops[last].within[:2]
        return next((i for i in range(last + 1, len(ops)) if ops[i].within[:2] != around), len(ops))


def _casts(graph: Graph, saved: Saved) -> dict[int, int]:
    """Storages of weights that autocast has cast, and when it lets go of them: where the forward pass ends."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    end = 0
    for i, op in enumerate(graph.ops):
        if op.thread == "main":
            end = end if "aten::ones_like" in op.within else i + 1
            waiting += [graph.tensors[t].storage for t in op.outputs] if _casts_weight(graph, op, saved) else []
        else:
            found |= dict.fromkeys(waiting, end)
            waiting = []
    return found


def _casts_weight(graph: Graph, op: Op, saved: Saved) -> bool:
    if op.name != "aten::copy_" or len(op.within) < 3 or op.within[-2:] != CAST:
        return False
    return any(
        graph.storages[t.storage].role == "parameter" and t.storage in saved.differentiable for t in graph.inputs_of(op)
    )


EDITS = (
    valued(
        "checkpoint",
        "Modules whose name matches (by default the repeated blocks, as blocks.0 and blocks.1) keep only their inputs; "
        "what their backward pass needs is computed again when it comes to it, as torch.utils.checkpoint does with "
        "use_reentrant=False. Less memory, more time.",
        "REGEX",
        checkpoint,
        tried=("",),
        needed=False,
    ),
)
