"""A Setting: a step on a machine, and how edits change it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from presage.capture.variants import Variant
from presage.errors import PresageError
from presage.graph import save
from presage.graph.check import faults
from presage.graph.graph import Graph
from presage.prediction.api import step_graph
from presage.prediction.machine import Machine
from presage.usercode import users_line
from presage.whatif.edit_spec import ARGUMENT, Asked
from presage.whatif.edits import NotApplicable

__all__ = ["Capture", "Setting", "Source", "applied", "read_otherwise", "source_of", "stages"]


class Capture(Protocol):
    """Gives the graph of a step with these arguments, with changes made around its code."""

    def __call__(self, step: str, arguments: Mapping[str, Any], *, variant: Variant = ...) -> Graph: ...


TOLD = 3  # kinds of ops
# What a training function may call these arguments.
NAMES = {
    "batch": ("batch", "batch_size", "bs", "b", "micro_batch", "micro_batch_size", "n"),
    "seq": ("seq", "seq_len", "seq_length", "sequence", "sequence_length", "s", "length", "context", "tokens"),
}


@dataclass(frozen=True)
class Source:
    """Where a graph is from: FILE.py:FUNCTION with arguments, or nowhere that it could be captured again from."""

    step: str = ""  # '' for a graph alone
    arguments: Mapping[str, Any] = field(default_factory=dict)
    capture: Capture = step_graph
    traced: bool = False
    kept: dict[str, Graph] = field(default_factory=dict, repr=False)  # what was captured already

    def graph(self) -> Graph:
        key = f"{self.arguments!r} {self.traced}"
        if key not in self.kept:
            self.kept[key] = self.capture(self.step, self.arguments, variant=Variant(traced=self.traced))
        return self.kept[key]

    def again(self, word: str, value: Any) -> tuple[Graph, Source, float]:
        """The step with another argument, and how many times as much work a step is then: nan if that is not known."""
        if not self.step:
            raise PresageError(f"{word}={value}: a graph alone cannot be captured again; give FILE.py:FUNCTION")
        name, default = self._argument(word)
        arguments = {**self.arguments, name: value}
        before = self.arguments.get(name, default)
        sized = word in NAMES and isinstance(before, int | float) and before > 0
        other = replace(self, arguments=arguments)
        return other.graph(), other, value / before if sized else float("nan")

    def _argument(self, word: str) -> tuple[str, Any]:
        """What FUNCTION calls it, and its default (None where there is none)."""
        from presage.capture import load

        names = NAMES.get(word, (word.removeprefix(ARGUMENT),))
        taken = inspect.signature(load(self.step)).parameters
        for name in names:
            if name in taken:
                default = taken[name].default
                return name, None if default is inspect.Parameter.empty else default
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            given = [name for name in names if name in self.arguments]
            return (given or names)[0], None
        there = ", ".join(list(taken)[1:]) or "none"
        raise PresageError(f"{self.step} takes no argument {' or '.join(names[:2])}; it takes {there}")


@dataclass(frozen=True)
class Setting:
    """A step's graph on a machine. `work` is how much a step does in terms of the first setting's; `unit` of what."""

    graph: Graph
    machine: Machine
    source: Source = field(default_factory=Source)
    work: float = 1.0
    unit: str = ""  # 'sample' or 'token', where a step does more or less of them


def source_of(step: str | Path | Graph, arguments: Mapping[str, Any] | None, capture: Capture) -> tuple[Graph, Source]:
    """The graph of a step, and where it is from."""
    if isinstance(step, Graph):
        return step, Source()
    source = Source(str(step), arguments or {}, capture)
    saved = save.is_saved(step) or str(step).endswith(save.SUFFIX)
    return source.graph(), Source() if saved else source


def stages(start: Setting, edits: Sequence[Asked]) -> Iterator[Setting]:
    """The setting with the first edit, with the first two, and so on."""
    setting = start
    for k, edit in enumerate(edits):
        if edit.traced and not setting.source.traced:
            setting = _read(start)
            for earlier in edits[:k]:
                setting = applied(setting, earlier)
        setting = applied(setting, edit)
        yield setting


def _read(setting: Setting) -> Setting:
    """The step as its code runs while it is read; as it is, where it cannot be captured again."""
    if not setting.source.step:
        return setting
    source = replace(setting.source, traced=True)
    return replace(setting, graph=source.graph(), source=source)


def read_otherwise(before: Graph, after: Graph) -> str:
    """What the step's own code does otherwise while it is read, in words; '' where it does not."""
    old, new = (Counter(op.name for op in g.ops if op.kernels and op.phase != "optimizer") for g in (before, after))
    more = [f"{n} more {name}" for name, n in (new - old).most_common(TOLD)]
    fewer = [f"{n} fewer {name}" for name, n in (old - new).most_common(TOLD)]
    if not more and not fewer:
        return ""
    return f"while it is read for this, its own code runs otherwise: {', '.join(more + fewer)}"


def applied(setting: Setting, edit: Asked) -> Setting:
    """The setting with one edit more. NotApplicable where there is nothing to change."""
    if edit.argument is not None:
        word, value = edit.argument
        graph, source, more = setting.source.again(word, value)
        known = word in NAMES
        unit = "token" if word == "seq" or setting.unit == "token" else "sample"
        return replace(
            setting,
            graph=graph,
            source=source,
            work=setting.work * more if known else setting.work,
            unit=unit if known else setting.unit,
        )
    if edit.machine is not None:
        return replace(setting, machine=edit.machine(setting.machine))
    unit = setting.unit if edit.samples == 1 else setting.unit or "sample"
    return replace(setting, graph=_changed(edit, setting.graph), work=setting.work * edit.samples, unit=unit)


def _changed(edit: Asked, graph: Graph) -> Graph:
    """The edited graph, if it is a valid one."""
    assert edit.graph is not None
    try:
        made = edit.graph(graph)
    except NotApplicable as e:
        raise NotApplicable(f"{edit.text}: nothing to change: {e}") from e
    except PresageError:
        raise
    except Exception as e:
        raise PresageError(f"{edit.text} failed on this graph: {users_line(e)} {type(e).__name__}: {e}") from e
    for where, problem in faults(made):
        raise PresageError(f"{edit.text} made a graph that is not valid: {where}: {problem}")
    return made
