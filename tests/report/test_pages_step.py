"""Pages of predict, whatif, trace and replay: what they say agrees with the answers they are made of."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from commands import runner
from graph_sketches import Sketch
from presage.cli.app import app
from presage.errors import InputError
from presage.graph.graph import Graph
from presage.memory.step_memory import memory_profile
from presage.prediction.api import predict, rank_set_of
from presage.prediction.machine import machine
from presage.prediction.rank_set import RankOverride, predict_rank_set
from presage.prediction.step import StepResult
from presage.report.answer import Answer, Section
from presage.report.html import render_page
from presage.report.next_sections import next_edits_section
from presage.report.predict_answer import predict_answer
from presage.report.replay_answer import replay_answer
from presage.report.terms import family_name, step_text
from presage.report.trace_answer import trace_answer
from presage.report.trace_tasks import shown_step
from presage.report.whatif_answer import suggest_answer, whatif_answer
from presage.text import seconds, size
from presage.traces.explain import activity
from presage.traces.findings import TraceFindings
from presage.traces.replay import Replay, StepTime, measured_steps, replay_of
from presage.traces.trace_set import files_of, read_runs
from presage.whatif import suggestions, what_if
from presage.whatif.replay_result import ReplayedRun, ReplayFindings, SimulatedReplay
from synthetic import Tracer, gpu_bound

ROOT = Path(__file__).resolve().parents[2]


def section(page: Answer, key: str) -> Section:
    return next(s for s in page.sections if s.key == key)


def numbers(values: object) -> np.ndarray:
    """What Plotly keeps of an array, as numbers."""
    return np.asarray(values, dtype=float)


# ---- predict


def test_the_step_of_the_timeline_is_the_one_predicted(gpt: Graph, predicted: StepResult) -> None:
    begin, end = predicted.window.window
    assert end - begin == pytest.approx(predict(gpt, draws=1).step.p50, rel=0.03)


def test_kinds_of_memory_add_up_to_what_is_allocated(gpt: Graph) -> None:
    plain, told = memory_profile(gpt), memory_profile(gpt, kinds=True)
    assert plain.timeline.kinds == {}
    assert (sum(told.timeline.kinds.values()) == told.timeline.allocated).all()
    at_peak = {k: int(v[told.peak_op]) for k, v in told.timeline.kinds.items() if v[told.peak_op]}
    assert at_peak == told.by_role()


@pytest.fixture(scope="module")
def page(predicted: StepResult) -> Answer:
    return predict_answer(predicted, page=True)


def test_a_prediction_s_page_says_what_it_found(predicted: StepResult, page: Answer) -> None:
    assert page.headline.startswith(step_text(predicted.step))
    assert page.headline.endswith(".") and ". " not in page.headline  # one sentence
    assert page.verdict.startswith("Fits in memory")
    families = section(page, "where-the-step-goes")
    assert families.tables[1].rows[0][0] == family_name(predicted.families[0].name)
    whole = sum(numbers(families.figure.data[0].x)) * 1e-3  # type: ignore[union-attr]
    assert whole == pytest.approx(predicted.step.p50, rel=0.02)
    lanes = section(page, "timeline-of-a-step").tables[0]
    assert [row[0] for row in lanes.rows] == ["main thread", "autograd thread", "GPU stream"]
    memory = section(page, "memory-over-the-step")
    assert size(predicted.peak_memory) in memory.text
    assert len(memory.tables[1].rows) == 20
    assert section(page, "uncertainty").tables[0].rows


def test_every_chart_has_its_numbers(page: Answer) -> None:
    for part in page.sections:
        assert part.tables and all(t.rows for t in part.tables), part.title
        assert part.text, part.title


def test_the_roofline_has_every_op_that_moves_something(predicted: StepResult, page: Answer) -> None:
    figure = section(page, "roofline").figure
    dots = [t for t in figure.data if t.mode == "markers"]  # type: ignore[union-attr]
    assert sum(len(t.x) for t in dots) == sum(1 for w in predicted.roofline if w.moved)
    assert sum(w.seconds for w in predicted.roofline) == pytest.approx(predicted.gpu_active)
    names = {t.name for t in figure.data if t.mode != "markers"}  # type: ignore[union-attr]
    assert names == {"memory, 4.8 TB/s", "fp16 and bf16, 989.5 TFLOP/s"}


@pytest.mark.slow
def test_pages_of_the_same_answer_are_the_same_bytes(gpt: Graph) -> None:
    first, second = (
        render_page(predict_answer(p, page=True)) for p in (predict(gpt, draws=30), predict(gpt, draws=30))
    )
    assert first == second
    assert len(first) < 6_500_000


def test_many_ranks_with_a_slow_one(gpt: Graph) -> None:
    team = rank_set_of(gpt, 16, "ddp", "dgx-h100", kinds={3: RankOverride(speed=0.5)})
    found = predict_rank_set(team, machine("h100_sxm"), draws=30, steps=4)
    page = predict_answer(found, page=True)
    ranks = section(page, "ranks")
    assert [row[0] for row in ranks.tables[1].rows] == ["rank 0 (and 14 like it)", "rank 3"]
    assert "16 x NVIDIA H100" in page.subject
    lanes = [row[0] for row in section(page, "timeline-of-a-step").tables[0].rows]
    assert "rank 0 (+14): main thread" in lanes and any(name.startswith("rank 3: ") for name in lanes)
    assert section(page, "collectives").tables[0].rows


def odd(name: str = "odd") -> Graph:
    """One op, in a step that says nothing else of itself."""
    sketch = Sketch()
    x = sketch.tensor(4, 4, role="input")
    sketch.op(name, [x], [sketch.new(4, 4)])
    return sketch.graph()


def test_a_step_of_one_op_with_an_odd_name_has_a_page() -> None:
    graph = odd("</script><b>\N{SNOWMAN}")
    found = predict(graph, draws=3)
    text = render_page(predict_answer(found, page=True)).decode()
    assert "</script><b>" not in text
    assert "\N{SNOWMAN}" in text or "\\u2603" in text


# ---- what if


def test_before_and_after(gpt: Graph) -> None:
    found = what_if(gpt, ["checkpoint", "cuda_graph"], draws=30)
    page = whatif_answer(found, page=True)
    assert seconds(found.edited.step.p50) in page.headline and seconds(found.base.step.p50) in page.headline
    bars = section(page, "before-and-after").figure.data  # type: ignore[union-attr]
    for drawn, told in zip(bars, (found.base, found.edited), strict=True):
        assert numbers(drawn.x).sum() == pytest.approx(told.step.p50 * 1e3, rel=0.02)
    assert len(section(page, "one-by-one").figure.data[0].x) == 3  # type: ignore[union-attr]
    lanes = [row[0] for row in section(page, "timelines").tables[0].rows]
    assert {name.split(":")[0] for name in lanes} == {"before", "after"}
    assert sum(s.title.startswith("Memory") for s in page.sections) == 2


@pytest.mark.slow
def test_suggestions_are_ranked(gpt: Graph) -> None:
    found = suggestions(gpt, draws=5, steps=4, combine=1)
    page = suggest_answer(found)
    ranking = section(page, "edits-best-first")
    assert [row[0] for row in ranking.tables[0].rows] == [", ".join(w.edits) for w in found.tried]
    drawn = numbers(ranking.figure.data[0].x)  # type: ignore[union-attr]
    assert drawn + 1 == pytest.approx([w.per_work.p50 for w in found.tried])


# ---- traces


@pytest.fixture(scope="module")
def demo() -> TraceFindings:
    return traced(files_of([Path("demo")]))


def traced(files: list[Path], **how: bool) -> TraceFindings:
    return TraceFindings([replay_of(run) for run in read_runs(files, **how)])


def test_a_trace_s_page_adds_up(demo: TraceFindings) -> None:
    page = trace_answer(demo)
    told = activity(demo.replays[0], 0)
    parts = section(page, "where-the-time-goes").figure.data[0]  # type: ignore[union-attr]
    assert numbers(parts.x).sum() * 1e-3 == pytest.approx(told.span)
    assert "the GPU computes 39% of the time, waits for the host 58%" in page.headline
    steps = measured_steps(demo.replays[0], 0)
    assert section(page, "step-times").tables[0].rows[0][2:] == tuple(seconds(s.seconds) for s in steps)
    lanes = {row[0]: row for row in section(page, "timeline-of-a-step").tables[0].rows}
    assert lanes["stream 7"][1] == "490"
    assert all(t.rows for s in page.sections for t in s.tables)


def test_two_ranks_one_of_them_late() -> None:
    page = trace_answer(traced(files_of([ROOT / "data" / "gloo" / "late"]), need_gpu=False))
    late = section(page, "stragglers")
    assert "Rank 1 arrived last" in late.text
    assert len(late.figure.data[0].x) == 2 * 5  # type: ignore[union-attr]
    assert "the CPU computes" in page.headline


def test_traces_of_several_runs_have_a_page(tmp_path: Path) -> None:
    files = [gpu_bound().write(tmp_path / f"{name}.json") for name in ("a", "b")]
    page = trace_answer(traced(files))
    assert page.subject == "2 traces, Test GPU"
    assert render_page(page)


def test_the_step_in_the_middle_is_shown() -> None:
    steps = [StepTime("", 0, 0, took) for took in (9.0, 3.0, 1.0, 2.0)]
    assert shown_step(steps) == 3
    assert shown_step(steps[:1]) == 0
    assert shown_step([]) == 0


def test_a_replay_s_page_has_measured_and_found(demo: TraceFindings) -> None:
    page = replay_answer(replayed(demo.replays[0], None))
    assert "dependencies are understood" in page.headline
    measured, found = section(page, "measured-and-replayed").figure.data  # type: ignore[union-attr]
    assert numbers(measured.y) * 1e-3 == pytest.approx([s.seconds for s in measured_steps(demo.replays[0], 0)])
    assert numbers(found.y) == pytest.approx(numbers(measured.y), rel=0.01)
    lanes = [row[0] for row in section(page, "timelines").tables[0].rows]
    assert sum(n.startswith("measured: ") for n in lanes) == sum(n.startswith("replayed: ") for n in lanes) == 3


def replayed(replay: Replay, changed: Replay | None) -> ReplayFindings:
    after = None if changed is None else SimulatedReplay(changed)
    return ReplayFindings([ReplayedRun(["0"], SimulatedReplay(replay), after)], ["cuda_graph"] if changed else [])


def test_an_edited_replay_is_beside_the_others(demo: TraceFindings) -> None:
    from presage.whatif import replay_edits as edits
    from presage.whatif.replay_names import parse

    found = replayed(demo.replays[0], edits.edited(demo.replays[0], parse("cuda_graph")))
    page = replay_answer(found)
    assert found.edited is not None and seconds(found.edited) in page.headline
    assert len(section(page, "measured-and-replayed").figure.data) == 3  # type: ignore[union-attr]
    assert any(row[0].startswith("edited: ") for row in section(page, "timelines").tables[0].rows)
    assert f"why: {found.reasons[0]}" in page.notes


def test_many_kernels_of_many_ranks_do_not_hang(tmp_path: Path, ranks: int = 6, kernels: int = 1_500) -> None:
    for rank in range(ranks):
        t = Tracer(rank, ranks)
        t.step(0, 0, 10 * kernels)
        for i in range(kernels):
            t.op(f"aten::odd<{i % 7}></script>", 10 * i, 9)
            t.launch(f"void k<float, {i % 5}>(</script>)", 10 * i + 1, 10 * i + 6, 3 + rank % 2, tid=1)
        (tmp_path / f"rank_{rank}.json.gz").write_bytes(gzip.compress(t.text(), 1))
    page = trace_answer(traced(files_of([tmp_path])))
    text = render_page(page)
    assert len(text) < 6_500_000
    assert b"</script>)" not in text
    assert "of ranks" in section(page, "timeline-of-a-step").text


# ---- the command line


def test_commands_write_reports(tmp_path: Path) -> None:
    graph, out = Path(__file__).with_name("gpt.presage"), tmp_path / "out.html"
    asked = {
        "predict": [str(graph), "--draws", "5"],
        "whatif": [str(graph), "--apply", "cuda_graph", "--draws", "5"],
        "trace": ["demo"],
        "replay": ["demo"],
    }
    for name, arguments in asked.items():
        json.loads(runner(app)(name, *arguments, "--json", "-", "--report", out))
        assert out.read_bytes().startswith(b"<!doctype html>")
        out.unlink()


def test_where_the_report_is_is_said(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert f"report: {out}" in runner(app)("replay", "demo", "--report", out)


def test_a_graph_without_times_has_no_report(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces" / "chakra" / "feeder_small_chakra.0.json"
    with pytest.raises(InputError, match="omit --report"):
        runner(app)("trace", path, "--report", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_a_family_has_one_share_in_chart_and_table(predicted: StepResult) -> None:
    where = section(predict_answer(predicted), "where-the-step-goes")
    (bars,) = where.figure.data  # type: ignore[union-attr]
    shown = dict(zip(bars.customdata, bars.text, strict=True))
    assert all(shown[row[0]].endswith(f", {row[3]}") for row in where.tables[-1].rows if row[0] in shown)


def test_what_to_do_next_has_the_edits_that_gain_most(predicted: StepResult) -> None:
    card = next_edits_section(predicted)
    assert card is not None and 1 <= len(card.tables[0].rows) <= 3
    speedups = [float(row[1].rstrip("x")) for row in card.tables[0].rows]
    assert speedups == sorted(speedups, reverse=True) and speedups[-1] > 1
    assert "presage whatif" in card.text
