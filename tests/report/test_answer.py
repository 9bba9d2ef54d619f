"""The Answer value: what a terminal, a page and a notebook show of it."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from presage.report.answer import Answer, Fact, Section, data_table, limit_rows
from presage.report.html import render_page
from presage.report.terminal import print_answer
from presage.report.terms import PARTS, WORK, interval, signed

TABLE = data_table("Parts", ("part", "time"), [("[bold]a", "1 s"), ("total",)], bold=(-1,))
HIDDEN = data_table("Only on the page", ("x",), [("1",)], where="page")
ANSWER = Answer(
    title="job",
    subject="job on 8 GPUs",
    headline="1 s/step.",
    facts=(Fact("Step time", "1 s"),),
    sections=(Section("Step", (TABLE, HIDDEN)), Section("Why", text="Because.")),
    notes=("a note",),
    to_data=lambda: {"kind": "job"},
    brief="brief",
)


def printed(answer: Answer, quiet: bool = False) -> str:
    out, main = (Console(file=StringIO(), width=100, quiet=q) for q in (quiet, False))
    target = main.file
    out.file = target
    print_answer(answer, out, main)
    return target.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_terminal_shows_headline_tables_text_and_notes() -> None:
    text = printed(ANSWER)
    assert text.splitlines()[:2] == ["1 s/step.", "job on 8 GPUs"]
    assert "[bold]a" in text and "Because." in text and "note: a note" in text
    assert "Only on the page" not in text and "brief" not in text


def test_quiet_leaves_headline_and_brief() -> None:
    assert printed(ANSWER, quiet=True).splitlines() == ["1 s/step.", "job on 8 GPUs", "brief"]


def test_a_page_shows_all_tables_and_the_command() -> None:
    page = render_page(ANSWER, "presage job x").decode()
    assert "Only on the page" in page and "presage job x" in page and "Because." in page


def test_a_notebook_shows_headline_facts_and_tables() -> None:
    html = ANSWER._repr_html_()
    assert "1 s/step." in html and "Step time" in html and "<td>total</td>" in html


def test_data_is_the_json() -> None:
    assert ANSWER.data == {"kind": "job"}


def test_short_rows_are_filled_and_long_tables_cut() -> None:
    assert TABLE.rows[1] == ("total", "") and TABLE.bold == {1}
    assert limit_rows([("a",), ("b",), ("c",)], 2)[-1] == ("and 1 more",)


def test_intervals_name_their_unit_once() -> None:
    assert interval(0.03307, 0.0376) == "33.07-37.6 ms"
    assert interval(0.9, 1.1) == "900 ms to 1.1 s"
    assert signed(0.0259) == "+2.6%"


def test_only_communication_is_said_to_be_exposed() -> None:
    assert PARTS["tp"] == f"{WORK['tp']} (exposed)" and PARTS["products"] == "GEMM"
