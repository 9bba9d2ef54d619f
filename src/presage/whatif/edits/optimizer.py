"""Optimizers: the same updates by other ops. Fused and foreach forms, and the form that a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from msgspec.structs import replace

from presage.graph.arguments import aten, references
from presage.graph.graph import Graph, Ref
from presage.whatif.edits.edit import NotApplicable, plain
from presage.whatif.edits.pen import Pen
from presage.whatif.edits.updating.foreach import foreach
from presage.whatif.edits.updating.fused import found_inf, fused
from presage.whatif.edits.updating.loop import capturable_loop
from presage.whatif.edits.updating.updates import Algorithm, Update, read

__all__ = ["EDITS", "capturable", "foreach_adam", "fused_adam", "waiting"]

Group: TypeAlias = list[Update]
FUSED: tuple[Algorithm, ...] = ("adam", "sgd", "adagrad")
UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
LISTED: tuple[Algorithm, ...] = ("adam", "sgd", "adagrad", "rmsprop")
# What an optimizer's step does on the host alone: count its steps, and read the count.
HOST = set(aten("add_ empty_strided copy_ _local_scalar_dense empty to lift_fresh _foreach_add_"))


def fused_adam(graph: Graph) -> Graph:
    """Adam, AdamW, SGD and Adagrad in their fused form: one op for all parameters of a group and dtype."""
    groups = _groups(graph, FUSED)
    if not groups:
        raise NotApplicable(_reason(graph, "no update of Adam, AdamW, SGD or Adagrad that is not fused already"))
    checks = _checks(graph, {p for group in groups for u in group for p in u.places})
    decoupled = any("decoupled" in group[0].flags for group in groups)  # AdamW, also where a group has no decay

    def write(pen: Pen, group: Group, _: bool) -> None:
        place = checks.get(group[0].places[0])
        fused(pen, group, None if place is None else next(references(graph.ops[place].inputs)), decoupled)

    return _rewritten(graph, groups, write, set(checks.values()))


def _checks(graph: Graph, replaced: set[int]) -> dict[int, int]:
    """By op of an optimizer, where a gradient scaler looks whether to run it: a fused op looks by itself, on the GPU.

    Only where all that the optimizer runs is replaced.
    """
    written = {graph.tensors[w].storage for op in graph.ops if op.name == UNSCALE for w in op.writes}
    out: dict[int, int] = {}
    check, run = None, list[int]()
    for i, op in enumerate((*graph.ops, None)):
        if op is not None and op.phase == "optimizer":
            run += [i] if op.kernels else []
            continue
        if check is not None and run and replaced.issuperset(run):
            out |= dict.fromkeys(run, check)
        looks = op is not None and op.name == "aten::_local_scalar_dense" and op.sync
        seen = {graph.tensors[r].storage for r in references(op.inputs)} if op is not None and looks else set()
        check, run = (i if seen and seen <= written else None), []
    return out


def foreach_adam(graph: Graph) -> Graph:
    """Adam, AdamW, SGD, Adagrad and RMSprop that go through parameters one by one, in their foreach form."""
    groups = _groups(graph, LISTED, lambda u: not u.foreach)
    if not groups:
        raise NotApplicable(_reason(graph, "no optimizer that goes through its parameters one by one"))
    return _rewritten(graph, groups, lambda pen, group, counted: foreach(pen, group, counted, False))


def capturable(graph: Graph) -> Graph:
    """Adam as a CUDA graph can hold it: its step counts are on the GPU. The graph itself where nothing changes."""
    groups = _groups(graph, ("adam",), lambda u: u.step is None)
    return _rewritten(graph, groups, _captured) if groups else graph


def _captured(pen: Pen, group: Group, counted: bool) -> None:
    if group[0].foreach:
        foreach(pen, group, counted, True)
    else:
        for update in group:
            capturable_loop(pen, update)


def _reason(graph: Graph, wanted: str) -> str:
    found = {u.algorithm for u in read(graph)}
    told = {"sparse": "gradients are sparse", "unknown": "an optimizer is of another kind"}
    return "; ".join([wanted, *(text for name, text in told.items() if name in found)])


def _groups(graph: Graph, algorithms: Sequence[Algorithm], wanted: Callable[[Update], bool] = bool) -> list[Group]:
    """Neighbouring updates of one kind. A sparse gradient keeps SGD from lists: torch does not take it in them."""
    updates = read(graph)
    kept = set(algorithms) - ({"sgd", "adagrad"} if any(u.algorithm == "sparse" for u in updates) else set())
    runs = (list(run) for _, run in groupby(updates, key=lambda u: u.kind))
    return [run for run in runs if run[0].algorithm in kept and wanted(run[0])]


def _rewritten(
    graph: Graph, groups: Sequence[Group], write: Callable[[Pen, Group, bool], None], checks: Collection[int] = ()
) -> Graph:
    """The groups' ops written anew, each where it began; `checks` on the host become an addition on the GPU."""
    pen, removed = Pen(graph), set[int]()
    for place in checks:
        pen.at(place, replace(graph.ops[place], within=()))
        found_inf(pen, Ref(next(references(graph.ops[place].inputs))))
    before = waiting(graph)
    for group in groups:
        places = {p for u in group for p in u.places}
        hosts = {h for p in places for h in before.get(p, ())}
        first = min(places)
        for part in _by_dtype(graph, group):
            pen.at(first, graph.ops[first])
            write(pen, part, bool(hosts))
        removed |= places | hosts
    return pen.done(removed)


def _by_dtype(graph: Graph, group: Group) -> Iterator[Group]:
    """Parameters of one dtype each: a list holds no others."""
    dtypes = dict.fromkeys(graph.tensors[u.parameter].dtype for u in group)
    for dtype in dtypes:
        yield [u for u in group if graph.tensors[u.parameter].dtype == dtype]


def waiting(graph: Graph) -> dict[int, list[int]]:
    """Ops of the host's alone that an optimizer runs before each op of the GPU's."""
    out: dict[int, list[int]] = {}
    before: list[int] = []
    for i, op in enumerate(graph.ops):
        if op.phase != "optimizer":
            before = []
        elif op.kernels:
            out[i], before = before, []
        elif op.name in HOST and not op.inputs and not op.sync:
            before.append(i)
    return out


EDITS = (
    plain(
        "fused_adam",
        "Adam, AdamW, SGD and Adagrad run as torch's fused=True does: one op for all parameters of a group and dtype, "
        "with step counts on the GPU. Clipping, unscaling and zeroing of gradients stay; a gradient scaler no longer "
        "waits for the GPU. Not for sparse gradients or other optimizers.",
        fused_adam,
    ),
    plain(
        "foreach_adam",
        "Adam, AdamW, SGD, Adagrad and RMSprop that update one parameter after the other (foreach=False) work on lists "
        "of all parameters of a group and dtype, as torch's foreach=True does, with the temporaries that takes.",
        foreach_adam,
    ),
)
