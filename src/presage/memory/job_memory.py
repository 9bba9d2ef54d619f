"""JobMemory: what each stage of a job needs on one GPU, whether it fits, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job, Recompute
from presage.configs.transformer import Transformer
from presage.memory.activations import LayerMemory, layer_activations, number_bytes, sample_first
from presage.memory.buffers import OLD, Buffers, buffers, input_masks, logits, outside, token_buffers
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
    own = (job.parallel,)
    found = _FamilyMemory(job, (job.micro_batch,), own, own, (job.recompute,), every=True).peaks()
    whole = np.empty((len(found), 1, 1, 1, job.parallel.pp))
    for row, part in zip(whole, found, strict=True):
        row[...] = part
    rows: list[Any] = [(*row[:-1], int(row[-1])) for row in whole[:, 0, 0, 0].T.tolist()]
    stages = tuple(StageMemory(*row) for row in rows)
    return JobMemory(stages, float(job.platform.gpu.memory), _memory_source(job))


def plans_needed(
    job: Job, sizes: Sequence[int], splits: Sequence[ParallelPlan], shardings: Sequence[ParallelPlan],
    recomputes: Sequence[Recompute],
) -> Floats:  # fmt: skip
    """[size, split, sharding, recomputation]: `job_memory(...).needed` of plans that differ from the job's in the size
    of microbatches, in how layers are assigned to stages and run, in what replicas share, and in what is recomputed."""
    family = _FamilyMemory(job, sizes, splits, shardings, recomputes)
    by_stage: Any = StageMemory(*family.peaks()).needed
    needed = np.broadcast_to(by_stage, (len(sizes), len(shardings), len(recomputes), len(family.first)))
    return np.moveaxis(np.maximum.reduceat(needed, family.begin, axis=-1), -1, 1)


def most_needed(job: Job) -> float:
    """`job_memory(job).needed`, computed from fewer stages."""
    own = (job.parallel,)
    return float(plans_needed(job, (job.micro_batch,), own, own, (job.recompute,)).item())


def _memory_source(job: Job) -> str:
    """Megatron logs what is allocated, PyTorch's trainers what is reserved; before, one looked at nvidia-smi."""
    host = job.framework.host
    if host in OLD:
        return "device"
    return "allocated" if host in ("megatron-core", "graph") else "reserved"


def layer_counts(job: Job) -> tuple[tuple[int, int], ...]:
    """Number of layers without and with experts, by stage; `StageKinds` tells those of a pattern apart."""
    return stage_counts(job.model, job.parallel)


def stage_counts(m: Transformer, p: ParallelPlan) -> tuple[tuple[int, int], ...]:
    """`layer_counts` of a plan."""
    x = m.experts
    if m.pattern:
        return routed_layers(m, p)
    split = p.slot_layers(m.layers, m.predicted)
    return _counted(split, p.slots, 0 if x is None else x.dense_layers, 0 if x is None else x.every)


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
    """Memory of plans that differ in the size of microbatches, in how layers are assigned to stages, in what replicas
    share and in what is recomputed. Values go with some of these alone: arrays are [size, sharding, recomputation,
    stage], with axes of one."""

    def __init__(
        self, job: Job, sizes: Sequence[int], splits: Sequence[ParallelPlan], shardings: Sequence[ParallelPlan],
        recomputes: Sequence[Recompute], every: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.model, self.recomputes, p = job, job.model, recomputes, job.parallel
        self.sized = [job.changed(micro_batch=size) for size in sizes]
        self.sharded = [job.changed(parallel=p) for p in shardings]
        self.shares, self.outside, self.host = parameter_shards(job), outside(job), host_share(job)
        self.state = OptimizerState(*_along(1, [optimizer_state(j) for j in self.sharded]))
        self.buffers = Buffers(*_along(1, [buffers(j, self.shares) for j in self.sharded]))
        self.tokens, self.logits, self.spare, self.masks, self.token_buffers, self.per_flight = _along(
            0, [(float(j.rank_tokens), *logits(j), input_masks(j), *token_buffers(j)) for j in self.sized]
        )
        self.ends = job.model.hidden * self.tokens / (p.tp if p.sequence_parallel else 1)  # numbers of a microbatch
        (self.idle,) = _along(2, [(IDLE_AGAIN if r.mode == "full" else IDLE,) for r in recomputes])
        self.dense = LayerMemory(*self._by_token(recomputes, lambda j: layer_activations(j, experts=False)))
        self.moe = self.dense
        if job.model.experts:
            self.moe = LayerMemory(*self._by_token(recomputes, lambda j: layer_activations(j, experts=True)))
        self._stages(splits, every)
        if job.model.pattern:
            found = self._by_token(
                recomputes, lambda j: [k for split in splits for k in stage_kinds(j.changed(parallel=split))]
            )
            self.kinds = StageKinds(*np.moveaxis(found[:, :, :, :, 0], (4, 0), (0, 4)))

    def _by_token(self, recomputes: Sequence[Recompute], make: Callable[[Job], Sequence[Any]]) -> Floats:
        """Bytes a token, [value, size, 1, recomputation, 1]: they go with the size only where samples come first."""
        found: dict[bool, list[Sequence[Any]]] = {}
        for j in self.sized:
            if sample_first(j) not in found:
                found[sample_first(j)] = [make(j.changed(recompute=r)) for r in recomputes]
        return np.moveaxis(np.array([found[sample_first(j)] for j in self.sized]), 2, 0)[:, :, None, :, None]

    def _stages(self, splits: Sequence[ParallelPlan], every: bool) -> None:
        each = [_ranks(p.schedule, p.pp, p.virtual, p.layers_as, p.ends_as_layers, self.model, every) for p in splits]
        self.begin = np.cumsum([0, *map(len, each[:-1])])
        ranks = [(p, rank) for p, some in zip(splits, each, strict=True) for rank in some]
        self.layers, self.layers_moe, self.first, self.last = np.array([rank[1:] for _, rank in ranks], np.float64).T
        self.virtual = np.array([p.virtual for p, _ in ranks], np.float64)
        microbatches = [max(1, j.microbatches) for j in self.sized]
        flight = [
            _held(p.schedule, some, Extent(p.pp, m, p.virtual, 1))
            for m in microbatches
            for p, some in zip(splits, each, strict=True)
        ]
        self.flight = np.array([*chain.from_iterable(flight)], np.float64).reshape(len(microbatches), 1, 1, -1)

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
            kept = kept + self.first * self.tower()
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
        self, s: FrozenBytes[Any], kept: Floats, working: Floats, logits: Floats, held: Floats, gathered: Floats
    ) -> tuple[Any, ...]:
        """PyTorch's eager trainers free gradients before each step and update lists of tensors: the worst of the loss,
        the backward pass of the last layer and of the first, and the update, with one more copy of what is trained.

        FSDP's hooks on the inputs of frozen units (_register_post_backward_reshard_only_hook) hold these and their
        gradients to the end of the backward pass."""
        (several,) = _along(0, [(j.microbatches > 1,) for j in self.sized])
        (hooks,) = _along(1, [(j.tuning.frozen and j.parallel.fsdp,) for j in self.sharded])
        early = s.gradients * several
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

    def tower(self) -> Floats:
        """What an encoder of images keeps."""
        found = [[tower_activations(j.changed(recompute=r)) for r in self.recomputes] for j in self.sized]
        return np.array(found)[:, None, :, None]

    def states(self, shared: Floats, experts: Floats, ends: Floats) -> FrozenBytes[Any]:
        """Weights, gradients and the optimizer's state."""
        if self.job.tuning.frozen:
            layers = self.layers + self.layers_moe
            found = [frozen_bytes(j, layers, shared - ends, experts, ends) for j in self.sharded]
            parts = ([np.array(np.broadcast_to(x, shared.shape), ndmin=4) for x in p] for p in zip(*found, strict=True))
            return FrozenBytes(*(np.concatenate(part, axis=1) for part in parts))
        s, (adam,) = self.state, _along(1, [(adam_of_ends(j, 1.0),) for j in self.sharded])
        return FrozenBytes(
            s.weight * shared + s.expert_weight * experts, s.gradient * shared + s.expert_gradient * experts,
            self.host * (s.optimizer * shared + s.expert_optimizer * experts + adam * ends),
        )  # fmt: skip

    def parameters(self) -> tuple[Floats, Floats, Floats]:
        """Shared ones, experts, and of the shared ones embedding and head. Tied weights are on both ends."""
        s, m, first, last = self.shares, self.model, self.first, self.last
        counted = 0.0 if m.pattern else 1.0  # layers of a pattern are counted by kind
        dense, moe = counted * self.layers, counted * self.layers_moe
        shared, experts = dense * s.dense + moe * s.moe, moe * s.experts
        ends = first * (s.embedding + s.positions + m.trained_vision_parameters / self.job.parallel.tp)
        ends = ends + last * (s.norm + s.head * (1 - first * m.tied))
        if m.predicted:
            further = m.predicted * last
            shared, experts = shared + further * s.further, experts + further * s.further_experts
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
            + self.token_buffers
            + self.per_flight * self.flight
        )
        return total + b.head * self.last, b.dense * dense + b.moe * moe - b.both * (dense & moe)


def _along(axis: int, rows: Sequence[Sequence[float]]) -> Floats:
    """[value, ...]: values of plans along an axis of the arrays."""
    found = np.array(rows, np.float64).T
    return found.reshape(len(found), *(-1 if i == axis else 1 for i in range(4)))


@lru_cache(1 << 16)
def _held(schedule: str, ranks: tuple[_Rank, ...], extent: Extent) -> list[int]:
    """Chunks in flight on some stages."""
    kind = schedule_kind(schedule)
    return [kind.in_flight(rank.number, extent) for rank in ranks]


@lru_cache(4096)
def _ranks(
    schedule: str, pp: int, virtual: int, layers_as: tuple[int, ...], ends: bool, m: Transformer, every: bool
) -> tuple[_Rank, ...]:
    """The stages of a plan, or enough to find the one that needs most: of equal inner ones the first, which holds most
    microbatches, for `in_flight` never grows from a stage to the next."""
    p = ParallelPlan(schedule=schedule, pp=pp, virtual=virtual, layers_as=layers_as, ends_as_layers=ends)
    counts, last = stage_counts(m, p), p.slot_count - 1
    numbers: Iterable[int] = range(p.pp)
    if not (every or m.pattern):
        alike: dict[tuple[int, int], int] = {}
        for number in range(1, p.pp - 1):
            alike.setdefault(counts[number], number)
        numbers = sorted({0, p.pp - 1, *alike.values()})
    return tuple(_Rank(n, *counts[n], 0 in p.slots[n], last in p.slots[n]) for n in numbers)


# ---- How many microbatches (of a chunk) a pipeline stage holds at once.


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most."""
    p, microbatches = job.parallel, max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    return schedule_kind(p.schedule).in_flight(stage, Extent(p.pp, microbatches, p.virtual, 1))
