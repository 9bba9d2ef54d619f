"""Gradients in buckets, as PyTorch's reducer fills them: in the order they are ready, up to a size, by dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.graph.builder import GraphBuilder, Lifetime, new_op
from presage.graph.graph import Ref
from presage.parallel.gradients import Gradient

__all__ = ["Bucket", "buckets", "fill"]

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


def buckets(found: Sequence[Gradient], limit_mb: float = 25.0, first_mb: float = 1.0) -> list[Bucket]:
    """Gradients in ready order, cut where a bucket has reached its limit; the first one's limit is smaller.

    Buckets are sent in order: one that is full waits for those before it.
    """
    open_: dict[str, list[Gradient]] = {}
    closed: list[list[Gradient]] = []
    for g in found:
        mine = open_.setdefault(g.tensor.dtype, [])
        mine.append(g)
        limit = (limit_mb if closed else first_mb) * MIB
        if sum(x.tensor.nbytes for x in mine) >= limit:
            closed.append(open_.pop(g.tensor.dtype))
    closed += [rest for rest in open_.values() if rest]
    out, ready = [], -1
    for members in closed:
        ready = max(ready, max(g.ready for g in members))
        out.append(Bucket(tuple(members), ready))
    return out


def fill(
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
