"""JobMemory: what each stage of a job needs on one GPU, whether it fits, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from presage.configs.job import Job
from presage.memory.activations import layer_activations, number_bytes, transformer_engine
from presage.memory.layer_kinds import (
    FrozenBytes,
    adam_of_ends,
    frozen_bytes,
    frozen_tower,
    host_share,
    tower_activations,
)
from presage.memory.optimizer_state import ParameterShards, optimizer_state, padded, parameter_shards
from presage.memory.stage_kinds import StageKinds, routed_layers, stage_kinds
from presage.parallel.orders import Extent
from presage.parallel.schedules import schedule_kind

# Of activations and working tensors, what the allocator holds beside them and cannot hand out: the medians of our own
# decoder steps on an H200 (data/h200_varied, gqa_*), ten that keep all activations and two that compute them again.
IDLE, IDLE_AGAIN = 0.11, 0.24


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
    def margin(self) -> float:
        """Bytes left, or missing where negative."""
        return self.memory - self.needed


def job_memory(job: Job) -> JobMemory:
    """Memory of one rank of every stage."""
    common = _Common(job)
    layers = _layers(job)
    stages = tuple(common.stage(number, *layers[number]) for number in range(job.parallel.pp))
    return JobMemory(stages, float(job.platform.gpu.memory), _memory_source(job))


def most_needed(job: Job) -> float:
    """`job_memory(job).needed`, computed from fewer stages: of equal inner stages the first holds most microbatches."""
    if job.model.pattern:
        return job_memory(job).needed
    common, layers, last = _Common(job), _layers(job), job.parallel.pp - 1
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


def _layers(job: Job) -> tuple[tuple[int, int], ...]:
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
        self.idle = IDLE_AGAIN if job.recompute.mode == "full" else IDLE

    def stage(self, number: int, dense: int, moe: int) -> StageMemory:
        own = self.job.parallel.slots[number]
        first, last = 0 in own, self.last in own
        flight = in_flight(self.job, number)
        shared, experts, ends = self.parameters(dense, moe, first, last)
        kept, working, loss = self.activations(dense, moe, flight, first, last)
        if self.kinds:
            k = self.kinds[number]
            shared, experts, ends = (
                x + y for x, y in zip(self.parameters(0, 0, first, last), (*k[:2], 0.0), strict=True)
            )
            kept, working, loss = self.kind_activations(k, flight, first, last)
        states = self.states(dense + moe, shared, experts, ends)
        if first and self.model.vision:
            states, kept = states._replace(weights=states.weights + frozen_tower(self.job)), kept + self.tower
        return StageMemory(
            *states, kept, working, loss,
            self.buffer_bytes(shared + experts, ends, dense, moe, last, flight),
            self.idle * (kept + working) + (self.spare if loss else 0.0), self.outside, flight,
        )  # fmt: skip

    def states(self, layers: int, shared: float, experts: float, ends: float) -> FrozenBytes:
        """Weights, gradients and the optimizer's state."""
        if self.job.tuning.frozen:
            return frozen_bytes(self.job, layers, shared - ends, experts, ends)
        s = self.state
        return FrozenBytes(
            s.weight * shared + s.expert_weight * experts, s.gradient * shared + s.expert_gradient * experts,
            host_share(self.job) * (s.optimizer * shared + s.expert_optimizer * experts + adam_of_ends(self.job, ends)),
        )  # fmt: skip

    def kind_activations(self, k: StageKinds, flight: int, first: bool, last: bool) -> tuple[float, float, float]:
        """As `activations`, of a stage with layers of a pattern."""
        kept, _, loss = self.activations(0, 0, flight, first, last)
        kept += k.kept * self.tokens * flight / self.virtual
        working = k.working * self.tokens
        return (kept, 0.0, loss) if loss > working else (kept, working, 0.0)

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

    def activations(self, dense: int, moe: int, flight: int, first: bool, last: bool) -> tuple[float, float, float]:
        """Activations of all microbatches in flight; and the larger of a running layer and the loss."""
        d, x, e = self.dense, self.moe, number_bytes(self.job.precision)
        kept = (dense * d.kept + moe * x.kept) * self.tokens * flight / self.virtual
        working = max(d.working if dense else 0.0, x.working if moe else 0.0) * self.tokens
        if first and self.job.framework.dropout:
            kept += self.ends * flight
        if not last:
            return kept, working, 0.0
        further = self.model.predicted  # tokens beside the next, each with a layer of its own
        kept += 2 * e * self.ends * (1 + further) + further * (x if moe else d).kept * self.tokens
        return (kept, 0.0, self.logits) if self.logits > working else (kept, working, 0.0)

    def buffer_bytes(self, parameters: float, ends: float, dense: int, moe: int, last: bool, flight: int) -> float:
        """Buffers for communication and the optimizer."""
        b = self.buffers
        total = (
            b.fixed + b.per_parameter * min(parameters, b.most_parameters) + b.per_end * ends + b.per_flight * flight
        )
        total += (b.dense if dense else 0.0) + (b.moe if moe else 0.0) - (b.both if dense and moe else 0.0)
        return total + (b.head if last else 0.0)


# ---- Buffers: what a framework holds beside weights and activations, and what is outside its allocator.

GIB, MIB = 1024.0**3, 1024.0**2
# A process on an A100 with one number on it, as the BLOOM chronicles tell (1573 MiB: CUDA 11 loads all kernels at
# once); about a third with lazy loading, since CUDA 11.7.
CONTEXT, LAZY_CONTEXT = 1573 * MIB, 0.5 * GIB
# Of one NCCL communicator: 544 MB for two A100, 688 MB for more (github.com/NVIDIA/nccl issue 964).
COMMUNICATOR = 0.6e9
DEEPSPEED_BUCKET = 5e8  # elements, its default
OLD = ("deepspeed", "megatron-2021")


class Buffers(NamedTuple):
    """Bytes: fixed ones, by the parameter of a stage, and by what a stage has."""

    fixed: float
    per_parameter: float
    most_parameters: float  # more than so many need no more
    per_end: float  # of embedding and head
    head: float
    dense: float  # where there is a layer without experts
    moe: float  # where there is one with
    both: float  # of these two, what a stage with both kinds has once
    per_flight: float


def buffers(job: Job, s: ParameterShards) -> Buffers:
    p, f = job.parallel, job.framework
    fixed, per_flight = _transfers(job)
    fixed += job.platform.gpu.cublas_workspace
    per_parameter = per_end = dense = moe = both = head = 0.0
    most = float("inf")
    if p.fsdp or p.zero >= 3:
        per_parameter, per_end, layer = _gathered(job)
        dense, moe = layer * s.dense, layer * (s.moe + s.experts)
        both = min(dense, moe)
    elif f.host == "deepspeed" and p.zero:
        per_parameter, most = 2.0, DEEPSPEED_BUCKET
    elif f.host == "torch" and job.dp > 1 and p.zero == 0:
        per_parameter = float(f.gradient_bytes)  # DDP's buckets
    if transformer_engine(job):
        # gradients go straight into the accumulated ones; autograd gets a stand-in for each shape of weight, kept
        e, x = number_bytes(job.precision), job.model.experts
        one = s.experts * p.ep / x.experts if x else 0.0
        head, dense, moe, both = e * s.head, dense + e * s.dense, moe + e * (s.moe + one), both + e * s.attention
    return Buffers(fixed, per_parameter, most, per_end, head, dense, moe, both, per_flight)


def _gathered(job: Job) -> tuple[float, float, float]:
    """Parameters of other ranks: bytes by the parameter of the stage, of its ends, of one layer. One layer is in use,
    the next on its way, in the buffer it arrives in; then a gradient and the buffer it is sent from. A pipeline keeps
    all parameters, and all gradients until its last microbatch."""
    f, p = job.framework, job.parallel
    if p.pp > 1:
        return f.gather_bytes + f.reduce_bytes, 0.0, 0.0
    if p.zero == 2:
        return f.gather_bytes, 0.0, 2.0 + f.reduce_bytes
    return 0.0, f.gather_bytes, 3.0 * f.gather_bytes + 2 + f.reduce_bytes


def _transfers(job: Job) -> tuple[float, float]:
    """Between stages and between tensor-parallel ranks: bytes, and bytes by the microbatch in flight."""
    p = job.parallel
    whole = number_bytes(job.precision) * job.model.hidden * job.rank_tokens
    outer = whole / p.tp if p.sequence_parallel else whole
    total = 2 * outer if p.pp > 1 else 0.0
    if p.tp > 1 and p.sequence_parallel:
        total += whole
    if job.overlap.tensor and p.tp > 1:
        total += 4 * whole  # of each product that runs beside a transfer: both ways, both passes
    kept = outer if p.pp > 1 and job.framework.host in OLD else 0.0  # later ones free what they have sent
    return total, kept


def outside(job: Job) -> float:
    """Bytes of the driver and of NCCL, which no framework's allocator counts."""
    p = job.parallel
    old = job.framework.host in OLD
    groups = sum(n > 1 for n in (p.tp, p.pp, p.cp, p.ep, job.dp)) + (job.gpus > 1)
    if old and p.pp > 1:  # one for each neighbour, one for all of a replica, one for tied embeddings
        groups += 2 + job.model.tied
    return (CONTEXT if old else LAZY_CONTEXT) + groups * COMMUNICATOR


# ---- Loss: the logits of one microbatch and what the cross entropy makes of them, where the head is.


def logits(job: Job) -> tuple[float, float]:
    """Bytes at the worst moment, and of freed blocks that nothing of this size can use again."""
    m, p, f = job.model, job.parallel, job.framework
    e = number_bytes(job.precision)
    count = float(padded(m.vocab, p.tp)) * job.rank_tokens * (1 + m.predicted)
    back = (
        e * (m.hidden + (m.hidden / p.tp if p.sequence_parallel else 0.0)) * job.rank_tokens
    )  # gradient of the head's input
    if f.fused_loss:  # gradients are written over the logits; a compiled loss writes them beside
        return (2 * e if f.compiled else e) * count + back, 0.0
    if f.host in ("deepspeed", "megatron-2021", "megatron-core", "graph"):
        return (e + 8.0) * count, 0.0  # the logits, in fp32, and their exponentials
    # PyTorch: log-probabilities, their gradient and that of the logits, all in fp32; the logits are free by then
    return 12.0 * count, e * count


# ---- How many microbatches (of a chunk) a pipeline stage holds at once.


def in_flight(job: Job, stage: int) -> int:
    """Chunks of a stage whose forward pass is done and whose backward pass is not, at most."""
    p, microbatches = job.parallel, max(1, job.global_batch // max(1, job.micro_batch * job.dp))
    return schedule_kind(p.schedule).in_flight(stage, Extent(p.pp, microbatches, p.virtual, 1))
