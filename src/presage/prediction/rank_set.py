"""RankSet: the step of several ranks, from a captured step, a strategy and a platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from presage.costs.kernel_model import OpTime
from presage.engine import Durations, Timeline
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.graph.work import collective
from presage.hardware import Platform
from presage.memory.step_memory import MemoryProfile, memory_profile
from presage.parallel.rank_layout import CodeLayout, RankLayout, fold_ranks
from presage.parallel.strategy import STRATEGIES, Strategy
from presage.prediction.machine import Machine, kernel_times
from presage.prediction.overlap_contention import apply_contention, overlap_slowdown
from presage.prediction.rank_program import Member, RankProgram, rank_program
from presage.prediction.rank_results import (
    OWN,
    CollectiveStats,
    RankClass,
    RankResults,
    collective_stats,
    collective_times,
    draw_steps,
    groups_of,
    rank_uses,
)
from presage.prediction.result import Quantiles
from presage.prediction.step import (
    GPU_BOUND,
    Bound,
    StepBasis,
    StepProgram,
    StepResult,
    StepWindow,
    result_of,
    step_program,
)
from presage.prediction.step_program import step_seconds

DATA_PARALLEL = ("ddp", "zero1", "zero2", "fsdp")
ASSUMED = "ranks are taken to hold equal numbers where the code reads what a collective returns"
MUCH = 0.15  # of a step: less communication than that does not hold up GPUs that are busy otherwise
WORTH = 1.01  # times as fast: less is not worth naming
SIMULATED = 4  # steps: the last is like all that follow
CELLS = 60e6  # task-draws held at a time


@dataclass(frozen=True)
class RankOverride:
    """Settings of one rank: GPU speed, host-time factor, and which captured step it runs."""

    speed: float = 1.0
    host: float = 1.0
    step: int = 0  # which of the captured steps it runs
    arguments: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not (0 < self.speed < float("inf") and 0 < self.host < float("inf")):
            raise PresageError(f"a rank's speed and host factor are numbers above 0, not {self.speed} and {self.host}")


USUAL = RankOverride()


@dataclass(frozen=True, eq=False)
class RankSet:
    """The ranks of a job, identical ones folded, with their steps and kernel times."""

    platform: Platform
    strategy: Strategy | None  # None: the code's own
    layout: RankLayout | CodeLayout
    kinds: tuple[RankOverride, ...]  # by member
    steps: tuple[StepProgram, ...]  # by captured step
    times: tuple[tuple[OpTime, ...], ...]
    ranks: RankProgram
    captured: tuple[Graph, ...] = ()  # the steps on one GPU that the strategy was applied to
    where: Machine | None = None  # whose kernels and host they were priced with

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of every task of all ranks."""
        return self.ranks.timeline()

    @cached_property
    def memory(self) -> tuple[MemoryProfile, ...]:
        """Memory over each captured step."""
        return tuple(memory_profile(s.graph, chip=self.platform.gpu, kinds=True) for s in self.steps)


@dataclass(frozen=True, eq=False)
class RankBasis(StepBasis):
    """What the result of several ranks was computed from."""

    team: RankSet

    @cached_property
    def window(self) -> StepWindow:
        """The simulated steps of all ranks."""
        timeline, ranks = self.team.timeline, self.team.ranks
        ends = [float(timeline.end[ranks.step == k].max()) for k in range(ranks.steps)]
        return StepWindow(timeline, (ends[-3], ends[-2]))


def rank_set(
    graphs: Sequence[Graph],
    platform: Platform,
    strategy: Strategy,
    count: int,
    where: Machine,
    kinds: Mapping[int, RankOverride] | None = None,
    steps: int = SIMULATED,
) -> RankSet:
    """`count` ranks that run the first captured step, except those with settings in `kinds`."""
    layout = strategy.layout(count)
    _check_reach(count, platform)
    groups = groups_of(layout, platform)
    outside = [r for r in kinds or {} if not 0 <= r < count]
    if outside:
        raise PresageError(f"rank {outside[0]} is out of range [0, {count - 1}]")
    built, timed, slow = [], [], []
    for graph in graphs:
        one = strategy.step(graph, count)
        times = collective_times(one, kernel_times(one, where), platform, groups)
        timed.append(tuple(times))
        built.append(step_program(one, times, where.host))
        slow.append(overlap_slowdown(one, times, platform, groups))
    by_rank = [(kinds or {}).get(r, USUAL) for r in range(count)]
    members, mine = [], []
    for f in fold_ranks(layout, by_rank):
        kind = by_rank[f.rank]
        mine.append(kind)
        members.append(Member(f, built[kind.step]).paced(kind.speed, kind.host))
    ranks = apply_contention(rank_program(members, steps), [slow[k.step] for k in mine])
    return RankSet(platform, strategy, layout, tuple(mine), tuple(built), tuple(timed), ranks, tuple(graphs), where)


def _check_reach(count: int, platform: Platform) -> None:
    reach = platform.links[-1].ranks
    if count > reach:
        raise PresageError(f"{count} ranks do not fit: {platform.name} ({platform.key}) links {reach} GPUs")


def code_rank_set(graphs: Sequence[Graph], platform: Platform, where: Machine, steps: int = SIMULATED) -> RankSet:
    """The ranks of code that spreads itself: each graph is the step of the ranks that it names."""
    layout = CodeLayout(tuple(g.ranks for g in graphs), tuple(g.groups for g in graphs))
    _check_reach(layout.ranks, platform)
    _check_all_call(graphs)
    built, timed, slow = [], [], []
    for k, graph in enumerate(graphs):
        groups = groups_of(layout, platform, k)
        times = collective_times(graph, kernel_times(graph, where), platform, groups)
        timed.append(tuple(times))
        built.append(step_program(graph, times, where.host))
        slow.append(overlap_slowdown(graph, times, platform, groups))
    members = [Member(f, step) for f, step in zip(layout.fold(), built, strict=True)]
    ranks = apply_contention(rank_program(members, steps), slow)
    kinds = tuple(RankOverride(step=k) for k in range(len(graphs)))
    return RankSet(platform, None, layout, kinds, tuple(built), tuple(timed), ranks)


def _check_all_call(graphs: Sequence[Graph]) -> None:
    """Refuse a collective or a message that some of its group's ranks have no part in."""
    lines = [{op.group: op.line or op.module for op in reversed(g.ops) if collective(op)} for g in graphs]
    step_of = {rank: k for k, g in enumerate(graphs) for rank in g.ranks}
    for graph, calls in zip(graphs, lines, strict=True):
        for name, line in calls.items():
            absent = [r for r in graph.groups.get(name, ()) if name not in lines[step_of.get(r, 0)]]
            if absent:
                raise PresageError(
                    f"deadlock: rank {graph.ranks[0]} communicates in group {name} ({line}) and rank {absent[0]} of "
                    f"that group never does: rank {graph.ranks[0]} would wait for ever"
                )


def predict_rank_set(team: RankSet, where: Machine, *, draws: int, steps: int, seed: int = 0) -> StepResult:
    """Step time and memory of several ranks."""
    members = team.ranks.members
    many = rank_program(members, steps)
    draws = max(1, min(draws, int(CELLS // max(len(many.member), 1)) or 1))
    if draws == 1:
        drawn = step_seconds(many.program, Durations.of(many.seconds), many.step, steps)
    else:
        drawn = draw_steps(many, draws, where.spread(team.steps[0].graph), np.random.default_rng(seed))
    step, ranks, first = Quantiles.of(drawn), _rank_results(team), team.kinds[0].step
    basis = RankBasis(team.steps[first], team.times[first], team.platform.gpu, team.memory[first], team)
    out = result_of(basis, step, _bound(ranks, step), draws, steps)
    peak = max(k.peak_memory for k in ranks.kinds)
    said = (*where.notes, *where.engine_notes(basis.times), *where.host_notes(out.bound))
    notes = (*out.notes, *([] if team.strategy else [ASSUMED]), *said)
    return replace(out, many=ranks, peak_memory=peak, notes=notes, draws=drawn)


def other_strategies(p: StepResult, most: int = 3) -> list[tuple[Strategy, float, StepResult]]:
    """Strategies that make equal ranks faster, or fit where theirs does not: with their speed-up, fastest first."""
    team = p.basis.team if isinstance(p.basis, RankBasis) else None
    if team is None or set(team.kinds) != {USUAL} or team.where is None or team.strategy is None:
        return []
    where, how, count = team.where, team.strategy, team.layout.ranks
    usual = predict_rank_set(team, where, draws=1, steps=SIMULATED).step.p50
    found = []
    for name in DATA_PARALLEL:
        way = Strategy(name, STRATEGIES[name].options, how.tensor, how.vocabulary)
        if STRATEGIES[name].apply is STRATEGIES[how.name].apply:
            continue
        other = rank_set(team.captured, team.platform, way, count, where)
        result = predict_rank_set(other, where, draws=1, steps=SIMULATED)
        gain = usual / result.step.p50
        if result.fits and (not p.fits or gain > WORTH):
            found.append((way, gain, result))
    return sorted(found, key=lambda f: -f[1])[:most]


def _rank_results(found: RankSet) -> RankResults:
    peaks = [m.peak_allocated for m in found.memory]
    uses = rank_uses(found.ranks, found.timeline)
    kinds = []
    for m, kind, use in zip(found.ranks.members, found.kinds, uses, strict=True):
        host = found.steps[kind.step].host_total * kind.host
        how = kind.speed, kind.host, dict(kind.arguments)
        kinds.append(RankClass(m.fold.rank, m.fold.ranks, *use, host, peaks[kind.step], *how))
    most = max(kinds, key=lambda k: k.exposed)
    return RankResults(
        platform=found.platform.name,
        strategy=OWN if found.strategy is None else found.strategy.name,
        layout=tuple((n, size) for n, size in found.layout.sizes if size > 1),
        ranks=found.layout.ranks,
        communication=most.communication,
        exposed=most.exposed,
        wait=max(k.wait for k in kinds),
        kinds=tuple(kinds),
        collectives=_collectives(found),
    )


def _collectives(found: RankSet) -> tuple[CollectiveStats, ...]:
    """The collectives of a step; of several, those that are not like ones before."""
    out: dict[tuple[str, str, int, int], CollectiveStats] = {}
    for k, step in enumerate(found.steps if found.strategy is None else found.steps[:1]):
        for c in collective_stats(step.graph, found.platform, groups_of(found.layout, found.platform, k)):
            out.setdefault((c.name, c.group, c.nbytes, c.calls), c)
    return tuple(sorted(out.values(), key=lambda s: -s.nbytes * s.calls))


def _bound(ranks: RankResults, step: Quantiles) -> Bound:
    """The bottleneck of the busiest class of ranks."""
    busiest = max(ranks.kinds, key=lambda k: k.compute)
    sent = busiest.exposed + busiest.wait
    busy = busiest.compute + (sent if sent < MUCH * step.p50 else 0)
    if busy > GPU_BOUND * step.p50:
        return "gpu"
    idle = step.p50 - busiest.compute
    return "communication" if sent > idle / 2 else "host"
