"""Charts of steps: lanes, heat maps, memory, ranges draw what they are given, and stay readable when that is much."""

from __future__ import annotations

import math

import numpy as np
import pytest
from lane_bars import lane_tasks

from presage.graph.families import family
from presage.graph.graph import Graph
from presage.prediction.api import predict
from presage.report.html.charts.bars import AxisUnit, IntervalBar, band_figure, interval_figure, label
from presage.report.html.charts.heat import ABOVE, USUAL, heat_figure, notable_rows
from presage.report.html.charts.lanes import (
    MARKS,
    LaneTasks,
    lane_table,
    lanes_figure,
    lanes_section,
    merge_short_tasks,
)
from presage.report.html.charts.points import memory_figure
from presage.report.html.theme import MEANINGS, colours
from presage.report.step_sections import step_roofline_section
from presage.report.terms import MEMORY, PARTS, ROLES


def numbers(values: object) -> np.ndarray:
    """What Plotly keeps of an array, as numbers."""
    return np.asarray(values, dtype=float)


def test_a_name_is_shown_as_it_is() -> None:
    assert label("std::vector<float>&\n x") == "std::vector&lt;float&gt;&amp; x"
    assert len(label("x" * 500, 70)) == 70


def test_bars_of_one_colour_each_and_all_of_the_time() -> None:
    bars = lane_tasks(("a", 0, 1, "f", "x"), ("b", 1, 2, "g", "y"), ("a", 3, 0.5, "g", "z"))
    figure = lanes_figure(bars)
    assert [t.name for t in figure.data] == ["f", "g"]
    assert sum(numbers(t.x).sum() for t in figure.data) == pytest.approx(3.5)
    assert list(figure.layout.yaxis.ticktext) == ["a", "b"]
    assert bars.busy.tolist() == [1.5, 2.0]


def test_a_window_cuts_what_is_partly_in_it() -> None:
    bars = lane_tasks(("a", 0, 2, "f"), ("a", 2, 2, "f"), ("a", 9, 1, "f")).clipped(1, 3)
    assert bars.start.tolist() == [0, 1]
    assert bars.seconds.tolist() == [1, 1]


def test_too_many_bars_become_fewer_that_cover_the_same(n: int = 60_000) -> None:
    rng = np.random.default_rng(0)
    gap, took = rng.uniform(0, 1e-7, n), rng.uniform(1e-7, 1e-5, n)
    start = np.cumsum(gap + np.append(0, took[:-1]))
    lane = np.repeat([0, 1, 2], n // 3)
    bars = LaneTasks(
        ("a", "b", "c"), ("f", "g"), ("x",), lane, start, took, rng.integers(0, 2, n), np.zeros(n, np.int64)
    )
    few = merge_short_tasks(bars)
    assert len(few) <= MARKS < len(bars)
    assert few.span == pytest.approx(bars.span, rel=1e-3)
    for k in (0, 1):  # each group keeps its share of a lane
        both = [b.seconds[(b.lane == 1) & (b.group == k)].sum() for b in (few, bars)]
        assert both[0] == pytest.approx(both[1])
    assert sum(int(name.split()[0]) if "tasks" in name else 1 for name in map(few.names.__getitem__, few.name)) == n
    told = lanes_section("t", bars)
    assert "60,000 tasks are drawn as" in told.text
    assert told.tables[0].rows[0][1] == f"{n // 3:,}"


def test_of_many_lanes_the_busiest_and_the_least_busy_are_drawn() -> None:
    bars = lane_tasks(*((f"rank {i}", 0, 1 + i, "f") for i in range(64)))
    names = list(lanes_figure(bars).layout.yaxis.ticktext)
    assert len(names) == 24
    assert (names[0], names[-1]) == ("rank 0", "rank 63")
    assert len(lane_table(bars, 64.0).rows) == 64


def test_joined_bars_keep_their_lanes_apart_and_their_groups_together() -> None:
    one, two = (
        lane_tasks(("a", 0, 1, "f", "x")),
        lane_tasks(("a", 0, 2, "g", "y"), ("b", 0, 3, "f", "x")),
    )
    both = LaneTasks.joined([one, two])
    assert (both.lanes, both.groups, both.names) == (("a", "a", "b"), ("f", "g"), ("x", "y"))
    assert (both.lane.tolist(), both.group.tolist(), both.name.tolist()) == ([0, 1, 2], [0, 1, 0], [0, 1, 0])


def test_heat_is_far_from_the_usual() -> None:
    table = [[1.0, 5.0], [1.0, 5.0], [3.0, 5.0]]
    usual, red = USUAL, f"rgba({ABOVE},0.80)"
    colours = heat_figure(["a", "b", "c"], ["x", "y"], table).data[0].marker.color
    assert list(colours) == [usual, usual, usual, usual, red, usual]
    alike = heat_figure(["a", "b"], ["x"], [[1.0], [3.0]], alike=[15, 1]).data[0].marker.color
    assert list(alike) == [usual, red]
    many = np.ones((500, 2))
    many[321, 1] = 9
    assert 321 in notable_rows(many)
    assert len(notable_rows(many)) == 64
    assert heat_figure(["a"], ["x"], [[math.nan]]).data


def test_memory_of_many_ops_keeps_the_peak() -> None:
    held = np.arange(20_000) % 7_919
    figure = memory_figure(held, held + 1, {"all": held}, 1e6)
    assert len(figure.data[0].x) < 2_000
    assert held[numbers(figure.data[0].x).astype(int)].max() == held.max()
    assert memory_figure(held[:0], held[:0], {}, 0.0).layout.height


def test_ranges_are_judged_by_where_all_of_them_lie() -> None:
    rows = [IntervalBar("up", 1.1, 1.2, 1.3), IntervalBar("either", 0.9, 1.1, 1.2), IntervalBar("down", 0.5, 0.6, 0.7)]
    figure = interval_figure(rows, AxisUnit("x", 1.0), "times", base=1.0, judged=True)
    assert len(set(figure.data[0].marker.color)) == 3
    assert numbers(figure.data[0].x) == pytest.approx([0.2, 0.1, -0.4])


def test_the_roofline_counts_what_a_kernel_touches_and_names_the_roof_it_exceeds(gpt: Graph) -> None:
    p = predict(gpt, "rtx4090", draws=5)
    loss = next(w for w in p.roofline if w.name == "aten::nll_loss_backward")
    assert loss.of_peak < 0.2  # one place per target: zeros are another op's
    above = [w for w in p.roofline if w.of_peak > 1]
    assert above and all(w.limit == "memory" and w.moved / w.calls < p.basis.gpu.l2 for w in above)
    section = step_roofline_section(p)
    assert section is not None and "L2 cache" in section.text
    cells = [row[-1] for row in section.tables[0].rows if float(row[-1].split("%")[0]) > 100]
    assert all("from L2" in cell for cell in cells)


def test_copies_of_fsdp_are_no_optimizer() -> None:
    assert family("aten::_foreach_copy_") == "copy and cast"
    assert family("aten::_foreach_add_") == "optimizer"


def test_a_colour_has_one_meaning() -> None:
    assert colours(["TP communication (exposed)"]) != colours(["CP communication"])
    assert colours(["a", "TP communication (exposed)"])["TP communication (exposed)"] == MEANINGS["TP communication"]
    apart = {MEANINGS[n] for n in ("GEMM", "attention", "TP communication", "forward", "backward", "gradients", "p95")}
    assert len(apart) == 7
    named = {*PARTS.values(), *MEMORY.values(), *ROLES.values()}
    assert [n for n in named if n.removesuffix(" (exposed)") not in MEANINGS] == []


def test_a_replay_error_is_drawn_against_a_fixed_band() -> None:
    figure = band_figure(["0", "1"], [-0.0018, 0.001], 0.05)
    assert list(figure.layout.yaxis.range) == pytest.approx([-0.1, 0.1])
