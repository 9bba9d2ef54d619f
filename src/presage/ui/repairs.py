"""Repairs: the nearest plan that can be run, what that changed, and what undoes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from presage.configs.job import Job
from presage.errors import PresageError
from presage.parallel.schedules import default_schedule
from presage.search.plan_repair import repair
from presage.ui.knobs import KEPT, KNOBS, InvalidPlan
from presage.ui.plans import Plan, job_of_text, plan_like, plan_of, predicted, text_of

AROUND = ("model", "platform", "gpus")  # what a plan is for: another choice keeps the plan that was wanted
SHORT = {"gpus": "GPUs", "virtual": "chunks", "micro_batch": "microbatch", "global_batch": "batch"}


class KnobChange(NamedTuple):
    """A setting that was changed to make a plan legal."""

    name: str
    before: Any
    now: Any

    def text(self) -> str:
        word = SHORT.get(self.name, self.name)
        return f"{word} {_shown(self.before)} → {_shown(self.now)}"


def repair_plan(plan: Plan, keep: Collection[str] = ()) -> tuple[Plan, tuple[KnobChange, ...]]:
    """The plan itself where it is legal; else the nearest legal one with what is named in `keep`, or without."""
    job = job_of_text(text_of(plan), checked=False)
    found = repair(job, keep) or repair(job)
    if found is None:
        raise InvalidPlan(f"no plan for {job.gpus:,} GPUs and a batch of {job.global_batch:,} samples", ("gpus",))
    if found is job:
        return plan, ()
    made = plan_of({**plan.knobs, **_knobs_of(found)}, {**plan.rest, "parallel": _rest_of(found)})
    changed = [KnobChange(k.name, plan.knobs[k.name], made.knobs[k.name]) for k in KNOBS]
    return made, tuple(c for c in changed if c.before != c.now)


def _knobs_of(job: Job) -> dict[str, Any]:
    p = job.parallel
    return {
        "gpus": job.gpus, "tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "virtual": p.virtual,
        "schedule": "auto" if p.schedule == default_schedule(p.virtual) else p.schedule,
        "global_batch": job.global_batch, "micro_batch": job.micro_batch, "sequence": job.sequence,
        "precision": job.precision,
    }  # fmt: skip


def _rest_of(job: Job) -> dict[str, Any]:
    """What of [parallel] no control has."""
    p = job.parallel
    out: dict[str, Any] = {"ends_as_layers": True} if p.ends_as_layers else {}
    out |= {"expert_tp": p.expert_tp} if p.expert_tp > 1 else {}
    out |= {"shard": p.shard} if p.shard else {}
    if p.tp > 1 and p.sequence_parallel != job.framework.sequence:
        out["sequence_parallel"] = p.sequence_parallel
    return out


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


# ---- what is wanted, and what is shown instead

Kept = Mapping[str, Any]
NAMES = frozenset(k.name for k in KNOBS)


def turn(values: Mapping[str, Any], rest: Any, kept: Kept | None) -> tuple[Plan, Kept]:
    """The plan to show for the controls' values, and what the page keeps for the next turn.

    `kept` is that of the turn before: what was `wanted`, what was `shown` for it, and the last state that needed no
    repair (`before`). Another model, cluster or number of GPUs is a new place for the plan that was wanted; any other
    control is turned on the plan that is shown.
    """
    kept = kept if sound_kept(kept) else None
    shown = dict(kept["shown"]) if kept else {}
    turned = {name for name, value in values.items() if not kept or shown.get(name) != value}
    around = bool(kept) and turned <= set(AROUND)
    wanted = {**kept["wanted"], **{n: values[n] for n in turned}} if kept and around else dict(values)
    plan, changes = repair_plan(plan_of(wanted, rest), turned if len(turned) <= len(AROUND) else ())
    before = kept.get("before") if kept and kept.get("changes") else shown
    return plan, {
        "wanted": wanted, "shown": dict(plan.knobs), "before": before if changes else {},
        "changes": ", ".join(c.text() for c in changes),
    }  # fmt: skip


def sound_kept(kept: Any) -> bool:
    """Whether it is what a turn kept: a page may send anything."""
    if not isinstance(kept, Mapping):
        return False
    tables = [kept.get(name) for name in ("wanted", "shown", "before")]
    return all(isinstance(t, Mapping) and (set(t) == NAMES or not t) for t in tables) and bool(kept["shown"])


# ---- Offers: what a person can do about an answer, each a button with the values that the controls then have.

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
