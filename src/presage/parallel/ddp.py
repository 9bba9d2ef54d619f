"""Data parallelism: every rank has the whole model, and gradients are averaged over the ranks in buckets.

What PyTorch's DistributedDataParallel does in a step that is not the first: each gradient is copied into its bucket as
it becomes ready; a full bucket's all-reduce runs beside the rest of the backward pass; what reads gradients afterwards
waits for all. With `gradient_as_bucket_view` gradients then live in the buckets, else they are copied back. Buffers
(running means of normalisations) are sent out by the first rank before the forward pass. The buckets of the first step,
filled before the order was known, stay in memory: so measured in seven of eight runs of PyTorch 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass

from presage.graph.builder import GraphBuilder, host_op, new_op
from presage.graph.graph import Graph, Ref
from presage.parallel.gradients import (
    Bucket,
    Gradient,
    backward_passes,
    earlier_gradients,
    fill_bucket,
    gradients,
    make_buckets,
    parameters,
    whole_tensors,
)  # fmt: skip

GROUP = "dp"


@dataclass(frozen=True)
class Ddp:
    """How DistributedDataParallel is set up; the defaults are PyTorch's."""

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    rebuilt_buckets: bool = True  # as without find_unused_parameters: in the order that the first step has shown
    no_sync: bool = True  # of several backward passes in a step only the last one's gradients are sent


DEFAULT = Ddp()


def ddp(graph: Graph, ranks: int, options: Ddp = DEFAULT, group: str = GROUP) -> Graph:
    """The step of one of `ranks` data-parallel ranks."""
    if ranks == 1:
        return graph
    builder = GraphBuilder(graph)
    builder.before(0, host_op("DDP::forward", (), new_op("", (), phase="forward")))
    if options.broadcast_buffers:
        _broadcast_buffers(builder, group)
    passes = backward_passes(graph)
    for backward in passes[-1:] if options.no_sync else passes:
        found = gradients(graph, backward)
        filled = [
            (bucket, _reduce(builder, bucket, ranks, group, f"bucket {k}"))
            for k, bucket in enumerate(make_buckets(found, options.bucket_cap_mb, options.first_bucket_mb))
        ]
    _note_unused(builder, found)
    if options.rebuilt_buckets:
        builder.add_storage(sum(b.nbytes for b, _ in filled), "buffer", "buckets of the first step", lifetime="always")
    _finish(builder, filled, passes[-1][-1], options.gradient_as_bucket_view)
    return builder.build()


def _reduce(builder: GraphBuilder, bucket: Bucket, ranks: int, group: str, name: str) -> int:
    """A bucket is filled and all-reduced."""
    flat = fill_bucket(builder, bucket, 1 / ranks, name)
    like = builder.source.ops[bucket.ready]
    reduce = new_op("c10d::allreduce_", [[Ref(flat)]], writes=(flat,), like=like, stream=group, group=group)
    builder.after(bucket.ready, reduce)
    return flat


def _finish(builder: GraphBuilder, filled: list[tuple[Bucket, int]], end: int, as_view: bool) -> None:
    """The buckets become the gradients, or are copied back into them."""
    views = {g.storage: (g, flat + 1 + k) for bucket, flat in filled for k, g in enumerate(bucket.gradients)}
    if as_view:
        builder.redirect_reads({s: view for s, (_, view) in views.items()}, end)
        builder.lifetimes |= dict.fromkeys(views, "while used")
        for s in earlier_gradients(builder.source):  # they were parts of the buckets
            builder.resize(s.id, 0)
        return
    like = builder.source.ops[end]
    for g, view in views.values():
        both = [Ref(g.tensor.id), Ref(view)]
        back = "reducer::copy_bucket_to_grad"
        builder.after(end, new_op("aten::copy_", both, writes=(g.tensor.id,), like=like, within=back))


def _broadcast_buffers(builder: GraphBuilder, group: str) -> None:
    """All buffers, flat by dtype, from the first rank; then back to where they belong."""
    tensors = whole_tensors(builder.source)
    by_dtype: dict[str, list[int]] = {}
    for s in builder.source.storages:
        if s.role == "buffer" and s.id in tensors:
            by_dtype.setdefault(tensors[s.id].dtype, []).append(tensors[s.id].id)
    for dtype, members in by_dtype.items():
        flat = builder.add_buffer(sum(builder.tensors[t].elements for t in members), dtype, "workspace", "buffers")
        builder.before(
            0,
            new_op("aten::cat", [[Ref(t) for t in members], 0], outputs=(flat,), phase="forward"),
            new_op("c10d::broadcast_", [[Ref(flat)]], writes=(flat,), phase="forward", stream=group, group=group),
            *(new_op("aten::copy_", [Ref(t), Ref(flat)], writes=(t,), phase="forward") for t in members),
        )


def _note_unused(builder: GraphBuilder, found: list[Gradient]) -> None:
    without = {p.name for p in parameters(builder.source)} - {g.parameter for g in found}
    if without:
        some = ", ".join(sorted(without)[:3])
        builder.notes.append(f"{len(without)} parameters get no gradient in this step and are not sent ({some})")
