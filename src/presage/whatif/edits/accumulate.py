"""Gradient accumulation: forward and backward several times before the optimizer runs once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.arguments import references
from presage.graph.check import uses
from presage.graph.graph import Event, Graph, Op, Ref, Storage
from presage.whatif.edits.copies import Copies
from presage.whatif.edits.edit import Change, NotApplicable, valued

__all__ = ["EDITS", "accumulate", "factor"]

ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
ADD = "aten::add_"


def factor(value: str) -> int:
    """How many microbatches a step has under accumulate=VALUE."""
    if not value.isdecimal() or int(value) < 2:
        raise PresageError(f"accumulate={value} is not a number of microbatches: write 2 or more, as in accumulate=4")
    return int(value)


def accumulate(microbatches: int) -> Change:
    """The step with so many microbatches of the size it has."""
    if microbatches < 2:
        raise PresageError(f"{microbatches} microbatches accumulate nothing: 2 or more do")

    def change(graph: Graph) -> Graph:
        bodies = _bodies(graph)
        if not bodies:
            raise NotApplicable("no backward pass that could run more than once before the optimizer")
        for body in reversed(bodies):
            graph = _repeated(graph, body, microbatches)
        return replace(graph, notes=(*graph.notes, f"{microbatches} microbatches a step"))

    return change


def _bodies(graph: Graph) -> list[range]:
    """Forward and backward passes between optimizer steps: from the first op that is not about old gradients."""
    found: list[range] = []
    start = 0
    for end in [*(i for i, op in enumerate(graph.ops) if op.phase == "optimizer"), len(graph.ops)]:
        backward = [i for i in range(start, end) if graph.ops[i].thread == "autograd"]
        first = next((i for i in range(start, end) if not _clears(graph, graph.ops[i])), end)
        if backward and first <= backward[-1]:
            found.append(range(first, backward[-1] + 1))
        start = end + 1
    return found


def _clears(graph: Graph, op: Op) -> bool:
    """Whether an op sets gradients to zero."""
    touched, zeroes = uses(graph, op), any("zero" in name for name in (op.name, *op.within))
    return zeroes and bool(touched) and all(graph.storages[s].role == "gradient" for s in touched)


@dataclass(frozen=True)
class _Gain:
    """Where a gradient is added to its parameter's: the ops that do it, what comes in and where it goes (tensors)."""

    ops: range
    incoming: tuple[int, ...]  # one, or of a sparse gradient indices and values
    target: int
    taken: bool  # there was none yet: what comes in becomes the parameter's


def _gains(graph: Graph, body: range) -> Iterator[_Gain]:
    """The gains of a body; ops on autograd's last nodes, one stretch for each parameter."""
    start = body.start
    for i in body:
        if not _accumulates(graph.ops[i]):
            start = i + 1
        elif i + 1 == body.stop or not _accumulates(graph.ops[i + 1]) or _arrived(graph, i):
            yield from _gain(graph, range(start, i + 1))
            start = i + 1


def _accumulates(op: Op) -> bool:
    return bool(op.within) and op.within[0] == ACCUMULATE


def _arrived(graph: Graph, place: int) -> bool:
    """Whether an op has left a gradient where it stays, and the next one is about another."""
    kept = {t.storage for t in graph.outputs_of(graph.ops[place]) if graph.storages[t.storage].role == "gradient"}
    rest = takewhile(_accumulates, graph.ops[place + 1 :])
    return bool(kept) and kept.isdisjoint(next((s for op in rest if (s := uses(graph, op))), ()))


def _gain(graph: Graph, ops: range) -> Iterator[_Gain]:
    read = [graph.tensors[i] for k in ops for i in references(graph.ops[k].inputs)]
    made = [graph.tensors[i] for k in ops for i in graph.ops[k].outputs]
    sparse = next((t for t in read if t.shape and not t.strides), None)
    if sparse is not None:
        parts = {t.storage == sparse.storage: t.id for t in made}
        if len(parts) == 2:  # indices and values
            yield _Gain(ops, (parts[False], parts[True]), sparse.id, taken=True)
    elif read and made:
        incoming = next((t for t in read if t.storage != made[-1].storage), read[0])
        yield _Gain(ops, (incoming.id,), made[-1].id, taken=graph.ops[ops[-1]].name != ADD)


@dataclass(frozen=True)
class _Body:
    """Ops that run several times, with the storages they make: when each is allocated, and freed if it is."""

    ops: range
    gains: tuple[_Gain, ...]
    lives: Mapping[int, tuple[int, int | None]]

    @property
    def outliving(self) -> Iterator[int]:
        """Storages that are there after it."""
        return (s for s, (_, end) in self.lives.items() if end is None or end > self.ops.stop)


def _body(graph: Graph, ops: range) -> _Body:
    freed = {e.storage: e.op for e in graph.events if not e.allocates}
    made = (e for e in graph.events if e.allocates and e.op in ops)
    return _Body(ops, tuple(_gains(graph, ops)), {e.storage: (e.op, freed.get(e.storage)) for e in made})


@dataclass(frozen=True)
class _Turn:
    """One time that a body runs: where each of its ops is (and its end), and the storages of its own."""

    places: tuple[int, ...]
    own: Mapping[int, int]
    ops: tuple[Op, ...] = ()

    def place(self, body: _Body, op: int) -> int:
        return self.places[op - body.ops.start]


def _repeated(graph: Graph, ops: range, times: int) -> Graph:
    copies, body = Copies(graph), _body(graph, ops)
    targets = {graph.tensors[g.target].storage: g for g in reversed(body.gains)}  # of several gains the first
    numbers = [op.sequence for op in graph.ops if op.sequence >= 0]
    count = max(numbers) - min(numbers) + 1 if numbers else 0
    turns = [_Turn(tuple(range(ops.start, ops.stop + 1)), {s: s for s in body.lives})]
    for k in range(1, times):
        turns.append(_turn(graph, copies, body, turns[-1].places[-1], k * count))
    last = {s: turns[-1].own[s] for s in body.outliving if s not in targets}
    late = [copies.op(_numbered(op, count * (times - 1)), last) for op in graph.ops[ops.stop :]]
    again = (op for turn in turns for op in turn.ops)
    return copies.graph([*graph.ops[: ops.stop], *again, *late], _events(graph, body, turns, targets))


def _numbered(op: Op, later: int) -> Op:
    return replace(op, sequence=op.sequence + later) if op.sequence >= 0 else op


def _turn(graph: Graph, copies: Copies, body: _Body, start: int, later: int) -> _Turn:
    """One more microbatch: gradients are added to those that are there, all else is on new memory."""
    own = {s: copies.storage(s, **_as_activation(graph.storages[s])) for s in body.lives}
    where, by_op = dict(own), {i: g for g in body.gains if g.taken for i in g.ops}
    ops: list[Op] = []
    places = []
    for i in body.ops:
        places.append(start + len(ops))
        op, gain = _numbered(graph.ops[i], later), by_op.get(i)
        if gain is None:
            ops.append(copies.op(op, where))
        elif i == gain.ops[-1]:
            ops.append(_added(op, gain.target, [copies.tensor(i, where) for i in gain.incoming]))
            where.pop(graph.tensors[gain.target].storage, None)
    return _Turn((*places, start + len(ops)), own, tuple(ops))


def _as_activation(storage: Storage) -> dict[str, str]:
    return {"role": "activation", "name": ""} if storage.role == "gradient" else {}


def _added(op: Op, target: int, incoming: Sequence[int]) -> Op:
    """What adds a gradient to one that is there, in place of an op that takes it over."""
    into = replace(op, outputs=(target,), writes=(target,), within=op.within[:2], kernels=True)
    if len(incoming) == 1:
        dense = (Ref(target), Ref(*incoming), 1)
        return replace(into, name=ADD, overload="Tensor", names=("self", "other", "alpha"), inputs=dense)
    sparse = (Ref(target), 0, *map(Ref, incoming), 1)
    names = ("self", "dim", "index", "source", "alpha")
    return replace(into, name="aten::index_add_", overload="", names=names, inputs=sparse)


def _events(graph: Graph, body: _Body, turns: Sequence[_Turn], targets: Mapping[int, _Gain]) -> Iterator[Event]:
    """All lifetimes: what the body makes lives once for each turn, what it only uses to the last."""
    for k, turn in enumerate(turns):
        yield from _held(body, turns, k, targets)
        for e in graph.events:
            if e.storage in body.lives and e.op <= body.ops.stop:
                yield Event(turn.place(body, e.op), turn.own[e.storage], e.allocates)
    longer, used = turns[-1].places[-1] - body.ops.stop, {s for i in body.ops for s in uses(graph, graph.ops[i])}
    for e in graph.events:
        if e.op > body.ops.stop:
            own = e.storage if e.storage in targets else turns[-1].own.get(e.storage, e.storage)
            yield Event(e.op + longer, own, e.allocates)
        elif e.storage not in body.lives:
            late = e.op == body.ops.stop or (e.storage in used and e.op > body.ops.start)
            yield replace(e, op=turns[-1].place(body, e.op)) if late else e


def _held(body: _Body, turns: Sequence[_Turn], number: int, targets: Mapping[int, _Gain]) -> Iterator[Event]:
    """The end, in one turn, of what outlives the body: a loss until the next is there, a gradient until it is added."""
    turn = turns[number]
    for s in body.outliving:
        if s in targets and number > 0:
            yield Event(turn.place(body, targets[s].ops.stop), turn.own[s], False)
        elif s not in targets and turn is not turns[-1]:
            yield Event(turns[number + 1].place(body, body.lives[s][0]) + 1, turn.own[s], False)


EDITS = (
    valued(
        "accumulate",
        "Forward and backward run K times, each time with a microbatch of the size the step has, before the optimizer "
        "runs once: from the second on, gradients are added to those there are. A step then has K times the samples.",
        "K",
        lambda value: accumulate(factor(value)),
        tried=("2",),
    ),
)
