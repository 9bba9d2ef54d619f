"""Pages of job, plan, run, shard, sensitivity and place: what they say agrees with the answers they are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_answers import JOBS, LARGE, SMALL, job, moves, plans, shards, surely, whole

from commands import runner
from presage.cli.app import app
from presage.embeddings.sharding_cost import memory_by_rank
from presage.noise.sampling import RandomStreams
from presage.placement import PlacementFindings, place, random_fleet
from presage.prediction.draws import step_model
from presage.prediction.draws.distribution import belief_of
from presage.prediction.jobs.job_detail import job_roofline, perturb
from presage.prediction.jobs.job_prediction import COMPUTE, predict_job
from presage.report.answer import Answer, Section
from presage.report.html import render_page
from presage.report.html.charts.bars import TIMES, Swing, time_unit, tornado_figure, tornado_table
from presage.report.html.charts.distribution import distribution_figure, distribution_table, quantiles_of
from presage.report.html.charts.points import thin_plans
from presage.report.job_answer import job_answer
from presage.report.next_sections import next_plans_section
from presage.report.place_answer import place_answer
from presage.report.plan_answer import plan_answer
from presage.report.run_answer import run_answer, span_known
from presage.report.sensitivity_answer import sensitivity_answer
from presage.report.shard_answer import shard_answer
from presage.report.terms import step_text
from presage.runs.failures import DAY
from presage.search import better_neighbours, job_plan, parse_keep, plan_words, search
from presage.text import known_seconds, percent, seconds, size


def section(page: Answer, key: str) -> Section:
    return next(s for s in page.sections if s.key == key)


def numbers(values: object) -> np.ndarray:
    return np.asarray(values, dtype=float)


def trace(page: Answer, key: str, name: str) -> Any:
    figure = section(page, key).figure
    assert figure is not None
    return next(t for t in figure.data if t.name == name)


# ---- the distribution


def test_bars_and_what_lies_past_them_are_all_draws() -> None:
    draws = np.random.default_rng(0).lognormal(1.0, 0.3, 4000)
    figure = distribution_figure(draws)
    bars, curve = figure.data
    edge = figure.layout.xaxis.range[1]
    assert numbers(bars.y).sum() + (draws > edge).mean() == pytest.approx(1.0)
    assert (np.diff(numbers(curve.y)[:-1]) <= 0).all()
    at = numbers(curve.x)
    told = [(draws > x).mean() for x in at[1:-1]]
    assert numbers(curve.y)[1:-1] == pytest.approx(told)


def test_quantiles_are_lines_in_both_and_a_deadline_too() -> None:
    draws = np.linspace(1.0, 2.0, 1001)
    figure = distribution_figure(draws, marks={"deadline": 2.5})
    lines = [s.x0 for s in figure.layout.shapes if s.xref == "x"]
    assert lines == pytest.approx([1.5, 1.95, 1.99, 2.5])
    assert "deadline" in figure.layout.annotations[-1].text


def test_a_mark_far_away_is_named_at_the_edge() -> None:
    figure = distribution_figure(np.linspace(1.0, 2.0, 1001), marks={"deadline": 90.0})
    assert figure.layout.xaxis.range[1] < 3
    assert figure.layout.annotations[-1].text == "<b>deadline</b> 90 s →"


def test_a_long_tail_does_not_squash_the_bars() -> None:
    draws = np.concatenate([np.linspace(1.0, 1.1, 990), np.linspace(5.0, 50.0, 10)])
    figure = distribution_figure(draws)
    assert figure.layout.xaxis.range[1] < 1.6
    assert "1.00% beyond the edge, at most 50 s" in figure.layout.xaxis2.title.text
    assert figure.layout.xaxis2.range == figure.layout.xaxis.range  # both are read together


@pytest.mark.parametrize("draws", [[], [np.nan], [np.inf, np.inf], [1e-3] * 5, [0.0], [1.0, np.inf, np.nan]])
def test_odd_draws_are_drawn(draws: list[float]) -> None:
    json.loads(distribution_figure(draws, marks={"deadline": 1.0}).to_json())
    assert len(distribution_table(draws).rows) == (10 if any(x == x for x in draws) else 0)


def test_what_never_ends_is_counted() -> None:
    draws = [1.0] * 90 + [np.inf] * 10
    figure = distribution_figure(draws)
    assert numbers(figure.data[1].y)[-1] == pytest.approx(0.1)
    assert quantiles_of(draws)[0.95] == np.inf
    assert distribution_table(draws).rows[-1] == ("p99.9", "never", "0.10%")


# ---- tornado, units, thinning


def test_the_longest_bar_is_on_top_and_small_ones_are_in_the_table_alone() -> None:
    swings = [Swing("a", (-0.01, 0.02)), Swing("b", (-0.3, float("nan"))), Swing("none", (0.0, 1e-6))]
    figure = tornado_figure(swings, ("less", "more"), "the step")
    assert list(figure.layout.yaxis.ticktext) == ["b", "a"]
    rows = tornado_table(swings, "what", ("less", "more")).rows
    assert rows == (("b", "-30.0%", "-"), ("a", "-1.00%", "+2.00%"), ("none", "~0", "~0"))


def test_units_fit_what_they_tell() -> None:
    assert [time_unit(x).name for x in (3 * DAY, 1.5 * DAY, 90.0, 4.9, 0.02, 3e-6, 0.0, float("inf"))] == [
        "days", "hours", "s", "s", "ms", "us", "s", "s",
    ]  # fmt: skip


def test_thinning_keeps_the_front() -> None:
    rng = np.random.default_rng(0)
    time, memory = rng.lognormal(0, 0.5, 5000), rng.lognormal(0, 0.5, 5000)
    kept = thin_plans(time.tolist(), memory.tolist(), 300)
    best = [i for i in range(5000) if not ((time < time[i]) & (memory <= memory[i])).any()]
    assert len(kept) == len(set(kept)) <= 300
    assert set(best) <= set(kept)


# ---- job


@pytest.mark.parametrize("name", ["llama3.1-405b", "deepseek-v3", "torchtitan", "own_model", "megatron"])
def test_parts_of_layers_add_up_to_the_step(name: str) -> None:
    p = predict_job(JOBS / f"{name}.toml")
    found = job_roofline(p.job, p.job_step)
    for kind in COMPUTE:
        took = sum(r.seconds for r in found if r.family == kind)
        assert took == pytest.approx(p.job_step.parts[kind], rel=1e-9)
    assert all(r.least <= r.seconds for r in found if r.family != "streams")


def test_quicker_work_is_a_shorter_step() -> None:
    found = perturb(job().job)
    assert found[0].name == "products"
    assert all(s.quicker <= job().seconds * (1 + 1e-9) <= s.slower * (1 + 2e-9) for s in found)
    assert found[0].quicker == pytest.approx(predict_job(LARGE).seconds - 0.1 * job().breakdown["products"], rel=0.05)


def test_the_job_page_agrees_with_the_prediction() -> None:
    p = replace(job(), spread=surely())
    page = job_answer(p, 15e12, page=True)
    assert page.headline.startswith("5.0 s/step (90% interval 4.4-6.4 s): ")
    assert "15 T tokens take 5" in page.headline and "Fits in memory with 14.5 GiB to spare" in page.verdict
    (bars,) = section(page, "where-the-step-goes").figure.data  # type: ignore[union-attr]
    assert numbers(bars.x).sum() == pytest.approx(p.step.p50)
    kinds = section(page, "memory").figure.data  # type: ignore[union-attr]
    held = sum(numbers(k.y) for k in kinds) * 1024**3
    assert held == pytest.approx([m.needed for m in p.memory.stages])
    keys = [s.key for s in page.sections]
    assert keys == [
        "what-to-do-next", "where-the-step-goes", "uncertainty", "timeline-of-a-step", "memory", "roofline",
        "sensitivity",
    ]  # fmt: skip
    assert all(s.figure is not None and s.tables for s in page.sections[1:])


def test_the_timeline_is_as_long_as_the_step() -> None:
    bars = section(job_answer(job(), page=True), "timeline-of-a-step").figure.data  # type: ignore[union-attr]
    ends = np.concatenate([numbers(b.base) + numbers(b.x) for b in bars])
    assert ends.max() == pytest.approx(job().seconds, rel=1e-4)
    assert {b.name for b in bars} >= {"forward", "backward", "optimizer"}


def test_a_job_that_does_not_fit_says_so() -> None:
    p = predict_job(LARGE, {"training": {"sequence": 32768}})
    page = job_answer(p)
    assert f"Does NOT fit in memory: {size(-p.memory.margin)} too little" in page.verdict
    assert "if it fitted" in page.verdict and page.verdict_tone == "bad"
    assert next(f for f in page.facts if f.label == "Memory per GPU").tone == "bad"


def test_a_job_of_one_stage_has_no_stages_to_compare() -> None:
    page = job_answer(predict_job(SMALL, {"parallel": {"pp": 1, "dp": None}}))
    assert "stages" not in [s.key for s in page.sections]


# ---- plan


def test_the_plan_page_agrees_with_the_search() -> None:
    found = plans()
    page = plan_answer(predict_job(SMALL).job, found)
    best = found.best[0]
    assert step_text(found.chosen.step) in page.headline
    star = trace(page, "time-against-memory", "the best plan")
    dots = trace(page, "time-against-memory", "plans that fit")
    unit = time_unit(best.seconds).size
    assert numbers(star.y)[0] * unit == pytest.approx(best.seconds)
    assert len(dots.x) == len(found.cloud) == found.counts.priced
    assert numbers(dots.y).min() * unit == pytest.approx(best.seconds)
    assert section(page, "the-best-plans").tables[0].rows[0][0] == plan_words(job_plan(best.job))
    beside = section(page, "the-best-plans").figure
    assert beside is not None
    more = sum(numbers(t.y)[0] for t in beside.data) * next(
        u.size for u in TIMES if u.name == beside.layout.yaxis.title.text
    )
    assert more == pytest.approx(found.best[1].seconds - best.seconds, abs=1e-5 * best.seconds)


def test_where_nothing_fits_the_page_says_what_would_help() -> None:
    found = search(job().job, 8, keep=parse_keep(["tp=8"]))
    page = plan_answer(job().job, found)
    assert page.headline.startswith(f"None of {found.counts.legal:,} legal plans fits in 80 GiB")
    assert render_page(page)


# ---- run


def test_the_run_page_agrees_with_the_draws() -> None:
    p, page = whole(), run_answer(whole())
    assert page.headline.startswith(span_known(p.outcome.quantile(0.5)))
    done = next(f for f in page.facts if f.label.startswith("Done within"))
    assert done.value == percent(p.outcome.done_by(6.5 * DAY), 0)
    (bars,) = section(page, "where-the-time-goes").figure.data  # type: ignore[union-attr]
    unit = time_unit(float(numbers(bars.x).max()) * DAY).size
    assert numbers(bars.x).sum() * unit == pytest.approx(float(p.outcome.wall.mean()))
    goodput = percent(float(p.outcome.goodput.mean()))  # one number wherever it stands
    assert goodput in section(page, "where-the-time-goes").text
    assert goodput in {f.value for f in page.facts} and bars.text[0].endswith(goodput)
    marks = [a.text for a in section(page, "how-long").figure.layout.annotations]  # type: ignore[union-attr]
    assert any(m.startswith("<b>deadline</b> 6.5 days") for m in marks)
    assert len(section(page, "what-would-change-it").figure.data) == 2  # type: ignore[union-attr]


# ---- shard


def test_tables_and_what_comes_in_are_a_ranks_memory() -> None:
    problem, found = shards()
    held = np.nansum(memory_by_rank(problem, found.plan), axis=0)
    rest = found.cost.load.memory - held
    assert rest == pytest.approx(np.full(4, rest[0])) and rest[0] >= 0


def test_the_shard_page_agrees_with_the_plan() -> None:
    problem, found = shards()
    page = shard_answer(problem, found)
    assert f"{seconds(found.cost.seconds)}/step for embeddings on 4 GPUs" in page.headline
    best = min(a.cost.seconds for a in found.alternatives if a.cost is not None and not a.cost.over)
    assert f"{percent(1 - found.cost.seconds / best)} less than the best heuristic" in page.headline
    (bars,) = section(page, "where-the-time-goes").figure.data  # type: ignore[union-attr]
    assert numbers(bars.x).sum() * time_unit(max(found.cost.phases.values())).size == pytest.approx(found.cost.seconds)
    lookups = trace(page, "load-of-the-ranks", "lookups")
    unit = time_unit(float((found.cost.load.forward + found.cost.load.backward).max())).size
    assert numbers(lookups.y) * unit == pytest.approx(found.cost.load.forward)
    cells = section(page, "which-table-is-where").figure.data[0]  # type: ignore[union-attr]
    assert len(cells.x) == sum(len(set(t.ranks)) or 4 for t in found.plan.tables)
    assert len(section(page, "which-table-is-where").tables[0].rows) == len(problem.tables)


# ---- sensitivity and place


def test_the_sensitivity_page_agrees_with_its_rows() -> None:
    s, page = moves(), sensitivity_answer(moves())
    bars = trace(page, "classes-of-work", "if 10% faster")
    row = next(r for r in s.of("class") if r.name == "products")
    at = list(section(page, "classes-of-work").figure.layout.yaxis.ticktext).index("GEMM")  # type: ignore[union-attr]
    assert row.faster is not None
    assert numbers(bars.x)[at] == pytest.approx(row.faster.p95.value / s.draws.p95.value)
    assert page.headline.startswith("Varia")


def test_the_place_page_shows_who_is_slow() -> None:
    shape = step_model(predict_job(SMALL).job)
    fleet = random_fleet(shape.job.gpus, 8, 0.02, RandomStreams(0)("fleet"), 0.05, 1.3)
    belief, source = belief_of(shape.job, shape.seconds)
    placed = place(shape, fleet, belief.noise, draws=200, randoms=3)
    page = place_answer(PlacementFindings(placed, source))
    assert page.headline.startswith(("Best placement: p95 step ", "p95 step "))
    figure = section(page, "groups-of-the-best-placement").figure
    assert figure is not None
    assert len(figure.data[0].x) == placed.best.placement.factors.size
    assert render_page(page)


# ---- files and commands


def test_the_same_answer_is_the_same_bytes() -> None:
    assert render_page(job_answer(job())) == render_page(job_answer(predict_job(LARGE)))
    assert render_page(run_answer(whole())) == render_page(run_answer(whole()))


def test_a_page_is_not_large_and_names_do_no_harm() -> None:
    p = predict_job(LARGE, {"name": "</script><b>x & y"})
    text = render_page(job_answer(p, page=True)).decode()
    assert "<b>x" not in text and "&lt;/script&gt;&lt;b&gt;x &amp; y" in text
    assert len(text) < 2_000_000
    assert "default-src &#39;none&#39;" in text  # and nothing is fetched


def test_the_command_writes_the_page_beside_its_answer(tmp_path: Path) -> None:
    out = tmp_path / "job.html"
    told = json.loads(runner(app)("job", SMALL, "--report", out, "--json", "-"))
    assert "distribution" not in told  # drawn for the page alone
    step = told["step_ms"]
    assert f"{known_seconds(*(step[k] / 1e3 for k in ('p50', 'p5', 'p95')))}/step" in out.read_text("utf-8")


def test_what_to_do_next_is_faster_fits_and_says_how_to_try_it() -> None:
    p = predict_job(SMALL)
    found = better_neighbours(p)
    assert found and all(n.memory.fits and n.seconds < p.seconds for n in found)
    assert [n.seconds for n in found] == sorted(n.seconds for n in found)
    card = next_plans_section(p)
    assert len(card.tables[0].rows) == len(found) <= 3
    change, _, memory, options = card.tables[0].rows[0]
    assert "recompute every-2 -> none" in change and memory.startswith("+")
    assert options == "--set training.recompute=none"
    assert predict_job(SMALL, {"training": {"recompute": "none"}}).seconds == pytest.approx(found[0].seconds)
