"""Attention written out: a product of queries and keys, a scale, a mask, a softmax, dropout, a product with values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from presage.graph.arguments import references
from presage.graph.graph import Graph, Op, Ref, Tensor
from presage.whatif.edits.rewriting.runs import Run, Story

__all__ = ["Manual", "Part", "found"]

PRODUCTS = ("aten::matmul", "aten::bmm", "aten::einsum")
CAST = ("aten::to", "aten::_to_copy")
SCALES = ("aten::mul", "aten::div", "aten::mul_", "aten::div_")
MASKS = ("aten::add", "aten::add_", "aten::masked_fill_", "aten::where", "aten::sub", "aten::sub_")


@dataclass(frozen=True)
class Part:
    """One of the factors: the old tensor that the products are given, and whether its last dimensions are swapped."""

    tensor: Tensor
    swapped: bool = False
    source: int = -1  # the op that swapped them, if it did nothing else


@dataclass
class Manual:
    """One attention: its ops in both passes, by place, and what it is given."""

    q: Part
    k: Part
    v: Part
    out: Tensor
    forward: list[int]  # ops of the forward pass that fusing takes away
    last: int  # the op after which the result is there
    scale: float = 1.0
    dropout: float = 0.0
    masks: list[int] = field(default_factory=list)  # old tensors
    numbers: set[int] = field(default_factory=set)  # autograd's, of the forward ops
    low: bool = False  # under autocast
    causal: bool = False  # said to be


def found(graph: Graph, runs: Sequence[Run], story: Story) -> list[Manual]:
    """Every attention that is written out, in order."""
    out = []
    for run in runs:
        if run.kind == "forward" and run.listed in PRODUCTS and (one := _Search(graph, runs, story).begin(run)):
            out.append(one)
    return out


class _Search:
    """Follows the scores from one product to the next."""

    def __init__(self, graph: Graph, runs: Sequence[Run], story: Story) -> None:
        self.graph, self.runs, self.story = graph, runs, story
        self.scale, self.dropout = 1.0, 0.0
        self.masks: list[int] = []
        self.softmax = False
        self.chain: set[int] = set()  # storages that hold scores or probabilities
        self.taken: list[int] = []

    def begin(self, run: Run) -> Manual | None:
        factors = self._factors(run)
        scores = self._result(run)
        if scores is None or len(factors) != 2 or len(scores.shape) not in (3, 4):
            return None
        q, k = factors
        if len(q.shape) != len(scores.shape) or len(k.shape) != len(scores.shape):
            return None
        keys = self._keys(q, k, scores, run)
        if keys is None:
            return None
        self.chain = {scores.storage}
        self.taken = [i for i in run.ops if not self._casts(i)]
        second = self._follow(run)
        return None if second is None else self._made(Part(q), keys, second, scores)

    def _keys(self, q: Tensor, k: Tensor, scores: Tensor, run: Run) -> Part | None:
        """The keys, whichever way they are given."""
        depth, length = q.shape[-1], scores.shape[-1]
        if q.shape[-2] != scores.shape[-2] or q.shape[:-2] != scores.shape[:-2]:
            return None
        straight, swapped = (k.shape[-2:] == s for s in ((length, depth), (depth, length)))
        if swapped and (not straight or run.listed != "aten::einsum"):
            return Part(k, True, self._swap(self._uncast(k, run), run))
        return Part(k) if straight and run.listed == "aten::einsum" else None

    def _uncast(self, t: Tensor, run: Run) -> Tensor:
        """What a cast at the start of a run is given."""
        for i in run.ops:
            if self._casts(i) and self._op(i).outputs == (t.id,):
                return self.graph.tensors[list(references(self._op(i).inputs))[1]]
        return t

    def _swap(self, k: Tensor, run: Run) -> int:
        """The op that swaps the keys' dimensions right before the product, if nothing else uses its result."""
        for i in range(run.first - 1, max(-1, run.first - 12), -1):
            op = self.graph.ops[i]
            if op.outputs == (k.id,) and op.within[-1:] == ("aten::transpose",) and not op.kernels:
                others = [
                    j for j in self._forward_readers(k.storage) if j > i and k.id in references(self._op(j).inputs)
                ]
                return i if all(j in run.ops for j in others) else -1
        return -1

    def _op(self, i: int) -> Op:
        return self.graph.ops[i]

    def _run(self, i: int) -> Run:
        return self.runs[self.story.run_of[i]]

    def _casts(self, i: int) -> bool:
        return self._op(i).within[-2:] == CAST

    def _factors(self, run: Run) -> list[Tensor]:
        """What a product is given, after the casts it makes; both factors may be parts of one storage."""
        made = {t for i in run.ops if self._casts(i) for t in self._op(i).outputs}
        out: dict[tuple[int, int], Tensor] = {}
        for i in (i for i in run.ops if not self._casts(i)):
            for x in (self.graph.tensors[t] for t in references(self._op(i).inputs)):
                if self.story.made.get(x.storage, -1) < run.first or x.id in made:
                    out.setdefault((x.storage, x.offset), x)
        return list(out.values())

    def _result(self, run: Run) -> Tensor | None:
        outputs = [self._op(i).outputs for i in run.ops if self._op(i).outputs]
        return self.graph.tensors[outputs[-1][0]] if outputs else None

    def _forward_readers(self, storage: int) -> Iterator[int]:
        return (i for i in self.story.readers.get(storage, ()) if self._run(i).kind == "forward")

    def _follow(self, run: Run) -> Run | None:
        """From the first product to the second; None where the scores are used for something else."""
        at = run.last
        while True:
            readers = [i for s in self.chain for i in self._forward_readers(s) if i >= at]
            if not readers:
                return None
            after = self._run(min(readers))
            if after.listed in PRODUCTS:
                return after if self.softmax and self._last_reader() < after.last else None
            for i in after.ops:
                if not self._allows(i):
                    return None
            at = after.last

    def _last_reader(self) -> int:
        return max(i for s in self.chain for i in self._forward_readers(s))

    def _allows(self, i: int) -> bool:
        """Whether an op belongs between the products; then its results do."""
        op = self._op(i)
        ids = list(references(op.inputs))
        storages = ((t, self.graph.tensors[t].storage) for t in ids)
        others = [t for t, s in storages if s not in self.chain and self.story.made.get(s) != i]
        if op.kernels and not self._known(op, ids, others):
            return False
        self.taken.append(i)
        self.chain |= {self.graph.tensors[t].storage for t in op.outputs} - {
            self.graph.tensors[t].storage for t in others
        }
        return True

    def _known(self, op: Op, ids: list[int], others: list[int]) -> bool:
        name = op.name
        if name in SCALES:
            return self._scales(op, others)
        if name in MASKS:
            if name == "aten::where":
                others = others[:1]
            self.masks += others[:1]
            return len(others) == 1 and not self.softmax
        if name == "aten::_softmax":
            self.softmax = not self.softmax
            return self.softmax and op.inputs[1] in (-1, len(self.graph.tensors[ids[0]].shape) - 1)
        if name in ("aten::native_dropout", "aten::_fused_dropout"):
            rate = op.inputs[1]
            self.dropout = float(rate) if isinstance(rate, int | float) else 0.0
            return self.softmax
        return name in ("aten::copy_", "aten::fill_")

    def _scales(self, op: Op, others: list[int]) -> bool:
        factor = op.inputs[1] if len(op.inputs) > 1 else None
        if isinstance(factor, int | float) and factor:
            self.scale *= factor if "mul" in op.name else 1 / factor
            return not self.softmax
        return (
            isinstance(factor, Ref)
            and not self.softmax
            and not self.graph.tensors[factor.id].shape
            and len(others) == 1
        )

    def _made(self, q: Part, k: Part, second: Run, scores: Tensor) -> Manual | None:
        factors = [t for t in self._factors(second) if t.storage not in self.chain]
        casts = {self._op(i).outputs[0] for i in second.ops if self._casts(i) and self._op(i).outputs}
        factors = [t for t in factors if not (t.id in casts and t.shape == scores.shape)] or factors
        out = self._result(second)
        if out is None or len(factors) != 1 or len(factors[0].shape) != len(scores.shape):
            return None
        v = factors[0]
        if v.shape[-2] != scores.shape[-1] or out.shape[-1] != v.shape[-1] or out.shape[-2] != q.tensor.shape[-2]:
            return None
        taken = [*self.taken, *(i for i in second.ops if not self._casts(i) or self._of_chain(i))]
        if k.source >= 0:
            taken.append(k.source)
        taken += [i for i in range(self.taken[0], second.first) if self._is_idle(i, second) and i not in taken]
        numbers = {self._op(i).sequence for i in taken} - {-1}
        low = any(self._op(i).within[:2] == (second.listed,) * 2 for i in second.ops)
        return Manual(
            q, k, Part(v), out, sorted(taken), second.last - 1, self.scale, self.dropout, self.masks, numbers, low
        )

    def _is_idle(self, i: int, second: Run) -> bool:
        """A call between the products that does nothing: dropout of nothing, a cast to the same type."""
        op, last = self._op(i), self._op(second.first)
        return not op.kernels and not op.outputs and not op.inputs and op.module == last.module and op.thread == "main"

    def _of_chain(self, i: int) -> bool:
        """A cast of the probabilities."""
        op = self._op(i)
        cast = op if op.outputs else self._op(i + 1)
        ids = list(references(cast.inputs))
        return len(ids) == 2 and self.graph.tensors[ids[1]].storage in self.chain
