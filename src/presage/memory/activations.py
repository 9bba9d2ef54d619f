"""Activation memory: what one layer keeps of a microbatch for its backward pass, tensor by tensor, in bytes a token.

Dense layers as in Korthikanti et al. (arXiv 2205.05198): 34 h + 5 a s bytes a token with dropout and without fused
attention. Fused attention keeps queries, keys, values, its output and a number a head and token in place of scores.
Transformer Engine keeps the inputs of matrix products in the precision it multiplies in.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.memory.layer_kinds import narrowed, without_frozen
from presage.memory.optimizer_state import key_heads

FLASH = ("flash1", "flash2", "flash3")
INPUT_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}  # of Transformer Engine, with scales
# What is not kept where a module is computed again.
AGAIN = {
    "core_attn": ("core",),
    "norm": ("norm_out", "mlp_norm"),
    "layernorm": ("norm_out", "mlp_norm"),
    "mla_up_proj": ("heads",),
    "mlp": ("up", "act"),
    "mamba": ("out",),
    "moe_act": ("act", "expert_act"),
    "moe": ("router", "sorted", "up", "act", "expert_up", "expert_act"),
}


class LayerMemory(NamedTuple):
    """One kind of layer, bytes of one token (of a rank's share of tokens)."""

    kept: float  # with the job's recomputation
    whole: float  # without any
    working: float  # while its backward pass runs: what is computed again, and gradients


class LayerActivations(NamedTuple):
    """Activation bytes of a layer, by part."""

    norm_in: float
    norm_out: float
    latent: float  # narrow queries and keys
    heads: float  # queries, keys, values
    core: float  # inside attention: scores or statistics
    out: float  # of attention
    masks: float  # of dropout on the residual stream
    mlp_in: float  # the second normalisation's input
    mlp_norm: float  # and output
    router: float
    sorted: float  # tokens by expert
    up: float  # what the activation function reads
    act: float  # and writes
    expert_up: float
    expert_act: float


def number_bytes(precision: str) -> float:
    """Bytes of one number of an activation."""
    return 4.0 if precision in ("fp32", "tf32") else 2.0


def transformer_engine(job: Job) -> bool:
    """Whether layers are Transformer Engine's: Megatron's own softmax kernel is part of its own layers only."""
    f = job.framework
    return f.host in ("megatron-core", "graph") and not f.compiled and f.attention != "fused-softmax"


def layer_activations(job: Job, experts: bool, mixer: str = "attention", feeds: bool = True) -> LayerMemory:
    k, r = _whole_layer(job, experts, mixer, feeds), job.recompute
    whole = sum(k)
    if r.mode == "full":
        kept = _layer_input(job)
    elif r.mode == "selective":
        kept = sum(_selected(job, k, r.modules or ("core_attn",)))
    else:
        kept = whole
    kept = r.share * kept + (1 - r.share) * whole
    return LayerMemory(kept * (1 - r.offload), whole, whole - kept + _live_gradients(job, experts))


def layer_parts(job: Job, experts: bool, mixer: str = "attention", feeds: bool = True) -> dict[str, float]:
    """What a layer keeps with the job's recomputation, by part; `input`: of layers that are recomputed as a whole."""
    k, r = _whole_layer(job, experts, mixer, feeds), job.recompute
    parts = {"input": 0.0} | k._asdict()
    left = parts
    if r.mode == "full":
        left = dict.fromkeys(parts, 0.0) | {"input": _layer_input(job)}
    elif r.mode == "selective":
        left = {"input": 0.0} | _selected(job, k, r.modules or ("core_attn",))._asdict()
    return {name: (r.share * left[name] + (1 - r.share) * parts[name]) * (1 - r.offload) for name in parts}


def _whole_layer(job: Job, experts: bool, mixer: str, feeds: bool) -> LayerActivations:
    """A layer without recomputation."""
    k = without_frozen(job, _kept(job, experts))
    return narrowed(job, k, mixer, feeds, number_bytes(job.precision))


def _layer_input(job: Job) -> float:
    m, p = job.model, job.parallel
    wide = job.tuning.frozen and job.tuning.residual_bits == 32
    return (4.0 if wide else number_bytes(job.precision)) * (m.hidden / p.tp if p.sequence_parallel else m.hidden)


def _kept(job: Job, experts: bool) -> LayerActivations:
    m, p, f = job.model, job.parallel, job.framework
    e = number_bytes(job.precision)
    i = INPUT_BYTES.get(job.precision, e) if transformer_engine(job) else e
    outer = (
        m.hidden / p.tp if p.sequence_parallel else m.hidden
    )  # of a token, what a rank has between tensor-parallel blocks
    norm = (e if f.fused_norms or f.compiled else e + 4) * outer  # unfused: a copy in fp32, and the normalised one
    norm += 8 if m.norm == "layernorm" else 4  # what it divides by, and the mean
    value = m.value_width / p.tp
    latent, heads = _heads(job, e, i)
    return LayerActivations(
        norm_in=norm,
        norm_out=i * outer,
        latent=latent,
        heads=heads,
        core=_core(job, e),
        out=e * value + (i * value if i != e or p.cp > 1 or sample_first(job) else 0.0),
        masks=2.0 * outer if f.dropout else 0.0,
        mlp_in=norm,
        mlp_norm=(e if experts else i) * outer,
        **(_routed(job, e, i) if experts else _dense(job, e, i)),
    )


def sample_first(job: Job) -> bool:
    """FlashAttention-2 wants samples first, Transformer Engine has tokens first: of its output both orders are kept."""
    return transformer_engine(job) and job.framework.attention == "flash2" and job.micro_batch > 1


def _heads(job: Job, e: float, i: float) -> tuple[float, float]:
    """Narrow queries and keys; queries, keys and values."""
    m, p, a = job.model, job.parallel, job.model.latent
    if a is None:
        return 0.0, e * (m.query_width / p.tp + 2 * key_heads(m, p.tp) * m.head_dim)
    narrow = (e + i) * (a.query_rank + a.key_rank) + e * a.rope
    return narrow / (p.tp if p.sequence_parallel else 1), e * (2 * m.query_width + m.value_width) / p.tp


def _dense(job: Job, e: float, i: float) -> dict[str, float]:
    up, act = _block(job, e, i)
    width = job.model.ffn / job.parallel.tp
    return {"router": 0.0, "sorted": 0.0, "up": up * width, "act": act * width, "expert_up": 0.0, "expert_act": 0.0}


def _routed(job: Job, e: float, i: float) -> dict[str, float]:
    m, p, x = job.model, job.parallel, job.model.experts
    assert x is not None
    up, act = _block(job, e, i)
    copies = routed(job)
    shared, width = x.shared_ffn / p.tp, x.ffn / p.expert_tp * copies
    return {
        "router": 9.0 * x.experts / (p.tp if p.sequence_parallel else 1),  # scores and probabilities in fp32, and a map
        "sorted": (i * m.expert_width + 8) * copies + (2.0 * i * x.latent if x.latent else 0.0),
        "up": up * shared,
        "act": act * shared,
        "expert_up": up * width,
        "expert_act": (act + (e if _weighted_apart(job) else 0.0)) * width,
    }


def _weighted_apart(job: Job) -> bool:
    """Megatron-Core weights what experts' activation functions write by the router's probabilities before the second
    product; only gated functions do so in one kernel, others keep it before and after."""
    return job.framework.host in ("megatron-core", "graph") and not job.model.gated


def _block(job: Job, e: float, i: float) -> tuple[float, float]:
    """Bytes a unit of a feed-forward block's width: what its activation function reads, and what is written after."""
    if not job.model.gated:
        return e, i if not job.framework.compiled else 0.0
    if job.framework.compiled:
        return 2 * e, 0.0  # made again beside the products that need it
    eager = job.framework.host == "torch"
    return 2 * e, i + (e if eager else 0.0)


def _core(job: Job, e: float) -> float:
    """Tensors kept inside attention."""
    f, heads = job.framework, job.model.heads / job.parallel.tp
    if f.attention in FLASH:
        return 4.0 * heads
    return heads * job.sequence * (e + ((1 + e) if f.dropout else 0.0))  # softmax; dropout's mask and output


def routed(job: Job) -> float:
    """Copies of a token that a rank's experts get, for each of the rank's tokens."""
    p, x = job.parallel, job.model.experts
    assert x is not None
    return x.top_k * x.busiest(p.ep) * p.expert_tp / p.tp


def _selected(job: Job, k: LayerActivations, modules: tuple[str, ...]) -> LayerActivations:
    """The activations left where these modules are recomputed."""
    if "op" in modules:
        return _by_op(job, k)
    return k._replace(**{part: 0.0 for name in modules for part in AGAIN.get(name, ())})


def _by_op(job: Job, k: LayerActivations) -> LayerActivations:
    """PyTorch's selective checkpointing keeps attention's output and every second product: queries, values, gate."""
    m, p, e = job.model, job.parallel, number_bytes(job.precision)
    outer = e * (m.hidden / p.tp if p.sequence_parallel else m.hidden)
    last = 0.0 if job.framework.compiled else outer  # eager keeps the last product too, though nothing reads it
    half = 0.5 if m.gated else 1.0
    heads = e * (m.query_width / p.tp + key_heads(m, p.tp) * m.head_dim)
    return k._replace(
        norm_in=outer, norm_out=0.0, latent=0.0, heads=heads, masks=0.0, mlp_in=last, mlp_norm=0.0, up=k.up * half,
        act=0.0, expert_up=k.expert_up * half, expert_act=0.0,
    )  # fmt: skip


def _live_gradients(job: Job, experts: bool) -> float:
    """Gradients alive with everything kept, when the last layer's backward pass has come to its activation function:
    its output's, and the one of what the function reads; op by op, of a gated one also that of the product. With
    sequence parallelism before that a gathered one."""
    m, p = job.model, job.parallel
    e = number_bytes(job.precision)
    outer = _layer_input(job)
    gate = (3.0 if job.framework.host == "torch" else 2.0) if m.gated else 1.0
    if experts and m.experts is not None:
        tokens, width = routed(job), m.experts.ffn / p.expert_tp
        return outer + e * tokens * max(2.0 * m.expert_width, m.expert_width + gate * width)
    width = m.ffn / p.tp
    gathered = e * (m.hidden + width) if p.sequence_parallel else 0.0
    return outer + max(e * gate * width, gathered)
