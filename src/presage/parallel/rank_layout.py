"""How ranks are laid out: the dimensions they are counted in, and who meets whom in each.

Ranks that run the same, meet the same kinds of ranks in every dimension, and so on, do the same at the same time. One
of them stands for all (`fold`): a thousand equal data-parallel ranks cost as much to simulate as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from presage.errors import PresageError
from presage.parallel.plan import Axis, ParallelPlan


@dataclass(frozen=True)
class RankLayout:
    """Dimensions and their sizes, the innermost (neighbours) first: (("tp", 4), ("dp", 2))."""

    sizes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.sizes:
            if size < 1:
                raise PresageError(f"a dimension of ranks has a size from 1 on, and {name} has {size}")

    @staticmethod
    def of(plan: ParallelPlan, ranks: int) -> RankLayout:
        """The ranks of a plan: TP ranks are neighbours, then CP, DP and stages."""
        inner, outer = ((axis, getattr(plan, axis.value)) for axis in (Axis.CP, Axis.PP))
        sizes = ((Axis.TP, plan.tp), *([inner] if plan.cp > 1 else []), (Axis.DP, plan.dp(ranks)))
        return RankLayout(tuple((axis.value, n) for axis, n in (*sizes, *([outer] if plan.pp > 1 else []))))

    @cached_property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    def size(self, name: str) -> int:
        return dict(self.sizes).get(name, 1)

    def stride(self, name: str) -> int:
        """How far apart the ranks are that meet in a dimension."""
        inner = [n for n, _ in self.sizes].index(name)
        return prod(size for _, size in self.sizes[:inner])

    def meeting(self, name: str, rank: int) -> int:
        """The number of a rank's communicator in a dimension: the lowest rank in it."""
        stride, size = self.stride(name), self.size(name)
        return rank - (rank // stride % size) * stride

    def per_domain(self, name: str, domain: int) -> int:
        """How many ranks of a communicator share a domain of so many neighbours."""
        return max(1, min(self.size(name), domain // self.stride(name)))


@dataclass(frozen=True)
class CodeLayout:
    """Ranks of code that spreads itself over them: who runs each captured step, and the process groups in it."""

    holders: tuple[tuple[int, ...], ...]  # ranks, by step
    groups: tuple[dict[str, tuple[int, ...]], ...]  # by step: who is in a group, by its name

    @cached_property
    def ranks(self) -> int:
        return sum(map(len, self.holders))

    @cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Groups of collectives and their sizes; pairs that exchange messages are left out."""
        found = {name: len(ranks) for groups in self.groups for name, ranks in groups.items() if " to " not in name}
        return tuple(found.items())

    def per_domain(self, step: int, name: str, domain: int) -> int:
        """How many ranks of a communicator share a domain of so many neighbours."""
        return max(Counter(r // domain for r in self.groups[step][name]).values())

    def fold(self) -> list[FoldedRank]:
        """One rank for each step; communicators in which the same steps meet are one."""
        step_of = {rank: k for k, ranks in enumerate(self.holders) for rank in ranks}
        number: dict[tuple[str, frozenset[int]], int] = {}
        out = []
        for ranks, groups in zip(self.holders, self.groups, strict=True):
            mixes = {name: frozenset(step_of[r] for r in members if r in step_of) for name, members in groups.items()}
            meets = {name: number.setdefault((name, mix), len(number)) for name, mix in mixes.items()}
            out.append(FoldedRank(ranks[0], len(ranks), meets))
        return out


@dataclass(frozen=True)
class FoldedRank:
    """A rank that stands for all that do the same, and its communicators: numbers by dimension."""

    rank: int
    ranks: int
    meets: dict[str, int]


def fold_ranks(layout: RankLayout, kinds: Sequence[Hashable]) -> list[FoldedRank]:
    """One rank for all whose kind is the same, and who meet the same in every dimension."""
    if len(kinds) != layout.ranks:
        raise ValueError(f"{layout.ranks} ranks, but kinds of {len(kinds)}")
    names = [n for n, size in layout.sizes if size > 1]
    colours, mixes = _settled(layout, names, _numbers(kinds))
    number: dict[tuple[str, frozenset[int]], int] = {}
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for rank, colour in enumerate(colours):
        first.setdefault(colour, rank)
        count[colour] = count.get(colour, 0) + 1
    out = []
    for colour, rank in first.items():
        keys = {n: (n, mixes[n][layout.meeting(n, rank)]) for n in names}
        out.append(FoldedRank(rank, count[colour], {n: number.setdefault(key, len(number)) for n, key in keys.items()}))
    return out


Mixes = dict[str, dict[int, frozenset[int]]]


def _settled(layout: RankLayout, names: Sequence[str], colours: list[int]) -> tuple[list[int], Mixes]:
    """Colours told apart by whom they meet until nothing more is; and who meets, by dimension and communicator."""
    while True:
        mixes = {name: _mixes(layout, name, colours) for name in names}
        met = ((c, *(mixes[n][layout.meeting(n, rank)] for n in names)) for rank, c in enumerate(colours))
        finer = _numbers([*met])
        if max(finer) == max(colours):
            return colours, mixes
        colours = finer


def _mixes(layout: RankLayout, name: str, colours: Sequence[int]) -> dict[int, frozenset[int]]:
    """The colours that meet in each communicator of a dimension."""
    found: dict[int, set[int]] = {}
    for rank, colour in enumerate(colours):
        found.setdefault(layout.meeting(name, rank), set()).add(colour)
    return {meeting: frozenset(mix) for meeting, mix in found.items()}


def _numbers(values: Sequence[Hashable]) -> list[int]:
    """Equal values get equal numbers, from 0 on."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(v, len(seen)) for v in values]
