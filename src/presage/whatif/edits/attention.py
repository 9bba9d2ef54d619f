"""Fused attention in place of attention that is written out."""

from __future__ import annotations

from presage.graph.graph import Graph, Op
from presage.whatif.edits.edit import NotApplicable, plain
from presage.whatif.edits.rewriting import manual, sdpa
from presage.whatif.edits.rewriting.fusing import Fusing
from presage.whatif.edits.rewriting.runs import Run

__all__ = ["EDITS", "fused_attention"]


def fused_attention(graph: Graph) -> Graph:
    """`scaled_dot_product_attention` wherever its parts are written out; the scores are never in memory."""
    return _Fused(graph).changed()


def _listing(op: Op) -> tuple[int, str]:
    """Products, with autocast's own call of them or without."""
    path = (*op.within, op.name)
    depth = next((d for d, name in enumerate(path) if name in manual.PRODUCTS), -1)
    inside = depth < 0 or any(name in ("aten::linear", sdpa.AROUND) for name in path[:depth])
    return (-1, "") if inside else (depth, path[depth])


class _Fused(Fusing):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, _listing)
        found = manual.found(graph, self.runs, self.story)
        for m in found:
            self.pair(m, found)
        self.manuals = [m for m in found if self.takes(m)]
        for m in self.manuals:
            self.plan(m)

    def changed(self) -> Graph:
        if not self.manuals:
            raise NotApplicable(
                "no attention that is written out and that a fused kernel takes: a product of queries and keys, a "
                "softmax, and a product of its result with values"
            )
        for run in self.runs:
            if run.kind in ("backward", "gradient"):
                self.backward(run)
            else:
                self._forward(run)
        return self.draft.done()

    def _forward(self, run: Run) -> None:
        start = len(self.draft.ops)
        for i in run.ops:
            self.draft.begin(i)
            if not self.ahead(i):
                self.translate(i)
        self.draft.nodes.append((start, len(self.draft.ops)))


EDITS = (
    plain(
        "fused_attention",
        "Attention that is written out (product, scale, mask, softmax, dropout, product) becomes one call of "
        "scaled_dot_product_attention, by the kernel that PyTorch would pick: cuDNN's in low precision, the memory-"
        "efficient one in float32. A mask that is the same for all samples and heads is taken to be causal.",
        fused_attention,
    ),
)
