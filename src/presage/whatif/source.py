"""Source: the code that a step's graph was captured from, so that it can be captured again with changes."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace as with_fields

from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import PresageError
from presage.graph import save
from presage.graph.graph import Graph, Op
from presage.graph.rescale import batch_of
from presage.prediction.api import StepSource, step_graph
from presage.scripts import MODULE, TrainingScript, is_script
from presage.traces.trace_graph import is_trace
from presage.usercode import parse_arguments

SHOWN = 3  # kinds of ops in a sentence
ARGUMENT = "arg:"
# Names that a training function may give to these arguments.
NAMES = {
    "batch": (
        "batch", "batch_size", "bs", "b", "micro_batch", "micro_batch_size", "per_device_train_batch_size", "n",
    ),
    "seq": (
        "seq", "seq_len", "seq_length", "sequence", "sequence_length", "s", "length", "context", "tokens", "block_size",
        "max_length", "max_seq_length",
    ),
}  # fmt: skip
TRACE = "a trace has no code: give TRAIN.py or FILE.py:FUNCTION"
ALONE = "a graph alone cannot be captured again: give FILE.py:FUNCTION"


class Capture(Protocol):
    """Captures the graph of a step with these arguments, and with a variant's changes made around its code."""

    def __call__(self, step: Any, arguments: Mapping[str, Any], *, variant: Variant = ...) -> Graph: ...


@dataclass(frozen=True)
class Source:
    """A step's code with its arguments. `missing` says why the step cannot be captured again, where it cannot."""

    step: StepSource = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    capture: Capture = step_graph
    missing: str = ""
    given: Graph | None = field(default=None, repr=False)  # a graph that the code must still give
    kept: dict[str, Graph] = field(default_factory=dict, repr=False)  # captures made so far

    @staticmethod
    def of_graph(graph: Graph, capture: Capture = step_graph) -> Source:
        """The source that a captured graph names, if it is there."""
        path = graph.source if is_script(graph.source) else graph.source.rpartition(":")[0]
        if not path:
            return Source(missing=ALONE)
        if not Path(path).is_file() and not path.startswith(MODULE):
            return Source(missing=f"the graph's code, {graph.source}, is not here: give FILE.py:FUNCTION")
        if find_spec("torch") is None:
            return Source(missing="capturing a step needs torch: pip install 'presage[torch]'")
        arguments = parse_arguments([f"{name}={value}" for name, value in graph.arguments.items()])
        return Source(graph.source, arguments, capture, given=graph)

    def graph(self, variant: Variant = AS_WRITTEN) -> Graph:
        """The step captured with a variant."""
        if self.missing and self.missing != TRACE:
            raise PresageError(self.missing)
        if self.given is not None and not self.kept:
            self._check(self.given)
        return self._captured(variant)

    def _check(self, given: Graph) -> None:
        if not same_step(given, self._captured(Variant(**given.variant))):  # type: ignore[arg-type]
            raise PresageError(
                f"the graph is not what {self.step} gives now: give FILE.py:FUNCTION, and your own changes as edits"
            )

    def _captured(self, variant: Variant) -> Graph:
        key = f"{self.arguments!r} {variant}"
        if key not in self.kept:
            self.kept[key] = self.capture(self.step, self.arguments, variant=variant)
        return self.kept[key]

    def with_argument(self, word: str, value: Any) -> tuple[Source, float]:
        """The step with another argument, and how many times as much work a step then is: nan if that is not known."""
        if self.missing and (self.missing != TRACE or word != "batch"):
            raise PresageError(f"{word}={value}: {self.missing}")
        if is_script(self.step):
            names = NAMES.get(word, (word.removeprefix(ARGUMENT),))
            script, text = TrainingScript.of(str(self.step), self.arguments).with_option(names, value)
            before, changed = parse_arguments([f"before={text}"])["before"], {"argv": list(script.argv)}
        elif self.missing == TRACE:
            before, changed = batch_of(self.graph()), {word: value}
        else:
            name, default = self._argument(word)
            before, changed = self.arguments.get(name, default), {name: value}
        sized = word in NAMES and isinstance(before, int | float) and before > 0
        other = replace(self, arguments={**self.arguments, **changed}, given=None)
        return other, value / before if sized else float("nan")

    def _argument(self, word: str) -> tuple[str, Any]:
        """FUNCTION's name for an argument, and its default (None where there is none)."""
        from presage.capture import load

        names = NAMES.get(word, (word.removeprefix(ARGUMENT),))
        parameters = inspect.signature(self.step if callable(self.step) else load(str(self.step))).parameters
        for name in names:
            if name in parameters:
                default = parameters[name].default
                return name, None if default is inspect.Parameter.empty else default
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            given = [name for name in names if name in self.arguments]
            return (given or names)[0], None
        known = ", ".join(list(parameters)[1:]) or "none"
        name = getattr(self.step, "__name__", str(self.step))
        raise PresageError(f"{name} takes no argument {' or '.join(names[:2])}; it takes {known}")


def source_of(
    step: StepSource | Graph, arguments: Mapping[str, Any] | None, capture: Capture, variant: Variant = AS_WRITTEN
) -> tuple[Graph, Source]:
    """The graph of a step, captured with a variant where it is code, and its source."""
    if isinstance(step, Graph):
        return step, Source.of_graph(step, capture)
    traced = not callable(step) and is_trace(step)
    source = Source(step if callable(step) else str(step), arguments or {}, capture, TRACE if traced else "")
    graph = source.graph(variant)
    if callable(step):
        return graph, source
    saved = save.is_saved(step) or str(step).endswith(save.SUFFIX)
    return graph, Source.of_graph(graph, capture) if saved else source


def same_step(one: Graph, other: Graph) -> bool:
    """Whether two captures run the same ops on the same tensors; autograd's numbers go on from capture to capture."""
    if len(one.ops) != len(other.ops) or one.tensors != other.tensors or one.flags != other.flags:
        return False
    return all(_unnumbered(a) == _unnumbered(b) for a, b in zip(one.ops, other.ops, strict=True))


def _unnumbered(op: Op) -> Op:
    return with_fields(op, sequence=-1, line="")


def traced_difference(before: Graph, after: Graph) -> str:
    """What the step's own code runs otherwise while it is traced, in words; '' where it does not."""
    old, new = (Counter(op.name for op in g.ops if op.kernels and op.phase != "optimizer") for g in (before, after))
    more = [f"{n} more {name}" for name, n in (new - old).most_common(SHOWN)]
    fewer = [f"{n} fewer {name}" for name, n in (old - new).most_common(SHOWN)]
    if not more and not fewer:
        return ""
    return f"while it is traced for this, its own code runs otherwise: {', '.join(more + fewer)}"
