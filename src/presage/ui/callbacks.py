"""What happens when: the page's events, and the replies they get. Nothing is kept here between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, no_update

from presage.ui.controls import CHOSEN, options_of
from presage.ui.knobs import InvalidPlan, knob
from presage.ui.layout import ASKED, CHARTS, PLANS
from presage.ui.opening import ALLOWED, into, into_question, knobs_of, register_opening, store
from presage.ui.replies import NAMES, question_reply, run_reply, spread_reply, turn_reply

Value = Any


def register(app: Dash) -> None:
    _answers(app)
    _draws(app)
    _shown(app)
    register_opening(app)
    _in_browser(app)


# ---- answers at once


def _answers(app: Dash) -> None:
    inputs = [Input(knobs_of(p), "value") for p in PLANS] + [Input(store(p, "rest"), "data") for p in PLANS]
    outputs: list[Any] = []
    for p in PLANS:
        outputs += [
            Output(store(p, "step"), "data"), Output(store(p, "figures"), "data"),
            Output({"plan": p, "text": "toml"}, "value"), Output(f"wrong-{p}", "children"),
            Output(f"dp-{p}", "children"), Output({"plan": p, "field": ALL}, "className"),
            Output(knobs_of(p), "value", **ALLOWED), Output(store(p, "kept"), "data"),
            *(Output({"plan": p, "knob": name}, "options") for name in (*CHOSEN, "model", "platform", "recompute")),
        ]  # fmt: skip
    outputs += [Output("wrong-asked", "children"), Output("link", "data"), *_elements()]
    asked = [*(Input(name, "value") for name in ASKED), Input("two", "data")]

    kept = _stores(State, "kept", "sure", "run")
    busy = [(Output("main", "className"), "busy", "")]

    @app.callback(outputs, [*inputs, *asked], kept, prevent_initial_call="initial_duplicate", running=busy)
    def answers(a: Value, b: Value, rest_a: Value, rest_b: Value, *said: Value) -> list[Any]:
        of_run, (two, kept_a, *drawn_a, kept_b, sure_b, run_b) = said[: len(ASKED)], said[len(ASKED) :]
        plans = {"a": (a, rest_a, kept_a, drawn_a), "b": (b, rest_b, kept_b, [sure_b, run_b])}
        return answered(plans, dict(zip(ASKED, of_run, strict=True)), two)


def answered(plans: Mapping[str, Sequence[Any]], said: Mapping[str, Any], two: Any) -> list[Any]:
    """All that changes at once; what is shown of it is in the same reply, so that it is painted without another."""
    asked = question_reply(said)
    out: list[Any] = []
    texts: dict[str, str] = {}
    replies: dict[str, Sequence[Any]] = {}
    for p in PLANS:
        values, rest, kept, drawn = named(plans[p][0]), *plans[p][1:]
        if p == "b" and two is not True:
            made = _nothing()
        else:
            reply = turn_reply(values, rest, asked.get("asked"), kept)
            texts |= {p: reply["text"]} if "text" in reply else {}
            made = _outputs_of(reply, values, asked.get("asked"))
        out += made
        replies[p] = (made[0], *drawn)
    return [*out, asked.get("wrong", ""), link(texts, asked.get("asked")), *shown_of(replies)]


def named(values: Any) -> dict[str, Any]:
    """The values of controls in the order of knobs, by name."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(NAMES):
        raise InvalidPlan(f"a plan has {len(NAMES)} knobs")
    return dict(zip(NAMES, values, strict=True))


def _outputs_of(reply: Mapping[str, Any], values: Mapping[str, Any], asked: Mapping[str, Any] | None) -> list[Any]:
    from presage.ui.question import with_question

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
        with_question(reply["text"], asked) if "text" in reply else no_update,
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
        Output(store(MATCH, "ask"), "data"),
        Input(store(MATCH, "step"), "data"),
    )
    cast(Any, app).clientside_callback(
        ClientsideFunction("presage", "again"),
        Output(store(MATCH, "ask"), "data", **ALLOWED),
        [Input(store(MATCH, "sure"), "data"), Input(store(MATCH, "run"), "data")],
        State(store(MATCH, "ask"), "data"),
        prevent_initial_call=True,
    )
    for kind, reply in (("sure", spread_reply), ("run", run_reply)):

        @app.callback(Output(store(MATCH, kind), "data"), Input(store(MATCH, "ask"), "data"))
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
    return reply(ask["text"], {name: said[name] for name in ASKED if name in said})


# ---- what is shown


def _elements(**more: Any) -> list[Any]:
    parts = [({"plan": p, part: kind}) for p in PLANS for kind in ("sure", "run") for part in ("lead", "numbers")]
    ids: list[Any] = [*(f"notice-{p}" for p in PLANS), *(f"answer-{p}" for p in PLANS), "difference", *parts, "notes"]
    stale = [Output(f"stale-{p}", "className", **more) for p in PLANS]
    return [*(Output(i, "children", **more) for i in ids), *stale, Output("bar-text", "children", **more)]


def _stores(kind: Any, *names: str) -> list[Any]:
    return [kind(store(p, name), "data") for p in PLANS for name in names]


def _shown(app: Dash) -> None:
    """Once more, when steps and runs have been drawn."""

    @app.callback(
        _elements(**ALLOWED), _stores(Input, "sure", "run"), _stores(State, "step"), prevent_initial_call=True
    )
    def when_drawn(sure_a: Value, run_a: Value, sure_b: Value, run_b: Value, a: Value, b: Value) -> list[Any]:
        return shown_of({"a": (a, sure_a, run_a), "b": (b, sure_b, run_b)})


def shown_of(replies: Mapping[str, Sequence[Any]]) -> list[Any]:
    """What is wrong with a plan leaves its last answer as it is, marked as such."""
    from presage.ui.shown import answer, bar, collect_measures, difference, notes, notice, numbers_table

    sound = {p: [r if isinstance(r, Mapping) else None for r in replies[p]] for p in PLANS}
    wrong = {p: "wrong" in (sound[p][0] or {}) for p in PLANS}
    told = {p: collect_measures(*sound[p]) for p in PLANS}
    two = sound["b"][0] is not None
    drawn = {p: bool(r[1]) and (r[1] or {}).get("key") == (r[0] or {}).get("key") for p, r in sound.items()}
    alike = told  # what is compared: steps with draws are not held against steps without
    if two and drawn["a"] != drawn["b"]:
        alike = {p: collect_measures(sound[p][0], None, sound[p][2]) for p in PLANS}
    other = {} if drawn["b"] and not drawn["a"] else alike["a"]
    out: list[Any] = [notice(p, sound[p][0], two) for p in PLANS]
    out += [
        no_update if wrong[p] else answer(p, sound[p], other if p == "b" else {}, two) for p in PLANS
    ]  # fmt: skip
    texts = [(sound[p][0] or {}).get("text", "") for p in PLANS]
    out.append(no_update if any(wrong.values()) else difference(alike["a"], alike["b"], texts))
    for p in PLANS:
        step = sound[p][0] or {}
        for reply in sound[p][1:]:
            now = reply if reply and ("wrong" in reply or reply.get("key") == step.get("key")) else {}
            lead = now.get("wrong") or now.get("lead", no_update if step else "")
            out += [lead, numbers_table(now["numbers"]) if "numbers" in now else no_update if step else []]
    out.append(notes({p: sound[p][0] for p in PLANS}))
    marks = (f"mark {p} {'stale' if wrong[p] else ''}".strip() for p in PLANS)
    return [*out, *marks, bar({p: sound[p] for p in PLANS})]


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
            *[Input(store(p, source), "data") for p in PLANS], Input("theme", "data"))  # fmt: skip
    own("linked", Output("told", "children", **ALLOWED), Input("link", "data"), Input("opened", "data"),
        Input("copy-link", "n_clicks"), prevent_initial_call=True)  # fmt: skip
    own("turned", [Output("work", "className"), Output("tab-a", "className"), Output("tab-b", "className"),
                   Output("tab-b", "children"), Output("controls-a", "hidden"), Output("controls-b", "hidden")],
        Input("tab-a", "n_clicks"), Input("tab-b", "n_clicks"), Input("two", "data"))  # fmt: skip
    both = {p: [State(knobs_of(p), "value"), State(store(p, "rest"), "data")] for p in PLANS}
    two = Output("two", "data", **ALLOWED)
    own("copied", [*into("b"), two], Input("copy-plan", "n_clicks"), Input("tab-b", "n_clicks"), State("two", "data"),
        *both["a"], prevent_initial_call=True)  # fmt: skip
    own("kept", into("a"), Input("keep-b", "n_clicks"), *both["b"], prevent_initial_call=True)
    for p in PLANS:
        own("offered", Output(knobs_of(p), "value", **ALLOWED), Input({"plan": p, "offer": ALL}, "n_clicks"),
            State(store(p, "step"), "data"), State(knobs_of(p), "value"), prevent_initial_call=True)  # fmt: skip
    own("drawn_found", Output("found-chart", "figure"), Input("found", "data"), Input("theme", "data"))
    own("drawn_found", Output("sweep-chart", "figure"), Input("swept", "data"), Input("theme", "data"))
    own("chosen", [*into("a"), *into("b"), two], Input({"found": ALL, "to": ALL}, "n_clicks"), State("found", "data"),
        *[State(knobs_of(p), "value") for p in PLANS], prevent_initial_call=True)  # fmt: skip
    dropped, told = Input("dropped", "data"), Output("told", "children", **ALLOWED)
    own("placed", [*into("a"), *into("b"), *into_question(), told], dropped,
        *[State(knobs_of(p), "value") for p in PLANS], prevent_initial_call=True)  # fmt: skip
    own("carded", [Output("dropped-trace", "hidden"), Output("dropped-title", "children"),
                   Output("dropped-card", "children"), Output("dropped-tables", "children"),
                   Output("dropped-figure", "hidden"),
                   Output("dropped-save", "hidden")],
        dropped, Input("dropped-close", "n_clicks"), prevent_initial_call=True)  # fmt: skip
    own("drawn_dropped", Output("dropped-chart", "figure"), dropped, Input("theme", "data"))
    own("report_saved", Output("download", "data", **ALLOWED), Input("dropped-save", "n_clicks"),
        State("dropped", "data"), prevent_initial_call=True)  # fmt: skip
    own("closed", two, Input("close-b", "n_clicks"), prevent_initial_call=True)
    own("saved", Output("download", "data"), *[Input(f"download-{p}", "n_clicks") for p in PLANS],
        *[State({"plan": p, "text": "toml"}, "value") for p in PLANS], prevent_initial_call=True)  # fmt: skip
