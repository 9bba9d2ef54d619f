"""Embedding tables joined by an edit against tables joined in the model: the same ops, host ops, memory and facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from presage.capture import Variant, capture
from presage.capture.variants import AS_WRITTEN
from presage.graph.graph import Graph, Op, faults
from presage.memory.step_memory import memory_profile
from presage.whatif.edits import NotApplicable, cuda_graph, table_batched

DENSE = ("bottom", "top")
ROWS, WIDTH, BATCH, POOL = (1000, 500, 2000), 16, 64, 2
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "loop": lambda p: torch.optim.Adam(p, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


class Model(nn.Module):
    """Tables one by one, or joined. Ways of indices: 'offsets' (a list of them, and of offsets), 'rows' (a row for each
    bag, all tables in one tensor), 'columns' (no bags, all tables in one tensor), 'list' (no bags, a list)."""

    def __init__(self, way: str, joined: bool, device: str, rows: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if way in ("offsets", "rows") else nn.Embedding
        more = {"mode": "sum"} if way in ("offsets", "rows") else {}
        sizes = (sum(rows),) if joined else rows
        self.tables = nn.ModuleList([kind(n, WIDTH, device=device, **more, **options) for n in sizes])
        self.register_buffer("first", torch.tensor([0, *rows[:-1]], device=device).cumsum(0), persistent=False)
        self.way, self.joined, self.count = way, joined, len(rows)
        self.bottom = nn.Linear(WIDTH, WIDTH, device=device)
        self.top = nn.Linear(WIDTH * (len(rows) + 1), 1, device=device)

    def forward(self, x: Any, index: Any, offsets: Any, ends: Any) -> Any:
        dense = self.bottom(x)
        parts = self.together(index, offsets, ends) if self.joined else self.apart(index, offsets)
        return self.top(torch.cat([dense, *parts], 1)).squeeze(1)

    def apart(self, index: Any, offsets: Any) -> Any:
        if self.way == "offsets":
            return [t(i, o) for t, i, o in zip(self.tables, index, offsets, strict=True)]
        if self.way == "columns":
            return [t(index[:, k]) for k, t in enumerate(self.tables)]
        return [t(i) for t, i in zip(self.tables, index, strict=True)]

    def together(self, index: Any, offsets: Any, ends: Any) -> Any:
        table = self.tables[0]
        if self.way == "rows":
            flat = (index + self.first[:, None, None]).view(self.count * BATCH, POOL)
            return table(flat).view(self.count, BATCH, -1).unbind(0)
        if self.way == "columns":
            return table((index.t() + self.first[:, None]).reshape(-1)).view(self.count, BATCH, -1).unbind(0)
        joined = torch.cat([i + f for i, f in zip(index, self.first, strict=True)])
        if self.way == "list":
            return table(joined).view(self.count, BATCH, -1).unbind(0)
        bags = torch.cat([o + e for o, e in zip(offsets, ends, strict=True)])
        return table(joined, bags).view(self.count, BATCH, -1).unbind(0)


def build(device: str, way: str, opt: str, joined: bool, rows: tuple[int, ...] = ROWS, **options: Any) -> Any:
    torch.manual_seed(0)
    m = Model(way, joined, device, rows, **options)
    x, y = torch.rand(BATCH, WIDTH, device=device), torch.rand(BATCH, device=device)
    count = BATCH * POOL if way == "offsets" else BATCH
    index: Any = [torch.randint(0, n, (count,), device=device) for n in rows]
    if way == "rows":
        index = torch.stack([torch.randint(0, n, (BATCH, POOL), device=device) for n in rows])
    elif way == "columns":
        index = torch.stack(index, 1)
    offsets = [torch.arange(0, BATCH * POOL, POOL, device=device) for _ in rows]
    ends = torch.arange(len(rows), device=device) * BATCH * POOL
    optimizer = OPTIMIZERS[opt](m.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(m(x, index, offsets, ends), y).backward()
        optimizer.step()

    return step


@cache
def captured(way: str, opt: str, joined: bool = False, variant: Variant = AS_WRITTEN, **options: Any) -> Graph:
    return capture(lambda device: build(device, way, opt, joined, **options), {}, source="tables", variant=variant)


def told(graph: Graph, op: Op) -> tuple[Any, ...]:
    tensors = tuple((t.shape, t.strides, t.dtype) for t in (*graph.inputs_of(op), *graph.outputs_of(op)))
    return op.name, op.overload, op.within, op.phase, op.thread, len(op.writes), tensors


def launched(graph: Graph) -> Counter[tuple[Any, ...]]:
    return Counter(told(graph, op) for op in graph.ops if op.kernels)


def on_host(graph: Graph) -> Counter[tuple[Any, ...]]:
    return Counter((op.name, op.within) for op in graph.ops if not op.kernels)


CASES = [("offsets", o) for o in OPTIMIZERS] + [
    ("rows", "sgd"),
    ("rows", "fused"),
    ("columns", "foreach"),
    ("list", "loop"),
]


@pytest.mark.parametrize(("way", "opt"), CASES)
def test_joined_tables_run_what_a_joined_model_runs(way: str, opt: str) -> None:
    edited, wanted = table_batched(captured(way, opt)), captured(way, opt, joined=True)
    assert not list(faults(edited))
    assert launched(edited) == launched(wanted)
    assert on_host(edited) == on_host(wanted)
    ours, theirs = memory_profile(edited).peak_allocated, memory_profile(wanted).peak_allocated
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_sparse_gradients_are_joined_too() -> None:
    edited = table_batched(captured("offsets", "sgd", sparse=True))
    wanted = captured("offsets", "sgd", joined=True, sparse=True)
    assert not list(faults(edited))
    assert launched(edited) == launched(wanted)
    assert memory_profile(edited).peak_allocated == pytest.approx(memory_profile(wanted).peak_allocated, rel=1e-3)


def _looked_up(graph: Graph) -> list[tuple[int, int]]:
    return [
        graph.facts[i.id]
        for op in graph.ops
        if op.name == "aten::_embedding_bag"
        for i in op.inputs[1:2]
        if getattr(i, "id", -1) in graph.facts
    ]


def test_distinct_rows_add_up_and_the_most_frequent_stays() -> None:
    before, after = _looked_up(captured("offsets", "sgd")), _looked_up(table_batched(captured("offsets", "sgd")))
    assert len(before) == len(ROWS)
    assert after == [(sum(d for d, _ in before), max(m for _, m in before))]


def test_tables_of_other_widths_or_ways_stay() -> None:
    graph = captured("offsets", "sgd", rows=ROWS[:1])
    with pytest.raises(NotApplicable, match="rows of one length"):
        table_batched(graph)
    with pytest.raises(NotApplicable):
        table_batched(table_batched(captured("offsets", "sgd")))
    for options in ({"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(NotApplicable):
            table_batched(captured("list", "sgd", **options))


class Tied(nn.Module):
    """One of three tables is also a matrix."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(50, 8, device=device) for _ in range(3)])

    def forward(self, index: Any) -> Any:
        one, two, three = (t(i) for t, i in zip(self.tables, index, strict=True))
        return (one * two + three) @ self.tables[0].weight.t()


def test_a_table_with_another_use_stays() -> None:
    def build(device: str) -> Callable[[], None]:
        m = Tied(device)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        index = torch.randint(0, 50, (3, 16), device=device)

        def step() -> None:
            optimizer.zero_grad()
            m(index).sum().backward()
            optimizer.step()

        return step

    edited = table_batched(capture(build, {}, source="tied"))
    assert not list(faults(edited))
    shapes = sorted(
        edited.inputs_of(op)[0].shape for op in edited.ops if op.name == "aten::gather" and op.phase == "forward"
    )  # fmt: skip
    assert shapes == [(50, 8), (100, 8)]


def test_lookups_that_wait_for_each_other_stay() -> None:
    """The second table is looked up at what came out of the first."""

    def build(device: str) -> Callable[[], None]:
        tables = nn.ModuleList([nn.Embedding(50, 8, device=device) for _ in range(2)])
        optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
        index = torch.randint(0, 50, (16,), device=device)

        def step() -> None:
            optimizer.zero_grad()
            first = tables[0](index)
            (first + tables[1](first.detach().argmax(1))).sum().backward()
            optimizer.step()

        return step

    with pytest.raises(NotApplicable):
        table_batched(capture(build, {}, source="waits"))


def test_edits_compose_in_any_order() -> None:
    base = captured("offsets", "foreach", variant=Variant(optimizer="fused"))
    wanted = launched(table_batched(base))
    assert sum(op.name == "aten::_fused_adam_" for op in base.ops) == 1
    for edited in (cuda_graph(table_batched(base)), table_batched(cuda_graph(base))):
        assert not list(faults(edited))
        assert launched(edited) == wanted
        assert all(op.replayed for op in edited.ops)


def test_passes_of_a_step_are_joined_one_by_one() -> None:
    both = Variant(accumulate=2)
    edited = table_batched(captured("offsets", "sgd", variant=both))
    real = captured("offsets", "sgd", joined=True, variant=both)
    assert not list(faults(edited))
    assert sum(op.name == "aten::_embedding_bag" for op in edited.ops) == 2
    assert Counter(op.name for op in edited.ops if op.kernels) == Counter(op.name for op in real.ops if op.kernels)
    assert memory_profile(edited).peak_allocated == pytest.approx(memory_profile(real).peak_allocated, rel=0.02)


def test_other_ops_stay_as_they_are() -> None:
    """Nothing of the dense layers changes, forward or backward."""
    base = captured("offsets", "sgd")
    ours, theirs = (
        [told(g, op) for op in g.ops if op.module in ("bottom", "top")] for g in (table_batched(base), base)
    )
    assert ours == theirs
