"""Many ranks: layouts, meetings, waits, folding, and what the command says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import runner

torch = pytest.importorskip("torch", reason="capturing needs torch: pip install 'presage[torch]'")

from presage.capture import capture, load  # noqa: E402
from presage.cli.predict import command  # noqa: E402
from presage.errors import PresageError  # noqa: E402
from presage.graph.graph import Graph  # noqa: E402
from presage.hardware import platform  # noqa: E402
from presage.parallel.rank_layout import RankLayout, fold_ranks  # noqa: E402
from presage.parallel.strategy import strategy  # noqa: E402
from presage.prediction.api import predict, predict_ranks, rank_set_of  # noqa: E402
from presage.prediction.machine import machine  # noqa: E402
from presage.prediction.overlap_contention import _covered  # noqa: E402
from presage.prediction.rank_results import RankClass, RankResults, groups_of, rank_uses  # noqa: E402
from presage.prediction.rank_set import RankOverride, RankSet, _bound, other_strategies, predict_rank_set  # noqa: E402
from presage.prediction.result import Quantiles, model_error  # noqa: E402
from presage.prediction.stream_dependencies import crossings  # noqa: E402
from presage.report.next_sections import next_edits_section  # noqa: E402

ROOT = Path(__file__).parents[2]
BIG = {"layers": 4, "batch": 8}


@cache
def gpt(**arguments: int) -> Graph:
    return capture(load(f"{ROOT}/examples/gpt.py:build"), dict(arguments), source="examples/gpt.py:build")


def apart(count: int, **differ: RankOverride) -> dict[int, RankOverride]:
    """Ranks that are alike but told apart, so that none is folded."""
    return {r: differ.get(f"r{r}", RankOverride(arguments=(("rank", str(r)),))) for r in range(count)}


def step_ms(found: RankSet) -> float:
    return 1e3 * predict_rank_set(found, machine("h200"), draws=1, steps=8).step.p50


# Layouts


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.data())
def test_ranks_meet_in_the_dimension_they_differ_in(a: int, b: int, c: int, data: st.DataObject) -> None:
    layout = RankLayout((("tp", a), ("pp", b), ("dp", c)))
    rank = data.draw(st.integers(0, layout.ranks - 1))
    for name, size in layout.sizes:
        mates = [r for r in range(layout.ranks) if layout.meeting(name, r) == layout.meeting(name, rank)]
        assert len(mates) == size
        assert rank in mates
    everyone = {tuple(layout.meeting(n, r) for n, _ in layout.sizes) for r in range(layout.ranks)}
    assert len(everyone) == layout.ranks or 1 in (a, b, c)


def test_how_many_of_a_group_are_close() -> None:
    layout = RankLayout((("tp", 4), ("dp", 8)))
    assert layout.per_domain("tp", 8) == 4
    assert layout.per_domain("dp", 8) == 2
    assert RankLayout((("tp", 8), ("dp", 4))).per_domain("dp", 8) == 1
    groups = groups_of(layout, platform("dgx-h100"))
    assert (groups["dp"].ranks, groups["dp"].per_domain) == (8, 2)


def test_folding_keeps_every_rank_once() -> None:
    layout = RankLayout((("tp", 4), ("dp", 4)))
    assert [(f.rank, f.ranks) for f in fold_ranks(layout, [0] * 16)] == [(0, 16)]
    folds = fold_ranks(layout, [0] * 5 + [1] + [0] * 10)
    assert sum(f.ranks for f in folds) == 16
    by = {f.rank: f for f in folds}
    assert by[5].ranks == 1  # the odd one,
    assert by[4].meets["tp"] == by[5].meets["tp"] != by[0].meets["tp"]  # whom three meet in tp
    assert by[1].meets["dp"] == by[5].meets["dp"] != by[0].meets["dp"]  # and three in dp


@pytest.mark.parametrize("how", [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("tp", 1)])
def test_folded_ranks_take_as_long_as_all_of_them(how: tuple[str, int]) -> None:
    name, tensor = how
    graph = gpt(**BIG)
    folded = rank_set_of(graph, 4, name, "4xh100", tensor=tensor)
    all_of_them = rank_set_of(graph, 4, name, "4xh100", tensor=tensor, kinds=apart(4))
    assert (len(folded.ranks.members), len(all_of_them.ranks.members)) == (1, 4)
    assert step_ms(folded) == pytest.approx(step_ms(all_of_them), rel=1e-9)
    few, many = (rank_uses(t.ranks, t.timeline) for t in (folded, all_of_them))
    assert np.allclose(few * 4, many)


def test_folding_with_one_odd_rank_is_exact() -> None:
    graph, slow = gpt(**BIG), RankOverride(speed=0.6)
    folded = rank_set_of(graph, 8, "ddp", "dgx-h100", tensor=2, kinds={5: slow})
    plain = rank_set_of(graph, 8, "ddp", "dgx-h100", tensor=2, kinds=apart(8, r5=slow))
    assert len(folded.ranks.members) < len(plain.ranks.members) == 8
    assert step_ms(folded) == pytest.approx(step_ms(plain), rel=1e-9)


# Waits


def test_a_slow_rank_makes_the_others_wait_and_that_is_no_communication() -> None:
    graph = gpt(**BIG)
    even = predict_ranks(graph, 4, "ddp", "4xh100", draws=1)
    odd = predict_ranks(graph, 4, "ddp", "4xh100", draws=1, kinds={2: RankOverride(speed=0.5)})
    assert even.many is not None and odd.many is not None
    assert even.many.wait == 0
    slow = next(k for k in odd.many.kinds if k.rank == 2)
    others = next(k for k in odd.many.kinds if k.rank == 0)
    assert (slow.ranks, others.ranks) == (1, 3)
    assert slow.wait == 0
    lost = odd.step.p50 - even.step.p50
    assert others.wait == pytest.approx(lost, rel=0.15)
    assert others.communication == pytest.approx(even.many.kinds[0].communication, rel=0.1)


def test_without_the_slow_rank_it_is_as_if_it_had_never_been() -> None:
    graph = gpt(**BIG)
    assert step_ms(rank_set_of(graph, 4, "ddp", "4xh100", kinds={2: RankOverride()})) == step_ms(
        rank_set_of(graph, 4, "ddp", "4xh100")
    )


def test_the_number_of_a_slow_rank_changes_nothing() -> None:
    graph, slow = gpt(**BIG), RankOverride(speed=0.7)
    steps = [step_ms(rank_set_of(graph, 4, "fsdp", "4xh100", kinds={r: slow})) for r in (0, 3)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_a_rank_with_more_to_do_holds_up_all() -> None:
    graphs = [gpt(**BIG), gpt(layers=4, batch=12)]
    odd = predict_ranks(graphs, 4, "ddp", "4xh100", draws=1, kinds={1: RankOverride(step=1)})
    alone = predict_ranks(graphs[1], 4, "ddp", "4xh100", draws=1)
    assert odd.step.p50 == pytest.approx(alone.step.p50, rel=0.02)
    assert odd.peak_memory == alone.peak_memory


def test_ranks_that_call_unequally_are_told() -> None:
    with pytest.raises(PresageError, match="wait for each other for ever"):
        rank_set_of([gpt(**BIG), gpt(layers=3, batch=8)], 4, "ddp", "4xh100", kinds={1: RankOverride(step=1)})


# Streams and overlap


def test_kernels_wait_for_what_other_streams_make() -> None:
    found = strategy("fsdp").step(gpt(**BIG), 4)
    pairs = crossings(found)
    before = {b: [a for a, c in pairs.within if c == b] for _, b in pairs.within}
    for i, op in enumerate(found.ops):
        if op.name == "c10d::_allgather_base_":
            assert any(found.ops[a].stream == "copy-in" for a in before[i])
        if op.name == "c10d::_reduce_scatter_base_":
            assert any(found.ops[a].stream == "" for a in before[i])
    update = [(a, b) for a, b in pairs.carried if found.ops[a].phase == "optimizer"]
    assert update and all(found.ops[b].stream == "copy-in" for _, b in update)  # the next step gathers what was updated


def test_communication_hides_behind_compute_where_it_can() -> None:
    graph = gpt(**BIG)
    ddp = predict_ranks(graph, 4, "ddp", "4xh100", draws=1).many
    tp = predict_ranks(graph, 4, "tp", "4xh100", draws=1).many
    assert ddp is not None and tp is not None
    assert ddp.exposed < 0.5 * ddp.communication  # beside the backward pass
    assert tp.exposed > 0.5 * tp.communication  # each layer waits for it, but for weight gradients


def test_overlap_costs_both() -> None:
    graph = gpt(**BIG)
    found = rank_set_of(graph, 4, "ddp", "4xh100")
    m = found.ranks.members[0]
    plain = found.steps[0].tasks.seconds
    slower = m.tasks.seconds / np.maximum(plain, 1e-12)
    assert slower.max() > 1.02
    assert slower.min() == 1.0
    assert (slower[m.tasks.lane < 2] == 1).all()  # hosts do not care


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 3)), min_size=1, max_size=8))
def test_shares_beside_others(spans: list[tuple[float, float]]) -> None:
    start = np.array([s for s, _ in spans])
    end = start + np.array([d for _, d in spans])
    assert np.allclose(_covered(start, end, start, end), 1.0)
    assert np.allclose(_covered(start, end, end.max() + start, end.max() + end), 0.0)


# Predictions


def test_one_rank_is_one_gpu() -> None:
    graph = gpt(**BIG)
    one, none = predict_ranks(graph, 1, "ddp", "dgx-h200", draws=1), predict(graph, gpu="h200", draws=1)
    assert one.gpu_active == pytest.approx(none.gpu_active)
    assert one.peak_memory == none.peak_memory
    assert one.many is not None and one.many.communication == 0


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2"])
def test_more_ranks_never_finish_sooner(name: str) -> None:
    graph = gpt(layers=2, batch=2)
    steps = [predict_ranks(graph, n, name, "dgx-h100", draws=1).step.p50 for n in (2, 4, 8)]
    more = [predict_ranks(graph, n, "ddp", "dgx-h100", draws=1).step.p50 for n in (8, 64, 1024)]
    assert name != "ddp" or more == sorted(more)
    assert all(s > 0 for s in steps)


def test_draws_surround_the_usual_step() -> None:
    graph = gpt(**BIG)
    usual = predict_ranks(graph, 8, "fsdp", "dgx-h100", draws=1).step.p50
    found = predict_ranks(graph, 8, "fsdp", "dgx-h100").step
    assert found.p5 < usual < found.p95
    assert found == predict_ranks(graph, 8, "fsdp", "dgx-h100").step  # the same seed
    assert predict_ranks(graph, 1024, "fsdp", "dgx-h100").step.p50 > found.p50  # the slowest of more hosts


# The command

predict_command = runner(command)
STEP = ["examples/gpt.py:build", "--arg", "layers=2", "--arg", "batch=2"]


def test_command_tells_of_many_ranks(tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    many = ["--ranks", "4", "--strategy", "fsdp", "--platform", "4xh100", "--rank", "2:speed=0.5", "--draws", "20"]
    predict_command(*STEP, *many, "--json", out, "--trace", trace)
    found = json.loads(out.read_text())
    assert found["ranks"] == 4
    assert found["strategy"] == "fsdp"
    assert {k["rank"]: k["ranks"] for k in found["kinds"]} == {0: 3, 2: 1}
    assert found["wait_ms"] > 0
    assert {c["name"] for c in found["collectives"]} == {"all_gather", "reduce_scatter"}
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 (and 2 like it)", "rank 2"}
    waits = [e for e in events if e.get("cat") == "wait"]
    assert waits and {e["pid"] for e in waits if e["dur"] > 100} == {0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "8", "--strategy", "dpd"], "choose from ddp"),
        (["--platform", "dgx-h1000"], "no platform"),
        (["--platform", "4xgv100", "--ranks", "8"], "8 ranks do not fit"),
        (["--platform", "dgx-h100", "--gpu", "h200"], "omit --gpu"),
        (["--ranks", "8", "--rank", "9:speed=1"], "ranks are 0 to 7"),
        (["--ranks", "8", "--rank", "1:speed=fast"], "not a number"),
        (["--ranks", "8", "--rank", "1:speed=-1"], "above 0"),
        (["--ranks", "8", "--rank", "one:speed=1"], "is not a rank or a range of ranks"),
        (["--ranks", "8", "--rank", "1"], "RANK:NAME=VALUE"),
        (["--ranks", "8", "--option", "bucket"], "NAME=VALUE"),
        (["--option", "bucket_cap_mb=3"], "apply to several ranks"),
        (["--ranks", "8", "--tensor", "3"], "ranks = tensor x data"),
    ],
)
def test_command_says_what_is_wrong(words: list[str], said: str) -> None:
    with pytest.raises(PresageError) as told:
        predict_command(*STEP, *words)
    assert said in str(told.value)


def test_command_prints_tables_of_ranks() -> None:
    said = predict_command(
        *STEP, "--ranks", "8", "--platform", "dgx-h100", "--rank", "3:host=2,batch=3", "--draws", "20"
    )
    assert "on 8 x NVIDIA H100 SXM 80 GB (NVIDIA DGX H100" in said
    assert "3 (host x2, batch=3)" in said
    assert "Collectives per rank" in said
    assert "all_reduce" in said


# The interval, and what to try next


def test_the_interval_of_several_ranks_has_the_error_of_published_runs() -> None:
    error = model_error("ranks")
    one, two = (predict_ranks(gpt(layers=1), n, draws=1) for n in (1, 2))
    assert two.step.p95 / two.step.p50 == pytest.approx(error.high)
    assert two.step.p5 / two.step.p50 == pytest.approx(error.low)
    assert two.notes[0].startswith(f"90% interval: presage's error on {error.runs} published runs")
    assert one.step.p95 == one.step.p50, "one GPU sends nothing"


def test_strategies_that_gain_are_named_with_their_memory() -> None:
    found = predict_ranks(gpt(layers=2, batch=1), 8, "fsdp", draws=1)
    ways = other_strategies(found)
    gains = [gain for _, gain, _ in ways]
    assert "ddp" in {way.name for way, _, _ in ways} and gains == sorted(gains, reverse=True) and gains[-1] > 1
    section = next_edits_section(found)
    assert section is not None and section.title == "What to do next" and len(section.tables[0].rows) == len(ways)
    assert not other_strategies(predict_ranks(gpt(layers=2, batch=1), 2, kinds={1: RankOverride(0.9)}, draws=1))


def test_the_terminal_names_a_command_to_try_next() -> None:
    step = [f"{ROOT}/examples/gpt.py:build", "--arg", "layers=2", "--arg", "batch=1", "--draws", "1"]
    told = predict_command(*step, "--ranks", "8", "--strategy", "fsdp")
    assert told.splitlines()[-1].endswith("--ranks 8 --platform dgx-h200 --strategy ddp")


@pytest.mark.parametrize(
    ("compute", "exposed", "bound"),
    [(0.95, 0.02, "gpu"), (0.88, 0.09, "gpu"), (0.88, 0.01, "host"), (0.7, 0.28, "communication"), (0.4, 0.1, "host")],
)
def test_a_little_communication_beside_busy_gpus_is_not_what_holds_them_up(
    compute: float, exposed: float, bound: str
) -> None:
    kind = RankClass(0, 8, compute, exposed, exposed, wait=0.0, host=0.5, peak_memory=1)
    ranks = RankResults("dgx-h100", "ddp", (), 8, exposed, exposed, 0.0, (kind,), ())
    assert _bound(ranks, Quantiles.of(np.ones(3))) == bound
