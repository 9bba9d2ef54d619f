"""Replies to what a page says: pure functions of its values, each a table of plain values that the page keeps.

Whatever is wrong with a plan is a sentence in its reply; the other plan's reply is what it would be alone.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from presage.errors import PresageError
from presage.ui.knobs import KNOBS, Wrong

if TYPE_CHECKING:
    from presage.configs.job import Job

__all__ = ["asked_reply", "best_reply", "key_of", "linked", "opened", "run_reply", "step_reply", "sure_reply"]

Reply = dict[str, Any]
DRAWING, SEARCHING = threading.Semaphore(2), threading.Semaphore(1)  # at once: others wait, or are told to
PATIENCE = 60.0  # seconds of a search
NAMES = tuple(k.name for k in KNOBS)


def _answered(reply: Callable[..., Reply]) -> Callable[..., Reply]:
    """A reply in any case: a mistake is a sentence, and so is a fault of ours."""

    @wraps(reply)
    def said(*given: Any) -> Reply:
        try:
            return reply(*given)
        except Wrong as e:
            return {"wrong": str(e), "knobs": list(e.knobs)}
        except PresageError as e:
            return {"wrong": str(e), "knobs": []}
        except (MemoryError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as e:
            print(f"presage ui: {reply.__name__} failed: {type(e).__name__}: {e}", file=sys.stderr)
            return {"wrong": f"presage cannot work this plan out ({type(e).__name__}): please report it", "knobs": []}

    return said


def key_of(text: str, asked: Mapping[str, Any]) -> str:
    """Of a plan and what is asked of it, so that late answers are told from new ones."""
    said = repr((text, asked.get("tokens"), asked.get("days"), asked.get("noise")))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# ---- at once


@_answered
def step_reply(values: Mapping[str, Any], rest: Any, asked: Mapping[str, Any] | None) -> Reply:
    """What is known at once of a plan. `text` is there even where the plan is wrong, if it can be written. Without
    anything that can be asked of the run, of the step alone."""
    from presage.ui.plans import plan_of, text_of

    text = text_of(plan_of(values, rest))
    found = _step(text, asked)
    return {"text": text, "key": key_of(text, asked or {}), "asked": asked and dict(asked)} | found


@_answered
def asked_reply(tokens: Any, days: Any, noise: Any) -> Reply:
    """What is asked of the run, if it can be."""
    from presage.ui.asked import asked_of

    asked_of(tokens, days, noise)
    return {"asked": {"tokens": str(tokens), "days": days, "noise": noise}}


@_answered
def _step(text: str, asked: Mapping[str, Any] | None) -> Reply:
    from presage.ui.answers import step_measures, step_sentence
    from presage.ui.asked import asked_of
    from presage.ui.controls import choices
    from presage.ui.figures import memory_chart, parts_chart
    from presage.ui.plans import job_of_text, predicted

    offered = choices(job_of_text(text, checked=False))
    try:
        p = predicted(text)
    except Wrong as e:
        return {"wrong": str(e), "knobs": list(e.knobs), "choices": offered}
    job = p.job
    return {
        "sentence": step_sentence(p),
        "measures": [list(m) for m in step_measures(p, asked_of(**asked) if asked else None)],
        "figures": {"parts": parts_chart(p), "memory": memory_chart(p)},
        "choices": offered,
        "derived": f"{job.dp:,} replicas (dp), {job.microbatches:,} microbatches each",
        "notes": list(p.notes),
        "helps": [] if p.memory.fits else [h.change for h in p.helps if h.fits][:3],
    }


# ---- with draws


@_answered
def sure_reply(text: str, asked: Mapping[str, Any]) -> Reply:
    from presage.ui.answers import draws_of, step_drawn, sure_measures
    from presage.ui.asked import asked_of
    from presage.ui.figures import numbers, sure_chart
    from presage.ui.plans import predicted

    said, p = asked_of(**asked), predicted(text)
    with DRAWING:
        g = step_drawn(text, said.noise)
    lead = f"{draws_of(p):,} draws: half of the steps take {_seconds(g.quantile(0.5).value)} or less."
    return {"key": key_of(text, asked), "measures": [list(m) for m in sure_measures(p, g)], "lead": lead,
            "figure": sure_chart(p, g), "numbers": numbers(g.draws.seconds)}  # fmt: skip


@_answered
def run_reply(text: str, asked: Mapping[str, Any]) -> Reply:
    from presage.ui.answers import run_drawn, run_measures, run_sentence
    from presage.ui.asked import asked_of
    from presage.ui.figures import numbers, run_chart

    said = asked_of(**asked)
    with DRAWING:
        r = run_drawn(text, said)
    return {"key": key_of(text, asked), "measures": [list(m) for m in run_measures(r)], "lead": run_sentence(r, said),
            "figure": run_chart(r), "numbers": numbers(r.outcome.wall)}  # fmt: skip


def _seconds(value: float) -> str:
    from presage.text import seconds

    return seconds(value)


# ---- links, texts, the best plan


@_answered
def opened(text: str) -> Reply:
    """A job's text as the values of controls and the rest."""
    from presage.ui.plans import plan_of_text

    plan = plan_of_text(text)
    return {"knobs_set": [plan.knobs[name] for name in NAMES], "rest": dict(plan.rest)}


@_answered
def linked(fragment: str) -> Reply:
    """Plans and questions of a link."""
    from presage.ui.links import shared_of

    shared = shared_of(fragment)
    found = {name: opened(text) for name, text in shared.texts.items()}
    for name, reply in found.items():
        if "wrong" in reply:
            raise Wrong(f"plan {name.upper()} of this link: {reply['wrong']}")
    return {"plans": found, "asked": shared.asked}


@_answered
def best_reply(text: str) -> Reply:
    """The best plan that presage's search finds for the job of this text, on as many GPUs."""
    from presage.ui.plans import plan_like

    if not SEARCHING.acquire(blocking=False):
        raise Wrong("another search is under way: try again when it is done")
    try:
        plan = plan_like(text, _best(text))
    finally:
        SEARCHING.release()
    return {"knobs_set": [plan.knobs[name] for name in NAMES], "rest": dict(plan.rest)}


def _best(text: str) -> Job:
    import time

    from presage.search import search
    from presage.ui.plans import job_of_text

    job, until = job_of_text(text, checked=False), time.monotonic() + PATIENCE

    def tell(_: Any) -> None:
        if time.monotonic() > until:
            more = f"presage plan JOB.toml --gpus {job.gpus} has no limit"
            raise Wrong(f"the search took longer than {PATIENCE:.0f} s: {more}")

    found = search(job, job.gpus, top=1, tell=tell)
    if not found.best:
        raise Wrong("no plan of this job fits on these GPUs: take more of them, or larger ones", ("gpus",))
    return found.best[0].job
