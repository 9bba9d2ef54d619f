"""Edits of when things run and how often: microbatches, waits, faster kernels, transfers beside other work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from presage.capture import Variant, capture  # noqa: E402
from presage.capture.variants import AS_WRITTEN  # noqa: E402
from presage.costs.host_model import host_model  # noqa: E402
from presage.costs.host_units import host_terms, host_units  # noqa: E402
from presage.costs.kernel_model import OpTime  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph.graph import (  # noqa: E402
    Graph,
    Op,
    faults,
)
from presage.memory.step_memory import memory_profile  # noqa: E402
from presage.prediction.step import step_program  # noqa: E402
from presage.whatif.edits import EDITS, NotApplicable, faster, no_sync, overlap  # noqa: E402


def build(device: Any, microbatches: int = 1, kept: bool = False, sparse: bool = False, fed: bool = False) -> Any:
    """An embedding, a tied head, a layer; gradients set to zero or to nothing; data on the GPU or fed from the host."""
    words = nn.Embedding(2000, 64, sparse=sparse, device=device)
    layer, norm = nn.Linear(64, 64, device=device), nn.LayerNorm(64, device=device)
    weights = [*words.parameters(), *layer.parameters(), *norm.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    index = torch.randint(0, 2000, (64, 32), device="cpu" if fed else device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=not kept)
        for _ in range(microbatches):
            hidden = norm(layer(words(index.to(device))).relu())
            loss = hidden.pow(2).mean() if sparse else (hidden @ words.weight.t()).logsumexp(-1).mean()
            loss.backward()
        seen = loss.item() if fed else 0.0
        if fed:
            torch.cuda.synchronize()
        optimizer.step()
        return seen

    return step


def captured(variant: Variant = AS_WRITTEN, **arguments: Any) -> Graph:
    return capture(lambda device: build(device, **arguments), {}, source="test", variant=variant)


@pytest.fixture(scope="module")
def plain() -> Graph:
    return captured()


@pytest.fixture(scope="module")
def fed() -> Graph:
    return captured(fed=True)


def shape_of(graph: Graph, op: Op) -> tuple[Any, ...]:
    return op.name, tuple((t.shape, t.dtype) for t in graph.inputs_of(op)), op.thread, op.phase, op.within


def host_us(graph: Graph) -> float:
    us = host_model().us
    found = host_terms(graph, host_units(graph))
    return sum(us.get(key, 0.0) * times for _, before, own in found for key, times in (*before, *own))


def step_seconds(graph: Graph, kernel: float = 50e-6) -> float:
    times = [OpTime(kernel / op.speed * op.kernels, int(op.kernels), "copy", "model") for op in graph.ops]
    return step_program(graph, times, host_model()).usual(4)


# ---------------------------------------------------------------- microbatches
@pytest.mark.parametrize(("kept", "count"), [(False, 2), (False, 3), (True, 2)])
def test_microbatches_are_what_a_loop_gives(kept: bool, count: int) -> None:
    edited, real = captured(Variant(accumulate=count), kept=kept), captured(kept=kept, microbatches=count)
    assert not list(faults(edited))
    assert [shape_of(edited, op) for op in edited.ops] == [shape_of(real, op) for op in real.ops]
    assert memory_profile(edited).peak_allocated == pytest.approx(memory_profile(real).peak_allocated, rel=0.005)
    assert host_us(edited) == pytest.approx(host_us(real), rel=0.001)


def test_gradients_are_added_from_the_second_on(plain: Graph) -> None:
    edited = captured(Variant(accumulate=3))
    added = [op for op in edited.ops if op.name == "aten::add_" and "AccumulateGrad" in op.within[-1]]
    weights = sum(s.role == "parameter" for s in plain.storages)
    assert len(added) == 2 * weights
    assert {edited.storages[edited.tensors[op.writes[0]].storage].role for op in added} == {"gradient"}
    assert sum(op.phase == "optimizer" for op in edited.ops) == sum(op.phase == "optimizer" for op in plain.ops)


def test_sparse_gradients_accumulate() -> None:
    edited, real = captured(Variant(accumulate=2), sparse=True), captured(sparse=True, microbatches=2)
    assert not list(faults(edited))
    assert [op.name for op in edited.ops if op.kernels] == [op.name for op in real.ops if op.kernels]
    assert memory_profile(edited).peak_allocated == pytest.approx(memory_profile(real).peak_allocated, rel=0.005)


def test_what_follows_the_backward_pass_runs_once() -> None:
    """The loss is read, and the GPU waited for, after the last microbatch only."""
    edited, real = captured(Variant(accumulate=2), fed=True), captured(fed=True, microbatches=2)
    assert [op.name for op in edited.ops if op.sync] == [op.name for op in real.ops if op.sync]


@pytest.mark.parametrize("value", ["0", "1", "-2", "2.5", "two"])
def test_a_number_of_microbatches_is_two_or_more(value: str) -> None:
    with pytest.raises(PresageError, match="2 or more"):
        EDITS["accumulate"].make(value)


# ---------------------------------------------------------------- waits
def test_no_wait_is_left(fed: Graph) -> None:
    edited = no_sync()(fed)
    assert not list(faults(edited))
    assert any(op.sync for op in fed.ops) and not any(op.sync for op in edited.ops)
    gone = Counter(op.name for op in fed.ops) - Counter(op.name for op in edited.ops)
    assert gone == {"aten::_local_scalar_dense": 1, "cuda::synchronize": 1}  # the copy of the data stays
    assert step_seconds(edited) < step_seconds(fed)


def test_waits_by_name_or_line(fed: Graph) -> None:
    edited = no_sync("synchronize")(fed)
    assert [op.name for op in edited.ops if op.sync] == ["aten::copy_", "aten::_local_scalar_dense"]
    line = next(op.line for op in fed.ops if op.name == "aten::_local_scalar_dense")
    assert "aten::_local_scalar_dense" not in {op.name for op in no_sync(line + "$")(fed).ops}
    with pytest.raises(NotApplicable, match=r"at nowhere: choose from aten::copy_ \(test_edits_order.py"):
        no_sync("nowhere")(fed)
    with pytest.raises(NotApplicable, match="no wait for the GPU"):
        no_sync()(no_sync()(fed))
    with pytest.raises(PresageError, match="not a regular expression"):
        no_sync("*")


# ---------------------------------------------------------------- faster kernels
def test_faster_kernels_by_op_or_module(plain: Graph) -> None:
    edited = EDITS["faster"].make("aten::addmm:2")(plain)
    assert {op.name for op in edited.ops if op.speed != 1} == {"aten::addmm"}
    assert EDITS["faster"].make("addmm:2")(plain) == edited
    both = faster("addmm", 1.5)(faster("mm|addmm", 2)(plain))
    assert {op.speed for op in both.ops if op.name == "aten::addmm"} == {3.0}
    assert {op.speed for op in both.ops if op.name == "aten::mm"} == {2.0}
    modules = faster("Linear", 2)(plain)
    assert {op.module for op in modules.ops if op.speed != 1} == {"Linear"}
    assert step_seconds(faster(".*", 4)(plain), 1e-3) < step_seconds(plain, 1e-3)


def test_what_cannot_be_faster(plain: Graph) -> None:
    with pytest.raises(NotApplicable, match=r"no op or module called aten::admm: choose from .*aten::addmm"):
        faster("aten::admm", 2)(plain)
    for value in ("aten::mm", "aten::mm:", "aten::mm:fast", "mm"):
        with pytest.raises(PresageError, match="has no factor"):
            EDITS["faster"].make(value)
    for value in ("mm:0", "mm:-1", "mm:inf", "mm:nan"):
        with pytest.raises(PresageError, match="above 0"):
            EDITS["faster"].make(value)


# ---------------------------------------------------------------- transfers beside
def test_copies_run_beside(fed: Graph) -> None:
    edited = overlap()(fed)
    assert not list(faults(edited))
    assert [op.name for op in edited.ops if op.stream] == ["aten::copy_"]
    assert not any(op.sync for op in edited.ops if op.stream)
    assert sorted(op.name for op in edited.ops) == sorted(op.name for op in fed.ops)
    assert step_seconds(edited) <= step_seconds(fed)
    with pytest.raises(NotApplicable, match="a stream of their own"):
        overlap()(edited)


def test_an_op_is_issued_once_what_it_reads_is_there() -> None:
    graph = capture(build_late_copy, {}, source="late")
    edited = overlap()(graph)
    assert not list(faults(edited))
    order, old = ([op.name for op in g.ops if op.kernels] for g in (edited, graph))
    assert old.index("aten::copy_") == 4 and order.index("aten::copy_") == 1  # after the ones that it reads
    assert step_seconds(edited, 1e-3) < step_seconds(graph, 1e-3)
    assert memory_profile(edited).peak_allocated >= memory_profile(graph).peak_allocated


def build_late_copy(device: Any) -> Any:
    home = torch.empty(1 << 20)

    def step() -> Any:
        x = torch.ones(1 << 20, device=device)
        y = x.cos().cos().cos()
        home.copy_(x, non_blocking=True)
        return y.sin()

    return step


def test_an_op_never_passes_what_it_writes_over(plain: Graph) -> None:
    """Every op after each that wrote what it reads, or touched what it writes."""
    for pattern in ("aten::.*", "aten::copy_|aten::mul"):
        edited = overlap(pattern)(plain)
        assert not list(faults(edited))
        place = {id(op.inputs): i for i, op in enumerate(edited.ops)}
        seen: dict[int, int] = {}  # by storage, where it was last written
        for op in plain.ops:
            here = place[id(op.inputs)]
            for t in plain.inputs_of(op):
                assert here >= seen.get(t.storage, 0)
            seen |= {plain.tensors[i].storage: here for i in (*op.outputs, *op.writes)}


def test_nothing_to_run_beside(plain: Graph) -> None:
    with pytest.raises(NotApplicable, match="no copies from or to the host"):
        overlap()(plain)
    with pytest.raises(NotApplicable, match="no kernels of aten::conv2d"):
        overlap("aten::conv2d")(plain)
