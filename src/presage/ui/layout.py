"""The page: controls on the left, answers on the right, first of one plan, then of two side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dash import dcc, html

from presage.configs.frameworks import frameworks
from presage.configs.models import preset_facts
from presage.hardware import platforms
from presage.ui.knobs import KEPT, KNOBS, Knob

if TYPE_CHECKING:
    from presage.configs.job import Job
    from presage.ui.plans import Plan


PLANS = ("a", "b")
BEST = "Best plan for these GPUs"
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
            dcc.Interval(id="search-tick", interval=400, disabled=True),
            dcc.Download(id="download")]  # fmt: skip


def _top() -> Any:
    return html.Header(
        [
            html.Div([html.Span("presage", className="brand"), html.Span("plan a training job", className="soft")]),
            html.Div(
                [
                    html.Span("", id="told", role="status", **LIVE),
                    html.Button("Copy link", id="copy-link", title="A link that opens both plans as they are now"),
                    html.Button("◐", id="theme-switch", title="Light or dark", **_aria(label="Light or dark")),
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
            html.Button("Plan A", id="tab-a", className="side on", role="tab", **_aria(selected="true")),
            html.Button("Compare …", id="tab-b", className="side", role="tab", **_aria(selected="false")),
        ],
        className="sides",
        role="tablist",
    )
    sides = [_controls(p, first, hidden=p != "a") for p in PLANS]
    done = html.Button("Show the answer", id="drawer-close")
    return html.Aside([done, tabs, *sides, _run()], className="panel", **_aria(label="Plans"))


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
                    *(html.Button(label, id={"plan": plan, "export": kind}) for kind, label in EXPORTS.items()),
                    dcc.Upload(html.Button("Upload"), id=f"upload-{plan}", accept=".toml", max_size=65_536),
                ],
                className="acts",
            ),
        ],
        className="text",
    )  # fmt: skip


def _run() -> Any:
    from presage.ui.question import FIRST_QUESTION as asked

    options = [{"value": k, "label": v} for k, v in CONDITIONS.items()]
    return html.Fieldset(
        [
            html.Legend("The run, for both plans"),
            _ask("tokens", "Tokens", dcc.Input(id="tokens", type="text", value=asked["tokens"], debounce=0.4,
                                                 autoComplete="off"), "Training tokens, e.g. 15T or 300B"),
            _ask("days", "Deadline, days", dcc.Input(id="days", type="number", value=asked["days"], min=0, step="any",
                                                       debounce=0.4, autoComplete="off"), "After the start"),
            _ask("noise", "GPUs are", dcc.Dropdown(id="noise", options=options, value=asked["noise"], clearable=False,
                                                     searchable=False), "Noise preset"),
            html.P("", id="wrong-asked", className="wrong", role="alert"),
        ],
        className="asked",
    )  # fmt: skip


def _ask(name: str, label: str, control: Any, about: str) -> Any:
    return html.Div(
        [html.Label(label, title=about), control],
        id=f"field-{name}",
        className=f"field {name}",
        title=about,
        role="group",
        **_aria(label=label),
    )


# ---- answers


def _answers() -> Any:
    heads = html.Div([_head(p) for p in PLANS], className="heads")
    charts = html.Div([_chart(name, *words) for name, words in CHARTS.items()], className="charts")
    marks = [html.I("", id=f"stale-{p}", className=f"mark {p}") for p in PLANS]  # rules of ui.css look at their classes
    parts = [heads, _search(), html.Div("", id="difference"), charts, html.Footer("", id="notes")]
    return html.Main([*marks, *parts], id="main")


def _search() -> Any:
    """A search under way, and the plans that it found."""
    under_way = html.Div(
        [
            html.Progress(id="search-done", max="100", value="0", **_aria(label="Search")),
            html.Span("", id="search-text", **LIVE),
            html.Button("Stop and show the best so far", id="search-stop"),
        ],
        id="search-box",
        className="search",
        hidden=True,
    )
    chart = dcc.Graph(id="found-chart", config=GRAPH, figure=_blank(), responsive=True, style={"height": "420px"})
    table = html.Div([html.Div("", id="found-table", className="scroll"), chart], className="pair")
    found = html.Section([html.H2("The ten best plans"), html.P("", id="found-text", className="lead"), table],
                         id="found-plans", hidden=True)  # fmt: skip
    return html.Div([under_way, found])


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


def _aria(**words: str) -> dict[str, Any]:
    """Attributes for screen readers: aria-label, aria-selected."""
    return {f"aria-{name}": word for name, word in words.items()}


# ---- The controls of a plan: a labelled field for every knob, with the choices that its model and GPUs leave.

GROUPS = ("What", "Parallelism", "Training")
CHOSEN = ("tp", "pp", "cp", "ep", "virtual", "micro_batch", "precision")  # whose choices depend on the others
LARGEST = 20  # 2 to the power of it GPUs are the slider's end
MOST_TP, LEAST_TOKENS, MANY = 72, 256, 64
TYPED = ("gpus", "global_batch", "sequence")


def fields(plan: str, values: Mapping[str, Any]) -> list[Any]:
    """All controls of a plan, in groups."""
    return [
        html.Fieldset([html.Legend(group), *(_field(plan, k, values) for k in KNOBS if k.group == group)])
        for group in GROUPS
    ]


def _field(plan: str, k: Knob, values: Mapping[str, Any]) -> Any:
    ident = {"plan": plan, "knob": k.name}
    name = f"{k.name}-{plan}-label"
    parts = [html.Label(k.label, id=name, title=k.about), _control(k, ident, values.get(k.name))]
    if k.name == "gpus":
        parts.append(_slider(plan, values["gpus"]))
    place = {"plan": plan, "field": k.name}
    return html.Div(parts, id=place, className=f"field {k.name}", title=k.about, role="group", **_aria(label=k.label))


def _control(k: Knob, ident: dict[str, str], value: Any) -> Any:
    if k.kind == "price" or k.name in TYPED:
        least, step = (0, "any") if k.kind == "price" else (1, 1)
        return dcc.Input(id=ident, type="number", value=value, min=least, step=step, debounce=0.25, inputMode="numeric",
                         placeholder="per GPU-hour" if k.kind == "price" else "", autoComplete="off")  # fmt: skip
    return dcc.Dropdown(id=ident, options=options_of(k, value), value=value, clearable=False,
                        searchable=k.name in ("model", "platform", "framework"), optionHeight="auto")  # fmt: skip


def _slider(plan: str, gpus: int) -> Any:
    marks = {i: {"label": _short(2**i)} for i in (0, 5, 10, 15, 20)}
    return dcc.Slider(id={"plan": plan, "slider": "gpus"}, min=0, max=LARGEST, step=1, value=round(_log2(gpus)),
                      marks=marks, updatemode="drag", allow_direct_input=False)  # fmt: skip


def _log2(gpus: int) -> float:
    return min(float(LARGEST), float(max(1, gpus).bit_length() - 1))


def _short(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count >= 1 << 10 else str(count)


# ---- choices


def options_of(k: Knob, value: Any) -> list[dict[str, Any]]:
    """The options of a knob before anything else is known."""
    if k.name == "model":
        return _with(_models(), value)
    if k.name == "platform":
        return _with(_clusters(), value)
    if k.name == "framework":
        return _with([_choice(name) for name in frameworks()], value)
    if k.kind == "count":
        return _with([_choice(n) for n in (1, 2, 4, 8, 16)], value)
    return _with([_choice(word) for word in k.words], value)


@cache
def _models() -> list[dict[str, Any]]:
    return [_choice(name, f"{name}, {f['parameters_B']:.4g} B") for name, f in preset_facts().items()]


@cache
def _clusters() -> list[dict[str, Any]]:
    return [_choice(p.key, f"{p.key}: {p.gpu.name}") for p in platforms()]


def _choice(value: Any, label: str | None = None) -> dict[str, Any]:
    return {"value": value, "label": label or str(value)}


def _with(options: list[dict[str, Any]], value: Any) -> list[dict[str, Any]]:
    """What is chosen stays in the list, so that the page can say what is wrong with it."""
    known = any(o["value"] == value for o in options)
    if known or value is None:
        return options
    if value == KEPT:
        return [_choice(KEPT), *options]
    return [*options, {"value": value, "label": f"{value} (not possible)"}]


def choices(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Degrees that divide what they have to, with what the job has now."""
    m, p = job.model, job.parallel
    experts = m.experts.experts if m.experts else 1
    peaks = _precisions(job)
    found: dict[str, tuple[list[Any], Any]] = {
        "tp": ([t for t in divisors(m.heads) if t <= MOST_TP and not m.ffn % t and not job.gpus % t], p.tp),
        "pp": ([n for n in divisors(job.gpus) if n <= min(m.layers + 2, MANY)], p.pp),
        "cp": ([n for n in divisors(job.gpus) if n == 1 or _context(job, n)], p.cp),
        "ep": ([n for n in divisors(experts) if not job.gpus % n], p.ep),
        "virtual": ([n for n in range(1, 17) if n == 1 or (p.pp > 1 and n * p.pp <= m.layers + 2)], p.virtual),
        "micro_batch": ([1 << i for i in range(8) if 1 << i <= job.global_batch], job.micro_batch),
        "precision": (peaks, job.precision),
    }  # fmt: skip
    return {name: _with([_choice(v) for v in values], now) for name, (values, now) in found.items()}


def divisors(n: int) -> list[int]:
    """Up to those that a knob may be turned to."""
    return [d for d in range(1, min(n, 4096) + 1) if not n % d]


def _context(job: Job, n: int) -> bool:
    return n <= MANY and not job.sequence % (2 * n) and job.sequence // n >= LEAST_TOKENS


def _precisions(job: Job) -> list[str]:
    from presage.configs.check import supported
    from presage.configs.job import PRECISIONS

    gpu = job.platform.gpu
    return [p for p in PRECISIONS if supported(p, gpu.peak, gpu.architecture)]
