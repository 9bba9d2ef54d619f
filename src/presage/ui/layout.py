"""The page: controls on the left, answers on the right, first of one plan, then of two side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import dcc, html

from presage.ui.controls import fields

if TYPE_CHECKING:
    from presage.ui.plans import Plan

__all__ = ["BEST", "CHARTS", "PLANS", "page"]

PLANS = ("a", "b")
BEST = "Best plan for these GPUs"
LIVE: dict[str, Any] = {"aria-live": "polite"}  # read out when it changes
CHARTS = {
    "parts": ("Where the step goes", "Seconds on the stage that works longest; transfers where nothing hides them."),
    "memory": ("Memory of a GPU", "Of the stage that needs most, against what a GPU has."),
    "sure": ("How sure is the step?", "Steps drawn with the noise of such GPUs, and the chance of a longer one."),
    "run": ("When will the run end?", "Whole runs drawn with failures, checkpoints, restarts and presage's own error."),
}  # fmt: skip
CONDITIONS = {
    "screened": "screened, as for benchmarks", "production": "in production", "unscreened": "never screened",
}  # fmt: skip
TALL = {"parts": 350, "memory": 350, "sure": 450, "run": 450}  # pixels
GRAPH: Any = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def page(first: Plan) -> Any:
    """Both plans begin as `first`; the second is not shown until somebody compares."""
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            *_stores(first),
            _top(),
            html.Div([_panel(first), _answers()], id="work", className="work one"),
        ],
        id="page",
    )


def _stores(first: Plan) -> list[Any]:
    kinds = ("step", "ask", "sure", "run", "figures")
    out = [dcc.Store(id={"plan": p, "store": kind}) for p in PLANS for kind in kinds]
    out += [dcc.Store(id={"plan": p, "store": "rest"}, data=dict(first.rest)) for p in PLANS]
    return [*out, dcc.Store(id="two", data=False), dcc.Store(id="theme"), dcc.Store(id="link"), dcc.Store(id="opened"),
            dcc.Download(id="download")]  # fmt: skip


def _top() -> Any:
    return html.Header(
        [
            html.Div([html.Span("presage", className="brand"), html.Span("plan a training job", className="soft")]),
            html.Div(
                [
                    html.Span("", id="told", role="status", **LIVE),
                    html.Button("Copy link", id="copy-link", title="A link that opens both plans as they are now"),
                    html.Button("◐", id="theme-switch", title="Light or dark", **_named("Light or dark")),
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
            html.Button("Plan A", id="tab-a", className="side on", role="tab", **_chosen("true")),
            html.Button("Compare …", id="tab-b", className="side", role="tab", **_chosen("false")),
        ],
        className="sides",
        role="tablist",
    )
    sides = [_controls(p, first, hidden=p != "a") for p in PLANS]
    return html.Aside([tabs, *sides, _run()], className="panel", **_named("Plans"))


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
                    dcc.Upload(html.Button("Upload"), id=f"upload-{plan}", accept=".toml", max_size=65_536),
                ],
                className="acts",
            ),
        ],
        className="text",
    )  # fmt: skip


def _run() -> Any:
    from presage.ui.asked import ASKED as asked

    options = [{"value": k, "label": v} for k, v in CONDITIONS.items()]
    return html.Fieldset(
        [
            html.Legend("The run, for both plans"),
            _asked("tokens", "Tokens", dcc.Input(id="tokens", type="text", value=asked["tokens"], debounce=0.4,
                                                 autoComplete="off"), "To train on, such as 15T or 300B"),
            _asked("days", "Deadline, days", dcc.Input(id="days", type="number", value=asked["days"], min=0, step="any",
                                                       debounce=0.4, autoComplete="off"), "After the start"),
            _asked("noise", "GPUs are", dcc.Dropdown(id="noise", options=options, value=asked["noise"], clearable=False,
                                                     searchable=False), "What is assumed of their noise"),
            html.P("", id="wrong-asked", className="wrong", role="alert"),
        ],
        className="asked",
    )  # fmt: skip


def _asked(name: str, label: str, control: Any, about: str) -> Any:
    return html.Div(
        [html.Label(label, title=about), control],
        id=f"field-{name}",
        className=f"field {name}",
        title=about,
        role="group",
        **_named(label),
    )


# ---- answers


def _answers() -> Any:
    answers = [html.Article("", id=f"answer-{p}", className=f"answer {p}", **LIVE) for p in PLANS]
    heads = html.Div(answers, className="heads")
    charts = html.Div([_chart(name, *words) for name, words in CHARTS.items()], className="charts")
    return html.Main([heads, html.Div("", id="difference"), charts, html.Footer("", id="notes")])


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


def _named(label: str) -> dict[str, Any]:
    return {"aria-label": label}


def _chosen(word: str) -> dict[str, Any]:
    return {"aria-selected": word}
