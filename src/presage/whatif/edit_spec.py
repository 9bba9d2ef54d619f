"""Edits as they are asked for: `fused_adam,checkpoint=blocks,gpu=b200,batch=16,mine.py:change`.

    NAME, NAME=VALUE      an edit of the graph (presage.whatif.edits)
    gpu=NAME, host=F      another GPU; a host that is F times as fast, or a host model's file
    batch=N, seq=N, arg:NAME=VALUE    the step captured again with other arguments
    FILE.py:FUNCTION      an edit of the user's own: a function Graph -> Graph

A piece after a comma that begins with no such name belongs to the value before it: values may hold commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace as with_fields

from presage.costs.host_model import HostModel, host_model
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.machine import Machine, machine
from presage.usercode import load, parse_arguments
from presage.whatif.edits import EDITS, Change, Edit
from presage.whatif.edits.names import ALIASES, near, pieces

__all__ = ["ALIASES", "OTHERS", "Asked", "Other", "Wish", "asked_for", "of_edit", "parse"]

Wish: TypeAlias = "str | Change | Asked"  # what an edit may be given as

USERS = re.compile(r".+\.py:\w+")
ARGUMENT = "arg:"
REPEATS = "accumulate"  # its value is how many times as many samples a step has


@dataclass(frozen=True)
class Asked:
    """One edit: of the graph, of the machine, or of the arguments the step is captured with."""

    text: str
    graph: Change | None = None
    machine: Callable[[Machine], Machine] | None = None
    argument: tuple[str, Any] | None = None  # ('batch', 16), or ('arg:width', 2048)
    caution: str = ""
    samples: float = 1.0  # how many times as many a step has
    traced: bool = False  # the step is to be captured as when it is read for a CUDA graph or by a compiler


@dataclass(frozen=True)
class Other:
    """An edit that is not one of the graph, as the list tells it."""

    name: str
    value: str
    rule: str
    make: Callable[[str], Asked]


def asked_for(wishes: Iterable[Wish] | Wish) -> list[Asked]:
    """Edits given as text, as functions Graph -> Graph, or already read; those of arguments first."""
    some = [wishes] if isinstance(wishes, str | Asked) or callable(wishes) else list(wishes)
    out: list[Asked] = []
    for wish in some:
        if isinstance(wish, Asked):
            out.append(wish)
        else:
            out += parse(wish) if isinstance(wish, str) else [_own(wish)]
    return sorted(out, key=lambda a: a.argument is None)


def parse(text: str) -> list[Asked]:
    """The edits that a text names."""
    return [_read(name, value) for name, value in pieces(text, _known)]


def _known(name: str) -> bool:
    return name in EDITS or name in OTHERS or name.startswith(ARGUMENT) or USERS.fullmatch(name) is not None


def _read(name: str, value: str) -> Asked:
    if USERS.fullmatch(name):
        return replace(_own(_loaded(name)), text=name)
    if name in OTHERS:
        return OTHERS[name].make(value)
    if name.startswith(ARGUMENT):
        return _argument(name, value)
    if name not in EDITS:
        known = near(name, [*EDITS, *ALIASES, *OTHERS])
        raise PresageError(f"unknown edit {name!r}{known}; see `presage whatif --list`")
    return of_edit(EDITS[name], value)


def of_edit(edit: Edit, value: str) -> Asked:
    """One of the known edits of a graph."""
    made = Asked(f"{edit.name}={value}" if value else edit.name, graph=edit.make(value), caution=edit.caution)
    made = replace(made, traced=edit.traced)
    return replace(made, samples=float(value)) if edit.name == REPEATS else made


# ---- edits of the user's own


def _own(change: Change) -> Asked:
    """A plain function Graph -> Graph, under its name; one that a known edit made (`faster("mm", 2)`), under that."""
    name = getattr(change, "__qualname__", "").partition(".<locals>")[0]
    if name in EDITS:
        return Asked(name, graph=change, caution=EDITS[name].caution, traced=EDITS[name].traced)
    return Asked(getattr(change, "__name__", type(change).__name__), graph=change)


def _loaded(target: str) -> Change:
    function: Callable[..., Any] = load(target)

    def change(graph: Graph) -> Graph:
        made = function(graph)
        if not isinstance(made, Graph):
            raise PresageError(f"{target}: an edit returns a Graph, and this one returned {type(made).__name__}")
        return made

    return change


# ---- machines and arguments


def _gpu(value: str) -> Asked:
    if not value:
        raise PresageError("gpu needs a name: write gpu=NAME (`presage gpus` lists them)")
    other = machine(value)

    def change(where: Machine) -> Machine:
        return other if where.host == machine(where.kernels.gpu.key).host else replace(where, kernels=other.kernels)

    return Asked(f"gpu={value}", machine=change)


def _host(value: str) -> Asked:
    """A host so many times as fast, or another one's file."""
    if value.endswith(".toml"):
        other = host_model(Path(value))
        return Asked(f"host={value}", machine=lambda where: replace(where, host=other))
    factor = _number("host", value, "a factor above 0, such as host=1.5, or the file of a host model (.toml)")
    return Asked(f"host={value}", machine=lambda where: replace(where, host=_faster(where.host, factor)))


def _faster(host: HostModel, times: float) -> HostModel:
    """The same host with every time of its own divided."""
    c = host.calls
    calls = with_fields(
        c,
        launch_call_us=c.launch_call_us / times,
        replay_call_us=c.replay_call_us / times,
        replay_node_us=c.replay_node_us / times,
    )
    return replace(host, calls=calls, us={key: us / times for key, us in host.us.items()})


def _number(name: str, value: str, wanted: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise PresageError(f"{name}={value}: it should be {wanted}")
    return number


def _size(name: str) -> Callable[[str], Asked]:
    def make(value: str) -> Asked:
        if not value.isdigit() or not int(value):
            raise PresageError(f"{name}={value}: it should be a whole number above 0")
        return Asked(f"{name}={value}", argument=(name, int(value)))

    return make


def _argument(name: str, value: str) -> Asked:
    word = name.removeprefix(ARGUMENT)
    return Asked(f"{name}={value}", argument=(name, parse_arguments([f"{word}={value}"])[word]))


OTHERS = {
    o.name: o
    for o in (
        Other("gpu", "NAME", "The same step on another GPU (`presage gpus`), or a calibration pack's folder.", _gpu),
        Other("host", "F|FILE", "A host F times as fast, or another one's model (tools/fit_host.py makes it).", _host),
        Other("batch", "N", "The step captured again with this batch size; also the time a sample.", _size("batch")),
        Other("seq", "N", "The step captured again with this sequence length; also the time a token.", _size("seq")),
    )
}
