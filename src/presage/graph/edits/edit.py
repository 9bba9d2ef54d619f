"""An Edit: a change of a step that one might make, as a function from a graph to a graph, with the rule it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from presage.errors import PresageError
from presage.graph.graph import Graph

__all__ = ["Change", "Edit", "NotApplicable", "plain", "valued"]

Change: TypeAlias = Callable[[Graph], Graph]


class NotApplicable(PresageError):
    """An edit that a graph has no place for; says what it looked for."""


@dataclass(frozen=True)
class Edit:
    """A change by its name, as `presage whatif --list` tells it."""

    name: str  # 'checkpoint'
    rule: str  # what it does to a graph, in one or two sentences
    make: Callable[[str], Change]  # from what is written after '='
    value: str = ""  # what that is, as in 'REGEX'; '' where there is nothing to write
    needed: bool = False  # whether it must be written
    tried: tuple[str, ...] = ("",)  # the values that suggestions try; () for none


def plain(name: str, rule: str, change: Change) -> Edit:
    """An edit without a value."""

    def make(value: str) -> Change:
        if value:
            raise PresageError(f"{name} takes no value, but {value!r} was given: write just {name}")
        return change

    return Edit(name, rule, make)


def valued(
    name: str, rule: str, value: str, make: Callable[[str], Change], tried: tuple[str, ...] = (), needed: bool = True
) -> Edit:
    """An edit with a value: name=value."""

    def checked(text: str) -> Change:
        if needed and not text:
            raise PresageError(f"{name} needs a value: write {name}={value}")
        return make(text)

    return Edit(name, rule, checked, value, needed, tried)
