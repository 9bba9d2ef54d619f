"""Edited graphs stay valid, and what a valid graph is."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from graph_sketches import Sketch, training_step
from presage.errors import PresageError
from presage.graph import builder as edit
from presage.graph import work
from presage.graph.graph import Event, Graph, Op, Ref, Storage, check, faults

FUZZ = settings(suppress_health_check=list(HealthCheck))


def test_select_a_phase() -> None:
    g = training_step()
    forward = check(edit.select(g, lambda op: op.phase == "forward"))
    assert [op.name for op in forward.ops] == ["aten::mm", "aten::relu"] * 3
    assert work.total(forward).flops == 3 * 2 * 8 * 16 * 16
    assert not any(s.role == "gradient" for s in forward.storages)
    assert sum(s.role == "parameter" for s in forward.storages) == 3


def test_without_an_op() -> None:
    g = training_step()
    bare = check(edit.without(g, lambda op: op.name == "aten::relu"))
    assert len(bare.ops) == len(g.ops) - 3
    assert work.total(bare).flops == work.total(g).flops
    assert check(edit.without(g, lambda _: True)).ops == ()


def test_nothing_changed_is_the_same_graph() -> None:
    g = training_step()
    assert edit.replace_ops(g, {}) == g
    assert edit.select(g, lambda _: True) == g


def test_the_old_graph_is_not_changed() -> None:
    g, again = training_step(), training_step()
    edit.select(g, lambda op: op.phase != "forward")
    assert g == again


def test_fusion_frees_what_lay_between() -> None:
    """mm then relu become one op: the mm's output is never allocated."""
    g = training_step(layers=1)
    first, second = g.ops[:2]
    fused = replace(first, name="mine::mm_relu", outputs=second.outputs)
    new = check(edit.replace_ops(g, {0: [fused], 1: []}))
    assert len(new.ops) == len(g.ops) - 1
    assert len(new.storages) == len(g.storages) - 1
    made = [e for e in new.events if e.allocates and e.op == 0]
    assert len(made) == 1, "the output, allocated later before, is now there when the fused op runs"


def test_new_tensors_live_from_first_use_to_last() -> None:
    g = training_step(layers=1)
    mm, relu = g.ops[:2]
    builder = edit.GraphBuilder(g)
    storage = builder.add_storage(8 * 16 * 4, "activation")
    between = builder.add_tensor(storage, (8, 16), "float32")
    scaled = replace(relu, name="aten::mul", inputs=(Ref(relu.inputs[0].id), 2.0), outputs=(between,))  # type: ignore[union-attr]
    builder.replace(1, scaled, replace(relu, inputs=(Ref(between),)))
    new = check(builder.build(prune=True))
    assert [op.name for op in new.ops[:3]] == [mm.name, "aten::mul", "aten::relu"]
    life = [e for e in new.events if e.storage == storage]
    assert life == [Event(1, storage, True), Event(3, storage, False)]


def test_a_workspace_goes_with_its_op() -> None:
    s = Sketch()
    x = s.tensor(4)
    s.events += [Event(0, 1, True), Event(1, 1, False)]
    s.storages.append(Storage(1, 1 << 20, "workspace"))
    s.op("mm", [x], [x])
    s.op("relu", [x], [x])
    g = s.graph()
    assert len(check(edit.without(g, lambda op: op.name == "aten::relu")).storages) == 2
    assert len(check(edit.without(g, lambda op: op.name == "aten::mm")).storages) == 1


def test_an_op_that_is_not_there() -> None:
    with pytest.raises(PresageError, match="op 99 cannot be replaced: the graph has 18"):
        edit.replace_ops(training_step(), {99: []})


@FUZZ
@given(st.data())
def test_any_edit_of_a_valid_graph_is_valid(data: st.DataObject) -> None:
    g = training_step(layers=data.draw(st.integers(1, 4)))
    places = st.integers(0, len(g.ops) - 1)
    changes: dict[int, list[Op]] = {
        i: [g.ops[j] for j in data.draw(st.lists(places, max_size=3))] for i in data.draw(st.sets(places))
    }
    new = check(edit.replace_ops(g, changes))
    assert len(new.ops) == sum(len(changes.get(i, [op])) for i, op in enumerate(g.ops))
    kept = [op for i, old in enumerate(g.ops) for op in changes.get(i, [old])]
    assert [work.work(new, op) for op in new.ops] == [work.work(g, op) for op in kept]


def broken(g: Graph, **fields: object) -> Graph:
    return replace(g, **fields)


G = training_step()
STORAGE = G.events[0].storage


@pytest.mark.parametrize(
    ("graph", "field"),
    [
        (broken(G, tensors=G.tensors[1:]), "tensors[0]"),
        (broken(G, storages=G.storages[::-1]), "storages[0].id"),
        (broken(G, storages=()), "tensors[0]"),
        (broken(G, tensors=(replace(G.tensors[0], dtype="float7"), *G.tensors[1:])), "tensors[0]"),
        (broken(G, tensors=(replace(G.tensors[0], shape=(-1, 2)), *G.tensors[1:])), "tensors[0]"),
        (broken(G, tensors=(replace(G.tensors[0], strides=(1,)), *G.tensors[1:])), "tensors[0]"),
        (broken(G, storages=(replace(G.storages[0], nbytes=-1), *G.storages[1:])), "storages[0].nbytes"),
        (broken(G, ops=(replace(G.ops[0], inputs=(Ref(999),)), *G.ops[1:])), "ops[0].inputs"),
        (broken(G, ops=(replace(G.ops[0], inputs=([[Ref(-1)]],)), *G.ops[1:])), "ops[0].inputs"),
        (broken(G, ops=(replace(G.ops[0], outputs=(999,)), *G.ops[1:])), "ops[0].outputs"),
        (broken(G, ops=(replace(G.ops[0], writes=G.ops[1].outputs), *G.ops[1:])), "ops[0].writes"),
        (broken(G, ops=(replace(G.ops[0], names=("self",)), *G.ops[1:])), "ops[0].names"),
        (broken(G, events=(Event(99, 0, True),)), "events[0].op"),
        (broken(G, events=(Event(0, 99, True),)), "events[0].storage"),
        (broken(G, events=(Event(3, 0, False), Event(2, 1, False))), "events[1].op"),
        (broken(G, events=(Event(0, STORAGE, True), *G.events)), "events[1]"),
        (broken(G, events=(*G.events, *(Event(len(G.ops), STORAGE, False),) * 2)), f"events[{len(G.events)}]"),
        (broken(G, events=(Event(1, STORAGE, True),)), "ops[0]"),
        (broken(G, events=(Event(0, STORAGE, True), Event(1, STORAGE, False))), "ops[1]"),
        (broken(G, events=(Event(0, STORAGE, False), Event(0, STORAGE, True))), "events[1]"),
    ],
)
def test_what_is_not_valid(graph: Graph, field: str) -> None:
    assert next(faults(graph))[0] == field
    with pytest.raises(PresageError, match=re.escape(f"graph sketch: {field}: ")):
        check(graph)
