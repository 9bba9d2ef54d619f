"""The page: controls on the left, answers on the right, first of one plan, then of two side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dash import dcc, html

from presage.ui.controls import aria, fields

if TYPE_CHECKING:
    from presage.ui.plans import Plan


PLANS = ("a", "b")
BEST = "Best plan for these GPUs"
OPENED = "A job's TOML, a Hugging Face config.json, Megatron arguments, TorchTitan's TOML, or a trace"
EXPORTS = {"json": "JSON", "csv": "CSV", "html": "Report"}  # beside the TOML
LIVE: dict[str, Any] = {"aria-live": "polite"}  # read out when it changes
CHARTS = {
    "parts": ("Where the step goes", "Seconds on the busiest stage; communication where it is exposed."),
    "memory": ("Memory per GPU", "The fullest stage, against the GPU's capacity."),
    "sure": ("Step-time distribution", "Steps drawn with the noise of such GPUs; below, the chance of exceeding."),
    "run": ("Run duration", "Whole runs drawn with failures, checkpoints, restarts and presage's own error."),
}  # fmt: skip
CONDITIONS = {
    "screened": "screened, as for benchmarks", "production": "in production", "unscreened": "never screened",
}  # fmt: skip
# What is asked of the run: labels and explanations.
ASKED = {
    "tokens": ("Tokens", "Training tokens, e.g. 15T or 300B"),
    "days": ("Deadline, days", "After the start; empty: none"),
    "noise": ("GPUs are", "Noise preset: how much steps differ"),
    "failures": ("Failures as in", "Measured failure rates and restart times"),
    "rate": ("Failure rate", "Failures per 1,000 node-days; empty: as in the set"),
    "restart": ("Restart, s", "From detecting a failure to the next step; empty: as in the set"),
    "spares": ("Spare nodes", "Nodes that replace failed ones; empty: one is always ready"),
    "interval": ("Checkpoint every", "auto (the best interval), a number of steps, or a time such as 30min"),
}
TYPED: Any = {"debounce": 0.4, "autoComplete": "off"}
CHOSEN_ONE: Any = {"clearable": False, "searchable": False}
TALL = {"parts": 350, "memory": 350, "sure": 450, "run": 450}  # pixels
GRAPH: Any = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def page(first: Plan) -> Any:
    """Both plans begin as `first`; the second is not shown until somebody compares."""
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            *_stores(first),
            _top(),
            html.Div(
                [html.Div("", id="bar-text"), html.Button("Settings", id="drawer-open")], id="bar", className="bar"
            ),
            html.Div([_panel(first), _answers()], id="work", className="work one"),
        ],
        id="page",
    )


def _stores(first: Plan) -> list[Any]:
    kinds = ("step", "ask", "sure", "run", "figures", "kept")
    out = [dcc.Store(id={"plan": p, "store": kind}) for p in PLANS for kind in kinds]
    out += [dcc.Store(id={"plan": p, "store": "rest"}, data=dict(first.rest)) for p in PLANS]
    return [*out, dcc.Store(id="two", data=False), dcc.Store(id="theme"), dcc.Store(id="link"), dcc.Store(id="opened"),
            dcc.Store(id="page-id", data=uuid4().hex), dcc.Store(id="found"),
            dcc.Store(id="dropped"), dcc.Store(id="swept"),
            dcc.Interval(id="search-tick", interval=400, disabled=True),
            dcc.Download(id="download")]  # fmt: skip


def _top() -> Any:
    return html.Header(
        [
            html.Div([html.Span("presage", className="brand"), html.Span("plan a training job", className="soft")]),
            html.Div(
                [
                    html.Span("", id="told", role="status", **LIVE),
                    html.Button("Open a file …", id="open-file", className="open-file", title=OPENED),
                    html.Button("Copy link", id="copy-link", title="A link that opens both plans as they are now"),
                    html.Button("◐", id="theme-switch", title="Light or dark", **aria(label="Light or dark")),
                ],
                className="buttons",
            ),
        ],
        className="top",
    )


# ---- controls


def _panel(first: Plan) -> Any:
    tabs = html.Div(
        [
            html.Button("Plan A", id="tab-a", className="side on", role="tab", **aria(selected="true")),
            html.Button("Compare …", id="tab-b", className="side", role="tab", **aria(selected="false")),
        ],
        className="sides",
        role="tablist",
    )
    sides = [_controls(p, first, hidden=p != "a") for p in PLANS]
    done = html.Button("Show the answer", id="drawer-close")
    return html.Aside([done, tabs, *sides, _run(_question(first))], className="panel", **aria(label="Plans"))


def _question(first: Plan) -> dict[str, Any]:
    """What the page begins with, or the [run] of the job it is started with."""
    from presage.ui.question import FIRST_QUESTION, question_of

    return question_of(first.run) or FIRST_QUESTION


def _controls(plan: str, first: Plan, hidden: bool) -> Any:
    parts = [
        html.P("", id=f"wrong-{plan}", className="wrong", role="alert"),
        *fields(plan, first.knobs),
        html.P("", id=f"dp-{plan}", className="derived"),
        _acts(plan),
        _text(plan),
    ]
    return html.Div(parts, id=f"controls-{plan}", className="controls", hidden=hidden, role="tabpanel")


def _acts(plan: str) -> Any:
    if plan == "a":
        return html.Div(
            [
                html.Button(BEST, id="best", title="Search all legal plans; the best goes to plan B"),
                html.Button(
                    "Fewer and more GPUs", id="sweep", title="Curves of the plan on an eighth to eight times as many"
                ),
                html.Button("Copy A to B", id="copy-plan", title="Plan B becomes what plan A is now"),
            ],
            className="acts",
        )
    return html.Div(
        [
            html.Button("Make it plan A", id="keep-b", title="Plan A becomes what plan B is now"),
            html.Button("Close plan B", id="close-b"),
        ],
        className="acts",
    )


def _text(plan: str) -> Any:
    """The job's file, to look at, to change, to take away."""
    return html.Details(
        [
            html.Summary("TOML of this plan"),
            dcc.Textarea(id={"plan": plan, "text": "toml"}, value="", spellCheck=False, className="toml",
                         maxLength=40_000),
            html.P("", id=f"text-wrong-{plan}", className="wrong", role="alert"),
            html.Div(
                [
                    html.Button("Apply", id=f"apply-{plan}", title="Set the controls as this text says"),
                    html.Button("Download", id=f"download-{plan}", title="A file that `presage job` takes"),
                    *(html.Button(label, id={"plan": plan, "export": kind}) for kind, label in EXPORTS.items()),
                    html.Button("Open …", id=f"open-{plan}", className="open-file", title=OPENED),
                ],
                className="acts",
            ),
        ],
        className="text",
    )  # fmt: skip


def _run(said: Mapping[str, Any]) -> Any:
    """What is asked of the run: by when, and what goes wrong until then."""
    from presage.runs.sets import names, reliability

    conditions = [{"value": k, "label": v} for k, v in CONDITIONS.items()]
    sets = [{"value": n, "label": reliability(n).name} for n in names()]
    controls = {
        "tokens": dcc.Input(id="tokens", type="text", value=said["tokens"], **TYPED),
        "days": _number("days", said),
        "noise": dcc.Dropdown(id="noise", options=conditions, value=said["noise"], **CHOSEN_ONE),
        "failures": dcc.Dropdown(id="failures", options=sets, value=said["failures"], **CHOSEN_ONE),
        "rate": _number("rate", said, "as in these"),
        "restart": _number("restart", said, "as in these"),
        "spares": _number("spares", said, "always one"),
        "interval": dcc.Input(id="interval", type="text", value=said["interval"], placeholder="auto", **TYPED),
    }
    return html.Fieldset(
        [
            html.Legend("The run, for both plans"),
            *(_ask(name, label, controls[name], about) for name, (label, about) in ASKED.items()),
            html.P("", id="wrong-asked", className="wrong", role="alert"),
        ],
        className="asked",
    )


def _number(name: str, said: Mapping[str, Any], empty: str = "") -> Any:
    return dcc.Input(id=name, type="number", value=said[name], min=0, step="any", placeholder=empty, **TYPED)


def _ask(name: str, label: str, control: Any, about: str) -> Any:
    return html.Div(
        [html.Label(label, title=about), control],
        id=f"field-{name}",
        className=f"field {name}",
        title=about,
        role="group",
        **aria(label=label),
    )


# ---- answers


def _answers() -> Any:
    heads = html.Div([_head(p) for p in PLANS], className="heads")
    charts = html.Div([_chart(name, *words) for name, words in CHARTS.items()], className="charts")
    marks = [html.I("", id=f"stale-{p}", className=f"mark {p}") for p in PLANS]  # rules of ui.css look at their classes
    parts = [_dropped(), heads, _search(), html.Div("", id="difference"), charts, html.Footer("", id="notes")]
    return html.Main([*marks, *parts], id="main")


def _dropped() -> Any:
    """The answer to a trace that was dropped on the page."""
    chart = dcc.Graph(id="dropped-chart", config=GRAPH, figure=_blank(), responsive=True, style={"height": "320px"})
    buttons = [html.Button("Save the report", id="dropped-save"), html.Button("Close", id="dropped-close")]
    top = html.Div([html.H2("", id="dropped-title"), html.Div(buttons, className="acts")], className="title")
    return html.Section([top, html.Div("", id="dropped-card"), html.Div(chart, id="dropped-figure"),
                         html.Div("", id="dropped-tables")],
                        id="dropped-trace", className="dropped", hidden=True)  # fmt: skip


def _search() -> Any:
    """A search under way, and the plans that it found."""
    under_way = html.Div(
        [
            html.Progress(id="search-done", max="100", value="0", **aria(label="Search")),
            html.Span("", id="search-text", **LIVE),
            html.Button("Stop and show what there is", id="search-stop"),
        ],
        id="search-box",
        className="search",
        hidden=True,
    )
    chart = dcc.Graph(id="found-chart", config=GRAPH, figure=_blank(), responsive=True, style={"height": "420px"})
    table = html.Div([html.Div("", id="found-table", className="scroll"), chart], className="pair")
    found = html.Section([html.H2("The ten best plans"), html.P("", id="found-text", className="lead"), table],
                         id="found-plans", hidden=True)  # fmt: skip
    curves = dcc.Graph(id="sweep-chart", config=GRAPH, figure=_blank(), responsive=True, style={"height": "560px"})
    about = "The plan on other numbers of GPUs, repaired where it cannot be run; hollow where it does not fit."
    sweep = html.Section([html.H2("Fewer and more GPUs"), html.P(about, className="lead"), curves,
                          html.Div("", id="sweep-table")], id="sweep-plans", hidden=True)  # fmt: skip
    return html.Div([under_way, found, sweep])


def _head(p: str) -> Any:
    """What was changed or is wrong, with buttons; and the answer."""
    notice = html.Div("", id=f"notice-{p}", className="notice", role="alert")
    answer = html.Article("", id=f"answer-{p}", className=f"answer {p}", **LIVE)
    return html.Div([notice, answer], className=f"head {p}")


def _chart(name: str, title: str, lead: str) -> Any:
    cells = [
        html.Div(
            [
                html.Span(p.upper(), className=f"letter {p}"),
                html.P("", id={"plan": p, "lead": name}, className="lead"),
                dcc.Graph(
                    id={"plan": p, "chart": name},
                    config=GRAPH,
                    figure=_blank(),
                    responsive=True,
                    style={"height": f"{TALL[name]}px"},
                ),
                html.Div("", id={"plan": p, "numbers": name}),
            ],
            className=f"cell {p}",
        )
        for p in PLANS
    ]
    return html.Section([html.H2(title), html.P(lead, className="lead"), html.Div(cells, className="cells")],
                        className=f"chart-{name}")  # fmt: skip


def _blank() -> dict[str, Any]:
    axis = {"visible": False}
    return {"data": [], "layout": {"xaxis": axis, "yaxis": axis, "paper_bgcolor": "rgba(0,0,0,0)",
                                   "plot_bgcolor": "rgba(0,0,0,0)"}}  # fmt: skip
