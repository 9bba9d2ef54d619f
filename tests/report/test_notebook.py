"""Results in Python and in notebooks: one line, headline with tiles and a chart, a frame, a page."""

from __future__ import annotations

import base64
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

import presage as ps
from presage.displayed import Displayed
from presage.graph import save
from presage.report.answer import Answer, Fact
from presage.report.notebook import answer_of

ROOT = Path(__file__).parents[2]
KINDS = ("step", "ranks", "job", "run", "distribution", "whatif")


@pytest.fixture(scope="module")
def results() -> dict[str, Displayed]:
    graph = save.read(Path(__file__).parent / "gpt.presage")
    job = ps.predict_job(ROOT / "examples/jobs/own_model.toml")
    return {
        "step": ps.predict(graph, draws=30),
        "ranks": ps.predict_ranks(graph, 2, draws=3),
        "job": job,
        "run": ps.predict_run(job, 1000, draws=30),
        "distribution": ps.predict_distribution(job, count=200),
        "whatif": ps.what_if(graph, "gpu=h100_sxm", draws=3),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_prints_its_answer_in_one_line(results: dict[str, Displayed], kind: str) -> None:
    line, answer = repr(results[kind]), answer_of(results[kind])
    assert line.startswith(f"<{type(results[kind]).__name__} ") and "\n" not in line and len(line) < 300
    assert answer.headline.split(". ")[0].rstrip(".") in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_notebook_shows_headline_tiles_and_a_chart(results: dict[str, Displayed], kind: str) -> None:
    html, answer = results[kind]._repr_html_(), answer_of(results[kind])
    assert all(f.value in html.replace("&gt;", ">") for f in answer.facts) and answer.facts
    assert "<script" not in html and len(html) < 60_000
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    if kind != "distribution" and find_spec("plotly"):
        svg = ElementTree.fromstring(base64.b64decode(pictures[0]))
        assert len([e for e in svg if e.tag.endswith("rect")]) >= 2


def test_names_are_escaped() -> None:
    answer = Answer(title="<b>\x1b[31m", headline="<i>1 s</i>.", facts=(Fact("<script>", "1"),))
    assert "<script>" not in answer._repr_html_() and "<i>" not in answer._repr_html_()
    assert "\x1b" not in repr(answer) and repr(answer).startswith("<Answer ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_has_a_row_for_each_part(results: dict[str, Displayed], kind: str) -> None:
    pytest.importorskip("pandas")
    frame = results[kind].to_frame()
    assert len(frame) > 2 and not frame.isna().any().any()
    if kind in ("step", "job", "run"):
        assert list(frame.columns) == ["part", "seconds", "share"] and frame["share"].sum() == pytest.approx(1)
        assert list(frame["seconds"]) == list(results[kind].breakdown.values())  # type: ignore[attr-defined]
        assert "products" not in set(frame["part"]) and (kind == "run" or "GEMM" in set(frame["part"]))


def test_an_answers_tables_are_frames_by_title(results: dict[str, Displayed]) -> None:
    pytest.importorskip("pandas")
    answer = answer_of(results["step"])
    assert "GEMM" in set(answer.to_frame("Op families")["family"]) and len(answer.to_frame()) > 3
    with pytest.raises(ps.PresageError, match=r"no table 'x' in this answer; it has .*Op families"):
        answer.to_frame("x")


def test_a_frame_without_pandas_is_an_error_that_says_so(
    results: dict[str, Displayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ps.PresageError, match="pip install pandas"):
        results["job"].to_frame()


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_the_page_of_the_command(results: dict[str, Displayed], kind: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    results[kind].report(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert answer_of(results[kind]).facts[0].label in page


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_plain(results: dict[str, Displayed], kind: str) -> None:
    import json

    value = results[kind]
    assert isinstance(value, ps.Result | ps.StepDistribution | ps.WhatIf)
    assert json.loads(json.dumps(value.to_json()))
