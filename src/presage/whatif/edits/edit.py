"""An Edit: a change of a step that one might make, as a function from a graph to a graph, with the rule it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from presage.errors import PresageError
from presage.graph.graph import Graph

__all__ = ["Change", "Edit", "NotApplicable", "plain", "valued"]

Change: TypeAlias = Callable[[Graph], Graph]

# What to look out for before doing it, by the edit's name.
CAUTIONS = {
    "accumulate": "a step has more samples, so the learning rate's schedule goes with it",
    "autocast": "numbers change: products have 8 bits of mantissa (float16: 11, with a scaler); check the loss",
    "bf16": "numbers change: weights and the optimizer's state keep 8 bits of mantissa; check the loss",
    "compile": "the first step compiles for minutes, and again where shapes change; graph breaks gain less",
    "cuda_graph": "shapes and addresses must stay as they are, and the host must not look at results in between",
    "fp8": "numbers change: products have 8 bits and scales to keep; needs a library for it; check the loss",
    "no_sync": "the host must not need the value it waited for",
    "table_batched": "the tables become one parameter: checkpoints and what is set table by table change",
    "tf32": "numbers change: products keep 11 bits of mantissa; check the loss",
}
TRACED = ("compile", "cuda_graph")


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
    caution: str = ""  # what to look out for, where there is something: other numbers, work on the code
    traced: bool = False  # the step is read once and run from that: some libraries' code takes other ways then


def plain(name: str, rule: str, change: Change) -> Edit:
    """An edit without a value."""

    def make(value: str) -> Change:
        if value:
            raise PresageError(f"{name} takes no value, but {value!r} was given: write just {name}")
        return change

    return Edit(name, rule, make, caution=CAUTIONS.get(name, ""), traced=name in TRACED)


def valued(
    name: str, rule: str, value: str, make: Callable[[str], Change], tried: tuple[str, ...] = (), needed: bool = True
) -> Edit:
    """An edit with a value: name=value."""

    def checked(text: str) -> Change:
        if needed and not text:
            raise PresageError(f"{name} needs a value: write {name}={value}")
        return make(text)

    return Edit(name, rule, checked, value, needed, tried, CAUTIONS.get(name, ""))
