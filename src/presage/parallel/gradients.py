"""Parameters and their gradients in a captured step: which belong together, and when a gradient is ready."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from msgspec.structs import replace

from presage.errors import PresageError
from presage.graph.builder import GraphBuilder, Lifetime, new_op, retarget
from presage.graph.graph import DTYPE_BYTES, UNNAMED, Graph, Op, Ref, Storage, Tensor, references, uses


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, and after which op it is ready."""

    parameter: str
    storage: int
    tensor: Tensor
    ready: int


def parameters(graph: Graph) -> list[Storage]:
    """The parameters' memory, in the model's order."""
    return [s for s in graph.storages if s.role == "parameter"]


def whole_tensors(graph: Graph) -> dict[int, Tensor]:
    """The largest tensor in each memory: the parameter or gradient itself, not a piece of it."""
    largest: dict[int, Tensor] = {}
    for t in graph.tensors:
        if t.storage not in largest or t.elements > largest[t.storage].elements:
            largest[t.storage] = t
    return largest


def backward_passes(graph: Graph) -> list[range]:
    """The places of each backward pass: from its first op to its last, with none of a forward pass between."""
    out: list[range] = []
    forward = True
    for i, op in enumerate(graph.ops):
        if op.phase == "backward":
            out = [*out, range(i, i + 1)] if forward else [*out[:-1], range(out[-1].start, i + 1)]
        forward = op.phase == "forward" or (forward and op.phase != "backward")
    if not out:
        raise PresageError("the step has no backward pass: there is nothing to train on several ranks")
    return out


def gradients(graph: Graph, backward: range) -> list[Gradient]:
    """The gradients that a backward pass makes or adds to, in the order they are ready."""
    last: dict[int, int] = {}
    for i in backward:
        last |= dict.fromkeys(uses(graph, graph.ops[i]), i)
    tensors = whole_tensors(graph)
    shapes = {p.name: tensors[p.id].shape for p in parameters(graph) if p.id in tensors}
    found = [
        Gradient(s.name, s.id, _shaped(graph, tensors[s.id], shapes.get(s.name)), last[s.id])
        for s in graph.storages
        if s.role == "gradient" and s.id in last
    ]
    if not found:
        why = "the step makes no gradients of parameters: there is nothing for the ranks to share"
        raise PresageError(why if graph.memory_known else f"{graph.source}: {UNNAMED}")
    return sorted(found, key=lambda g: (g.ready, g.storage))


def _shaped(graph: Graph, whole: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """The tensor of a gradient's memory that has its parameter's shape, if there is one: a sum may have kept a 1."""
    if shape is None or whole.shape == shape:
        return whole
    alike = (t for t in graph.tensors[whole.id :] if t.storage == whole.storage and t.shape == shape)
    return next(alike, whole)


def earlier_gradients(graph: Graph) -> list[Storage]:
    """Gradients of the step before, which this one finds and frees."""
    made = {e.storage for e in graph.events if e.allocates}
    used = {s for op in graph.ops if op.phase == "backward" for s in uses(graph, op)}
    return [s for s in graph.storages if s.role == "gradient" and s.id not in made | used]


def fresh_gradients(graph: Graph) -> Graph:
    """The step where every backward pass makes gradients of its own, for what came before is sent and freed by then.

    On one GPU each microbatch's gradients are added to those there; here what would be added is the gradient.
    """
    builder = GraphBuilder(graph)
    for i in (i for backward in backward_passes(graph)[1:] for i in backward):
        if (addition := _added(graph, graph.ops[i])) is not None:
            total, new = addition
            builder.storages[new] = replace(total, id=new, nbytes=graph.storages[new].nbytes)
            builder.ops[i] = replace(graph.ops[i], inputs=(), names=(), outputs=(), writes=(), kernels=False)
    return builder.build()


def _added(graph: Graph, op: Op) -> tuple[Storage, int] | None:
    """The gradient that an op adds to, and the memory of what it adds; None if it is no such op."""
    if op.name != "aten::add_" or not op.kernels or len(op.writes) != 1:
        return None
    total = graph.storages[graph.tensors[op.writes[0]].storage]
    others = [s for i in references(op.inputs) if (s := graph.tensors[i].storage) != total.id]
    return (total, others[0]) if total.role == "gradient" and len(others) == 1 else None


# ---- Gradients in buckets, as PyTorch's reducer fills them: in the order they are ready, up to a size, by dtype.

MIB = 1024.0**2


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together."""

    gradients: tuple[Gradient, ...]
    ready: int  # after this op all of them are, and all of the buckets before

    @property
    def elements(self) -> int:
        return sum(g.tensor.elements for g in self.gradients)

    @property
    def nbytes(self) -> int:
        return sum(g.tensor.nbytes for g in self.gradients)

    @property
    def dtype(self) -> str:
        return self.gradients[0].tensor.dtype


def make_buckets(found: Sequence[Gradient], limit_mb: float = 25.0, first_mb: float = 1.0) -> list[Bucket]:
    """Gradients in ready order, cut where a bucket has reached its limit; the first one's limit is smaller.

    Buckets are sent in order: one that is full waits for those before it.
    """
    open_: dict[str, list[Gradient]] = {}
    closed: list[list[Gradient]] = []
    for g in found:
        own = open_.setdefault(g.tensor.dtype, [])
        own.append(g)
        limit = (limit_mb if closed else first_mb) * MIB
        if sum(x.tensor.nbytes for x in own) >= limit:
            closed.append(open_.pop(g.tensor.dtype))
    closed += [rest for rest in open_.values() if rest]
    out, ready = [], -1
    for members in closed:
        ready = max(ready, max(g.ready for g in members))
        out.append(Bucket(tuple(members), ready))
    return out


def fill_bucket(
    builder: GraphBuilder, bucket: Bucket, share: float, name: str, dtype: str = "", lifetime: Lifetime = "always"
) -> int:
    """A bucket's memory, and the copies that bring each gradient into it when it is ready, times `share`.

    Gives the bucket's tensor; the gradients' tensors in it follow it in the builder.
    """
    dtype = dtype or bucket.dtype
    flat = builder.add_buffer(bucket.elements, dtype, "buffer" if lifetime == "always" else "gradient", name, lifetime)
    offset = 0
    for g in bucket.gradients:
        view = builder.add_tensor(builder.tensors[flat].storage, g.tensor.shape, dtype, offset)
        offset += g.tensor.elements
        like = builder.source.ops[g.ready]
        inputs = [Ref(g.tensor.id), share, Ref(view)]
        builder.after(
            g.ready, new_op("aten::mul", inputs, outputs=(view,), like=like, overload="out", within="reducer::mul_out")
        )
    return flat


# ---- Parts of parameters: what a rank keeps and updates of what all of them train.

TRAINED = ("parameter", "gradient", "optimizer")


def shard_elements(tensor: Tensor, ranks: int) -> int:
    """Elements of the largest part of a tensor that is cut along its first dimension."""
    if not tensor.shape:
        return 1
    return ceil(tensor.shape[0] / ranks) * prod(tensor.shape[1:])


def shard_update(builder: GraphBuilder, ranks: int, end: int, held: dict[int, int], dtype: str = "") -> None:
    """After the backward pass (which ends at op `end`) all work on parameters, gradients and the optimizer's state is
    on the rank's own part of them.

    `held` are the parts of parameters and gradients, as tensors, by the storage of the whole. State of the optimizer,
    and what is computed from all these, shrinks as they do; `dtype` is what the state is kept in, if another.
    """
    graph = builder.source
    tensors = whole_tensors(graph)
    touched = {s.id for s in graph.storages if s.role in TRAINED}
    parts = dict(held)
    for i in range(end + 1, len(graph.ops)):
        own = uses(graph, graph.ops[i])
        if not own & touched:
            continue
        touched |= own
        for s in own - parts.keys():
            parts[s] = _part(builder, tensors[s], ranks, dtype)
        named = (*graph.inputs_of(graph.ops[i]), *graph.outputs_of(graph.ops[i]))
        builder.ops[i] = retarget(builder.ops[i], {t.id: parts[t.storage] for t in named})


def _part(builder: GraphBuilder, whole: Tensor, ranks: int, dtype: str) -> int:
    """The rank's part in the same memory, which shrinks to it."""
    if whole.elements <= 1:
        return whole.id
    dtype = dtype if dtype and whole.dtype.startswith(("float", "bfloat")) else whole.dtype
    elements = shard_elements(whole, ranks)
    builder.resize(whole.storage, elements * DTYPE_BYTES[dtype])
    return builder.add_tensor(whole.storage, (elements,), dtype)


# ---- Units of a model: the repeated blocks that sharded parallelism gathers and frees one at a time, and the rest.

ROOT = ""
PHASES = ("forward", "backward")
Span = tuple[int, int]


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that come and go together, and the first and last op that needs them, by backward pass."""

    name: str
    parameters: tuple[Storage, ...]
    forward: tuple[Span | None, ...]
    backward: tuple[Span | None, ...]


def fsdp_units(graph: Graph) -> list[FsdpUnit]:
    """The root (all that is in no block) and then the blocks, in the order of their first use."""
    blocks = _blocks(p.module for p in parameters(graph))
    members: dict[str, list[Storage]] = {ROOT: []}
    for p in parameters(graph):
        members.setdefault(unit_of(p.module, blocks), []).append(p)
    needs = _needs(graph, {p.id: name for name, some in members.items() for p in some}, blocks)
    passes = range(len(backward_passes(graph)))
    found = [
        FsdpUnit(name, tuple(some), *(tuple(needs.get((name, phase, k)) for k in passes) for phase in PHASES))
        for name, some in members.items()
        if some
    ]
    used = [u for u in found if u.forward[0] is not None]
    return sorted(used, key=lambda u: (u.name != ROOT, u.forward[0]))


def unit_of(module: str, blocks: set[str]) -> str:
    """The block a module is in: 'blocks.3' for 'blocks.3.attn.qkv'."""
    parts = module.split(".")
    return next((b for n in range(1, len(parts) + 1) if (b := ".".join(parts[:n])) in blocks), ROOT)


def _blocks(modules: Iterable[str]) -> set[str]:
    """Numbered modules with modules of their own inside, of which there are several side by side: the outermost."""
    found: dict[str, set[str]] = {}
    for module in modules:
        parts = module.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None and number + 1 < len(parts):
            found.setdefault(".".join(parts[:number]), set()).add(".".join(parts[: number + 1]))
    return {block for some in found.values() if len(some) > 1 for block in some}


def _needs(graph: Graph, owner: dict[int, str], blocks: set[str]) -> dict[tuple[str, str, int], Span]:
    """First and last op of each unit by phase and pass: those of its modules, and those that use its parameters."""
    ends = [backward[-1] for backward in backward_passes(graph)]
    out: dict[tuple[str, str, int], Span] = {}
    for i, op in enumerate(graph.ops[: ends[-1] + 1]):
        if op.phase not in PHASES:
            continue
        names = {owner[s] for s in uses(graph, op) if s in owner}
        if op.kernels and op.module and (block := unit_of(op.module, blocks)) != ROOT:
            names.add(block)
        for name in names:
            key = name, op.phase, bisect_left(ends, i)
            out[key] = out.get(key, (i, i))[0], i
    return out
