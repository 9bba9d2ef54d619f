"""The transformer in a captured step: layers found by their attention, and the products before and after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from presage.errors import PresageError
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.prediction.from_code.products import Attention, Product, StepProducts

SMALL = 0.02  # of the product after attention: gates and the like, which are left out
ACTIVATIONS = {
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
    "clamp_min": "relu",
    "sigmoid": "silu",
    "tanh": "gelu",
    "erf": "gelu",
}
GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


class ExpertBlock(NamedTuple):
    """A mixture of experts as one rank runs it."""

    here: int  # experts of the rank
    experts: int  # outputs of the router; 0 where none was found
    rows: int  # tokens that reach the rank's experts
    ffn: int
    gated: bool


@dataclass(frozen=True)
class Layer:
    """One call of a layer, in sizes of one rank."""

    attention: Attention
    qkv: tuple[Product, ...]
    proj: Product
    mlp: tuple[Product, ...]
    after: tuple[Product, ...]  # products that follow the layer: the head of the last one

    @property
    def hidden(self) -> int:
        return self.proj.outputs

    @property
    def kv_heads(self) -> int:
        """Those that the products make: code may repeat them before attention."""
        a = self.attention
        keys = sum(p.outputs for p in self.qkv) - a.heads * a.dim
        return keys // (a.dim + a.value)

    @property
    def down(self) -> Product:
        return self.mlp[-1]

    @property
    def dense(self) -> list[Product]:
        return [p for p in self.mlp if p.groups == 1]

    @property
    def up_width(self) -> int:
        return sum(p.outputs for p in self.dense if p is not self.down)

    @property
    def gated(self) -> bool:
        return self.experts.gated if self.experts else self.up_width == 2 * self.down.inputs

    @property
    def experts(self) -> ExpertBlock | None:
        """Experts as grouped products: one or two into them, one out."""
        grouped = [p for p in self.mlp if p.groups > 1]
        if len(grouped) < 2:
            return None
        out, width = grouped[-1], sum(p.outputs for p in grouped[:-1])
        router = [p for p in self.dense if p.place < grouped[0].place and p.inputs == self.hidden]
        return ExpertBlock(out.groups, router[-1].outputs if router else 0, out.rows, out.inputs, width > out.inputs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What equal layers have in common."""
        a = self.attention
        return (a.batch, a.heads, self.kv_heads, a.dim, a.value, a.queries, self.hidden, self.down.inputs, self.gated)


def not_described(graph: Graph, why: str) -> PresageError:
    return PresageError(f"{graph.source}: {why}; a job file describes transformers with layers of one kind")


def step_layers(found: StepProducts) -> tuple[Layer, ...]:
    """Every forward call of a layer, in order; an error where the step is not made of equal transformer layers."""
    graph = found.graph
    calls = [a for a in found.attention if graph.ops[a.place].phase == "forward"]
    if not calls:
        raise not_described(graph, "no attention was found in its forward pass")
    products = [p for p in found.products if graph.ops[p.place].phase == "forward" and not p.batched]
    at = {p.place: p for p in products}
    into = []
    for k, call in enumerate(calls):
        start = calls[k - 1].last if k else -1
        into.append(_into(found, call, at, start))
        if not into[-1]:
            raise not_described(graph, f"no product makes the queries and keys of {_where(graph, call)}")
    ends = [min(p.place for p in qkv) for qkv in into[1:]] + [len(graph.ops)]
    layers = [
        _layer(graph, call, qkv, [p for p in products if call.last < p.place < end])
        for call, qkv, end in zip(calls, into, ends, strict=True)
    ]
    return _equal(graph, layers)


def _where(graph: Graph, call: Attention) -> str:
    op = graph.ops[call.place]
    return f"the attention of {op.module or op.line or 'its first layer'}"


def _into(found: StepProducts, call: Attention, at: dict[int, Product], start: int) -> tuple[Product, ...]:
    """The products that queries, keys and values come from."""
    stop = frozenset(at)
    seen: dict[int, Product] = {}
    for tensor in call.inputs:
        for place in found.back(tensor, call.place, start, stop):
            if place in at:
                seen[place] = at[place]
    return tuple(seen[k] for k in sorted(seen))


def _layer(graph: Graph, call: Attention, qkv: tuple[Product, ...], after: list[Product]) -> Layer:
    hidden, rows = qkv[0].inputs, qkv[0].rows
    if call.style == "unfused":
        batch = max(1, rows // call.queries)
        call = call._replace(batch=batch, heads=call.heads // batch, kv_heads=call.kv_heads // batch)
    where = _where(graph, call)
    proj = next((p for p in after if p.inputs == call.heads * call.value), None)
    if proj is None:
        raise not_described(graph, f"no product takes what {where} gives ({call.heads} heads of {call.value})")
    if {p.inputs for p in qkv} != {proj.outputs}:
        widths = f"{' and '.join(map(str, sorted({p.inputs for p in qkv})))} numbers in, {proj.outputs} out"
        raise not_described(graph, f"the products around {where} do not fit, as with adapters or low ranks ({widths})")
    grouped = any(p.groups > 1 for p in after)  # then a small product may be their router
    rest = [p for p in after if p.place > proj.place and (grouped or p.flops > SMALL * proj.flops)]
    last = max((k for k, p in enumerate(rest) if p.outputs == hidden), default=-1)
    if last < 1:
        raise not_described(graph, f"no feed-forward block follows {where}")
    layer = Layer(call, qkv, proj, tuple(rest[: last + 1]), tuple(rest[last + 1 :]))
    spread = sum(p.outputs for p in qkv) - call.heads * call.dim
    if spread <= 0 or spread % (call.dim + call.value):
        raise not_described(graph, f"the products into {where} do not make queries, keys and values of its size")
    if layer.experts is None and layer.up_width not in (layer.down.inputs, 2 * layer.down.inputs):
        widths = f"{layer.up_width} numbers in, {layer.down.inputs} out"
        raise not_described(graph, f"what follows {where} is no block of two or three products ({widths})")
    return layer


def _equal(graph: Graph, layers: list[Layer]) -> tuple[Layer, ...]:
    """The layers; those of another kind than most are an error (experts and dense ones may take turns)."""
    kinds = Counter(x.sizes for x in layers if x.experts is None)
    if len(kinds) > 1:
        first, other = (k for k, _ in kinds.most_common(2))
        names = ("batch", "heads", "kv_heads", "head_dim", "head_dim of values", "sequence", "hidden", "ffn", "gated")
        differ = [f"{n} {a} and {b}" for n, a, b in zip(names, first, other, strict=True) if a != b]
        raise not_described(graph, f"its layers differ: {', '.join(differ)}")
    return tuple(layers)


# ---- what lies between the products


def activation(graph: Graph, layer: Layer) -> str | None:
    """The function between the products of a feed-forward block; None in compiled code, which does not show it."""
    ops = graph.ops[layer.mlp[0].place : layer.down.place]
    names = [op.name.removeprefix("aten::").removesuffix("_") for op in ops]
    found = next((ACTIVATIONS[n] for n in names if n in ACTIVATIONS), None)
    if found == "relu" and not layer.gated and any(n in ("square", "pow") for n in names):
        return "relu2"
    return GATED.get(found) if layer.gated and found else found


def rotates(found: StepProducts, layer: Layer) -> bool:
    """Whether queries are multiplied by something on their way to attention: positions as rotations."""
    a, graph = layer.attention, found.graph
    stop = frozenset(p.place for p in layer.qkv)
    start = min(stop) - 1
    between = [graph.ops[i] for i in found.back(a.inputs[0], a.place, start, stop) if i not in stop]
    return any(_mixes(graph, op) for op in between)


def _mixes(graph: Graph, op: Op) -> bool:
    large = [t for t in graph.inputs_of(op) if t.elements > 1 and "int" not in t.dtype]
    return len(large) > 1 and (op.name in ("aten::mul", "aten::complex") or op.name.startswith("triton::"))


class EmbeddingTable(NamedTuple):
    """A table that whole numbers look rows up in."""

    rows: int
    storages: frozenset[int]


def embedding_tables(found: StepProducts, first: Layer) -> list[EmbeddingTable]:
    """Tables of rows as wide as the model that are looked up ahead of the first layer, most rows first."""
    tables: dict[int, EmbeddingTable] = {}
    graph, hidden = found.graph, first.hidden
    for i, op in enumerate(graph.ops[: first.attention.place]):
        if op.phase != "forward" or not op.kernels or not (looks := _looks_up(op)):
            continue
        inputs = [t for t in graph.inputs_of(op) if t.id not in (*op.outputs, *op.writes)]
        if not any(t.dtype in ("int64", "int32") and t.elements > 1 for t in inputs):
            continue
        for t in inputs:
            if len(t.shape) == 2 and t.shape[1] == hidden and t.shape[0] > 1 and "float" in t.dtype:
                behind = found.storages_behind(t.id, i)
                if looks == "index" or any(graph.storages[s].role == "parameter" for s in behind):
                    old = tables.get(t.shape[0], EmbeddingTable(t.shape[0], frozenset()))
                    tables[t.shape[0]] = EmbeddingTable(old.rows, old.storages | behind)
    return sorted(tables.values(), key=lambda t: -t.rows)


def _looks_up(op: Op) -> str:
    """Whether it looks rows up, or is a fused kernel, which may."""
    return "fused" if op.name.startswith("triton::") else "index" if family(op.name) in ("index", "embedding") else ""


def counted(graph: Graph, layers: tuple[Layer, ...]) -> tuple[int, int]:
    """Layers of the rank, and microbatches of its step."""
    calls, tokens = len(layers), layers[0].proj.rows
    heads = [p for x in layers for p in x.after if p.inputs == layers[0].hidden]
    modules = Counter(graph.ops[x.attention.place].module for x in layers)
    if heads:
        widest = max(p.outputs for p in heads)
        often = max(1, round(sum(p.rows for p in heads if p.outputs == widest) / tokens))
    else:
        often = 1 if "" in modules else min(modules.values())
    if calls % often:
        raise not_described(graph, f"{calls} calls of attention are no multiple of {often} microbatches")
    return calls // often, often
