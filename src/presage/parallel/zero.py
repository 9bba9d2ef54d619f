"""ZeRO-1 and ZeRO-2: every rank has the whole model, and updates only its part of it.

Gradients go in buckets, as in data parallelism: all-reduced (stage 1) or reduce-scattered, each rank keeping its part
(stage 2). The optimizer's state is a rank's own part; after the update the parameters are all-gathered, bucket by
bucket, beside whatever the next step begins with. Stage 3 is `fsdp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import DTYPE_BYTES, Graph, Ref
from presage.parallel.gradients import (
    Bucket,
    backward_passes,
    earlier_gradients,
    fill_bucket,
    gradients,
    make_buckets,
    parameters,
    shard_elements,
    shard_update,
    whole_tensors,
)

GROUP = "dp"


@dataclass(frozen=True)
class Zero:
    """How the optimizer is sharded. An empty dtype is the model's own."""

    bucket_cap_mb: float = 25.0
    master_dtype: str = ""  # of the parts that are updated, where they are kept beside the model's


DEFAULT = Zero()


def zero(graph: Graph, ranks: int, options: Zero = DEFAULT, group: str = GROUP, *, stage: int = 1) -> Graph:
    """The step of one of `ranks` ranks, in stage 1 or 2."""
    if ranks == 1:
        return graph
    builder, end = GraphBuilder(graph), backward_passes(graph)[-1]
    some = make_buckets(gradients(graph, end), options.bucket_cap_mb, options.bucket_cap_mb)
    held: dict[int, int] = {}
    for k, bucket in enumerate(some):
        held |= _send(builder, bucket, ranks, stage, group, f"bucket {k}")
    for s in earlier_gradients(graph):
        builder.resize(s.id, 0 if stage == 1 else s.nbytes // ranks)
    masters = _parts(builder, ranks, options.master_dtype)
    shard_update(builder, ranks, end[-1], held | masters, options.master_dtype)
    _gather(builder, some, masters, ranks, group)
    return builder.build()


def _send(builder: GraphBuilder, bucket: Bucket, ranks: int, stage: int, group: str, name: str) -> dict[int, int]:
    """A bucket is filled and reduced; the rank's parts of its gradients, by their storages."""
    flat = fill_bucket(builder, bucket, 1 / ranks, name, lifetime="always" if stage == 1 else "while used")
    like, dtype = builder.source.ops[bucket.ready], bucket.dtype
    builder.lifetimes |= dict.fromkeys((g.storage for g in bucket.gradients), "while used")
    sizes = [shard_elements(g.tensor, ranks) for g in bucket.gradients]
    if stage == 1:
        storage = builder.tensors[flat].storage
        reduce = new_op("c10d::allreduce_", [[Ref(flat)]], writes=(flat,), like=like, stream=group, group=group)
    else:
        part = builder.add_buffer(sum(sizes), dtype, "gradient", f"{name}, this rank's part", lifetime="kept")
        storage = builder.tensors[part].storage
        both = [Ref(part), Ref(flat)]
        reduce = new_op("c10d::_reduce_scatter_base_", both, writes=(part,), like=like, stream=group, group=group)
    builder.after(bucket.ready, reduce)
    return {g.storage: builder.add_tensor(storage, (n,), dtype) for g, n in zip(bucket.gradients, sizes, strict=True)}


def _parts(builder: GraphBuilder, ranks: int, dtype: str) -> dict[int, int]:
    """What the rank updates of each parameter: in the parameter itself, or in a copy of another dtype."""
    tensors, out = whole_tensors(builder.source), {}
    for p in parameters(builder.source):
        if p.id not in tensors:
            continue
        t = tensors[p.id]
        n, kind, storage = shard_elements(t, ranks), dtype or t.dtype, p.id
        if kind != t.dtype:
            storage = builder.add_storage(
                n * DTYPE_BYTES[kind], "parameter", f"{p.name} (this rank's part)", lifetime="always"
            )
        out[p.id] = builder.add_tensor(storage, (n,), kind)
    return out


def _gather(builder: GraphBuilder, some: list[Bucket], masters: dict[int, int], ranks: int, group: str) -> None:
    """After the update every rank gets the others' parts of the parameters."""
    graph, place = builder.source, len(builder.source.ops) - 1
    tensors = whole_tensors(graph)
    by_name = {p.name: p.id for p in parameters(graph) if p.id in tensors}
    for bucket in some:
        ids = [by_name[g.parameter] for g in bucket.gradients if g.parameter in by_name]
        wholes = [tensors[i].id for i in ids]
        own = [builder.add_tensor(i, (shard_elements(tensors[i], ranks),), tensors[i].dtype) for i in ids]
        copied = [(m, masters[i]) for i, m in zip(ids, own, strict=True) if builder.tensors[masters[i]].storage != i]
        if copied:
            lists = [[Ref(m) for m, _ in copied], [Ref(s) for _, s in copied]]
            builder.after(
                place, new_op("aten::_foreach_copy_", lists, writes=[m for m, _ in copied], phase="optimizer")
            )
        both = [[*map(Ref, wholes)], [*map(Ref, own)]]
        gather = new_op("c10d::_allgather_base_", both, writes=wholes, phase="optimizer", stream=group, group=group)
        builder.after(place, gather)
