"""JobMemory: what each stage of a job needs on one GPU, whether it fits, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.memory.activations import LayerMemory, layer_activations, number_bytes
from presage.memory.buffers import OLD, Buffers, buffers, input_masks, logits, outside
from presage.memory.layer_kinds import (
    FrozenBytes,
    adam_of_ends,
    frozen_bytes,
    frozen_tower,
    host_share,
    tower_activations,
)
from presage.memory.optimizer_state import OptimizerState, optimizer_state, parameter_shards
from presage.memory.stage_kinds import StageKinds, routed_layers, stage_kinds
from presage.parallel.orders import Extent
from presage.parallel.plan import ParallelPlan
from presage.parallel.schedules import schedule_kind

Floats = NDArray[np.float64]
# Of activations and working tensors, what the allocator holds beside them and cannot hand out: the medians of our own
# decoder steps on an H200 (data/h200_varied, gqa_*), ten that keep all activations and two that compute them again.
IDLE, IDLE_AGAIN = 0.11, 0.24
# Of a GPU's memory, what is to be left beside all that is predicted to be in use, idle blocks included, so that a job
# surely fits: `presage accuracy memory` sets it on one half of the cases and tests it on the other.
SAFETY = 0.05


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes of one rank of a stage, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward passes
    working: (
        float  # one layer's tensors while it runs, and what it computes again; 0 where the loss is the worst moment
    )
    loss: float  # logits and what the loss makes of them; 0 where a layer is the worst moment
    buffers: float  # gathered parameters, buckets, receive buffers, workspaces
    idle: float  # an allowance: blocks the allocator holds and nothing is in
    outside: float  # the driver's and NCCL's
    microbatches: int  # in flight, chunks of a microbatch where the stage has several

    @property
    def allocated(self) -> float:
        """Bytes of tensors: PyTorch's max_memory_allocated."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.working + self.loss + self.buffers

    @property
    def reserved(self) -> float:
        """Bytes the allocator reserves for them: max_memory_reserved."""
        return self.allocated + self.idle

    @property
    def device(self) -> float:
        """All memory in use on the GPU, as nvidia-smi shows it."""
        return self.reserved + self.outside

    @property
    def needed(self) -> float:
        """Bytes needed at least: an allocator short of memory frees idle blocks."""
        return self.allocated + self.outside


@dataclass(frozen=True, slots=True)
class JobMemory:
    """All stages of a job, and the GPU's memory."""

    stages: tuple[StageMemory, ...]
    memory: float
    reported_as: str = "reserved"  # the figure that its framework logs: allocated, reserved or device

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda s: s.needed)

    @property
    def peak(self) -> float:
        """Peak bytes of the fullest stage, as the framework logs them."""
        return max(float(getattr(s, self.reported_as)) for s in self.stages)

    @property
    def needed(self) -> float:
        """Bytes that the fullest stage needs at least."""
        return self.worst.needed

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    @property
    def surely_fits(self) -> bool:
        """Whether it fits with idle blocks too, and a margin left."""
        return max(s.device for s in self.stages) <= (1 - SAFETY) * self.memory

    @property
    def margin(self) -> float:
        """Bytes left, or missing where negative."""
        return self.memory - self.needed


def job_memory(job: Job) -> JobMemory:
    """Memory of one rank of every stage."""
    found = _FamilyMemory(job, [job.parallel], [job.parallel], [job.recompute], every=True).peaks()
    whole = np.broadcast_arrays(*found)
    stages = tuple(StageMemory(*row[:-1], int(row[-1])) for row in zip(*(x[0, 0].tolist() for x in whole), strict=True))
    return JobMemory(stages, float(job.platform.gpu.memory), _memory_source(job))


def plans_needed(
    job: Job, splits: Sequence[ParallelPlan], shardings: Sequence[ParallelPlan], recomputes: Sequence[Recompute]
) -> Floats:
    """[split, sharding, recomputation]: `job_memory(...).needed` of plans that differ from the job's in how layers are
    assigned to stages and run, in what replicas share, and in what is recomputed."""
    family = _FamilyMemory(job, splits, shardings, recomputes)
    needed = StageMemory(*family.peaks()).needed
    needed = np.broadcast_to(needed, (len(shardings), len(recomputes), needed.shape[-1]))
    most = np.maximum.reduceat(needed, family.begin, axis=-1)
    return np.ascontiguousarray(np.moveaxis(most, -1, 0))


def most_needed(job: Job) -> float:
    """`job_memory(job).needed`, computed from fewer stages."""
    return float(plans_needed(job, [job.parallel], [job.parallel], [job.recompute]).item())


def _memory_source(job: Job) -> str:
    """Megatron logs what is allocated, PyTorch's trainers what is reserved; before, one looked at nvidia-smi."""
    host = job.framework.host
    if host in OLD:
        return "device"
    return "allocated" if host in ("megatron-core", "graph") else "reserved"


def layer_counts(job: Job) -> tuple[tuple[int, int], ...]:
    """Number of layers without and with experts, by stage; `StageKinds` tells those of a pattern apart."""
    x = job.model.experts
    if job.model.pattern:
        return routed_layers(job)
    split = job.parallel.slot_layers(job.model.layers, job.model.predicted)
    return _counted(split, job.parallel.slots, 0 if x is None else x.dense_layers, 0 if x is None else x.every)


@lru_cache(4096)
def _counted(
    split: tuple[int, ...], slots: tuple[tuple[int, ...], ...], dense: int, every: int
) -> tuple[tuple[int, int], ...]:
    """Dense and MoE layers by stage, from the layers of each slot; `every` is 0 without experts."""
    begin = [0, *accumulate(split)]
    moe = [_moe_before(dense, every, b) - _moe_before(dense, every, a) if every else 0 for a, b in pairwise(begin)]
    return tuple((sum(split[i] - moe[i] for i in own), sum(moe[i] for i in own)) for own in slots)


def _moe_before(dense: int, every: int, layers: int) -> int:
    """Number of MoE layers before a layer."""
    return -(-max(0, layers - dense) // every)


class _Rank(NamedTuple):
    """Stages whose memory is worked out, of all splits of a family one after the other."""

    number: int
    dense: int  # layers
    moe: int
    first: bool  # has the embedding
    last: bool  # has the head


class _FamilyMemory:
    """Memory of plans that differ in how layers are assigned to stages, in what replicas share and in what is
    recomputed. Values go with some of these alone: arrays are [sharding, recomputation, stage], with axes of one."""

    def __init__(
        self, job: Job, splits: Sequence[ParallelPlan], shardings: Sequence[ParallelPlan],
        recomputes: Sequence[Recompute], every: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.model = job, job.model
        self.sharded = [replace(job, parallel=p) for p in shardings]
        again = [replace(job, recompute=r) for r in recomputes]
        self.shares, self.outside = parameter_shards(job), outside(job)
        self.state = OptimizerState(*_by_sharding([optimizer_state(j) for j in self.sharded]))
        self.buffers = Buffers(*_by_sharding([buffers(j, self.shares) for j in self.sharded]))
        self.dense = LayerMemory(*_by_recompute([layer_activations(j, experts=False) for j in again]))
        routed = [layer_activations(j, experts=True) for j in again] if job.model.experts else ()
        self.moe = LayerMemory(*_by_recompute(routed)) if routed else self.dense
        self.tower, self.idle = _by_recompute([(tower_activations(j), _idle(j)) for j in again])
        self.host, self.tokens = host_share(job), float(job.rank_tokens)
        p = job.parallel
        self.ends = job.model.hidden * self.tokens / (p.tp if p.sequence_parallel else 1)  # numbers of a microbatch
        self.logits, self.spare = logits(job)
        self.masks = input_masks(job)
        self._stages(splits, again, every or bool(job.model.pattern))

    def _stages(self, splits: Sequence[ParallelPlan], again: Sequence[Job], every: bool) -> None:
        x, job = self.model.experts, self.job
        routed = (0, 0) if x is None else (x.dense_layers, x.every)
        jobs = [replace(job, parallel=p) for p in splits]
        if self.model.pattern:
            each = [_pattern_ranks(j) for j in jobs]
        else:
            each = [_ranks(j.parallel, self.model.layers, self.model.predicted, *routed, every) for j in jobs]
        self.begin = np.cumsum([0, *map(len, each[:-1])])
        flight = [in_flight(j, rank.number) for j, some in zip(jobs, each, strict=True) for rank in some]
        virtual = [p.virtual for p, some in zip(splits, each, strict=True) for _ in some]
        columns = zip(*(rank[1:] for some in each for rank in some), strict=True)
        self.layers, self.layers_moe, self.first, self.last = (np.array(c, np.float64) for c in columns)
        self.flight, self.virtual = np.array(flight, np.float64), np.array(virtual, np.float64)
        if self.model.pattern:
            found = [[k for j in jobs for k in stage_kinds(replace(j, recompute=a.recompute))] for a in again]
            self.kinds = StageKinds(*np.moveaxis(np.array(found), -1, 0))

    def peaks(self) -> tuple[Any, ...]:
        """The peak of each stage: arrays, as the values of `StageMemory`."""
        shared, experts, ends = self.parameters()
        kept, working = self.activations()
        if self.model.pattern:
            k = self.kinds
            shared, experts = shared + k.shared, experts + k.experts
            kept, working = kept + k.kept * self.tokens * self.flight / self.virtual, k.working * self.tokens
        states = self.states(shared, experts, ends)
        if self.model.vision:
            states = states._replace(weights=states.weights + self.first * frozen_tower(self.job))
            kept = kept + self.first * self.tower
        held, gathered = self.buffer_bytes(shared + experts, ends)
        held = held + self.masks * np.maximum(self.first, self.last)
        logits = self.logits * self.last
        if self.job.framework.foreach:
            return self.by_moment(states, kept, working, logits, held, gathered)
        loss = np.where(logits > working, logits, 0.0)
        return self.stage_memory(*states, kept, np.where(logits > working, 0.0, working), loss, held + gathered)

    def stage_memory(
        self, weights: Floats, gradients: Floats, optimizer: Floats, kept: Floats, working: Floats, loss: Floats,
        held: Floats,
    ) -> tuple[Any, ...]:  # fmt: skip
        idle = self.idle * (kept + working) + self.spare * (loss > 0)
        return weights, gradients, optimizer, kept, working, loss, held, idle, self.outside, self.flight

    def by_moment(
        self, s: FrozenBytes, kept: Floats, working: Floats, logits: Floats, held: Floats, gathered: Floats
    ) -> tuple[Any, ...]:
        """PyTorch's eager trainers free gradients before each step and update lists of tensors: the worst of the loss,
        the backward pass of the last layer and of the first, and the update, with one more copy of what is trained.

        FSDP's hooks on the inputs of frozen units (_register_post_backward_reshard_only_hook) hold these and their
        gradients to the end of the backward pass."""
        early = s.gradients if self.job.microbatches > 1 else 0.0
        hooks = np.array([j.tuning.frozen and j.parallel.fsdp for j in self.sharded])[:, None, None]
        moments = (
            (early, kept, 0.0, logits, held),
            (early, (1.0 + hooks) * kept, working, 0.0, held + gathered),
            (s.gradients, 0.0, working, 0.0, held + gathered),
            (s.gradients, 0.0, 0.0, 0.0, held + s.gradients),
        )
        worst = np.argmax(np.stack(np.broadcast_arrays(*(sum(m) for m in moments))), axis=0)
        chosen = (np.choose(worst, np.broadcast_arrays(*part, worst)[:-1]) for part in zip(*moments, strict=True))
        gradients, kept, working, loss, held = chosen
        return self.stage_memory(s.weights, gradients, s.optimizer, kept, working, loss, held)

    def states(self, shared: Floats, experts: Floats, ends: Floats) -> FrozenBytes:
        """Weights, gradients and the optimizer's state."""
        if self.job.tuning.frozen:
            layers = self.layers + self.layers_moe
            found = [frozen_bytes(j, layers, shared - ends, experts, ends) for j in self.sharded]
            return FrozenBytes(*(np.stack([np.broadcast_to(x, shared.shape) for x in part])[:, None] for part in zip(*found, strict=True)))
        s, (adam,) = self.state, _by_sharding([(adam_of_ends(j, 1.0),) for j in self.sharded])
        return FrozenBytes(
            s.weight * shared + s.expert_weight * experts, s.gradient * shared + s.expert_gradient * experts,
            self.host * (s.optimizer * shared + s.expert_optimizer * experts + adam * ends),
        )  # fmt: skip

    def parameters(self) -> tuple[Floats, Floats, Floats]:
        """Shared ones, experts, and of the shared ones embedding and head. Tied weights are on both ends."""
        s, m, first, last = self.shares, self.model, self.first, self.last
        dense, moe = (0.0, 0.0) if m.pattern else (self.layers, self.layers_moe)
        shared, experts = dense * s.dense + moe * s.moe, moe * s.experts
        ends = first * (s.embedding + s.positions + m.trained_vision_parameters / self.job.parallel.tp)
        ends = ends + last * (s.norm + s.head * (1 - first * m.tied))
        if m.predicted:
            shared, experts = shared + last * (m.predicted * s.further), experts + last * (m.predicted * s.further_experts)
            ends = ends + last * (1 - first) * (0.0 if m.tied else s.embedding)
        return shared + ends, experts, ends

    def activations(self) -> tuple[Floats, Floats]:
        """Activations of all microbatches in flight, and what a layer needs while it runs."""
        d, x, e = self.dense, self.moe, number_bytes(self.job.precision)
        dense, moe = (np.zeros(len(self.layers)),) * 2 if self.model.pattern else (self.layers, self.layers_moe)
        kept = (dense * d.kept + moe * x.kept) * self.tokens * self.flight / self.virtual
        working = np.maximum(d.working * (dense > 0), x.working * (moe > 0)) * self.tokens
        if self.job.framework.dropout:
            kept = kept + self.first * self.ends * self.flight
        further = self.model.predicted  # tokens beside the next, each with a layer of its own
        more = further * np.where(moe > 0, x.kept, d.kept) * self.tokens
        return kept + self.last * (2 * e * self.ends * (1 + further) + more), working

    def buffer_bytes(self, parameters: Floats, ends: Floats) -> tuple[Floats, Floats]:
        """Buffers for communication and the optimizer, and those of a layer alone."""
        b, dense, moe = self.buffers, self.layers > 0, self.layers_moe > 0
        total = (
            b.fixed
            + b.per_parameter * np.minimum(parameters, b.most_parameters)
            + b.per_end * ends
            + b.per_flight * self.flight
        )
        return total + b.head * self.last, b.dense * dense + b.moe * moe - b.both * (dense & moe)


def _idle(job: Job) -> float:
    return IDLE_AGAIN if job.recompute.mode == "full" else IDLE


def _by_sharding(rows: Sequence[Sequence[float]]) -> Floats:
    """[value, sharding, 1, 1]"""
    return np.array(rows).T[:, :, None, None]


def _by_recompute(rows: Sequence[Sequence[float]]) -> Floats:
    """[value, recomputation, 1]"""
    return np.array(rows).T[:, :, None]


@lru_cache(4096)
def _ranks(p: ParallelPlan, layers: int, predicted: int, dense: int, every: int, each: bool) -> tuple[_Rank, ...]:
    """The stages of a plan, or enough to find the one that needs most: of equal inner ones the first, which holds most
    microbatches, for `in_flight` never grows from a stage to the next."""
    counts, last = _counted(p.slot_layers(layers, predicted), p.slots, dense, every), p.slot_count - 1
    numbers: Iterable[int] = range(p.pp)
    if not each:
        alike: dict[tuple[int, int], int] = {}
        for number in range(1, p.pp - 1):
            alike.setdefault(counts[number], number)
        numbers = sorted({0, p.pp - 1, *alike.values()})
    return tuple(_Rank(n, *counts[n], 0 in p.slots[n], last in p.slots[n]) for n in numbers)


def _pattern_ranks(job: Job) -> tuple[_Rank, ...]:
    p, last = job.parallel, job.parallel.slot_count - 1
    return tuple(_Rank(n, *c, 0 in p.slots[n], last in p.slots[n]) for n, c in enumerate(routed_layers(job)))


# ---- How many microbatches (of a chunk) a pipeline stage holds at once.


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most."""
    p, microbatches = job.parallel, max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    return schedule_kind(p.schedule).in_flight(stage, Extent(p.pp, microbatches, p.virtual, 1))
