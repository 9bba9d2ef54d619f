"""What happens when: the page's events, and the replies they get. Nothing is kept here between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, no_update

from presage.ui.knobs import InvalidPlan, knob
from presage.ui.layout import BEST, CHARTS, CHOSEN, PLANS, options_of
from presage.ui.replies import (
    NAMES,
    best_reply,
    export_reply,
    link_reply_of,
    open_text,
    question_reply,
    run_reply,
    spread_reply,
    turn_reply,
)

Value = Any
ALLOWED: Any = {"allow_duplicate": True}


def register(app: Dash) -> None:
    _answers(app)
    _draws(app)
    _shown(app)
    _opening(app)
    _in_browser(app)


def _knobs(plan: str) -> dict[str, Any]:
    return {"plan": plan, "knob": ALL}


def _store(plan: Any, kind: str) -> dict[str, Any]:
    return {"plan": plan, "store": kind}


def _into(plan: str) -> list[Any]:
    """Where a plan that comes from elsewhere is put."""
    return [Output(_knobs(plan), "value", **ALLOWED), Output(_store(plan, "rest"), "data", **ALLOWED)]


# ---- answers at once


def _answers(app: Dash) -> None:
    inputs = [Input(_knobs(p), "value") for p in PLANS] + [Input(_store(p, "rest"), "data") for p in PLANS]
    outputs: list[Any] = []
    for p in PLANS:
        outputs += [
            Output(_store(p, "step"), "data"), Output(_store(p, "figures"), "data"),
            Output({"plan": p, "text": "toml"}, "value"), Output(f"wrong-{p}", "children"),
            Output(f"dp-{p}", "children"), Output({"plan": p, "field": ALL}, "className"),
            Output(_knobs(p), "value", **ALLOWED), Output(_store(p, "kept"), "data"),
            *(Output({"plan": p, "knob": name}, "options") for name in (*CHOSEN, "model", "platform", "recompute")),
        ]  # fmt: skip
    outputs += [Output("wrong-asked", "children"), Output("link", "data")]
    asked = [Input("tokens", "value"), Input("days", "value"), Input("noise", "value"), Input("two", "data")]

    kept = [State(_store(p, "kept"), "data") for p in PLANS]
    busy = [(Output("main", "className"), "busy", "")]

    @app.callback(outputs, [*inputs, *asked], kept, prevent_initial_call="initial_duplicate", running=busy)
    def answers(a: Value, b: Value, rest_a: Value, rest_b: Value, *said: Value) -> list[Any]:
        *said_of_run, kept_a, kept_b = said
        return answered({"a": (a, rest_a, kept_a), "b": (b, rest_b, kept_b)}, *said_of_run)


def answered(plans: Mapping[str, tuple[Any, Any, Any]], tokens: Any, days: Any, noise: Any, two: Any) -> list[Any]:
    """All that changes at once."""
    asked = question_reply(tokens, days, noise)
    out: list[Any] = []
    texts: dict[str, str] = {}
    for p in PLANS:
        values = named(plans[p][0])
        if p == "b" and two is not True:
            out += _nothing()
            continue
        reply = turn_reply(values, plans[p][1], asked.get("asked"), plans[p][2])
        texts |= {p: reply["text"]} if "text" in reply else {}
        out += _outputs_of(reply, values)
    return [*out, asked.get("wrong", ""), link(texts, asked.get("asked"))]


def named(values: Any) -> dict[str, Any]:
    """The values of controls in the order of knobs, by name."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(NAMES):
        raise InvalidPlan(f"a plan has {len(NAMES)} knobs")
    return dict(zip(NAMES, values, strict=True))


def _outputs_of(reply: Mapping[str, Any], values: Mapping[str, Any]) -> list[Any]:
    bad, figures = reply.get("knobs", ()), reply.get("figures", no_update)
    shown = {k: v for k, v in reply.items() if k not in ("figures", "choices", "kept", "values")}
    now = dict(zip(NAMES, reply.get("values", values.values()), strict=True))
    classes = [f"field {name}{' bad' if name in bad else ''}" for name in NAMES]
    choices = reply.get("choices", {})
    options = [choices.get(name, no_update) for name in CHOSEN]
    options += [options_of(knob(name), now.get(name)) for name in ("model", "platform", "recompute")]
    return [
        shown,
        figures,
        reply.get("text", no_update),
        reply.get("wrong", ""),
        reply.get("derived", ""),
        classes,
        [now[name] if now[name] != values[name] else no_update for name in NAMES],
        reply.get("kept", no_update),
        *options,
    ]


def _nothing() -> list[Any]:
    same = [no_update] * len(NAMES)
    classes = [f"field {n}" for n in NAMES]
    return [None, None, no_update, "", "", classes, same, None, *([no_update] * (len(CHOSEN) + 3))]


def link(texts: Mapping[str, str], asked: Mapping[str, Any] | None) -> str:
    from presage.ui.question import SharedPlans, make_link

    said = {k: "" if v is None else str(v) for k, v in (asked or {}).items()}
    return make_link(SharedPlans(dict(texts), said)) if texts else ""


# ---- draws


def _draws(app: Dash) -> None:
    """The browser asks for them when controls have come to rest."""
    cast(Any, app).clientside_callback(
        ClientsideFunction("presage", "settled"),
        Output(_store(MATCH, "ask"), "data"),
        Input(_store(MATCH, "step"), "data"),
    )
    cast(Any, app).clientside_callback(
        ClientsideFunction("presage", "again"),
        Output(_store(MATCH, "ask"), "data", **ALLOWED),
        [Input(_store(MATCH, "sure"), "data"), Input(_store(MATCH, "run"), "data")],
        State(_store(MATCH, "ask"), "data"),
        prevent_initial_call=True,
    )
    for kind, reply in (("sure", spread_reply), ("run", run_reply)):

        @app.callback(Output(_store(MATCH, kind), "data"), Input(_store(MATCH, "ask"), "data"))
        def drawn(ask: Value, reply: Any = reply) -> Any:
            return drawn_reply(reply, ask)


def drawn_reply(reply: Any, ask: Any) -> Any:
    if (
        not isinstance(ask, Mapping)
        or not isinstance(ask.get("text"), str)
        or not isinstance(ask.get("asked"), Mapping)
    ):
        return None
    said = ask["asked"]
    return reply(ask["text"], {name: said.get(name) for name in ("tokens", "days", "noise")})


# ---- what is shown


def _shown(app: Dash) -> None:
    """Twice, once for what is known at once and once for draws: Dash holds a callback back while any of its inputs is
    being worked out, and the first must not wait for the second."""

    def outputs(**more: Any) -> list[Any]:
        parts = [({"plan": p, part: kind}) for p in PLANS for kind in ("sure", "run") for part in ("lead", "numbers")]
        ids: list[Any] = [
            *(f"notice-{p}" for p in PLANS),
            *(f"answer-{p}" for p in PLANS),
            "difference",
            *parts,
            "notes",
        ]
        stale = [Output(f"stale-{p}", "className", **more) for p in PLANS]
        return [*(Output(i, "children", **more) for i in ids), *stale, Output("bar-text", "children", **more)]

    def stores(kind: Any, *names: str) -> list[Any]:
        return [kind(_store(p, name), "data") for p in PLANS for name in names]

    @app.callback(outputs(), stores(Input, "step"), stores(State, "sure", "run"))
    def at_once(a: Value, b: Value, *drawn: Value) -> list[Any]:
        return shown_of({"a": (a, *drawn[:2]), "b": (b, *drawn[2:])})

    @app.callback(outputs(**ALLOWED), stores(Input, "sure", "run"), stores(State, "step"), prevent_initial_call=True)
    def when_drawn(sure_a: Value, run_a: Value, sure_b: Value, run_b: Value, a: Value, b: Value) -> list[Any]:
        return shown_of({"a": (a, sure_a, run_a), "b": (b, sure_b, run_b)})


def shown_of(replies: Mapping[str, Sequence[Any]]) -> list[Any]:
    """What is wrong with a plan leaves its last answer as it is, marked as such."""
    from presage.ui.shown import answer, bar, collect_measures, difference, notes, notice, numbers_table

    sound = {p: [r if isinstance(r, Mapping) else None for r in replies[p]] for p in PLANS}
    wrong = {p: "wrong" in (sound[p][0] or {}) for p in PLANS}
    told = {p: collect_measures(*sound[p]) for p in PLANS}
    two = sound["b"][0] is not None
    out: list[Any] = [notice(p, sound[p][0], two) for p in PLANS]
    out += [
        no_update if wrong[p] else answer(p, sound[p], told["a"] if p == "b" else {}, two) for p in PLANS
    ]  # fmt: skip
    texts = [(sound[p][0] or {}).get("text", "") for p in PLANS]
    out.append(no_update if any(wrong.values()) else difference(told["a"], told["b"], texts))
    for p in PLANS:
        step = sound[p][0] or {}
        for reply in sound[p][1:]:
            now = reply if reply and ("wrong" in reply or reply.get("key") == step.get("key")) else {}
            lead = now.get("wrong") or now.get("lead", no_update if step else "")
            out += [lead, numbers_table(now["numbers"]) if "numbers" in now else no_update if step else []]
    out.append(notes({p: sound[p][0] for p in PLANS}))
    marks = (f"mark {p} {'stale' if wrong[p] else ''}".strip() for p in PLANS)
    return [*out, *marks, bar({p: sound[p] for p in PLANS})]


# ---- links, texts, the best plan


def _opening(app: Dash) -> None:
    sets = [Output(_knobs(p), "value", **ALLOWED) for p in PLANS] + [
        Output(_store(p, "rest"), "data", **ALLOWED) for p in PLANS
    ]
    more = [Output(name, "value", **ALLOWED) for name in ("tokens", "days", "noise")]
    told = Output("told", "children", **ALLOWED)

    @app.callback(
        [*sets, *more, Output("two", "data", **ALLOWED), told, Output("opened", "data")],
        Input("url", "hash"), State("link", "data"), prevent_initial_call="initial_duplicate",
    )  # fmt: skip
    def link_opened(fragment: Value, now: Value) -> list[Any]:
        return link_reply(fragment, now)

    for p in PLANS:

        @app.callback(
            [*_into(p), Output(f"text-wrong-{p}", "children")],
            [Input(f"apply-{p}", "n_clicks"), Input(f"upload-{p}", "contents")],
            State({"plan": p, "text": "toml"}, "value"), prevent_initial_call=True,
        )  # fmt: skip
        def applied(_: Value, file: Value, text: Value) -> list[Any]:
            return text_reply(file, text)

    _searching(app, told)


def _searching(app: Dash, told: Any) -> None:
    running = [
        (Output("best", "disabled"), True, False), (Output("best", "children"), "Searching …", BEST),
        (Output("search-box", "hidden"), False, True), (Output("search-tick", "disabled"), False, True),
    ]  # fmt: skip

    @app.callback(
        [*_into("b"), Output("two", "data", **ALLOWED), told, Output("found", "data"),
         Output("found-table", "children"), Output("found-text", "children"), Output("found-plans", "hidden")],
        Input("best", "n_clicks"), [State(_store("a", "step"), "data"), State("page-id", "data")],
        prevent_initial_call=True, running=running,
    )  # fmt: skip
    def best(_: Value, step: Value, page: Value) -> list[Any]:
        return searched(step, page)

    @app.callback(
        [Output("search-done", "value"), Output("search-text", "children")],
        Input("search-tick", "n_intervals"), State("page-id", "data"), prevent_initial_call=True,
    )  # fmt: skip
    def how_far(_: Value, page: Value) -> list[Any]:
        from presage.ui.searching import progress

        done, words = progress(page)
        return [f"{done:.0f}", words]

    @app.callback(Output("search-text", "children", **ALLOWED), Input("search-stop", "n_clicks"),
                  State("page-id", "data"), prevent_initial_call=True)  # fmt: skip
    def stopped(_: Value, page: Value) -> str:
        from presage.ui.searching import stop

        stop(page)
        return "Stopping …"

    for p in PLANS:

        @app.callback(Output("download", "data", **ALLOWED), Input({"plan": p, "export": ALL}, "n_clicks"),
                      State(_store(p, "step"), "data"), prevent_initial_call=True)  # fmt: skip
        def exported(_: Value, step: Value) -> Any:
            return export_of(step)


def export_of(step: Any) -> Any:
    """The file of the button that was pressed."""
    from dash import ctx

    kind = ctx.triggered_id.get("export") if isinstance(ctx.triggered_id, Mapping) else None
    if not any(t.get("value") for t in ctx.triggered) or not isinstance(step, Mapping) or not step.get("asked"):
        return no_update
    found = export_reply(step["text"], step["asked"], kind)
    return no_update if "wrong" in found else found


def searched(step: Any, page: Any) -> list[Any]:
    """Plan B, and the table of the best plans."""
    from presage.ui.shown import found_table

    text = step.get("text") if isinstance(step, Mapping) else None
    found = best_reply(text, str(page)) if isinstance(text, str) else {"wrong": "mend plan A first"}
    if "wrong" in found:
        return [[no_update] * len(NAMES), no_update, no_update, found["wrong"], *([no_update] * 4)]
    kept = {"plans": found["plans"], "figure": found["figure"]}
    told = "Plan B is the best that was found"
    return [found["knobs_set"], found["rest"], True, told, kept, found_table(found), found["lead"], False]


def link_reply(fragment: Any, now: Any) -> list[Any]:
    """Values of all controls; nothing changes without a link, or with the one that is shown."""
    same = [[no_update] * len(NAMES)] * 2 + [no_update] * 2 + [no_update] * 3
    if not isinstance(fragment, str) or len(fragment) < 2 or fragment == now:
        return [*same, no_update, no_update, True]
    found = link_reply_of(fragment)
    if "wrong" in found:
        return [*same, no_update, found["wrong"], True]
    plans, asked = found["plans"], found["asked"]
    if not plans:
        return [*same, no_update, no_update, True]
    knobs = [plans[p]["knobs_set"] if p in plans else [no_update] * len(NAMES) for p in PLANS]
    rests = [plans[p]["rest"] if p in plans else no_update for p in PLANS]
    said = [asked.get("tokens", no_update), _number(asked.get("days")), asked.get("noise", no_update)]
    return [*knobs, *rests, *said, "b" in plans, "", True]


def _number(text: str | None) -> Any:
    try:
        return None if not text else float(text)
    except ValueError:
        return None


def text_reply(file: Any, text: Any) -> list[Any]:
    """From a text, or a file that was given just now."""
    from dash import ctx

    if ctx.triggered_id is not None and str(ctx.triggered_id).startswith("upload"):
        text = uploaded(file)
    found = open_text(text) if isinstance(text, str) else {"wrong": "that file is no text: give a job's TOML"}
    if "wrong" in found:
        return [[no_update] * len(NAMES), no_update, found["wrong"]]
    return [found["knobs_set"], found["rest"], ""]


def uploaded(contents: Any) -> str | None:
    """The text of a data: address."""
    import base64
    import binascii

    try:
        return base64.b64decode(str(contents).partition(",")[2], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


# ---- what the browser does by itself


def _in_browser(app: Dash) -> None:
    def own(name: str, outputs: Any, *inputs: Any, **more: Any) -> None:
        cast(Any, app).clientside_callback(ClientsideFunction("presage", name), outputs, *inputs, **more)

    own("slid", [Output({"plan": MATCH, "slider": "gpus"}, "value"), Output({"plan": MATCH, "knob": "gpus"}, "value")],
        Input({"plan": MATCH, "slider": "gpus"}, "value"), Input({"plan": MATCH, "knob": "gpus"}, "value"),
        prevent_initial_call=True)  # fmt: skip
    own("themed", Output("theme", "data"), Input("theme-switch", "n_clicks"))
    for kind in CHARTS:
        source = "figures" if kind in ("parts", "memory") else kind
        own(f"draw_{kind}", [Output({"plan": p, "chart": kind}, "figure") for p in PLANS],
            *[Input(_store(p, source), "data") for p in PLANS], Input("theme", "data"))  # fmt: skip
    own("linked", Output("told", "children", **ALLOWED), Input("link", "data"), Input("opened", "data"),
        Input("copy-link", "n_clicks"), prevent_initial_call=True)  # fmt: skip
    own("turned", [Output("work", "className"), Output("tab-a", "className"), Output("tab-b", "className"),
                   Output("tab-b", "children"), Output("controls-a", "hidden"), Output("controls-b", "hidden")],
        Input("tab-a", "n_clicks"), Input("tab-b", "n_clicks"), Input("two", "data"))  # fmt: skip
    both = {p: [State(_knobs(p), "value"), State(_store(p, "rest"), "data")] for p in PLANS}
    two = Output("two", "data", **ALLOWED)
    own("copied", [*_into("b"), two], Input("copy-plan", "n_clicks"), Input("tab-b", "n_clicks"), State("two", "data"),
        *both["a"], prevent_initial_call=True)  # fmt: skip
    own("kept", _into("a"), Input("keep-b", "n_clicks"), *both["b"], prevent_initial_call=True)
    for p in PLANS:
        own("offered", Output(_knobs(p), "value", **ALLOWED), Input({"plan": p, "offer": ALL}, "n_clicks"),
            State(_store(p, "step"), "data"), State(_knobs(p), "value"), prevent_initial_call=True)  # fmt: skip
    own("drawn_found", Output("found-chart", "figure"), Input("found", "data"), Input("theme", "data"))
    own("chosen", [*_into("a"), *_into("b"), two], Input({"found": ALL, "to": ALL}, "n_clicks"), State("found", "data"),
        *[State(_knobs(p), "value") for p in PLANS], prevent_initial_call=True)  # fmt: skip
    own("closed", two, Input("close-b", "n_clicks"), prevent_initial_call=True)
    own("saved", Output("download", "data"), *[Input(f"download-{p}", "n_clicks") for p in PLANS],
        *[State({"plan": p, "text": "toml"}, "value") for p in PLANS], prevent_initial_call=True)  # fmt: skip
