"""OpWriter: a GraphBuilder that writes stretches of new ops in place of old ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from presage.graph.builder import GraphBuilder, new_op
from presage.graph.graph import DTYPE_BYTES, Arg, Graph, Op, Ref, Tensor


class OpWriter(GraphBuilder):
    """Ops are written at a position of the old graph (`at`); memory allocated there is freed where the stretch ends,
    unless it is kept (to its last use) or always there."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.written: dict[int, list[Op]] = {}
        self._position, self.like = 0, new_op("", ())

    def at(self, position: int, like: Op) -> None:
        """What follows is written in place of this op, and is like that one except for its name and tensors."""
        self._position, self.like = position, like
        self.written.setdefault(position, [])

    def get(self, ref: Ref | int) -> Tensor:
        return self.tensors[ref.id if isinstance(ref, Ref) else ref]

    def op(
        self,
        name: str,
        inputs: Sequence[Arg] = (),
        outputs: Sequence[Ref] = (),
        *,
        names: Sequence[str] = (),
        writes: Sequence[Ref] = (),
        **fields: Any,
    ) -> None:
        """Write one op. `name` without a colon is one of torch's own; `fields` are other fields of Op."""
        like = self.like
        op = new_op(
            name if ":" in name else f"aten::{name}", inputs, outputs=(o.id for o in outputs), like=like,
            names=tuple(names) if len(names) == len(inputs) else (), writes=(w.id for w in writes), line=like.line,
            sequence=like.sequence, stream=like.stream, replayed=like.replayed, **fields,
        )  # fmt: skip
        self.written[self._position].append(op)

    def host(self, name: str, within: Sequence[str] = ()) -> None:
        """Write an op of the host alone."""
        self.op(name, within=within, kernels=False)

    def view(self, of: Ref | int, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> Ref:
        """Another tensor over the memory of one."""
        t = self.get(of)
        return Ref(self.add_tensor(t.storage, shape, t.dtype, offset, strides))

    def new(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, *, kept: bool = False) -> Ref:
        """A tensor in memory of this stretch; `kept`: until its last use."""
        storage = self.add_storage(prod(shape) * DTYPE_BYTES[dtype], "activation", module=self.like.module)
        if not kept:
            self.free_after(storage, self._position)
        return Ref(self.add_tensor(storage, shape, dtype, strides=strides))

    def buffer(self, elements: int, dtype: str, name: str) -> Ref:
        """A flat tensor that is there before the step and after it."""
        storage = self.add_storage(elements * DTYPE_BYTES[dtype], "buffer", name, self.like.module, "always")
        return Ref(self.add_tensor(storage, (elements,), dtype))

    def done(self, removed: Collection[int] = (), dropped: Collection[int] = ()) -> Graph:
        """The graph with what was written in it, without the ops removed and the storages dropped."""
        for position in {*removed, *self.written}:
            self.replace(position, *self.written.get(position, ()))
        return self.build(prune=True, dropped=dropped, frees_first=True)
