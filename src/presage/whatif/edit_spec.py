"""Edits as users write them: `fused_adam,checkpoint=blocks,gpu=b200,batch=16,mine.py:change`.

    NAME, NAME=VALUE      an edit of the step (presage.edits)
    gpu=NAME, host=F      another GPU; a host that is F times as fast, or one by its name or file
    batch=N, seq=N, arg:NAME=VALUE    the step captured again with other arguments
    FILE.py:FUNCTION      an edit of the user's own: a function Graph -> Graph

A piece after a comma that begins with no such name belongs to the value before it: values may hold commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from presage.capture.variants import AS_WRITTEN, Variant
from presage.costs.host_model import HostModel, host_model
from presage.errors import PresageError, near
from presage.graph.graph import Graph
from presage.hardware import hosts
from presage.prediction.host_choice import UNKNOWN, chosen_host
from presage.prediction.machine import Machine, machine
from presage.usercode import load, parse_arguments
from presage.whatif.edits import EDITS, CaptureEdit, Change, Edit, EditKind
from presage.whatif.edits.edit import ALIASES, parse_factor, pieces
from presage.whatif.source import ARGUMENT

EditSpec: TypeAlias = "str | Change | CaptureEdit | ParsedEdit"  # the forms in which an edit may be given

USERS = re.compile(r".+\.py:\w+")


@dataclass(frozen=True)
class ParsedEdit:
    """One edit: of the capture, of the graph, of the machine, or of the arguments the step is captured with."""

    text: str
    graph: Change | None = None
    capture: CaptureEdit | None = None
    machine: Callable[[Machine], Machine] | None = None
    argument: tuple[str, Any] | None = None  # ('batch', 16), or ('arg:width', 2048)
    caution: str = ""
    variant: Variant = AS_WRITTEN  # of the capture it needs, or, for an edit of a graph, works on where it can

    @property
    def samples(self) -> int:
        """How many times as many samples a step has."""
        return self.variant.accumulate


def parse_edits(specs: Iterable[EditSpec] | EditSpec) -> list[ParsedEdit]:
    """Edits given as text, as functions Graph -> Graph, or already parsed; those of arguments first."""
    single = isinstance(specs, str | ParsedEdit) or callable(specs)
    out: list[ParsedEdit] = []
    listed: list[Any] = [specs] if single else list(specs)  # type: ignore[arg-type]
    for spec in listed:
        if isinstance(spec, ParsedEdit):
            out.append(spec)
        else:
            out += parse(spec) if isinstance(spec, str) else [_of_edit(spec)]
    return sorted(out, key=lambda a: a.argument is None)


def parse(text: str) -> list[ParsedEdit]:
    """The edits that a text names."""
    return [_read(name, value) for name, value in pieces(text, _known)]


def _known(name: str) -> bool:
    return name in EDITS or name in OTHERS or name.startswith(ARGUMENT) or USERS.fullmatch(name) is not None


def _read(name: str, value: str) -> ParsedEdit:
    if USERS.fullmatch(name):
        return replace(_of_edit(_loaded(name)), text=name)
    if name in OTHERS:
        return OTHERS[name].make(value)
    if name.startswith(ARGUMENT):
        return _argument(name, value)
    if name not in EDITS:
        raise _unknown(name)
    return of_kind(EDITS[name], value)


def _unknown(name: str) -> PresageError:
    known = near(name, [*EDITS, *ALIASES, *OTHERS])
    return PresageError(f"unknown edit {name!r}{known or ': see `presage whatif --list`'}")


def of_kind(kind: EditKind[Edit], value: str) -> ParsedEdit:
    """One of the known edits."""
    return _parsed(kind.make(value), f"{kind.name}={value}" if value else kind.name, kind)


def _parsed(edit: Change | CaptureEdit, text: str, kind: EditKind[Edit]) -> ParsedEdit:
    if isinstance(edit, CaptureEdit):
        return ParsedEdit(text, capture=edit, variant=edit.variant, caution=kind.caution)
    return ParsedEdit(text, graph=edit, variant=kind.variant, caution=kind.caution)


# ---- edits of the user's own


def _of_edit(edit: Change | CaptureEdit) -> ParsedEdit:
    """A function under its name; one that a known edit made (`faster("mm", 2)`), under that."""
    if isinstance(edit, CaptureEdit):
        return _parsed(edit, edit.name, EDITS[edit.name])
    name = getattr(edit, "__qualname__", "").partition(".<locals>")[0]
    if name in EDITS:
        return _parsed(edit, name, EDITS[name])
    return ParsedEdit(getattr(edit, "__name__", type(edit).__name__), graph=edit)


def _loaded(target: str) -> Change:
    function: Callable[..., Any] = load(target)

    def change(graph: Graph) -> Graph:
        made = function(graph)
        if not isinstance(made, Graph):
            raise PresageError(f"{target}: an edit returns a Graph, and this one returned {type(made).__name__}")
        return made

    return change


# ---- machines and arguments


def _gpu(value: str) -> ParsedEdit:
    if not value:
        raise PresageError("gpu needs a name: write gpu=NAME (`presage gpus` lists them)")
    other = machine(value)

    def change(where: Machine) -> Machine:
        return other if where.host == machine(where.kernels.gpu.key).host else replace(where, kernels=other.kernels)

    return ParsedEdit(f"gpu={value}", machine=change)


def _host(value: str) -> ParsedEdit:
    """A host so many times as fast, or another one by its name or file."""
    if value.endswith((".toml", ".json")) or value in (UNKNOWN, *(h.key for h in hosts())):
        other = chosen_host(value, host_model())
        return ParsedEdit(f"host={value}", machine=lambda where: replace(where, host=other))
    factor = parse_factor("host", value, "a factor above 0, such as host=1.5, or a host's name or file (presage hosts)")
    return ParsedEdit(f"host={value}", machine=lambda where: replace(where, host=_faster(where.host, factor)))


def _faster(host: HostModel, times: float) -> HostModel:
    """The same host with every time of its own divided."""
    return replace(host, factors=host.factors.times(1 / times))


def _size(name: str) -> Callable[[str], ParsedEdit]:
    def make(value: str) -> ParsedEdit:
        number, _, rest = value.partition(",")
        if rest and number.isdigit():
            raise _unknown(rest.partition("=")[0].strip())
        if not value.isdigit() or not int(value):
            raise PresageError(f"{name}={value}: it should be a whole number above 0")
        return ParsedEdit(f"{name}={value}", argument=(name, int(value)))

    return make


def _argument(name: str, value: str) -> ParsedEdit:
    word = name.removeprefix(ARGUMENT)
    return ParsedEdit(f"{name}={value}", argument=(name, parse_arguments([f"{word}={value}"])[word]))


OTHERS: dict[str, EditKind[ParsedEdit]] = {
    kind.name: kind
    for kind in (
        EditKind("gpu", "The same step on another GPU (`presage gpus`), or a calibration pack's folder.", _gpu, "NAME"),
        EditKind("host", "A host F times as fast, or another one by name or file (`presage hosts`).", _host, "F|FILE"),
        EditKind("batch", "The step captured again with this batch size; also the time a sample.", _size("batch"), "N"),
        EditKind("seq", "The step captured again with this sequence length; also the time a token.", _size("seq"), "N"),
    )
}
