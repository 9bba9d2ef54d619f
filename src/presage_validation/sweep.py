"""Cases that share nothing, scored one by one or by a pool, told of and given back in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.pool.pool import Pool
from presage_validation.turn import in_turn

__all__ = ["Captured", "Failed", "swept"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failed:
    """A case that could not be scored, and why."""

    reason: str


def swept(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    tell: Callable[[str], None],
    name: Callable[[Item], str],
    pool: Pool,
    piece: int = 1,
) -> Iterator[tuple[Item, Result | Failed]]:
    """Each item with what the function makes of it; of quick ones, several in one piece of work."""
    every = list(items)
    pieces = [every[i : i + piece] for i in range(0, len(every), piece)]
    found = chain.from_iterable(pool.map(partial(_tried_all, function), pieces))
    for item in in_turn(every, tell, name):
        yield item, next(found)


def _tried_all(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | Failed]:
    return [_tried(function, item) for item in items]


def _tried(function: Callable[[Item], Result], item: Item) -> Result | Failed:
    try:
        return function(item)
    except PresageError as e:
        return Failed(str(e))


@dataclass(frozen=True)
class Captured:
    """Cases of a workloads file. Each process imports the file for itself."""

    workloads: str

    @cached_property
    def functions(self) -> dict[str, Callable[..., Callable[[], Any]]]:
        from presage.capture import load_cases

        return load_cases(self.workloads)

    def __reduce__(self) -> tuple[type[Captured], tuple[str]]:
        return Captured, (self.workloads,)

    def graph(self, name: str) -> Graph:
        from presage.capture import capture

        return capture(self.functions[name], source=f"{self.workloads}:{name}")
