"""FLOPs of a job's step by the conventions in use, and the peaks they are held against.

All count 2 FLOPs a multiply-add, and a backward pass as two forward passes. Of experts, those a token goes to count.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.configs.job import Job
from presage.configs.transformer import Transformer
from presage.configs.tuning import adapter_parameters
from presage.errors import PresageError
from presage.hardware import Gpu
from presage.prediction.jobs.stages import recomputed_share

DEFAULT = "6N + causal attention"
CONVENTIONS = {
    DEFAULT: "all products with weights, and the scores a query may see",
    "full attention": "all products with weights, and all scores, masked ones too (Megatron's formula)",
    "6N": "6 x parameters x tokens, embedding included, scores left out",
}
PEAKS = {"mxfp8": "fp8", "nvfp4": "fp4"}  # whose peak a precision is held against
INSTEAD = {"fp4": ("fp8", 2.0), "fp8": ("bf16", 1.0), "bf16": ("fp16", 1.0), "tf32": ("fp32", 1.0)}


class JobFlops(NamedTuple):
    """FLOPs of one step on all GPUs."""

    model: float  # what the model asks for
    again: float  # what is computed a second time rather than kept
    convention: str

    @property
    def hardware(self) -> float:
        return self.model + self.again


def job_flops(job: Job, convention: str = DEFAULT) -> JobFlops:
    """By a convention's name."""
    if convention not in CONVENTIONS:
        raise PresageError(f"unknown FLOP convention {convention!r}: choose from {'; '.join(CONVENTIONS)}")
    m, sequence = job.model, job.sequence
    forward, again, scores = 0.0, 0.0, 0.0
    for count, layer in _kinds(m):
        blocks = layer_flops(m, layer, sequence, convention, job.documents)
        forward += count * sum(blocks.values())
        scores += count * blocks.get("core_attn", 0.0)
        again += count * sum(f * _repeated(job, name) for name, f in blocks.items())
    head = 2.0 * m.hidden * m.vocab
    last = layer_flops(m, m.layers - 1, sequence, convention, job.documents)
    further = m.predicted * (sum(last.values()) + 4.0 * m.hidden**2 + head)
    seen = _tower(m) / sequence
    model = 6.0 * m.active_parameters if convention == "6N" else 3 * (forward + head + further)
    if job.tuning.frozen:  # no gradients of frozen weights: two thirds of the products with them; scores as they are
        trained = sum(adapter_parameters(job.tuning, m, i) for i in range(m.layers))
        model = (model - 3 * scores) * 2 / 3 + 3 * scores + 6.0 * trained
    return JobFlops((model + (0.0 if convention == "6N" else seen)) * job.tokens, again * job.tokens, convention)


def _tower(m: Transformer) -> float:
    """FLOPs of a sample's images through the encoder before the decoder: forward, and backward where it is trained."""
    v = m.vision
    if v is None:
        return 0.0
    near = v.window or v.patches
    far = 1 / v.full_every if v.window and v.full_every else 0.0
    scores = 4.0 * v.hidden * (near * (1 - far) + v.patches * far)
    inner = 2.0 * (4 * v.hidden**2 + (3 if v.gated else 2) * v.hidden * v.ffn) + scores
    layers = v.layers * inner * v.patches * v.images * (1 if v.frozen else 3)
    return layers + 6.0 * v.projector(m.hidden) * v.tokens


def _repeated(job: Job, name: str) -> float:
    """The share of a block that is computed again; scores are no product where attention is fused."""
    fused = name == "core_attn" and job.framework.attention.startswith("flash")
    return recomputed_share(job.recompute, name, has_gemm=not fused)


def _kinds(m: Transformer) -> list[tuple[int, int]]:
    """How many layers there are of a kind, and the first of them."""
    seen: dict[tuple[object, ...], list[int]] = {}
    for layer in range(m.layers):
        seen.setdefault(m.kind(layer), []).append(layer)
    return [(len(layers), layers[0]) for layers in seen.values()]


def layer_flops(
    m: Transformer, layer: int, sequence: int, convention: str = DEFAULT, documents: tuple[int, ...] = ()
) -> dict[str, float]:
    """FLOPs of one token's forward pass through one layer, by block (those of `transformer_layer`). Scores are those
    within documents; masked ones that count are those of whole sequences all the same."""
    mixer = m.mixer(layer)
    rows = (documents if convention == DEFAULT else ()) or (sequence,)
    mixing = _attention(m, layer, rows, convention) if mixer == "attention" else _recurrent(m, mixer, convention)
    return mixing | (_feed_forward(m, layer) if m.feeds(layer) else {})


def _recurrent(m: Transformer, mixer: str, convention: str) -> dict[str, float]:
    """Projections and the scan of a layer with a state; the scan of Mamba-2 counts 7 a number of the state, as
    Megatron's formula has it, a delta rule its products with keys and states."""
    h, z, a = m.hidden, m.mamba, m.linear
    if mixer == "mamba" and z:
        into, scan, out = z.width + z.convolved + z.heads, 7.0 * z.width * z.state, z.width
    elif mixer == "linear" and a:
        into, out = 2 * a.keys + a.values + a.gates, a.values
        scan = 2.0 * a.value_heads * (3 * a.key_dim * a.value_dim + a.chunk * (2 * a.key_dim + a.value_dim))
    else:
        return {}
    return {"in_proj": 2.0 * h * into, "scan": 0.0 if convention == "6N" else scan, "out_proj": 2.0 * h * out}


def _attention(m: Transformer, layer: int, rows: tuple[int, ...], convention: str) -> dict[str, float]:
    h, z = m.hidden, m.latent
    dims = m.query_width + m.value_width
    scores = 0.0 if convention == "6N" else 2.0 * dims * _seen_of(m, layer, rows, convention != DEFAULT)
    if z is None:
        into = m.heads * m.head_dim * (2 if m.gated_attention else 1) + 2 * m.key_width
        return {"qkv": 2.0 * h * into, "core_attn": scores, "proj": 2.0 * h * m.value_width}
    query = z.query_rank * m.query_width if z.query_rank else 0
    return {
        "qkv": 0.0 if z.query_rank else 2.0 * h * m.query_width,
        "down_proj": 2.0 * h * (z.query_rank + z.key_rank + z.rope),
        "up_proj": 2.0 * (query + z.key_rank * m.heads * (z.nope + z.value)),
        "core_attn": scores,
        "proj": 2.0 * h * m.value_width,
    }


def _seen_of(m: Transformer, layer: int, rows: tuple[int, ...], all_of: bool) -> float:
    """Keys a query meets, on average over documents, which a layer with chunks cuts."""
    if m.chunked and m.has_window(layer) and not all_of:
        rows = tuple(min(m.window, n - i) for n in rows for i in range(0, n, m.window))
    return sum(n * _seen(m, layer, n, all_of) for n in rows) / sum(rows)


def _seen(m: Transformer, layer: int, sequence: int, all_of: bool) -> float:
    """Keys a query meets, on average over a sequence."""
    reach = min(m.window, sequence) if m.has_window(layer) else sequence
    return float(reach) if all_of or not m.causal else reach - reach * reach / (2.0 * sequence)


def _feed_forward(m: Transformer, layer: int) -> dict[str, float]:
    if not m.has_experts(layer):
        return _block(m, "mlp", m.ffn)
    e = m.experts
    assert e is not None
    routed = {name: e.top_k * f for name, f in _block(m, "moe", e.ffn, e.latent).items()}
    return {"router": 2.0 * m.router_parameters, **routed, **_block(m, "shared", e.shared_ffn)}


def _block(m: Transformer, name: str, ffn: int, outer: int = 0) -> dict[str, float]:
    up, h = 2 if m.gated else 1, outer or m.hidden
    return {f"{name}_up": 2.0 * h * up * ffn, f"{name}_down": 2.0 * h * ffn}


def peak_of(gpu: Gpu, precision: str) -> tuple[str, float]:
    """The peak a precision is held against, by its name, in FLOP/s; where a GPU has none, the one it would run at."""
    name, times = PEAKS.get(precision, precision), 1.0
    while name not in gpu.peak:
        name, more = INSTEAD.get(name, ("fp32", 1.0))
        times *= more
    return name, times * gpu.peak[name]
