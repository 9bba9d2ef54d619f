"""Differences of graphs, as a reviewer would name them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from graph_sketches import Sketch, training_step
from presage.graph.diff import diff, lines
from presage.graph.graph import Arg, Graph, Ref, check


def test_equal_graphs() -> None:
    found = diff(training_step(), training_step())
    assert not found
    assert lines(found) == ["no difference in 18 ops"]


def test_ids_do_not_matter() -> None:
    g = training_step()
    n, m = len(g.tensors), len(g.storages)
    turned = {t.id: n - 1 - t.id for t in g.tensors}

    def turn(value: Arg) -> Arg:
        return Ref(turned[value.id]) if isinstance(value, Ref) else value

    other = check(
        replace(
            g,
            ops=tuple(
                replace(
                    op,
                    inputs=tuple(map(turn, op.inputs)),
                    outputs=tuple(turned[i] for i in op.outputs),
                    writes=tuple(turned[i] for i in op.writes),
                )
                for op in g.ops
            ),
            tensors=tuple(replace(t, id=turned[t.id], storage=m - 1 - t.storage) for t in reversed(g.tensors)),
            storages=tuple(replace(s, id=m - 1 - s.id) for s in reversed(g.storages)),
            events=tuple(replace(e, storage=m - 1 - e.storage) for e in g.events),
        )
    )
    assert other != g
    assert not diff(g, other)


def test_another_activation() -> None:
    found = diff(training_step(), training_step(act="gelu"))
    assert {(c.kind, c.name) for c in found.changes} == {("removed", "aten::relu"), ("added", "aten::gelu")}
    assert found.same == 15
    assert lines(found) == [
        "3 added, 3 removed; 15 ops the same",
        "layers.*.act, forward",
        "  - aten::relu [8 16]float32 [8 16]float32  (3 times)",
        "  + aten::gelu [8 16]float32 [8 16]float32  (3 times)",
    ]


def test_another_batch_changes_shapes_only() -> None:
    found = diff(training_step(rows=8), training_step(rows=32))
    assert {c.kind for c in found.changes} == {"changed"}
    assert {w for c in found.changes for w in c.what} == {"shape"}
    assert found.same == 3, "the optimizer does not see the batch"
    assert "  ~ aten::relu shape [8 16] -> [32 16]  (3 times)" in lines(found)


def test_neighbours_that_happen_to_be_equal() -> None:
    """With 16 rows a layer's gradients have the weights' shape: ops must still meet their own."""
    found = diff(training_step(rows=16), training_step(rows=8))
    assert {c.kind for c in found.changes} == {"changed"}
    assert all(c.before == c.after for c in found.changes)


def test_views_are_counted_not_listed() -> None:
    def viewed(rows: int) -> Graph:
        s = Sketch()
        s.op("view", [s.tensor(rows, 2)], [s.new(2 * rows)], kernels=False)
        return s.graph()

    found = lines(diff(viewed(2), viewed(3)))
    assert found == [
        "1 changed; 0 ops the same",
        "... and 1 changes of ops that launch nothing (views, bookkeeping)",
    ]


def test_another_dtype() -> None:
    found = diff(training_step(), training_step(dtype="bfloat16"))
    assert len(found.changes) == 18
    assert {c.what for c in found.changes} == {("dtype",)}


def test_a_layer_more() -> None:
    found = diff(training_step(layers=3), training_step(layers=4))
    assert found.count("removed") == found.count("changed") == 0
    assert {c.module for c in found.changes} == {"layers.3", "layers.3.act", ""}


def chain(*names: str, module: str = "m") -> Graph:
    s = Sketch()
    x = s.tensor(4)
    for name in names:
        s.op(name, [x], [x], module=module)
    return s.graph()


def test_order_within_a_module() -> None:
    found = diff(chain("a", "b", "c", "d"), chain("b", "c", "d", "a"))
    (change,) = found.changes
    assert (change.kind, change.name, change.before, change.after) == ("moved", "aten::a", 0, 3)


def test_order_of_modules() -> None:
    def two(first: str, second: str) -> Graph:
        s = Sketch()
        x = s.tensor(4)
        s.op("relu", [x], [x], module=first)
        s.op("relu", [x], [x], module=second)
        return s.graph()

    found = diff(two("a", "b"), two("b", "a"))
    (change,) = found.changes
    assert (change.kind, change.what, found.same) == ("moved", ("order",), 2)


def test_layouts() -> None:
    def image(strides: tuple[int, ...], height: int = 4) -> Graph:
        s = Sketch()
        s.tensor(2, 3, 4, 8)
        x = s.view(0, (2, 3, height, 4), strides, "float32")
        s.op("relu", [x], [s.new(1)])
        return s.graph()

    rows, smaller, channels_last = (48, 16, 4, 1), (36, 12, 4, 1), (48, 1, 12, 3)
    assert diff(image(rows), image(channels_last)).changes[0].what == ("strides",)
    assert diff(image(rows), image(smaller, height=3)).changes[0].what == ("shape",)
    assert diff(image(channels_last), image(smaller, height=3)).changes[0].what == ("shape", "strides")


def test_scalar_arguments() -> None:
    def scaled(by: float | int | bool) -> Graph:
        s = Sketch()
        x = s.tensor(4)
        s.op("mul", [x, by, [1, 2]], [x])
        return s.graph()

    (change,) = diff(scaled(1), scaled(2)).changes
    assert (change.kind, change.what) == ("changed", ("arguments",))
    assert diff(scaled(1), scaled(1.0)), "an integer is not a float to a kernel"
    assert not diff(scaled(float("nan")), scaled(float("nan")))


def test_a_long_list_is_cut() -> None:
    found = diff(chain(*"abcdefghij"), chain(*"klmnopqrst"))
    assert lines(found, most=3)[-1] == "... and 17 more kinds of change"


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_every_op_is_told_once(old: list[str], new: list[str]) -> None:
    found = diff(chain(*old), chain(*new))
    befores = [c.before for c in found.changes if c.before is not None]
    afters = [c.after for c in found.changes if c.after is not None]
    assert len(set(befores)) == len(befores) == len(old) - found.same
    assert len(set(afters)) == len(afters) == len(new) - found.same
    assert found.count("added") - found.count("removed") == len(new) - len(old)


def test_ten_thousand_ops_in_one_module() -> None:
    began = time.process_time()
    assert len(diff(chain(*"abcd" * 2500), chain(*"abdc" * 2500)).changes) > 0
    assert time.process_time() - began < 5
