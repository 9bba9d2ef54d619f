"""JobMemory: what each stage of a job needs on one GPU, whether it fits, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from presage.configs.job import Job
from presage.memory.activations import layer_activations, number_bytes
from presage.memory.buffers import OLD, buffers, input_masks, logits, outside
from presage.memory.layer_kinds import (
    FrozenBytes,
    adam_of_ends,
    frozen_bytes,
    frozen_tower,
    host_share,
    tower_activations,
)
from presage.memory.optimizer_state import optimizer_state, parameter_shards
from presage.memory.stage_kinds import routed_layers, stage_kinds
from presage.parallel.orders import Extent
from presage.parallel.schedules import schedule_kind

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
    common = _Common(job)
    layers = layer_counts(job)
    stages = tuple(common.stage(number, *layers[number]) for number in range(job.parallel.pp))
    return JobMemory(stages, float(job.platform.gpu.memory), _memory_source(job))


def most_needed(job: Job) -> float:
    """`job_memory(job).needed`, computed from fewer stages: of equal inner stages the first holds most microbatches."""
    if job.model.pattern:
        return job_memory(job).needed
    common, layers, last = _Common(job), layer_counts(job), job.parallel.pp - 1
    alike: dict[tuple[int, int], int] = {}
    for number in range(1, last):
        alike.setdefault(layers[number], number)  # `in_flight` never grows from a stage to the next
    return max(common.stage(number, *layers[number]).needed for number in {0, last, *alike.values()})


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


class _Common:
    """Values common to all stages, computed once."""

    def __init__(self, job: Job) -> None:
        m, p = job.model, job.parallel
        self.job, self.model, self.virtual, self.last = job, m, p.virtual, p.slot_count - 1
        self.shares, self.state = parameter_shards(job), optimizer_state(job)
        self.buffers, self.outside = buffers(job, self.shares), outside(job)
        self.kinds = stage_kinds(job) if m.pattern else ()
        self.tower = tower_activations(job)
        self.dense = layer_activations(job, experts=False)
        self.moe = layer_activations(job, experts=True) if m.experts else self.dense
        self.tokens = float(job.rank_tokens)
        self.ends = m.hidden * self.tokens / (p.tp if p.sequence_parallel else 1)  # numbers in an embedded microbatch
        self.logits, self.spare = logits(job)
        self.masks = input_masks(job)
        self.idle = IDLE_AGAIN if job.recompute.mode == "full" else IDLE

    def stage(self, number: int, dense: int, moe: int) -> StageMemory:
        own = self.job.parallel.slots[number]
        first, last = 0 in own, self.last in own
        flight = in_flight(self.job, number)
        shared, experts, ends = self.parameters(dense, moe, first, last)
        kept, working = self.activations(dense, moe, flight, first, last)
        if self.kinds:
            k = self.kinds[number]
            shared, experts, ends = (
                x + y for x, y in zip(self.parameters(0, 0, first, last), (*k[:2], 0.0), strict=True)
            )
            kept, working = self.activations(0, 0, flight, first, last)
            kept, working = kept + k.kept * self.tokens * flight / self.virtual, k.working * self.tokens
        states = self.states(dense + moe, shared, experts, ends)
        if first and self.model.vision:
            states, kept = states._replace(weights=states.weights + frozen_tower(self.job)), kept + self.tower
        held, gathered = self.buffer_bytes(shared + experts, ends, dense, moe, last, flight)
        held += self.masks * (first or last)
        logits = self.logits if last else 0.0
        if self.job.framework.foreach:
            return self.by_moment(states, kept, working, logits, held, gathered, flight)
        kept, working, loss = (kept, 0.0, logits) if logits > working else (kept, working, 0.0)
        return self.stage_memory(*states, kept, working, loss, held + gathered, flight)

    def stage_memory(
        self, weights: float, gradients: float, optimizer: float, kept: float, working: float, loss: float,
        held: float, flight: int,
    ) -> StageMemory:  # fmt: skip
        idle = self.idle * (kept + working) + (self.spare if loss else 0.0)
        return StageMemory(weights, gradients, optimizer, kept, working, loss, held, idle, self.outside, flight)

    def by_moment(
        self, s: FrozenBytes, kept: float, working: float, logits: float, held: float, gathered: float, flight: int
    ) -> StageMemory:
        """PyTorch's eager trainers free gradients before each step and update lists of tensors: the worst of the loss,
        the backward pass of the last layer and of the first, and the update, with one more copy of what is trained.

        FSDP's hooks on the inputs of frozen units (_register_post_backward_reshard_only_hook) hold these and their
        gradients to the end of the backward pass."""
        early = s.gradients if self.job.microbatches > 1 else 0.0
        twice = 2.0 if self.job.tuning.frozen and self.job.parallel.fsdp else 1.0
        moments = (
            (early, kept, 0.0, logits, held),
            (early, twice * kept, working, 0.0, held + gathered),
            (s.gradients, 0.0, working, 0.0, held + gathered),
            (s.gradients, 0.0, 0.0, 0.0, held + s.gradients),
        )
        gradients, kept, working, loss, held = max(moments, key=sum)
        return self.stage_memory(s.weights, gradients, s.optimizer, kept, working, loss, held, flight)

    def states(self, layers: int, shared: float, experts: float, ends: float) -> FrozenBytes:
        """Weights, gradients and the optimizer's state."""
        if self.job.tuning.frozen:
            return frozen_bytes(self.job, layers, shared - ends, experts, ends)
        s = self.state
        return FrozenBytes(
            s.weight * shared + s.expert_weight * experts, s.gradient * shared + s.expert_gradient * experts,
            host_share(self.job) * (s.optimizer * shared + s.expert_optimizer * experts + adam_of_ends(self.job, ends)),
        )  # fmt: skip

    def parameters(self, dense: int, moe: int, first: bool, last: bool) -> tuple[float, float, float]:
        """Shared ones, experts, and of the shared ones embedding and head. Tied weights are on both ends."""
        s, m = self.shares, self.model
        shared, experts = dense * s.dense + moe * s.moe, moe * s.experts
        ends = s.embedding + s.positions + m.trained_vision_parameters / self.job.parallel.tp if first else 0.0
        if last:
            ends += s.norm + (0.0 if m.tied and first else s.head)
            if m.predicted:
                shared, experts = shared + m.predicted * s.further, experts + m.predicted * s.further_experts
                ends += 0.0 if first or m.tied else s.embedding
        return shared + ends, experts, ends

    def activations(self, dense: int, moe: int, flight: int, first: bool, last: bool) -> tuple[float, float]:
        """Activations of all microbatches in flight, and what a layer needs while it runs."""
        d, x, e = self.dense, self.moe, number_bytes(self.job.precision)
        kept = (dense * d.kept + moe * x.kept) * self.tokens * flight / self.virtual
        working = max(d.working if dense else 0.0, x.working if moe else 0.0) * self.tokens
        if first and self.job.framework.dropout:
            kept += self.ends * flight
        if last:
            further = self.model.predicted  # tokens beside the next, each with a layer of its own
            kept += 2 * e * self.ends * (1 + further) + further * (x if moe else d).kept * self.tokens
        return kept, working

    def buffer_bytes(
        self, parameters: float, ends: float, dense: int, moe: int, last: bool, flight: int
    ) -> tuple[float, float]:
        """Buffers for communication and the optimizer, and those of a layer alone."""
        b = self.buffers
        total = (
            b.fixed + b.per_parameter * min(parameters, b.most_parameters) + b.per_end * ends + b.per_flight * flight
        )
        layer = (b.dense if dense else 0.0) + (b.moe if moe else 0.0) - (b.both if dense and moe else 0.0)
        return total + (b.head if last else 0.0), layer


# ---- How many microbatches (of a chunk) a pipeline stage holds at once.


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most."""
    p, microbatches = job.parallel, max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    return schedule_kind(p.schedule).in_flight(stage, Extent(p.pp, microbatches, p.virtual, 1))
