"""What changed between two graphs: ops added, removed, changed, moved, by module and phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, TypeAlias

from presage.graph.graph import Graph, Op, Phase, Ref

Kind: TypeAlias = Literal["added", "removed", "changed", "moved"]
KINDS: tuple[Kind, ...] = ("added", "removed", "changed", "moved")
UNEVEN = 0.02  # of the elements that a step's ops read, and of the ops
_SIGN: dict[Kind, str] = {"added": "+", "removed": "-", "changed": "~", "moved": "^"}


@dataclass(frozen=True, slots=True)
class OpChange:
    """One op that differs. `before` and `after` are places in the two graphs' ops, None where it has none there."""

    kind: Kind
    module: str
    phase: Phase
    name: str
    before: int | None
    after: int | None
    what: tuple[str, ...]  # 'shape', 'dtype', 'strides', 'arguments', 'thread', ...: what a changed op differs in
    detail: str  # the op's tensors, or 'old -> new'
    kernels: bool = True  # whether it launches anything, in either graph


@dataclass(frozen=True, slots=True)
class GraphDiff:
    changes: tuple[OpChange, ...]
    same: int  # ops that are in both and equal

    def __bool__(self) -> bool:
        return bool(self.changes)

    def count(self, kind: Kind) -> int:
        return sum(c.kind == kind for c in self.changes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An op as two graphs can compare it: without ids."""

    place: int
    name: str
    kernels: bool
    facets: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name, *self.facets)


_Groups: TypeAlias = dict[tuple[str, Phase], list[_Entry]]
_Pair: TypeAlias = tuple[_Entry | None, _Entry | None]


def diff(before: Graph, after: Graph) -> GraphDiff:
    """Align the ops of each module and phase, then say what differs."""
    old, new = _groups(before), _groups(after)
    changes: list[OpChange] = []
    same = 0
    for where in {**old, **new}:
        pairs = list(_aligned(old.get(where, []), new.get(where, [])))
        equal = sum(a is not None and b is not None and a.key == b.key for a, b in pairs)
        same += equal
        if equal < len(pairs):
            changes += [_change(where, a, b) for a, b in _with_moves(pairs)]
    return GraphDiff((*changes, *_moved_groups(old, new)), same)


def alike(one: Graph, other: Graph) -> bool:
    """Whether two ranks run the same step: the same collectives in the same groups, hosts that wait alike, and as many
    other ops of each kind on as much, but for a few and for shards that do not come out even."""
    met, counts, sizes = [], [], []
    for g in (one, other):
        ops = [op for op in g.ops if op.kernels]
        met.append([(op.name, op.group) for op in ops if op.group or op.sync])
        counts.append(Counter((op.name, op.phase) for op in ops))
        sizes.append(Counter[Any]())
        for op in ops:
            sizes[-1][op.name, op.phase] += sum(t.elements for t in g.inputs_of(op))
    pairs = [sum(abs(a[k] - b[k]) for k in {**a, **b}) <= UNEVEN * a.total() for a, b in ((*counts,), (*sizes,))]
    return met[0] == met[1] and all(pairs)


def lines(found: GraphDiff, most: int = 40) -> list[str]:
    """A short printable form: ops that launch kernels; like changes of numbered modules ('blocks.3') are told once."""
    if not found:
        return [f"no difference in {found.same} ops"]
    shown = [c for c in found.changes if c.kernels]
    counts = Counter((_pattern(c.module), c.phase, c.kind, c.name, c.detail) for c in shown)
    numbers = ", ".join(f"{found.count(k)} {k}" for k in KINDS if found.count(k))
    out, heading = [f"{numbers}; {found.same} ops the same"], ""
    for (module, phase, kind, name, detail), times in list(counts.items())[:most]:
        here = f"{module or '(top level)'}, {phase}"
        if here != heading:
            out.append(here)
            heading = here
        out.append(f"  {_SIGN[kind]} {name} {detail}" + (f"  ({times} times)" if times > 1 else ""))
    if len(counts) > most:
        out.append(f"... and {len(counts) - most} more kinds of change")
    if len(shown) < len(found.changes):
        out.append(f"... and {len(found.changes) - len(shown)} changes of ops that launch nothing (views, bookkeeping)")
    return out


def _pattern(module: str) -> str:
    return re.sub(r"(?<!\w)\d+(?!\w)", "*", module)


# ---- ops made comparable


def _groups(graph: Graph) -> _Groups:
    groups: _Groups = {}
    for i, op in enumerate(graph.ops):
        groups.setdefault((op.module, op.phase), []).append(_entry(graph, i, op))
    return groups


def _entry(graph: Graph, place: int, op: Op) -> _Entry:
    tensors = [*graph.inputs_of(op), *graph.outputs_of(op)]
    written = tuple(n for n, t in enumerate(graph.inputs_of(op)) if t.id in op.writes)
    facets = (
        ("shape", tuple(t.shape for t in tensors)),
        ("dtype", tuple(t.dtype for t in tensors)),
        ("strides", tuple(t.strides for t in tensors)),
        ("arguments", (op.overload, _scalars(op.inputs))),
        ("in place", written),
        ("thread", op.thread),
        ("kernels", (op.kernels, op.sync)),
    )
    return _Entry(place, op.name, op.kernels, facets)


def _scalars(values: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with tensors blanked. Types are part of it, as 1 == 1.0 == True."""
    return tuple(
        "tensor" if isinstance(v, Ref) else _scalars(v) if isinstance(v, list) else (type(v).__name__, repr(v))
        for v in values
    )


# ---- alignment


def _aligned(old: list[_Entry], new: list[_Entry]) -> Iterator[_Pair]:
    """Pairs of what stands for the same op. Equal ops first; in between, ops of the same name in order.

    Where all names agree the order is right as it is, though ops of another batch may happen to equal their neighbours.
    """
    if [e.name for e in old] == [e.name for e in new]:
        yield from zip(old, new, strict=True)
        return
    keys: dict[tuple[Any, ...], int] = {}
    number = [[keys.setdefault(e.key, len(keys)) for e in entries] for entries in (old, new)]
    for tag, i0, i1, j0, j1 in _opcodes(number[0], number[1]):
        if tag == "equal":
            yield from zip(old[i0:i1], new[j0:j1], strict=True)
        else:
            yield from _by_name(old[i0:i1], new[j0:j1])


def _by_name(old: list[_Entry], new: list[_Entry]) -> Iterator[_Pair]:
    for tag, i0, i1, j0, j1 in _opcodes([e.name for e in old], [e.name for e in new]):
        if tag == "equal":
            yield from zip(old[i0:i1], new[j0:j1], strict=True)
        else:
            yield from ((e, None) for e in old[i0:i1])
            yield from ((None, e) for e in new[j0:j1])


_MOST_PAIRS = 2_000_000


def _opcodes(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[str, int, int, int, int]]:
    """As difflib's, with equal ends set aside first: they are most of two graphs and cost nothing this way."""
    head = _common(a, b)
    tail = _common(a[head:][::-1], b[head:][::-1])
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    counts = Counter(inner_b)
    often = sum(counts[x] for x in inner_a) > _MOST_PAIRS  # then difflib sets frequent keys aside, and stays fast
    codes = [
        (tag, i0 + head, i1 + head, j0 + head, j1 + head)
        for tag, i0, i1, j0, j1 in SequenceMatcher(None, inner_a, inner_b, autojunk=often).get_opcodes()
    ]
    before = [("equal", 0, head, 0, head)] if head else []
    after = [("equal", len(a) - tail, len(a), len(b) - tail, len(b))] if tail else []
    return [*before, *codes, *after]


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# ---- changes


def _change(where: tuple[str, Phase], a: _Entry | None, b: _Entry | None) -> OpChange:
    entry = a or b
    assert entry is not None
    kind: Kind = "removed" if not b else "added" if not a else "moved" if a.key == b.key else "changed"
    what, detail = _compared(a, b) if a and b and kind == "changed" else ((), _tensors(entry))
    return OpChange(
        kind,
        *where,
        name=entry.name,
        before=a.place if a else None,
        after=b.place if b else None,
        what=("order",) if kind == "moved" else what,
        detail=detail,
        kernels=bool((a and a.kernels) or (b and b.kernels)),
    )


def _compared(a: _Entry, b: _Entry) -> tuple[tuple[str, ...], str]:
    """What differs, and how. Strides that differ only because sizes do are no news."""
    pairs = [(name, x, y) for (name, x), (_, y) in zip(a.facets, b.facets, strict=True) if x != y]
    if len(pairs) > 1 and _orders(a) == _orders(b):
        pairs = [p for p in pairs if p[0] != "strides"]
    return tuple(name for name, _, _ in pairs), "; ".join(f"{name} {_difference(x, y)}" for name, x, y in pairs)


def _orders(entry: _Entry) -> list[list[int]]:
    facets = dict(entry.facets)
    return [_order(n, strides) for n, strides in zip(facets["shape"], facets["strides"], strict=True)]


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the widest stride to the narrowest: tells row-major, channels last and transposed apart."""
    return sorted((i for i, n in enumerate(shape) if n > 1 and strides), key=lambda i: -strides[i])


def _tensors(entry: _Entry) -> str:
    facets = dict(entry.facets)
    return " ".join(f"[{' '.join(map(str, s))}]{d}" for s, d in zip(facets["shape"], facets["dtype"], strict=True))


def _difference(x: Any, y: Any) -> str:
    """The parts of two equally long tuples that differ, else both."""
    if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
        differing = [(p, q) for p, q in zip(x, y, strict=True) if p != q]
        return ", ".join(dict.fromkeys(f"{_text(p)} -> {_text(q)}" for p, q in differing))
    return f"{_text(x)} -> {_text(y)}"


def _text(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and value[0] in _SCALARS:
        return str(value[1])
    return f"[{' '.join(_text(v) for v in value)}]" if isinstance(value, tuple) else str(value)


_SCALARS = ("bool", "int", "float", "str", "NoneType")


def _with_moves(pairs: Sequence[_Pair]) -> Iterator[_Pair]:
    """The pairs that differ. An op that went and came back equal elsewhere is a pair of equals: it was moved."""
    gone: dict[tuple[Any, ...], list[_Entry]] = {}
    for a, b in pairs:
        if a and not b:
            gone.setdefault(a.key, []).append(a)
    moved: dict[int, _Entry] = {}
    for a, b in pairs:
        if b and not a and gone.get(b.key):
            moved[gone[b.key].pop(0).place] = b
    arrived = {b.place for b in moved.values()}
    for a, b in pairs:
        if a and not b:
            yield a, moved.get(a.place)
        elif b and not a and b.place not in arrived:
            yield None, b
        elif a and b and a.key != b.key:
            yield a, b


def _moved_groups(old: _Groups, new: _Groups) -> Iterator[OpChange]:
    """Modules that run in another order than before, their ops being the same or not."""
    here, there = [w for w in old if w in new], [w for w in new if w in old]
    for tag, i0, i1, _, _ in _opcodes(here, there):
        for where in here[i0:i1] if tag != "equal" else ():
            a, b = old[where][0].place, new[where][0].place
            yield OpChange("moved", *where, "all of it", a, b, ("order",), "runs in another place")
