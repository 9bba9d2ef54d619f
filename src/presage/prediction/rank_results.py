"""RankResults: communication and waiting of several ranks, by class of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.costs.collectives import Collectives, RankGroup
from presage.costs.kernel_model import OpTime
from presage.engine import Durations, LaneKind, Timeline
from presage.engine.timeline import intersect, length, union
from presage.graph.graph import Graph
from presage.graph.work import collective, collective_bytes
from presage.hardware import Platform
from presage.noise.sampling import RANK_SD, pace_factors, step_paces
from presage.parallel.rank_layout import CodeLayout, RankLayout
from presage.prediction.rank_program import Member, RankProgram
from presage.prediction.step_program import AUTOGRAD, MAIN, STREAM, WARM_UP, StepSpread, step_seconds

Floats = NDArray[np.float64]
MS = 1e3
OWN = "as written"  # the strategy of code that spreads itself


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same; seconds per step."""

    rank: int  # the first of them
    ranks: int
    compute: float  # kernels, with what collectives beside them cost
    communication: float  # transfers, without waits for other ranks
    exposed: float  # of these, with no compute beside
    wait: float  # for other ranks, with no compute beside
    host: float
    peak_memory: int
    speed: float = 1.0
    pace: float = 1.0  # how many times as long its host takes
    arguments: Mapping[str, str] | None = None  # of its step, where they differ

    def to_json(self) -> dict[str, Any]:
        times = ("compute", "communication", "exposed", "wait", "host")
        out = {f"{k}_ms": getattr(self, k) * MS for k in times}
        rest = {"peak_memory_bytes": self.peak_memory, "speed": self.speed, "host_factor": self.pace}
        return {"rank": self.rank, "ranks": self.ranks, **out, **rest, "arguments": dict(self.arguments or {})}


@dataclass(frozen=True)
class CollectiveStats:
    """Collectives of a step that are alike: of one kind, group and size."""

    name: str
    group: str
    ranks: int
    nbytes: int
    calls: int
    seconds: float  # each, alone on the GPU
    busbw: float  # bytes/s, as nccl-tests counts them
    measured: bool  # on this platform; else composed from link facts

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        return {
            "name": out.pop("name"),
            "bytes": out.pop("nbytes"),
            "ms": out.pop("seconds") * MS,
            "busbw_GBps": out.pop("busbw") / 1e9,
            **out,
        }


@dataclass(frozen=True)
class RankResults:
    """Results of several ranks beyond the step itself."""

    platform: str
    strategy: str
    layout: tuple[tuple[str, int], ...]
    ranks: int
    communication: float  # of the slowest kind of rank, seconds a step
    exposed: float
    wait: float
    kinds: tuple[RankClass, ...]
    collectives: tuple[CollectiveStats, ...]

    @property
    def by_strategy(self) -> bool:
        """Whether a strategy of presage's was applied, and the code does not spread itself."""
        return self.strategy != OWN

    def to_json(self) -> dict[str, Any]:
        return {
            "platform": self.platform,
            "strategy": self.strategy,
            "layout": dict(self.layout),
            "ranks": self.ranks,
            "communication_ms": self.communication * MS,
            "exposed_communication_ms": self.exposed * MS,
            "wait_ms": self.wait * MS,
            "kinds": [k.to_json() for k in self.kinds],
            "collectives": [s.to_json() for s in self.collectives],
        }


def groups_of(layout: RankLayout | CodeLayout, platform: Platform, step: int = 0) -> dict[str, RankGroup]:
    """The communicator of each parallel dimension, or of each process group in a captured step."""
    if isinstance(layout, CodeLayout):
        sizes = {name: len(ranks) for name, ranks in layout.groups[step].items()}
        return {name: RankGroup(n, layout.per_domain(step, name, platform.domain)) for name, n in sizes.items()}
    return {name: RankGroup(size, layout.per_domain(name, platform.domain)) for name, size in layout.sizes if size > 1}


def collective_times(
    graph: Graph, times: Sequence[OpTime], platform: Platform, groups: Mapping[str, RankGroup]
) -> list[OpTime]:
    """Kernel times with those of collectives taken from the platform's links."""
    model, out = Collectives.of(platform), []
    for op, time in zip(graph.ops, times, strict=True):
        kind = collective(op)
        if kind is not None and op.group in groups:
            took = model.seconds(kind, float(collective_bytes(graph, op)), groups[op.group])
            time = OpTime(took, 1, "communication", "model")
        out.append(time)
    return out


def collective_stats(graph: Graph, platform: Platform, groups: Mapping[str, RankGroup]) -> tuple[CollectiveStats, ...]:
    """Collectives of a step, equal ones together, most bytes first."""
    model = Collectives.of(platform)
    found: dict[tuple[str, str, int], int] = {}
    for op in graph.ops:
        kind = collective(op)
        if kind is not None and op.group in groups:
            key = kind, op.group, collective_bytes(graph, op)
            found[key] = found.get(key, 0) + 1
    out = []
    for (kind, name, nbytes), calls in found.items():
        group = groups[name]
        rates = model.seconds(kind, float(nbytes), group), float(model.busbw(kind, float(nbytes), group))
        out.append(CollectiveStats(kind, name, group.ranks, nbytes, calls, *rates, model.measured(kind, group)))
    return tuple(sorted(out, key=lambda s: -s.nbytes * s.calls))


def rank_uses(ranks: RankProgram, timeline: Timeline) -> list[tuple[float, float, float, float]]:
    """Compute, transfers, transfers exposed and waits exposed of each member, seconds per steady-state step."""
    ends = [float(timeline.end[ranks.step == k].max()) for k in range(ranks.steps)]
    settled = min(WARM_UP, ranks.steps - 1)
    window = ends[settled - 1], ends[-1]
    steps = ranks.steps - settled
    out = []
    for m in ranks.members:
        rank = m.fold.rank
        compute, moved = (_inside(timeline, k, rank, window) for k in (LaneKind.COMPUTE, LaneKind.COMMUNICATION))
        exposed, wait = timeline.exposed_communication(rank, window)
        out.append((compute / steps, moved / steps, exposed / steps, wait / steps))
    return out


def _inside(timeline: Timeline, kind: LaneKind, rank: int, window: tuple[float, float]) -> float:
    """Seconds of a window in which a rank's lanes of this kind work."""
    some = timeline.spans(kind, rank)
    return length(intersect(union(timeline.start[some], timeline.end[some]), np.array([window])))


def draw_steps(ranks: RankProgram, draws: int, spread: StepSpread, rng: np.random.Generator) -> Floats:
    """Seconds a step in each draw: one pace of the hosts and one error of the kernel models for all ranks, and a little
    of each rank's own, of equal ranks the slowest's."""
    p = spread.host
    common = np.empty((STREAM + 1, ranks.steps, draws))
    for lane in (MAIN, AUTOGRAD):
        common[lane] = step_paces(rng, p.run_sd, p.step_sd, p.step_correlation, ranks.steps, draws)
    common[:STREAM] *= pace_factors(rng, p.machine_sd, draws)
    common[STREAM] = pace_factors(rng, spread.kernels, draws)
    took = np.concatenate([_drawn(m, common, spread.gpu, rng) for m in ranks.members])
    return step_seconds(ranks.program, Durations.of(took), ranks.step, ranks.steps)


def _drawn(m: Member, common: Floats, gpu_sd: float, rng: np.random.Generator) -> Floats:
    """Seconds of a member's tasks: (steps x tasks, draws)."""
    _, steps, draws = common.shape
    own = [pace_factors(rng, sd, draws, m.fold.ranks) for sd in (RANK_SD, RANK_SD, gpu_sd)]
    lanes = common * np.array(own)[:, None, :]
    table = lanes[np.minimum(m.tasks.lane, STREAM)]
    table[[task for task, _ in m.tasks.meetings]] = 1.0
    return (table.swapaxes(0, 1) * m.tasks.seconds[None, :, None]).reshape(steps * len(m.tasks), draws)
