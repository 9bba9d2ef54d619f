"""EngineMemory: what a decoding engine holds on one GPU, and how many tokens its KV cache has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from presage.configs.job import Job
from presage.configs.post_training import ENGINE_PRECISIONS, Engine
from presage.configs.transformer import Transformer
from presage.memory.buffers import COMMUNICATOR, GIB, LAZY_CONTEXT
from presage.memory.optimizer_state import parameter_shards
from presage.parallel.plan import ParallelPlan

BLOCK = 16  # tokens of a block of the KV cache, vLLM's default
SAMPLED = 10.0  # bytes per logit of the largest batch: in 16 bits, in fp32, and what sampling makes of it
GRAPHS = 0.5 * GIB  # CUDA graphs of all batch sizes, and workspaces


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one rank of an engine."""

    weights: float
    activations: float  # of the largest batch that is prefilled, and its sampling
    graphs: float
    outside: float  # the driver's and NCCL's
    allowed: float  # of the GPU's memory, what the engine may take
    token: float  # bytes of a token in the KV cache
    sequence: float  # tokens of the longest sequence

    @property
    def kv_cache(self) -> float:
        """Bytes left for the KV cache; negative: missing."""
        return self.allowed - self.weights - self.activations - self.graphs - self.outside

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache has room for, in whole blocks."""
        return max(0, int(self.kv_cache / (self.token * BLOCK))) * BLOCK

    @property
    def margin(self) -> float:
        """Bytes beyond what the longest sequence needs; negative: the engine does not start."""
        return self.kv_cache - self.token * self.sequence

    @property
    def fits(self) -> bool:
        return self.margin >= 0


def engine_job(job: Job, engine: Engine) -> Job:
    """The job as one replica of its engine sees it: tensor parallel, or with experts spread over the ranks."""
    cut = 1 if engine.ep > 1 or job.model.experts is None else engine.tp
    plan = ParallelPlan(tp=engine.tp, ep=engine.ep, expert_tp=cut)
    return replace(job, gpus=engine.tp, parallel=plan, precision=engine.precision, micro_batch=1)


def kv_token_bytes(m: Transformer, engine: Engine) -> float:
    """Bytes of a token in the KV cache of a rank, all layers. Latent keys are whole on every rank."""
    each = ENGINE_PRECISIONS[engine.kv_cache_precision]
    if m.latent:
        return m.layers * (m.latent.key_rank + m.latent.rope) * each
    return m.layers * 2 * max(1.0, m.kv_heads / engine.tp) * m.head_dim * each


def engine_memory(job: Job, engine: Engine, longest: float) -> EngineMemory:
    """Memory of one rank of the engine; `longest` is the tokens of its longest sequence."""
    m, shares = job.model, parameter_shards(engine_job(job, engine))
    moe = m.expert_layers
    layers = (m.layers - moe) * shares.dense + moe * (shares.moe + shares.experts)
    ends = shares.embedding + shares.positions + shares.norm + (0.0 if m.tied else shares.head)
    weights = layers * ENGINE_PRECISIONS[engine.precision] + ends * 2.0
    widest = max(m.ffn, m.experts.ffn * m.experts.top_k if m.experts else 0) / engine.tp * (2 if m.gated else 1)
    activations = engine.max_num_batched_tokens * (widest * 1.5 + 4 * m.hidden) * 2.0
    activations += SAMPLED * engine.max_num_seqs * m.vocab / (1 if engine.tp == 1 else 2)  # in 16 bits by rank
    outside = LAZY_CONTEXT + (COMMUNICATOR if engine.tp > 1 else 0.0)
    allowed = engine.gpu_memory_utilization * float(job.platform.gpu.memory)
    graphs = GRAPHS if engine.cuda_graphs else 0.0
    return EngineMemory(weights, activations, graphs, outside, allowed, kv_token_bytes(m, engine), longest)
