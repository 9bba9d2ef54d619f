"""Offers: what a person can do about an answer, each a button with the values that the controls then have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from presage.errors import PresageError
from presage.ui.knobs import KEPT, KNOBS
from presage.ui.plans import Plan, plan_like, plan_of, predicted, text_of
from presage.ui.repairs import repair_plan

Offer = dict[str, Any]
MOST_OFFERS = 3  # changes with which a plan fits
FIND = "Find the best plan"


def offers_of(plan: Plan, kept: Mapping[str, Any], rest: Any = None) -> list[Offer]:
    """Undo a repair; a round number of GPUs for the plan that was wanted; what would make the plan fit."""
    out: list[Offer] = []
    if kept["changes"] and kept["before"]:
        out.append({"label": "Undo", "values": _values(kept["before"])})
    try:
        p = predicted(text_of(plan))
        if kept["changes"]:
            out += _round_number(plan_of(kept["wanted"], rest), p.job.platform.domain)
        if not p.memory.fits:
            out += [*_that_fit(plan), {"label": FIND, "search": True}]
    except PresageError:
        pass
    return out


def _round_number(plan: Plan, node: int) -> list[Offer]:
    """The nearest power of two, for a number of GPUs that fills no nodes or leaves replicas without a batch."""
    gpus = plan.knobs["gpus"]
    near = min(1 << gpus.bit_length(), 1 << (gpus.bit_length() - 1), key=lambda n: abs(n - gpus))
    if near == gpus or (gpus % node == 0 and gpus % 64 == 0):
        return []
    made, _ = repair_plan(plan_of({**plan.knobs, "gpus": near}, plan.rest), ("gpus",))
    return [{"label": f"Use {near:,} GPUs", "values": _values(made.knobs)}]


def _that_fit(plan: Plan) -> list[Offer]:
    """Single changes with which the plan fits, those that controls can say."""
    text = text_of(plan)
    out: list[Offer] = []
    for saving in (h for h in predicted(text).helps if h.fits):
        knobs = {**plan.knobs, **_changed(plan, plan_like(text, saving.job))}
        if len(out) == MOST_OFFERS or knobs == dict(plan.knobs):
            continue
        made = plan_of(knobs, plan.rest)
        try:
            if predicted(text_of(made)).memory.fits:
                out.append({"label": f"Fit with {saving.change}", "values": _values(knobs)})
        except PresageError:
            continue
    return out


def _changed(plan: Plan, other: Plan) -> dict[str, Any]:
    """What another plan says otherwise, in words that controls have."""
    said = {k.name: other.knobs[k.name] for k in KNOBS if other.knobs[k.name] != plan.knobs[k.name]}
    return {name: value for name, value in said.items() if value != KEPT}


def _values(knobs: Mapping[str, Any]) -> list[Any]:
    return [knobs[k.name] for k in KNOBS]
