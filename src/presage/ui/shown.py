"""Replies as page elements: sentences, tiles with differences, the table of both plans."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from presage.report.answer import Answer, DataTable
from presage.ui.answers import Measure

Reply = Mapping[str, Any]
FIRST = ("Step", "Throughput", "MFU", "Memory", "Exposed comm")  # tiles, in order
IF_IT_FITTED = ("Whole run", "Goodput", "By the deadline", "Cost", "Steps alone", "GPU-hours")
IN_BAR = ("Step", "Memory", "Whole run")
THEN = ("p95 step", "Whole run", "Goodput", "By the deadline", "Cost")
SAME = 5e-4  # of a value: what differs by less is the same


def collect_measures(step: Reply | None, sure: Reply | None, run: Reply | None) -> dict[str, Measure]:
    """The key figures of a plan that belong to its current controls."""
    if not step or "measures" not in step:
        return {}
    replies = [step, *(r for r in (sure, run) if r and r.get("key") == step.get("key"))]
    return {m[0]: Measure(*m) for r in replies for m in r.get("measures", ())}


def notice(name: str, step: Reply | None, two: bool = False) -> list[Any]:
    """What is wrong with a plan, or was changed so that it can be run, and buttons for what can be done about it."""
    if not step:
        return []
    offers = step.get("offers") or []
    buttons = [
        html.Button(o["label"], id={"plan": name, "offer": i}, className="offer", **_marked_offer(o))
        for i, o in enumerate(offers)
    ]
    which = f"Plan {name.upper()}: " if two else ""
    if "wrong" in step:
        return [html.P([f"{which}{step['wrong']}"], className="wrong"), html.Div(buttons, className="acts")]
    words = f"{which}{'c' if which else 'C'}hanged {step['changes']}." if step.get("changes") else ""
    if not words and not buttons:
        return []
    return [html.P(words, className="changed"), html.Div(buttons, className="acts")]


def _marked_offer(offer: Reply) -> dict[str, Any]:
    return {"data-search": "yes"} if offer.get("search") else {}


def answer(name: str, replies: Sequence[Reply | None], other: Mapping[str, Measure], two: bool = False) -> list[Any]:
    """A plan's sentence and tiles; `other` are those it is held against, `two` leaves room for differences. Tiles
    whose draws are under way show what was drawn last."""
    step = replies[0]
    if not step:
        return []
    if "wrong" in step:
        return [_letter(name), html.H1("This plan cannot be run."), html.P(step["wrong"], className="wrong")]
    mine = collect_measures(*replies)
    last = {m[0]: Measure(*m) for r in replies[1:] if r for m in r.get("measures", ())}
    fits = step.get("fits", True)
    tiles = []
    for n in (*FIRST, *_expected(step)):
        now = mine.get(n) or last.get(n)
        marks = ["waits"] if n not in mine else []
        marks += ["unfit"] if not fits and n in IF_IT_FITTED else []
        tiles.append(_tile(n, now, other.get(n) if n in mine else None, two, marks))
    drawn = replies[1] if replies[1] and replies[1].get("key") == step.get("key") and "sentence" in replies[1] else None
    words = drawn or step
    tone = "" if fits else " bad"
    return [
        _letter(name),
        html.H1(words["sentence"], className="" if drawn else "waits"),
        html.P(words["verdict"], className=f"verdict{tone}"),
        html.P(words["subject"], className="subject"),
        html.Dl(tiles, className="facts"),
    ]


def _expected(step: Reply) -> list[str]:
    """The key figures that are still being drawn."""
    asked = step.get("asked")
    if not asked:
        return []
    unasked = {"By the deadline": not asked.get("days"), "Cost": "price_per_gpu_hour" not in step.get("text", "")}
    return [name for name in THEN if not unasked.get(name)]


def _letter(name: str) -> Any:
    return html.Span(name.upper(), className=f"letter {name}", title=f"Plan {name.upper()}")


def _tile(name: str, m: Measure | None, other: Measure | None, two: bool, marks: Sequence[str] = ()) -> Any:
    if m is None:
        waits = [html.Dt(name), html.Dd("…"), html.Dd("being drawn", className="detail")]
        return html.Div(waits, className="fact waits")
    changed = _change(m, other) if other and _differ(m.value, other.value) else "\u00a0"
    delta = [html.Dd(changed, className=f"delta {_verdict(m, other)}".strip())] if two else []
    detail = f"if it fitted; {m.detail}" if "unfit" in marks else m.detail
    parts = [html.Dt(m.name), html.Dd(m.shown, className="value"), *delta, html.Dd(detail, className="detail")]
    tone = "" if "unfit" in marks else m.tone
    return html.Div(parts, className=" ".join(filter(None, ("fact", tone, *marks))), **_marked(m.name))


def _marked(name: str) -> dict[str, Any]:
    return {"data-fact": name}


def _change(m: Measure, other: Measure | None) -> str:
    """Points for shares, else in percent of the other."""
    if other is None or not _differ(m.value, other.value):
        return "the same"
    if m.shown.endswith("%") and other.shown.endswith("%"):
        return f"{100 * (m.value - other.value):+.1f} points"
    return f"{100 * (m.value / other.value - 1):+.1f}%" if other.value else "none before"


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > SAME * max(abs(a), abs(b))


def _verdict(m: Measure, other: Measure | None) -> str:
    if other is None or not m.better or not _differ(m.value, other.value):
        return ""
    return "better" if (m.value - other.value) * m.better > 0 else "worse"


def difference(a: Mapping[str, Measure], b: Mapping[str, Measure], texts: Sequence[str]) -> list[Any]:
    """Plan B against plan A, number by number, and what differs in their texts."""
    rows = [name for name in a if name in b]
    if not rows:
        return []
    numbers = _table(("", "plan A", "plan B", "B vs A"), [_row(a[name], b[name]) for name in rows])
    changed = _table(("changed", "plan A", "plan B"), [_changed(*row) for row in differing_keys(*texts)])
    pair = html.Div([html.Div(numbers, className="scroll"), html.Div(changed, className="scroll")], className="pair")
    return [html.Section([html.H2("Plan B vs plan A"), pair])]


def differing_keys(a: str, b: str) -> list[tuple[str, str, str]]:
    """Keys of two jobs' texts whose values are not the same."""
    one, other = flatten(tomllib.loads(a)), flatten(tomllib.loads(b))
    names = dict.fromkeys((*one, *other))
    return [(n, one.get(n, "-"), other.get(n, "-")) for n in names if one.get(n) != other.get(n) and n != "name"]


def flatten(table: Mapping[str, Any], section: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        out |= flatten(value, name) if isinstance(value, Mapping) else {name: str(value)}
    return out


def _table(head: Sequence[str], rows: list[Any]) -> Any:
    cells = [html.Th(x, className="n" if i else "") for i, x in enumerate(head)]
    return html.Table([html.Thead(html.Tr(cells)), html.Tbody(rows)])


def _changed(name: str, a: str, b: str) -> Any:
    return html.Tr([html.Td(name), html.Td(a, className="n"), html.Td(b, className="n")])


def _row(a: Measure, b: Measure) -> Any:
    verdict = _verdict(b, a)
    mark = {"better": " ▲", "worse": " ▼"}.get(verdict, "")
    change = html.Td(
        [_change(b, a) + mark, html.Span(f" {verdict}", className="word")], className=f"n {verdict}".strip()
    )
    return html.Tr([html.Td(a.name), html.Td(a.shown, className="n"), html.Td(b.shown, className="n"), change])


def numbers_table(rows: Any) -> list[Any]:
    """A chart's numbers, folded."""
    if not rows:
        return []
    body = [html.Tr([html.Td(c, className="n" if i else "") for i, c in enumerate(row)]) for row in rows]
    return [html.Details([html.Summary("Numbers"), _table(("quantile", "at most", "longer"), body)])]


def notes(steps: Mapping[str, Reply | None]) -> list[Any]:
    """What to know before trusting it."""
    said = [(p, note) for p, step in steps.items() if step for note in step.get("notes", ())]
    rows = [html.Li([html.B(f"{p.upper()}: "), note]) for p, note in said]
    return [html.Details([html.Summary(f"Notes ({len(rows)})"), html.Ul(rows)])] if rows else []


def answer_card(answer: Answer) -> tuple[list[Any], list[Any]]:
    """Any command's answer: its headline and key figures; its tables, those of the longest work open."""
    facts = [
        html.Div([html.Dt(f.label), html.Dd(f.value, className="value"), html.Dd(f.note, className="detail")],
                 className=f"fact {f.tone}".strip())
        for f in answer.facts
    ]  # fmt: skip
    tables = [
        html.Details([html.Summary(t.title), html.Div(_data_table(t), className="scroll")], open="Top" in t.title)
        for t in answer.tables("terminal") if t.rows
    ]  # fmt: skip
    parts: list[Any] = [html.P(answer.headline, className="headline"), html.P(answer.subject, className="subject")]
    parts += [html.Dl(facts, className="facts")] if facts else []
    return parts, [*tables, *(html.P(f"Note: {n}", className="lead") for n in answer.notes)]


def _data_table(t: DataTable) -> Any:
    head = [html.Th(c, className="" if i in t.text_columns else "n") for i, c in enumerate(t.columns)]
    rows = [[html.Td(c, className="" if i in t.text_columns else "n") for i, c in enumerate(r)] for r in t.rows]
    return html.Table([html.Thead(html.Tr(head)), html.Tbody([html.Tr(r) for r in rows])])


def bar(replies: Mapping[str, Sequence[Reply | None]]) -> list[Any]:
    """Step, memory and end of each plan in a line, for narrow screens."""
    out: list[Any] = []
    for name, given in replies.items():
        found = {m[0]: Measure(*m) for r in given if r for m in r.get("measures", ())}
        parts = [html.Span(found[n].shown, className=found[n].tone) for n in IN_BAR if n in found]
        out += [html.Div([_letter(name), *parts], className=f"line {name}")] if parts else []
    return out


def sweep_table(found: Reply) -> list[Any]:
    """The numbers of a sweep's curves, folded."""
    rows = [
        html.Tr([html.Td(c, className="n" if k not in (0, 2) else "") for k, c in enumerate(r)]) for r in found["rows"]
    ]
    return [html.Details([html.Summary("Numbers"), html.Div(_table(found["head"], rows), className="scroll")])]


def found_table(found: Reply) -> Any:
    """The best plans, each with buttons that make it plan A or B."""
    rows = []
    for i, row in enumerate(found["rows"]):
        buttons = [
            html.Button(to.upper(), id={"found": i, "to": to}, title=f"Make it plan {to.upper()}") for to in "ab"
        ]
        cells = [html.Td(c, className="n" if k else "") for k, c in enumerate((str(i + 1), *row))]
        rows.append(html.Tr([*cells, html.Td(buttons, className="use")]))
    return _table(("", *found["head"], "use as"), rows)
