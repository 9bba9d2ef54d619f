"""What plans come from and go to: links, texts, files, searches and sweeps, exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import ALL, Dash, Input, Output, State, no_update

from presage.ui.layout import ASKED, BEST, PLANS
from presage.ui.replies import NAMES, best_reply, export_reply, link_reply_of, open_text, sweep_reply

Value = Any
MEND = "mend plan A first"
ALLOWED: Any = {"allow_duplicate": True}


def knobs_of(plan: str) -> dict[str, Any]:
    return {"plan": plan, "knob": ALL}


def store(plan: Any, kind: str) -> dict[str, Any]:
    return {"plan": plan, "store": kind}


def into(plan: str) -> list[Any]:
    """Where a plan that comes from elsewhere is put."""
    return [Output(knobs_of(plan), "value", **ALLOWED), Output(store(plan, "rest"), "data", **ALLOWED)]


def into_question() -> list[Any]:
    """Where what is asked of the run is put."""
    return [Output(name, "value", **ALLOWED) for name in ASKED]


def register_opening(app: Dash) -> None:
    sets = [Output(knobs_of(p), "value", **ALLOWED) for p in PLANS] + [
        Output(store(p, "rest"), "data", **ALLOWED) for p in PLANS
    ]
    told = Output("told", "children", **ALLOWED)

    @app.callback(
        [*sets, *into_question(), Output("two", "data", **ALLOWED), told, Output("opened", "data")],
        Input("url", "hash"), State("link", "data"), prevent_initial_call="initial_duplicate",
    )  # fmt: skip
    def link_opened(fragment: Value, now: Value) -> list[Any]:
        return link_reply(fragment, now)

    for p in PLANS:

        @app.callback(
            [*into(p), *into_question(), Output(f"text-wrong-{p}", "children")],
            Input(f"apply-{p}", "n_clicks"), State({"plan": p, "text": "toml"}, "value"), prevent_initial_call=True,
        )  # fmt: skip
        def applied(_: Value, text: Value) -> list[Any]:
            return text_reply(text)

    _searching(app, told)


def _searching(app: Dash, told: Any) -> None:
    running = [
        (Output("best", "disabled"), True, False), (Output("best", "children"), "Searching …", BEST),
        (Output("search-box", "hidden"), False, True), (Output("search-tick", "disabled"), False, True),
    ]  # fmt: skip

    @app.callback(
        [*into("b"), Output("two", "data", **ALLOWED), told, Output("found", "data"),
         Output("found-table", "children"), Output("found-text", "children"), Output("found-plans", "hidden")],
        Input("best", "n_clicks"), [State(store("a", "step"), "data"), State("page-id", "data")],
        prevent_initial_call=True, running=running,
    )  # fmt: skip
    def best(_: Value, step: Value, page: Value) -> list[Any]:
        return searched(step, page)

    busy = [(Output("sweep", "disabled"), True, False), *running[2:]]

    @app.callback(
        [Output("swept", "data"), Output("sweep-table", "children"), Output("sweep-plans", "hidden"), told],
        Input("sweep", "n_clicks"), [*(State(store(p, "step"), "data") for p in PLANS), State("page-id", "data")],
        prevent_initial_call=True, running=busy,
    )  # fmt: skip
    def sweep(_: Value, a: Value, b: Value, page: Value) -> list[Any]:
        return swept(a, b, page)

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
                      State(store(p, "step"), "data"), prevent_initial_call=True)  # fmt: skip
        def exported(_: Value, step: Value) -> Any:
            return export_of(step)


def swept(a: Any, b: Any, page: Any) -> list[Any]:
    """The curves, their numbers, and whether they are shown."""
    from presage.ui.shown import sweep_table

    steps = {p: s for p, s in (("a", a), ("b", b)) if isinstance(s, Mapping) and isinstance(s.get("text"), str)}
    asked = (steps.get("a") or {}).get("asked")
    found = sweep_reply({p: s["text"] for p, s in steps.items()}, asked, str(page)) if asked else {"wrong": MEND}
    if "wrong" in found:
        return [no_update, no_update, no_update, found["wrong"]]
    return [{"figure": found["figure"]}, sweep_table(found), False, ""]


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
    found = best_reply(text, str(page)) if isinstance(text, str) else {"wrong": MEND}
    if "wrong" in found:
        return [[no_update] * len(NAMES), no_update, no_update, found["wrong"], *([no_update] * 4)]
    kept = {"plans": found["plans"], "figure": found["figure"]}
    told = "Plan B is the best that was found"
    return [found["knobs_set"], found["rest"], True, told, kept, found_table(found), found["lead"], False]


def link_reply(fragment: Any, now: Any) -> list[Any]:
    """Values of all controls; nothing changes without a link, or with the one that is shown."""
    same = [[no_update] * len(NAMES)] * 2 + [no_update] * (2 + len(ASKED))
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
    return [*knobs, *rests, *(asked[name] for name in ASKED), "b" in plans, "", True]


def text_reply(text: Any) -> list[Any]:
    """A plan, and what its text asks of the run."""
    found: dict[str, Any] = open_text(text) if isinstance(text, str) else {"wrong": "give a job's TOML"}
    if "wrong" in found:
        return [[no_update] * len(NAMES), *([no_update] * (1 + len(ASKED))), found["wrong"]]
    return [found["knobs_set"], found["rest"], *(found["asked"].get(name, no_update) for name in ASKED), ""]
