"""The space of a search: all legal layouts of a job on so many GPUs, made from divisors; `check` turns down none.

A family has what a layer's prices depend on; the layouts of one differ in schedule, sharding and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import groupby
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.errors import PresageError
from presage.parallel.dispatchers import USUAL
from presage.parallel.plan import ParallelPlan
from presage.parallel.schedules import ONE_CHUNK, SCHEDULES, ScheduleKind
from presage.prediction.jobs.efficiency import LAWS
from presage.prediction.jobs.expert_exchange import dispatch_seconds
from presage.prediction.jobs.plan_cache import PlanCache, plan_cache
from presage.search.plans import KNOBS, RECOMPUTES, JobPlan, StateSharding, recompute_word, sharding_word

MOST_TP = 16  # or the GPUs that share a domain, where these are more
FUSED = ("deepep", "hybridep")  # dispatchers that are tried
FUSING = ("megatron-core", "nemo", "torchtitan")  # where there are such
LEAST_TOKENS = 1024  # of a sequence on a context-parallel rank
Keep = Mapping[str, frozenset[str]]  # knob: the words that are left of it


class PlanFamily(NamedTuple):
    """Layouts with the same degrees."""

    gpus: int
    parallel: ParallelPlan  # with the schedule and the sharding left open
    sizes: tuple[int, ...]  # of microbatches

    @property
    def dp(self) -> int:
        return self.parallel.dp(self.gpus)


class LayerSplit(NamedTuple):
    """How layers are assigned to stages and run."""

    virtual: int
    schedule: str
    ends_as_layers: bool


class PlanGrid(NamedTuple):
    """The plans of a family: each size of microbatches with each split that it allows, each sharding and each
    recomputation, in this order."""

    family: PlanFamily
    splits: tuple[ParallelPlan, ...]  # with the sharding left open
    shardings: tuple[ParallelPlan, ...]  # with the schedule left open
    recomputes: tuple[Recompute, ...]
    allowed: NDArray[np.bool_]  # [size, split]: whether a schedule takes so many microbatches

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return *self.allowed.shape, len(self.shardings), len(self.recomputes)

    @property
    def legal(self) -> int:
        """How many legal plans there are."""
        return int(self.allowed.sum()) * len(self.shardings) * len(self.recomputes)

    def words(self, name: str) -> tuple[int, list[str]]:
        """The axis of `shape` along which plans choose a knob, and their words for it."""
        if name in ("virtual", "schedule"):
            return 1, [str(getattr(p, name)) for p in self.splits]
        if name == "sharding":
            return 2, [sharding_word(p) for p in self.shardings]
        if name == "recompute":
            return 3, [recompute_word(r) for r in self.recomputes]
        sizes = self.family.sizes
        if name == "micro_batch":
            return 0, [str(size) for size in sizes]
        return 0, [str(self.family.gpus if name == "gpus" else getattr(self.family.parallel, name))] * len(sizes)

    def plan(self, place: int) -> JobPlan:
        """The plan at a place."""
        size, split, sharding, again = np.unravel_index(place, self.shape)
        q = self.shardings[sharding]
        parallel = replace(self.splits[split], zero=q.zero, fsdp=q.fsdp, shard=q.shard)
        return JobPlan(self.family.gpus, parallel, self.family.sizes[size], self.recomputes[again])


@dataclass(frozen=True)
class PlanSpace:
    """All legal plans of one job."""

    job: Job
    gpus: tuple[int, ...]
    keep: Keep = field(default_factory=dict)

    def families(self) -> Iterator[PlanFamily]:
        """All families, each once."""
        known = plan_cache(self.job, LAWS)
        for gpus in self.gpus:
            for tp in self._tps(gpus):
                for cp in self._cps(gpus, tp):
                    for pp in self._pps(gpus, tp, cp):
                        yield from self._inner(gpus, tp, cp, pp, known)

    def _inner(self, gpus: int, tp: int, cp: int, pp: int, known: PlanCache) -> Iterator[PlanFamily]:
        dp = gpus // (tp * cp * pp)
        if not self.allows("dp", dp):
            return
        sequence = tp > 1 and self.job.framework.sequence and self.job.sequence % (tp * cp) == 0
        plan = ParallelPlan(tp=tp, sequence_parallel=sequence, cp=cp, pp=pp)
        for ep, expert_tp in self._experts(gpus // pp, tp):
            each = [replace(plan, ep=ep, expert_tp=expert_tp, dispatcher=d) for d in self._dispatchers(ep * expert_tp)]
            sizes = self._micro_batches(dp) if each else []
            sized = [(self._quickest(gpus, each, size, known), size) for size in sizes]
            for quickest, some in groupby(sized, key=lambda pair: pair[0]):
                yield PlanFamily(gpus, quickest, tuple(size for _, size in some))

    def grid(self, f: PlanFamily) -> PlanGrid:
        """Plans of a family, by what they choose."""
        by_size = [self._splits(f, size) for size in f.sizes]
        choices = tuple(dict.fromkeys(split for some in by_size for split in some)), tuple(self._shardings(f))
        p = f.parallel
        degrees, experts = (p.tp, p.sequence_parallel, p.pp), (p.cp, p.ep, p.expert_tp)  # `replace` takes far longer
        splits = tuple(
            ParallelPlan(*degrees, virtual, kind, *experts, 0, False, 0, (), ends, p.dispatcher)
            for virtual, kind, ends in choices[0]
        )
        shardings = tuple(
            ParallelPlan(*degrees, 1, p.schedule, *experts, *one, (), False, p.dispatcher) for one in choices[1]
        )
        allowed = np.array([[split in some for split in choices[0]] for some in by_size], bool)
        return PlanGrid(f, splits, shardings, tuple(self._recomputes()), allowed)

    def layouts(self, f: PlanFamily) -> list[JobPlan]:
        """Plans of a family, in order."""
        grid = self.grid(f)
        every = np.broadcast_to(grid.allowed[:, :, None, None], grid.shape)
        return [grid.plan(place) for place in np.flatnonzero(every).tolist()]

    def allows(self, name: str, value: object) -> bool:
        return name not in self.keep or str(value) in self.keep[name]

    def _kept(self, name: str, values: Iterator[int]) -> list[int]:
        return [v for v in values if self.allows(name, v)]

    # ---- one knob each

    def _tps(self, gpus: int) -> list[int]:
        m, most = self.job.model, max(MOST_TP, self.job.platform.domain)
        fits = (t for t in divisors(gpus) if t <= most and not m.heads % t and not m.ffn % t)
        return self._kept("tp", (t for t in fits if m.latent or not m.kv_heads % t or not t % m.kv_heads))

    def _cps(self, gpus: int, tp: int) -> list[int]:
        """As `check` has it, and none whose ranks would have but a few tokens."""
        sequence = self.job.sequence
        fits = (c for c in divisors(gpus // tp) if c == 1 or not sequence % (2 * c))
        return self._kept("cp", (c for c in fits if c == 1 or sequence // c >= LEAST_TOKENS))

    def _pps(self, gpus: int, tp: int, cp: int) -> list[int]:
        most, batch = self.job.model.layers + 2, self.job.global_batch  # at most a layer, embedding or head each
        fits = (p for p in divisors(gpus // (tp * cp)) if p <= most)
        return self._kept("pp", (p for p in fits if not batch % (gpus // (tp * cp * p))))

    def _experts(self, ranks: int, tp: int) -> list[tuple[int, int]]:
        e = self.job.model.experts
        if e is None:
            return [(1, 1)] if self.allows("ep", 1) and self.allows("expert_tp", 1) else []
        cuts = self._kept("expert_tp", (t for t in sorted({1, tp}) if not e.ffn % t))
        return [(n, t) for t in cuts for n in self._kept("ep", (n for n in divisors(e.experts) if not ranks % (n * t)))]

    def _dispatchers(self, ranks: int) -> list[str]:
        """Those that the software has, and the job's own; of no matter where ranks have all experts."""
        e, own = self.job.model.experts, self.job.dispatcher
        if e is None:
            return [""] if self.allows("dispatcher", "") else []
        more = FUSED if self.job.framework.key in FUSING and not e.capacity else ()
        names = dict.fromkeys((own, USUAL, *more)) if ranks > 1 else (own,)
        return [name for name in names if self.allows("dispatcher", name)]

    def _quickest(self, gpus: int, each: list[ParallelPlan], size: int, known: PlanCache) -> ParallelPlan:
        """The plan with the shortest exchanges, of those that differ in their dispatcher alone."""
        if len(each) == 1:
            return each[0]
        jobs = (self.job.changed(gpus=gpus, parallel=p, micro_batch=size) for p in each)
        return min(jobs, key=lambda job: dispatch_seconds(job, known)).parallel

    def _micro_batches(self, dp: int) -> list[int]:
        """Powers of two, and the job's own."""
        replica = self.job.global_batch // dp
        sizes = {1 << i for i in range(replica.bit_length())} | {self.job.micro_batch}
        return self._kept("micro_batch", (s for s in sorted(sizes) if not replica % s))

    def _splits(self, f: PlanFamily, size: int) -> list[LayerSplit]:
        pp, searched = f.parallel.pp, [kind for kind in SCHEDULES.values() if self._tries(kind)]
        if pp == 1:
            found = [LayerSplit(1, ONE_CHUNK, False)]
        else:
            count = self.job.global_batch // (size * f.dp)
            flat, chunked = ([k.name for k in searched if k.chunks in few] for few in (("one", "any"), ("several",)))
            found = [LayerSplit(1, kind, ends) for ends in self._ends(pp) for kind in flat]
            chunks = self._chunks(pp) if not count % pp else []
            found += [LayerSplit(v, kind, ends) for kind in chunked for v in chunks for ends in self._ends(pp * v)]
            for kind in (k for k in searched if k.chunks == "two" and not k.misfit(pp, count)):
                slots = 2 * pp // kind.route.copies
                if slots <= self.job.model.layers + 2:
                    found += [LayerSplit(2, kind.name, ends) for ends in self._ends(slots)]
        return [s for s in found if self.allows("virtual", s.virtual) and self.allows("schedule", s.schedule)]

    def _tries(self, kind: ScheduleKind) -> bool:
        """Whether a schedule is tried: where the job's software has it, or where the job or `keep` name it."""
        named = kind.name == self.job.parallel.schedule or kind.name in self.keep.get("schedule", ())
        return named or (kind.searched and (not kind.software or self.job.framework.key in kind.software))

    def _chunks(self, pp: int) -> list[int]:
        """Chunks of a stage: powers of two, and what leaves all alike."""
        layers, more = self.job.model.layers, 2 + self.job.model.predicted
        every = range(2, (layers + 2) // pp + 1)
        return [v for v in every if not v & (v - 1) or not layers % (pp * v) or not (layers + more) % (pp * v)]

    def _ends(self, slots: int) -> list[bool]:
        """Whether embedding and head may take a layer's place; only where layers alone do not come out even."""
        layers = self.job.model.layers
        return [True] if slots > layers else [False, True] if layers % slots else [False]

    def _shardings(self, f: PlanFamily) -> list[StateSharding]:
        """ZeRO's stages, FSDP that keeps gathered parameters or not, FSDP within a node (HSDP), and the job's own.
        ZeRO's stages 2 and 3 go without a pipeline unless they are the job's own: DeepSpeed has no such plans."""
        q, p = f.parallel, self.job.parallel
        holders, near = f.dp * q.cp, self.job.platform.domain // q.tp
        found = [StateSharding(z, False, 0) for z in range(1 if holders == 1 else 4 if q.pp == 1 else 2)]
        if holders > 1:
            found += [StateSharding(2, True, 0), StateSharding(3, True, 0)]
            found += [StateSharding(3, True, near)] if 1 < near < holders and not holders % near else []
            own = StateSharding(p.zero, p.fsdp, p.shard)
            found += [] if own in found or (p.shard and holders % p.shard) else [own]
        return [s for s in found if self.allows("zero", s.zero) and self.allows("sharding", sharding_word(s))]

    def _recomputes(self) -> list[Recompute]:
        """The usual ones, and the job's own."""
        own = self.job.recompute
        every = [*RECOMPUTES.values()] + ([] if own in RECOMPUTES.values() else [own])
        return [r for r in every if self.allows("recompute", recompute_word(r))]


def divisors(n: int) -> list[int]:
    """Divisors of a number, in order."""
    low = [d for d in range(1, isqrt(n) + 1) if not n % d]
    return low + [n // d for d in reversed(low) if d * d != n]


def parse_keep(texts: list[str]) -> dict[str, frozenset[str]]:
    """From words like tp=8,recompute=full; a knob that is named twice may have either value."""
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, sign, value = part.partition("=")
            name = name.strip().replace("-", "_")
            if not sign or not value.strip():
                raise PresageError(f"--keep {part}: it should be like tp=8,recompute=full")
            if name not in KNOBS:
                near = get_close_matches(name, KNOBS, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise PresageError(f"--keep {part}: unknown knob {name!r}: choose from {', '.join(KNOBS)}{hint}")
            found[name] = found.get(name, frozenset()) | {value.strip()}
    return found
