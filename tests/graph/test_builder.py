"""GraphBuilder: ops inserted, replaced and appended; lifetimes that follow from use."""

from __future__ import annotations

from presage.graph.builder import GraphBuilder, new_op, row_major_strides
from presage.graph.graph import Event, Graph, Ref, check


def chain() -> Graph:
    """Two activations, each written by one op and read by the next."""
    builder = GraphBuilder()
    x = builder.add_buffer(4, "float32", "input", lifetime="always")
    for _ in range(2):
        y = builder.add_buffer(4, "float32", "activation")
        builder.append(new_op("aten::relu", [Ref(x)], outputs=[y]))
        x = y
    return check(builder.build(source="chain"))


def test_memory_lives_from_its_first_use_to_its_last() -> None:
    assert chain().events == (Event(0, 1, True), Event(1, 2, True), Event(2, 1, False), Event(2, 2, False))


def test_frees_come_first_where_asked() -> None:
    builder = GraphBuilder(chain())
    builder.after(0, new_op("aten::relu_", [Ref(1)], writes=[1]))
    events = builder.build(frees_first=True).events
    assert events == tuple(sorted(events, key=lambda e: (e.op, e.allocates)))


def test_an_op_inserted_later_holds_what_it_reads() -> None:
    builder = GraphBuilder(chain())
    builder.after(1, new_op("aten::relu_", [Ref(1)], writes=[1]))
    assert Event(3, 1, False) in check(builder.build()).events


def test_insertions_at_one_position_keep_their_order() -> None:
    builder = GraphBuilder(chain())
    builder.before(1, new_op("first", []))
    builder.before(1, new_op("second", []))
    assert [op.name for op in builder.build().ops] == ["aten::relu", "first", "second", "aten::relu"]


def test_kept_memory_is_not_freed() -> None:
    builder = GraphBuilder(chain())
    builder.lifetimes[2] = "kept"
    assert [e for e in builder.build().events if e.storage == 2] == [Event(1, 2, True)]


def test_memory_held_beyond_its_last_use() -> None:
    builder = GraphBuilder(chain())
    extra = builder.add_buffer(4, "float32", "workspace")
    builder.before(0, new_op("aten::zero_", [Ref(extra)], writes=[extra]))
    builder.free_after(3, 1)
    assert Event(3, 3, False) in check(builder.build()).events


def test_pruning_drops_what_only_removed_ops_used() -> None:
    builder = GraphBuilder(chain())
    builder.replace(1)
    graph = check(builder.build(prune=True))
    assert len(graph.ops) == 1
    assert len(graph.storages) == 2


def test_later_ops_read_another_tensor() -> None:
    builder = GraphBuilder(chain())
    copy = builder.copy_tensor(1, builder.add_storage(16, "activation"))
    builder.redirect_reads({1: copy}, after=0)
    assert builder.build().ops[1].inputs == (Ref(copy),)


def test_row_major_strides_of_empty_dimensions_are_those_of_size_one() -> None:
    assert row_major_strides((2, 0, 3)) == (3, 3, 1)
    assert row_major_strides(()) == ()
