"""What an edit is: a change made by capturing the step again, or a function from Graph to Graph, with a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from presage.capture.variants import AS_WRITTEN, NotApplicable, Variant
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.whatif.source import Source, same_step

Change: TypeAlias = Callable[[Graph], Graph]


@dataclass(frozen=True)
class CaptureEdit:
    """An edit made by capturing the step again with a variant; also a function Graph -> Graph, of captured graphs."""

    name: str
    variant: Variant
    nothing: str  # what to say where nothing changes
    applies: Callable[[Graph], bool] = bool  # whether a graph may have a place for it

    def __call__(self, graph: Graph) -> Graph:
        if not self.applies(graph):
            raise NotApplicable(self.nothing)
        source = Source.of_graph(graph)
        if source.missing:
            raise PresageError(f"{self.name} captures the step again: {source.missing}")
        edited = source.graph(Variant(**graph.variant) | self.variant)  # type: ignore[arg-type]
        if same_step(graph, edited):
            raise NotApplicable(self.nothing)
        return edited


Edit: TypeAlias = CaptureEdit | Change

E = TypeVar("E")
Edit_co = TypeVar("Edit_co", covariant=True)


@dataclass(frozen=True)
class EditKind(Generic[Edit_co]):
    """An edit by its name, as `presage whatif --list` and `presage replay --list` show it."""

    name: str
    rule: str  # what it does, in one or two sentences
    make: Callable[[str], Edit_co]  # from what is written after '='
    value: str = ""  # what that is, as in 'REGEX'; '' where there is nothing to write
    needed: bool = False  # whether it must be written
    tried: tuple[str, ...] = ("",)  # the values that suggestions try; () for none
    caution: str = ""  # what to look out for: other numbers, work on the code
    variant: Variant = AS_WRITTEN  # of the capture that a graph edit should work on, where the code is there


def plain(name: str, rule: str, edit: E, caution: str = "", variant: Variant = AS_WRITTEN) -> EditKind[E]:
    """An edit without a value."""

    def make(value: str) -> E:
        if value:
            raise PresageError(f"{name} takes no value, but {value!r} was given: write just {name}")
        return edit

    return EditKind(name, rule, make, caution=caution, variant=variant)


def valued(
    name: str,
    rule: str,
    value: str,
    make: Callable[[str], E],
    tried: tuple[str, ...] = (),
    needed: bool = True,
    caution: str = "",
) -> EditKind[E]:
    """An edit with a value: name=value."""

    def checked(text: str) -> E:
        if needed and not text:
            raise PresageError(f"{name} needs a value: write {name}={value}")
        return make(text)

    return EditKind(name, rule, checked, value, needed, tried, caution)


# ---- names as people write them

ALIASES = {
    "fused_optimizer": "fused_adam",
    "foreach_optimizer": "foreach_adam",
    "joined_tables": "table_batched",
    "tbe": "table_batched",
    "sdpa": "fused_attention",
    "flash_attention": "fused_attention",
    "torch_compile": "compile",
    "autocast_bf16": "autocast",
    "amp": "autocast",
    "cuda_graphs": "cuda_graph",
    "remove_sync": "no_sync",
}


def parse_factor(name: str, text: str, wanted: str, most: float = 1e300) -> float:
    """A number above 0 that a user wrote after an edit's name."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise PresageError(f"{name}={text}: it should be {wanted}")
    return number


def pieces(text: str, begins: Callable[[str], bool]) -> list[tuple[str, str]]:
    """`NAME=VALUE,NAME,...` as names (aliases resolved) and values. `begins`: whether a name is an edit's.

    A piece after a comma that does not begin with an edit's name belongs to the value before it.
    """
    parts: list[str] = []
    for piece in text.split(","):
        name = piece.partition("=")[0].strip()
        if not parts or "=" not in parts[-1] or name in ALIASES or begins(name):
            parts.append(piece.strip())
        else:
            parts[-1] += f",{piece}"
    split = (piece.partition("=") for piece in parts if piece)
    return [(ALIASES.get(name.strip(), name.strip()), value.strip()) for name, _, value in split]
