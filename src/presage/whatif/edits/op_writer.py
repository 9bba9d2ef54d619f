"""OpWriter: writes stretches of new ops into a graph in place of old ones, through GraphBuilder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from presage.graph.builder import GraphBuilder
from presage.graph.graph import DTYPE_BYTES, Arg, Graph, Op, Ref, Role, Tensor


class OpWriter:
    """Ops are written at a position of the old graph (`at`); memory made there is freed where the stretch ends, unless
    it is standing (there before the step and after it) or kept (to its last use)."""

    def __init__(self, graph: Graph) -> None:
        self.builder = GraphBuilder(graph)
        self.facts = self.builder.facts
        self._written: dict[int, list[Op]] = {}
        self._place, self._like = 0, Op("", "", (), (), "other", "main")

    def at(self, place: int, like: Op) -> None:
        """What follows is written in place of this op, and is like that one but for its name and tensors."""
        self._place, self._like = place, like
        self._written.setdefault(place, [])

    def get(self, ref: Ref | int) -> Tensor:
        return self.builder.tensors[ref.id if isinstance(ref, Ref) else ref]

    def op(
        self,
        name: str,
        inputs: Sequence[Arg] = (),
        outputs: Sequence[Ref] = (),
        *,
        overload: str = "",
        names: Sequence[str] = (),
        writes: Sequence[Ref] = (),
        within: Sequence[str] = (),
        kernels: bool = True,
    ) -> None:
        """Write one op. `name` without a colon is one of torch's own."""
        self._written[self._place].append(
            Op(
                name=name if ":" in name else f"aten::{name}",
                overload=overload,
                inputs=tuple(inputs),
                outputs=tuple(o.id for o in outputs),
                phase=self._like.phase,
                thread=self._like.thread,
                module=self._like.module,
                within=tuple(within),
                names=tuple(names) if len(names) == len(inputs) else (),
                writes=tuple(w.id for w in writes),
                kernels=kernels,
                sequence=self._like.sequence,
                line=self._like.line,
                stream=self._like.stream,
                replayed=self._like.replayed,
            )
        )

    def put(self, place: int, op: Op) -> None:
        """Put this op in place of an old one."""
        self._written[place] = [op]

    def until(self, ref: Ref, place: int) -> None:
        """Keep memory made here until after what is written at this position."""
        self.builder.free_after(self.get(ref).storage, place)

    def host(self, name: str, within: Sequence[str] = (), overload: str = "") -> None:
        """Write an op of the host's alone."""
        self.op(name, within=within, overload=overload, kernels=False)

    def view(self, of: Ref | int, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> Ref:
        """Another tensor over the memory of one."""
        t = self.get(of)
        return Ref(self.builder.add_tensor(t.storage, shape, t.dtype, offset, strides))

    def part(self, storage: int, like: Tensor, offset: int) -> Ref:
        """A tensor of the same shape over other memory."""
        return Ref(self.builder.add_tensor(storage, like.shape, like.dtype, offset, like.strides))

    def new(self, shape: Sequence[int], dtype: str, strides: Sequence[int] | None = None, *, kept: bool = False) -> Ref:
        """Memory of this stretch; `kept`: until its last use."""
        storage = self._storage(shape, dtype, "activation")
        if not kept:
            self.builder.free_after(storage, self._place)
        return Ref(self.builder.add_tensor(storage, shape, dtype, strides=strides))

    def standing(self, shape: Sequence[int], dtype: str, role: Role, name: str = "") -> Ref:
        """Memory that was there before the step, and is after it."""
        storage = self._storage(shape, dtype, role, name)
        self.builder.lifetimes[storage] = "always"
        return Ref(self.builder.add_tensor(storage, shape, dtype))

    def done(self, removed: Collection[int] = (), dropped: Collection[int] = ()) -> Graph:
        """The graph with what was written in it, without the ops removed and the storages dropped."""
        for place in set(removed) - self._written.keys():
            self.builder.replace(place)
        for place, ops in self._written.items():
            self.builder.replace(place, *ops)
        return self.builder.build(prune=True, dropped=dropped, frees_first=True)

    def _storage(self, shape: Sequence[int], dtype: str, role: Role, name: str = "") -> int:
        return self.builder.add_storage(prod(shape) * DTYPE_BYTES[dtype], role, name, self._like.module)
