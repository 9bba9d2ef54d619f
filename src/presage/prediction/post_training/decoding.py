"""DecodingModel: seconds of one iteration of a decoding engine by its batch and the tokens it attends to.

An iteration reads all weights (of experts: those that the batch touches) and the KV cache of every sequence. GEMMs and
memory-bound kernels are timed by the laws that time training, with as many rows as there are sequences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.configs.post_training import ENGINE_PRECISIONS, Engine
from presage.configs.transformer import Transformer
from presage.costs.closed_form import ClosedFormKernels
from presage.costs.collectives import Collectives
from presage.costs.collectives.group import RankGroup
from presage.costs.families.attention import AttentionShape
from presage.memory.engine_memory import engine_job
from presage.prediction.jobs.efficiency import shipped_efficiency
from presage.prediction.jobs.layer_graph import LOW, LayerBuilder, PendingOp, memory_bound_graph
from presage.prediction.jobs.transformer_layer import PADDED
from presage.prediction.post_training.software import software_costs

Floats = NDArray[np.float64]
# Of an iteration the GPU waits 200-300 us for the host where the next batch is scheduled while one runs; else 5-6 ms
# at 256 sequences of a 7B (github.com/vllm-project/vllm issue 10634), of which a part is by the sequence.
OVERLAPPED, EACH = 250e-6, (5.5e-3 - 0.9e-3) / 256
# Without CUDA graphs vLLM decodes a token of GPT-2's twelve layers in 4.81 ms on an H200, in 1.30 ms with them
# (deepspeedai/DeepSpeed pull request 8352).
LAUNCH = (4.81e-3 - 0.9e-3) / 12
CAPTURED = 512  # sequences of the largest CUDA graph, vLLM's default
# Bytes per logit: to fp32, over the temperature, softmax, random numbers, the largest (34); the log-probability of the
# chosen token, which trainers ask for: a copy, a log-softmax, its rank (24).
SAMPLING = 58.0
KERNELS = 9  # memory-bound kernels of a layer: two norms with residual, rope, KV write, activation, reshapes
CHUNK = 4096  # tokens of a batch that is prefilled: from here on time is by the token
SCORES = 0.5  # of the peak, by kernels that decode with latent keys


class DecodingModel:
    """Times iterations of one replica of an engine."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job, self.engine = engine_job(job, engine), engine
        gpu = job.platform.gpu
        self.kernels = ClosedFormKernels.of(gpu, "flash3" if job.framework.attention.startswith("flash") else "flash2")
        self.collectives = Collectives.of(job.platform)
        self.group = RankGroup.of(job.platform, engine.tp)
        self.product = shipped_efficiency().product
        self._prompts: dict[int, float] = {}  # attention of a token by the length of its prompt

    # ---- an iteration

    def seconds(self, batch: Floats | float, context: Floats | float) -> Floats:
        """Seconds of an iteration of `batch` sequences that attend to `context` tokens in all."""
        return np.asarray(np.interp(batch, self.batches, self.table) + self.attention_seconds(batch, context))

    def one(self, batch: int, context: float) -> float:
        """As `seconds`, of plain numbers."""
        return self._by_batch[batch] + self._context_token * (
            self._far * context + self._near * min(context, batch * self.job.model.window)
        )

    @cached_property
    def _by_batch(self) -> list[float]:
        every = np.arange(self.engine.max_num_seqs + 1)
        return [float(x) for x in np.interp(every, self.batches, self.table)]

    @cached_property
    def _near(self) -> int:
        """Layers with a window."""
        return sum(self.job.model.has_window(i) for i in range(self.job.model.layers))

    @property
    def _far(self) -> int:
        return self.job.model.layers - self._near

    @cached_property
    def batches(self) -> Floats:
        """Batch sizes of the table: every power of two, and halfway between large ones."""
        sizes = [2.0**i for i in range(4)] + [2.0**i * x for i in range(4, 13) for x in (1.0, 1.5)]
        return np.array([b for b in sizes if b < 2 * self.engine.max_num_seqs] or [1.0])

    @cached_property
    def table(self) -> Floats:
        """Seconds without attention to the KV cache, by batch size."""
        return np.array([self.iteration(int(b)) for b in self.batches])

    def iteration(self, batch: int) -> float:
        """An iteration without attention: GEMMs, memory-bound kernels, collectives, sampling, the host."""
        gpu = self.pass_seconds(batch) + self.sampling_seconds(batch)
        costs = software_costs()
        exposed = costs.iteration + EACH * batch + (costs.ranks if self.engine.tp > 1 else 0.0)
        host = OVERLAPPED if self.engine.async_scheduling else exposed
        launched = self.engine.cuda_graphs and batch <= CAPTURED
        return (gpu if launched else max(gpu, LAUNCH * self.job.model.layers)) + host

    def pass_seconds(self, tokens: int) -> float:
        """So many tokens through all layers and, one of each sequence, the head; no attention."""
        m = self.job.model
        kinds = [m.has_experts(i) for i in range(m.layers)]
        each = {kind: self._layer_seconds(tokens, kind) for kind in set(kinds)}
        return sum(each[kind] for kind in kinds)

    def sampling_seconds(self, batch: int) -> float:
        """The vocabulary's GEMM, logits gathered over ranks, and the choice of a token for each sequence."""
        m, tp = self.job.model, self.engine.tp
        b = LayerBuilder("bf16")
        b.block("head", [b.gemm(batch, -(-m.vocab // tp), m.hidden, "bf16")], [])
        logits = float(batch) * m.vocab
        gather = self._collective("all_gather", 2.0 * logits)
        return self._run(b) + self._memory_bound(SAMPLING * logits) + gather

    # ---- attention

    def attention_seconds(self, batch: Floats | float, context: Floats | float) -> Floats:
        """Reading the keys and values of all sequences, in layers with a window those within it."""
        seen = np.minimum(context, np.asarray(batch) * self.job.model.window)
        return np.asarray(self._context_token * (self._far * np.asarray(context) + self._near * seen))

    @cached_property
    def _context_token(self) -> float:
        """Seconds of attending to one token of the cache, in one layer."""
        m, e = self.job.model, self.engine
        each, rate = ENGINE_PRECISIONS[e.kv_cache_precision], self._memory_bound(2e9) - self._memory_bound(1e9)
        if m.latent is None:
            return rate / 1e9 * 2 * max(1.0, m.kv_heads / e.tp) * m.head_dim * each
        width = m.latent.key_rank + m.latent.rope
        flops = 2.0 * m.heads / e.tp * (width + m.latent.key_rank)
        return max(rate / 1e9 * width * each, flops / (SCORES * self.job.platform.gpu.peak["bf16"]))

    # ---- prefill

    def prefill_seconds(self, tokens: float, length: float) -> float:
        """Prefilling sequences of this length, so many tokens in all."""
        whole = max(1, round(length))
        if whole not in self._prompts:
            self._prompts[whole] = self._prompt_attention(whole)
        return tokens * (self._prefill_token + self._prompts[whole])

    @cached_property
    def _prefill_token(self) -> float:
        return self.pass_seconds(CHUNK) / CHUNK

    def _prompt_attention(self, length: int) -> float:
        """Seconds of attention a token of a prompt, all layers."""
        m, tp = self.job.model, self.engine.tp
        heads, keys = max(1, m.heads // tp), max(1, m.kv_heads // tp)
        dim, value = (m.latent.rope + m.latent.nope, m.latent.value) if m.latent else (m.head_dim, m.head_dim)
        b, count = LayerBuilder("bf16"), max(1, CHUNK // length)
        shape = AttentionShape(count, heads, heads if m.latent else keys, length, length, dim, value, True, 0)
        b.block("attention", [b.attention(shape)], [])
        return self._run(b) * m.layers / (count * length)

    # ---- a layer

    def _layer_seconds(self, tokens: int, experts: bool) -> float:
        m, b = self.job.model, LayerBuilder(self.job.precision)
        ops = _latent_gemms(b, m, self.engine, tokens) if m.latent else _attention_gemms(b, m, self.engine, tokens)
        ops += self._expert_gemms(b, tokens) if experts else _feed_forward(b, m, self.engine, tokens, m.ffn)
        b.block("layer", ops, [])
        between = float(tokens * m.hidden * 2)
        small = KERNELS * self._memory_bound(2 * between)
        casts = 4 * self._memory_bound(3 * between) if self.job.precision in LOW else 0.0
        return self._run(b) + small + casts + 2 * self._collective("all_reduce", between)

    def _expert_gemms(self, b: LayerBuilder, tokens: int) -> list[PendingOp]:
        """GEMMs of the experts that a batch touches, each with its share of the tokens."""
        m, e = self.job.model, self.job.model.experts
        assert e is not None
        cut, here = self.job.parallel.expert_tp, max(1, e.experts // self.engine.ep)
        shares = np.array(e.shares())
        touched = float((1 - (1 - shares) ** (tokens * e.top_k)).sum()) * here / e.experts
        groups = max(1, min(here, round(touched)))
        routed = tokens * e.top_k / self.engine.ep * e.busiest(self.engine.ep)
        rows = (
            max(1, -(-round(routed / groups) // PADDED)) * PADDED if tokens > PADDED else max(1, round(routed / groups))
        )
        up, width, sent = 2 if m.gated else 1, max(1, e.ffn // cut), m.expert_width
        out = [
            b.gemm(tokens, e.experts, m.hidden, "bf16"),
            b.gemm(rows, groups * up * width, sent, self.job.precision),  # reads as many weights, does as many FLOPs
            b.gemm(rows, groups * sent, width, self.job.precision),
            b.memory_bound(6.0 * tokens * e.top_k * sent * 2 / self.engine.ep, 4),  # sorted by expert, added up
        ]
        if e.latent:
            out += [
                b.gemm(tokens, sent, m.hidden, self.job.precision),
                b.gemm(tokens, m.hidden, sent, self.job.precision),
            ]
        return out + (_feed_forward(b, m, self.engine, tokens, e.shared_ffn) if e.shared_ffn else [])

    # ---- pieces

    def _run(self, b: LayerBuilder) -> float:
        times = self.kernels.op_times(b.layer().graph)
        return sum(t.seconds * (self.product if t.tensor_cores and t.family != "attention" else 1.0) for t in times)

    def _memory_bound(self, nbytes: float) -> float:
        return self.kernels.op_times(memory_bound_graph(nbytes, "pointwise"))[0].seconds

    def _collective(self, op: str, nbytes: float) -> float:
        return float(self.collectives.seconds(op, nbytes, self.group)) if self.engine.tp > 1 else 0.0


def _attention_gemms(b: LayerBuilder, m: Transformer, engine: Engine, tokens: int) -> list[PendingOp]:
    heads, keys = max(1, m.heads // engine.tp), max(1, m.kv_heads // engine.tp)
    into = (heads + 2 * keys) * m.head_dim
    return [
        b.gemm(tokens, into, m.hidden, engine.precision),
        b.gemm(tokens, m.hidden, heads * m.head_dim, engine.precision),
    ]


def _latent_gemms(b: LayerBuilder, m: Transformer, engine: Engine, tokens: int) -> list[PendingOp]:
    """Low-rank projections on every rank; keys and values stay in their rank, so queries go there and back."""
    z, kind = m.latent, engine.precision
    assert z is not None
    heads = max(1, m.heads // engine.tp)
    queries = heads * (z.rope + z.nope)
    return [
        b.gemm(tokens, z.query_rank + z.key_rank + z.rope, m.hidden, kind),
        b.gemm(tokens, queries, z.query_rank or m.hidden, kind),
        b.gemm(tokens, z.key_rank, z.nope, "bf16", batch=heads),
        b.gemm(tokens, z.value, z.key_rank, "bf16", batch=heads),
        b.gemm(tokens, m.hidden, heads * z.value, kind),
    ]


def _feed_forward(b: LayerBuilder, m: Transformer, engine: Engine, tokens: int, ffn: int) -> list[PendingOp]:
    width = max(1, ffn // engine.tp)
    return [
        b.gemm(tokens, (2 if m.gated else 1) * width, m.hidden, engine.precision),
        b.gemm(tokens, m.hidden, width, engine.precision),
    ]


def decoding_model(job: Job, engine: Engine) -> DecodingModel:
    """The model of an engine; engines that differ only in their number of GPUs share it."""
    return _known(job, replace(engine, gpus=engine.tp))


_MODELS: dict[tuple[Job, Engine], DecodingModel] = {}


def _known(job: Job, engine: Engine) -> DecodingModel:
    key = (replace(job, gpus=1, global_batch=1, name=""), engine)
    if key not in _MODELS:
        if len(_MODELS) > 64:
            _MODELS.clear()
        _MODELS[key] = DecodingModel(job, engine)
    return _MODELS[key]
