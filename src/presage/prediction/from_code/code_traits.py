"""What a captured step says of the software around its layers: precision, optimizer, recomputation, fused kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from presage.graph.graph import Graph
from presage.prediction.from_code.products import StepProducts
from presage.prediction.from_code.step_layers import Layer

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
WORTH = 0.1  # share of a layer's work: less is rounding


@dataclass(frozen=True)
class CodeTraits:
    """Words of a job file's [training] and [framework]; None where the code does not show it."""

    precision: str
    optimizer: str
    recompute: str | dict[str, object]
    compiled: bool
    host: str
    norm: str | None
    fused_norms: bool
    fused_loss: bool
    dropout: bool
    gradient_bytes: int
    parameters: int  # on one rank
    frozen: float  # share of the layers' weight gradients that are not computed


def code_traits(found: StepProducts, layers: Sequence[Layer], rotates: bool) -> CodeTraits:
    graph = found.graph
    first = layers[0]
    compiled = bool(graph.ops[first.qkv[0].place].compiled)
    replayed = any(op.replayed or "CUDA graphs" in op.compiled for op in graph.ops if op.phase == "forward")
    names = Counter(op.name for op in graph.ops if op.phase == "forward" and op.kernels)
    norm, fused = _norm(graph, names)
    recompute, frozen = _again(found, layers)
    plain = "torch" if rotates and first.gated else "torch-gpt"
    return CodeTraits(
        precision=_precision(graph, first),
        optimizer=_optimizer(found),
        recompute=recompute,
        compiled=compiled,
        host="graph" if replayed else "compiled" if compiled else plain,
        norm=norm,
        fused_norms=fused or compiled,
        fused_loss=compiled or not any("_log_softmax" in n for n in names),
        dropout=any("dropout" in n for n in names) or any(x.attention.dropout for x in layers),
        gradient_bytes=_width(graph, "gradient", 4),
        parameters=parameters(graph),
        frozen=frozen,
    )


def _precision(graph: Graph, layer: Layer) -> str:
    dtype = graph.tensors[layer.qkv[0].weight].dtype
    if dtype in PRECISIONS:
        return PRECISIONS[dtype]
    rounded = graph.flags.get("allow_tf32") or graph.flags.get("float32_matmul_precision") in ("high", "medium")
    return "tf32" if rounded else "fp32"


def _norm(graph: Graph, names: Counter[str]) -> tuple[str | None, bool]:
    """The kind of normalisation and whether it is one kernel."""
    if any("layer_norm" in n for n in names):
        return "layernorm", True
    if any("rms_norm" in n for n in names):
        return "rmsnorm", True
    if any(n.startswith("aten::rsqrt") for n in names):
        return "rmsnorm", False
    norms = [s.name for s in graph.storages if s.role == "parameter" and ("norm" in s.name or "ln_" in s.name)]
    if norms:
        return ("layernorm" if any(n.endswith("bias") for n in norms) else "rmsnorm"), True
    return None, True


def _width(graph: Graph, role: str, otherwise: int) -> int:
    """Bytes of a number, in the type that most bytes of a role have."""
    sizes: Counter[int] = Counter()
    kind = {t.storage: t.itemsize for t in graph.tensors}
    for s in graph.storages:
        if s.role == role and s.id in kind:
            sizes[kind[s.id]] += s.nbytes
    return sizes.most_common(1)[0][0] if sizes else otherwise


def parameters(graph: Graph) -> int:
    """Parameters that one rank holds."""
    kind = {t.storage: t.itemsize for t in graph.tensors}
    return sum(s.nbytes // kind.get(s.id, 4) for s in graph.storages if s.role == "parameter")


def _optimizer(found: StepProducts) -> str:
    graph = found.graph
    ops = [op for op in graph.ops if op.phase == "optimizer" and op.kernels]
    names = " ".join({op.name for op in ops})
    if not ops:
        return "none"
    if any(graph.ops[p.place].phase == "optimizer" for p in found.products):
        return "muon"
    for word, name in (("adagrad", "adagrad"), ("sgd", "momentum"), ("sign", "lion")):
        if word in names and "adam" not in names:
            return name if name != "momentum" or _state(graph) > 0.5 else "sgd"
    if "adam" in names or "addcdiv" in names or any(op.compiled for op in ops):
        return "adam" if _width(graph, "parameter", 4) == 4 else "adam-16bit"
    return "momentum" if _state(graph) > 0.5 else "sgd"


def _state(graph: Graph) -> float:
    """Bytes of optimizer state per byte of parameters."""
    held = Counter[str]()
    for s in graph.storages:
        held[s.role] += s.nbytes
    return held["optimizer"] / held["parameter"] if held["parameter"] else 0.0


def _again(found: StepProducts, layers: Sequence[Layer]) -> tuple[str | dict[str, object], float]:
    """Recomputation by what of a layer's forward work the backward pass has besides gradients; and what it lacks."""
    ops = found.graph.ops
    again = sum(ops[a.place].phase == "backward" for a in found.attention) / len(layers)
    ahead = sum(p.flops for x in layers for p in (*x.qkv, x.proj, *x.mlp))
    ends = sum(p.flops for x in layers for p in x.after)
    back = sum(p.flops for p in found.products if ops[p.place].phase == "backward" and not p.batched) - 2 * ends
    more = back / ahead - 2
    if more < -WORTH:
        return "none", -more
    if again > WORTH:
        mode = "full" if more > WORTH else "selective"
        return (mode if again > 0.99 else {"mode": mode, "share": round(again, 3)}), 0.0
    if more < WORTH:
        return "none", 0.0
    mlp = sum(p.flops for x in layers for p in x.mlp) / ahead
    return ("selective:mlp" if abs(more - mlp) < WORTH else "selective:op"), 0.0
