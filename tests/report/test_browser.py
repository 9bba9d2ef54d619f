"""Pages as a browser shows them: what is drawn, what the controls do, on wide and narrow screens and on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lane_bars import lane_tasks
from matplotlib.image import imread

from presage.prediction.step import StepResult
from presage.report.answer import Answer
from presage.report.html.charts.lanes import lanes_section
from presage.report.html.theme import colours
from presage.report.predict_answer import predict_answer
from presage.report.trace_answer import trace_answer
from presage.traces.findings import TraceFindings
from presage.traces.replay import replay_of
from presage.traces.trace_set import files_of, read_runs

pytestmark = pytest.mark.xdist_group("browser")
Looker = Callable[..., Any]

WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BARS = """(() => {
  const id = document.querySelector('#timeline-of-a-step .chart').dataset.figure;
  return JSON.parse(document.getElementById(id).textContent).data.reduce((n, t) => n + t.x.length, 0);
})()"""
RANGE = "document.querySelector('#timeline-of-a-step .chart')._fullLayout.xaxis.range.slice()"


@pytest.fixture(scope="module")
def told(predicted: StepResult) -> Answer:
    return predict_answer(predicted, page=True)


@pytest.fixture(scope="module")
def measured() -> Answer:
    return trace_answer(TraceFindings([replay_of(run) for run in read_runs(files_of([Path("demo")]))]))


def marks(look: Any, section: str) -> int:
    """Bars and dots that the chart of a section has."""
    return look.count(f"#{section} .bars path") + look.count(f"#{section} .scatterlayer .points path")


def test_a_prediction_as_it_is_seen(look: Looker, told: Answer, predicted: StepResult) -> None:
    seen = look(told)
    seen.well()
    assert seen.text("#answer") == told.headline
    assert seen.count("main > section") == len(told.sections) + bool(told.notes)
    assert seen.count(".facts .fact") == len(told.facts)
    assert seen.text("footer code") == "presage x"
    assert marks(seen, "where-the-step-goes") == len([f for f in predicted.families if f.gpu > 0]) + 1
    dots = sum(1 for w in predicted.roofline if w.moved)
    assert seen.count("#roofline .scatterlayer .points path") >= dots
    areas = seen.count("#memory-over-the-step .scatterlayer .js-fill")
    assert areas == len([k for k, v in predicted.memory.timeline.kinds.items() if v.any()])
    table = next(s for s in told.sections if s.key == "where-the-step-goes").tables[0]
    cells = seen.tab.locator("#where-the-step-goes tbody").first.locator("tr").first.locator("td").all_text_contents()
    assert tuple(cells) == table.rows[0]


def test_the_timeline_zooms(look: Looker, told: Answer) -> None:
    seen = look(told)
    timeline = next(s for s in told.sections if s.key == "timeline-of-a-step")
    assert seen(BARS) == sum(int(row[1].replace(",", "")) for row in timeline.tables[0].rows)
    low, high = seen(RANGE)
    box = seen.tab.locator("#timeline-of-a-step .nsewdrag").first
    box.scroll_into_view_if_needed()
    found = box.bounding_box()
    y = found["y"] + found["height"] / 2
    seen.tab.mouse.move(found["x"] + 0.3 * found["width"], y)
    seen.tab.mouse.down()
    seen.tab.mouse.move(found["x"] + 0.6 * found["width"], y, steps=4)
    seen.tab.mouse.up()
    seen.until(f"({RANGE})[1] - ({RANGE})[0] < {0.5 * (high - low)}")
    near, far = seen(RANGE)
    assert (near - low) / (high - low) == pytest.approx(0.3, abs=0.02)
    assert (far - low) / (high - low) == pytest.approx(0.6, abs=0.02)


def test_light_and_dark(look: Looker, measured: Answer) -> None:
    seen = look(measured, dark=True)
    seen.well()
    colours = (
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('.chart')._fullLayout.font.color]"
    )
    dark = seen(colours)
    seen.tab.click("#theme")
    seen.until(f"({colours})[1] !== '{dark[1]}'")
    light = seen(colours)
    assert light[0] != dark[0]
    assert _bright(light[0]) > 0.8 > 0.3 > _bright(dark[0])


def _bright(colour: str) -> float:
    """Of rgb(1, 2, 3), from 0 to 1."""
    return sum(float(x) for x in colour.strip("rgba()").split(",")[:3]) / 3 / 255


def test_a_narrow_screen_scrolls_only_down(look: Looker, told: Answer) -> None:
    seen = look(told, width=480)
    seen.well()
    for width in (480, 360):
        seen.tab.set_viewport_size({"width": width, "height": 800})
        seen.until(f"{WIDTH} <= 0")  # charts are drawn anew
        charts = seen("[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().width)")
        assert 250 < max(charts) <= width


@pytest.mark.slow
def test_on_paper_all_tables_are_open(look: Looker, told: Answer) -> None:
    seen = look(told)
    closed = "document.querySelectorAll('details:not([open])').length"
    folded = seen(closed)
    assert folded > 0
    assert seen.tab.pdf()[:5] == b"%PDF-"
    assert seen(closed) == folded  # as they were
    seen.tab.emulate_media(media="print")
    seen("window.dispatchEvent(new Event('beforeprint'))")
    assert seen(closed) == 0
    assert not seen.tab.locator("#theme").is_visible()
    seen("window.dispatchEvent(new Event('afterprint'))")
    assert seen(closed) == folded
    seen.well()


def test_names_that_look_like_tags_are_only_names(look: Looker, told: Answer) -> None:
    name = "void f<float>(</script><script>window.bad = 1</script><img src=x onerror='window.bad = 2'>)"
    odd = lanes_section("Odd names", lane_tasks((name, 0, 1, name, name), ("b", 1, 1, "\N{SNOWMAN}", "c")), name)
    seen = look(replace(told, headline=name, question=name, notes=(name,), sections=(odd,)), command=name)
    seen.well()
    assert seen("window.bad") is None
    assert seen.text("#answer") == name
    assert "<float>" in seen.tab.locator("#odd-names .ytick text").first.text_content()


def test_a_page_without_charts_and_an_empty_one(look: Looker) -> None:
    seen = look(Answer("nothing", "nothing.", sections=(lanes_section("None", lane_tasks()),)))
    seen.well()
    assert seen.count(".chart") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_a_screenshot_shows_the_bars_on_the_paper_of_the_day(look: Looker, told: Answer, dark: bool) -> None:
    seen = look(told, dark=dark)
    png = seen.tab.locator("#where-the-step-goes .chart").screenshot()
    shot = imread(BytesIO(png))[..., :3]
    for family, least in (("idle, waiting for the host", 0.02), ("GEMM", 0.0004)):
        colour = np.array([int(colours([family])[family][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(shot - colour).max(axis=-1) < 0.03).mean() > least
    assert (np.median(shot) < 0.3) == dark
