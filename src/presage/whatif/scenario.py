"""A Scenario: a step on a machine, and how edits change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from presage.capture.variants import AS_WRITTEN, NotApplicable, Variant
from presage.errors import PresageError
from presage.graph.graph import Graph, faults
from presage.prediction.machine import Machine
from presage.usercode import user_code_line
from presage.whatif.edit_spec import ParsedEdit
from presage.whatif.source import NAMES, Source, same_step


@dataclass(frozen=True)
class Scenario:
    """A step's graph on a machine, with the edits that led to it.

    `work` is how much a step does in terms of the first scenario's, in `unit`s ('sample' or 'token', where it differs).
    """

    graph: Graph
    machine: Machine
    source: Source = field(default_factory=Source)
    variant: Variant = AS_WRITTEN  # the step is captured with
    edits: tuple[ParsedEdit, ...] = ()  # of the graph, applied to the capture in this order
    work: float = 1.0
    unit: str = ""


def scenarios(start: Scenario, edits: Iterable[ParsedEdit]) -> Iterator[Scenario]:
    """The scenario with the first edit, with the first two, and so on."""
    for edit in edits:
        start = apply_edit(start, edit)
        yield start


def apply_edit(s: Scenario, edit: ParsedEdit) -> Scenario:
    """The scenario with one edit more. NotApplicable where there is nothing to change."""
    if edit.machine is not None:
        return replace(s, machine=edit.machine(s.machine))
    if edit.argument is not None:
        return _with_argument(s, *edit.argument)
    if edit.capture is not None:
        return _with_variant(s, edit)
    assert edit.graph is not None
    s = _best_capture(s, edit)
    return replace(s, graph=_edited(edit, s.graph), edits=(*s.edits, edit))


def _with_argument(s: Scenario, word: str, value: object) -> Scenario:
    source, more = s.source.with_argument(word, value)
    graph = _rebuilt(source, s.variant, s.edits)
    if word not in NAMES:
        return replace(s, graph=graph, source=source)
    unit = "token" if word == "seq" or s.unit == "token" else "sample"
    return replace(s, graph=graph, source=source, work=s.work * more, unit=unit)


def _with_variant(s: Scenario, edit: ParsedEdit) -> Scenario:
    """The step captured again with the edit's variant too, and the graph edits on top of that."""
    assert edit.capture is not None
    nothing = f"{edit.text}: nothing to change: "
    variant = s.variant | edit.variant
    if variant == s.variant or not edit.capture.applies(s.graph):
        raise NotApplicable(nothing + edit.capture.nothing)
    if s.source.missing:
        raise PresageError(f"{edit.text} captures the step again: {s.source.missing}")
    try:
        graph = _rebuilt(s.source, variant, s.edits)
    except NotApplicable as e:
        raise NotApplicable(nothing + str(e)) from e
    except PresageError as e:
        raise PresageError(f"{edit.text}: the step does not run with it: {e}") from e
    if same_step(s.graph, graph):
        raise NotApplicable(nothing + edit.capture.nothing)
    unit = s.unit if edit.samples == 1 else s.unit or "sample"
    return replace(s, graph=graph, variant=variant, work=s.work * edit.samples, unit=unit)


def _best_capture(s: Scenario, edit: ParsedEdit) -> Scenario:
    """The step captured as a graph edit needs it; as it is, where the code is not there."""
    variant = s.variant | edit.variant
    if variant == s.variant or s.source.missing:
        return s
    try:
        return replace(s, graph=_rebuilt(s.source, variant, s.edits), variant=variant)
    except PresageError:
        if s.source.given is None:
            raise
        return s  # a graph that its code does not give any more


def _rebuilt(source: Source, variant: Variant, edits: Iterable[ParsedEdit]) -> Graph:
    graph = source.graph(variant)
    for edit in edits:
        graph = _edited(edit, graph)
    return graph


def _edited(edit: ParsedEdit, graph: Graph) -> Graph:
    """The edited graph, if it is a valid one."""
    assert edit.graph is not None
    try:
        edited = edit.graph(graph)
    except NotApplicable as e:
        raise NotApplicable(f"{edit.text}: nothing to change: {e}") from e
    except PresageError:
        raise
    except Exception as e:
        raise PresageError(f"{edit.text} failed on this graph: {user_code_line(e)} {type(e).__name__}: {e}") from e
    for where, problem in faults(edited):
        raise PresageError(f"{edit.text} made a graph that is not valid: {where}: {problem}")
    return edited
