"""Sums by module, phase and family."""

from __future__ import annotations

from graph_sketches import Sketch, training_step
from presage.graph import summary, work
from presage.graph.graph import Event, Graph
from presage.graph.summary import SummaryRow, module_path


def test_paths_keep_numbers_with_their_list() -> None:
    assert module_path("") == ()
    assert module_path("bert.encoder.layer.0.attention") == ("bert", "encoder", "layer.0", "attention")
    assert module_path("0.1.conv") == ("0", "1", "conv")
    assert module_path("net.0.1") == ("net.0", "1")


def test_everything_adds_up() -> None:
    g = training_step(layers=4)
    whole, sums = summary.total(g), work.total(g)
    assert (whole.ops, whole.kernels, whole.flops) == (sums.ops, sums.kernels, sums.flops)
    assert (whole.read, whole.written) == (sums.bytes.read, sums.bytes.written)
    for depth in (1, 2, 3):
        top = [r for r in summary.by_module(g, depth) if r.depth == 0]
        assert sum(top, SummaryRow("total")).figures == whole.figures
        assert sum(summary.collapsed(top), SummaryRow("total")).figures == whole.figures
    for rows in (summary.by_phase(g), summary.by_family(g)):
        assert sum(r.flops for r in rows) == whole.flops
        assert sum(r.moved for r in rows) == whole.moved


def test_modules() -> None:
    g = training_step(layers=3)
    rows = {r.name: r for r in summary.by_module(g, 2)}
    assert list(rows) == [
        "layers.0",
        "layers.0.act",
        "layers.1",
        "layers.1.act",
        "layers.2",
        "layers.2.act",
        "(optimizer)",
    ]
    layer = rows["layers.1"]
    assert layer.flops_forward == 2 * 8 * 16 * 16
    assert layer.flops_backward == 2 * layer.flops_forward
    assert (layer.ops, layer.parameters, layer.parameter_bytes) == (5, 256, 1024)
    assert rows["layers.1.act"].saved_bytes == 8 * 16 * 4
    assert layer.saved_bytes == 8 * 16 * 4, "the product's own output is freed before the backward"
    assert rows["(optimizer)"].read == 3 * 2 * 1024


def test_equal_neighbours_share_a_row() -> None:
    rows = summary.collapsed(summary.by_module(training_step(layers=12), 2))
    assert [(r.name, r.alike) for r in rows] == [("layers.0-11", 12), ("layers.0-11.act", 12), ("(optimizer)", 1)]
    assert rows[0].parameters == 12 * 256
    odd = [
        SummaryRow("a.0", ops=1),
        SummaryRow("a.1", ops=1),
        SummaryRow("a.3", ops=1),
        SummaryRow("b.4", ops=1),
        SummaryRow("b.5", ops=2),
    ]
    assert [r.name for r in summary.collapsed(odd)] == ["a.0-1", "a.3", "b.4", "b.5"]


def test_what_is_inside_must_be_equal_too() -> None:
    rows = [
        SummaryRow("a.0", ops=1),
        SummaryRow("a.0.x", 1, ops=1),
        SummaryRow("a.1", ops=1),
        SummaryRow("a.1.y", 1, ops=1),
    ]
    assert summary.collapsed(rows) == rows


def accumulating() -> Graph:
    """Two forwards, each with a backward: activations of the first do not count for the second's."""
    s = Sketch()
    x = s.tensor(4)
    for _ in range(2):
        kept, passing = s.new(4), s.new(4)
        s.op("relu", [x], [kept], module="m")
        s.op("relu", [kept], [passing], module="m")
        s.free(passing)
        s.op("threshold_backward", [kept], [x], "backward", module="m")
        s.free(kept)
    return s.graph()


def test_saved_activations() -> None:
    g = accumulating()
    assert summary.saved_bytes(g) == {"m": 2 * 16}
    forever = Graph(g.ops, g.tensors, g.storages, tuple(e for e in g.events if e.allocates))
    assert summary.saved_bytes(forever) == {"m": 4 * 16}
    inference = Graph(g.ops[:2], g.tensors, g.storages, tuple(e for e in g.events if e.op < 2))
    assert summary.saved_bytes(inference) == {}
    assert Event(0, 1, True) in g.events


def test_a_shared_parameter_counts_once() -> None:
    s = Sketch()
    w = s.tensor(10, 4, role="parameter", name="embed.weight")
    s.op("embedding", [w, s.tensor(3, dtype="int64")], [s.new(3, 4)], module="embed")
    s.op("mm", [s.tensor(3, 4), s.view(0, (4, 10), (1, 4), "float32")], [s.new(3, 10)], module="head")
    rows = {r.name: r for r in summary.by_module(s.graph())}
    assert (rows["embed"].parameters, rows["head"].parameters) == (40, 0)
