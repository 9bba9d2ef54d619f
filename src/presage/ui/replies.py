"""Replies to what a page says: pure functions of its values, each a table of plain values that the page keeps.

Whatever is wrong with a plan is a sentence in its reply; the other plan's reply is what it would be alone.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, TypeVar

from presage.errors import PresageError
from presage.ui.knobs import KNOBS, InvalidPlan

Reply = dict[str, Any]
NAMES = tuple(k.name for k in KNOBS)

# ---- Draws in threads of their own: two at a time, a few that wait, and others are told to come again.

AT_ONCE, WAITING = 2, 14  # all others are turned away, so that threads are left for answers that need no draws
ADMITTED = threading.BoundedSemaphore(AT_ONCE + WAITING)
T = TypeVar("T")


class BusyError(PresageError):
    """Too many draws wait already: ask again in a moment."""


def draw(work: Callable[[], T]) -> T:
    """What `work` returns, when its turn has come."""
    if not ADMITTED.acquire(blocking=False):
        raise BusyError(f"{AT_ONCE + WAITING} draws are waiting: this one is asked for again in a moment")
    try:
        return _threads().submit(work).result()
    finally:
        ADMITTED.release()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="draw")


# ---- replies


def _answered(reply: Callable[..., Reply]) -> Callable[..., Reply]:
    """A reply in any case: a mistake is a sentence, and so is a fault of ours."""

    @wraps(reply)
    def answer(*given: Any) -> Reply:
        try:
            return reply(*given)
        except InvalidPlan as e:
            return {"wrong": str(e), "knobs": list(e.knobs)}
        except BusyError as e:
            return {"wrong": str(e), "knobs": [], "busy": True}
        except PresageError as e:
            return {"wrong": str(e), "knobs": []}
        except (MemoryError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as e:
            print(f"presage ui: {reply.__name__} failed: {type(e).__name__}: {e}", file=sys.stderr)
            return {"wrong": f"presage failed on this ({type(e).__name__}): please report it", "knobs": []}

    return answer


def reply_key(text: str, asked: Mapping[str, Any]) -> str:
    """A key of a plan and its question, to tell late replies from new ones."""
    said = repr((text, sorted((k, v) for k, v in asked.items() if v not in (None, ""))))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


# ---- at once


@_answered
def step_reply(values: Mapping[str, Any], rest: Any, asked: Mapping[str, Any] | None) -> Reply:
    """What is known at once of a plan. `text` is there even where the plan is wrong, if it can be written. Without
    anything that can be asked of the run, of the step alone."""
    from presage.ui.plans import plan_of, text_of

    text = text_of(plan_of(values, rest))
    found = _step(text, asked)
    return {"text": text, "key": reply_key(text, asked or {}), "asked": asked and dict(asked)} | found


def turn_reply(values: Mapping[str, Any], rest: Any, asked: Mapping[str, Any] | None, kept: Any) -> Reply:
    """`step_reply` of the nearest plan that can be run; with what was changed, and what can be done about it."""
    from presage.ui.repairs import offers_of, sound_kept, turn

    try:
        plan, now = turn(values, rest, kept)
    except PresageError:  # what is wrong is said by the reply
        last = [kept["shown"][n] for n in NAMES] if sound_kept(kept) else None
        back = [{"label": "Undo", "values": last}] if last else []
        return step_reply(values, rest, asked) | {"kept": kept, "offers": back}
    reply = step_reply(plan.knobs, plan.rest, asked)
    more = {"kept": now, "changes": now["changes"], "values": [plan.knobs[n] for n in NAMES]}
    return reply | more | {"offers": offers_of(plan, now, rest)}


@_answered
def question_reply(said: Mapping[str, Any]) -> Reply:
    """What is asked of the run, if it can be."""
    from presage.ui.question import parse_question

    parse_question(**said)
    return {"asked": {**said, "tokens": str(said["tokens"])}}


@_answered
def _step(text: str, asked: Mapping[str, Any] | None) -> Reply:
    from presage.ui.answers import memory_chart, parts_chart, step_measures, step_sentences
    from presage.ui.controls import choices
    from presage.ui.plans import job_of_text, predicted
    from presage.ui.question import parse_question

    offered = choices(job_of_text(text, checked=False))
    try:
        p = predicted(text)
    except InvalidPlan as e:
        return {"wrong": str(e), "knobs": list(e.knobs), "choices": offered}
    job = p.job
    return {
        **step_sentences(p),
        "measures": [list(m) for m in step_measures(p, parse_question(**asked) if asked else None)],
        "figures": {"parts": parts_chart(p), "memory": memory_chart(p)},
        "choices": offered,
        "derived": f"{job.dp:,} replicas (dp), {job.microbatches:,} microbatches each",
        "notes": list(p.notes),
        "fits": p.memory.fits,
    }


# ---- with draws


@_answered
def spread_reply(text: str, asked: Mapping[str, Any]) -> Reply:
    from presage.ui.answers import (
        draw_count,
        drawn_job,
        quantile_rows,
        spread_chart,
        spread_measures,
        step_measures,
        step_sentences,
    )  # fmt: skip
    from presage.ui.question import parse_question

    said = parse_question(**asked)
    p = draw(lambda: drawn_job(text, said.noise))
    measures = [*step_measures(p, said), *spread_measures(p)]
    return {"key": reply_key(text, asked), "measures": [list(m) for m in measures], **step_sentences(p),
            "lead": f"{draw_count(p):,} drawn steps.", "figure": spread_chart(p),
            "numbers": quantile_rows(p.draws), "notes": [p.model_error.note]}  # fmt: skip


@_answered
def run_reply(text: str, asked: Mapping[str, Any]) -> Reply:
    from presage.ui.answers import draw_run, quantile_rows, run_chart, run_measures, run_sentence
    from presage.ui.question import parse_question

    said = parse_question(**asked)
    r = draw(lambda: draw_run(text, said))
    return {"key": reply_key(text, asked), "measures": [list(m) for m in run_measures(r)],
            "lead": run_sentence(r, said), "figure": run_chart(r),
            "numbers": quantile_rows(r.outcome.wall)}  # fmt: skip


# ---- links, texts, the best plan


@_answered
def open_text(text: str) -> Reply:
    """A job's text as the values of controls and the rest."""
    from presage.ui.plans import plan_of_text
    from presage.ui.question import question_of

    plan = plan_of_text(text)
    return {"knobs_set": [plan.knobs[name] for name in NAMES], "rest": dict(plan.rest), "asked": question_of(plan.run)}


@_answered
def open_files_reply(files: Sequence[tuple[str, bytes]], text: str) -> Reply:
    """Files that were dropped on the page: a plan, or the answer to a trace."""
    from presage.ui.dropped import open_files

    return open_files(files, text)


@_answered
def link_reply_of(fragment: str) -> Reply:
    """Plans and questions of a link."""
    from presage.ui.question import link_values, read_link

    shared = read_link(fragment)
    found = {name: open_text(text) for name, text in shared.texts.items()}
    for name, reply in found.items():
        if "wrong" in reply:
            raise InvalidPlan(f"plan {name.upper()} of this link: {reply['wrong']}")
    return {"plans": found, "asked": link_values(shared.asked)}


@_answered
def best_reply(text: str, page: str = "") -> Reply:
    """The best plans that presage's search finds for the job of this text, on as many GPUs; the best for controls."""
    from presage.ui.answers import plain_chart
    from presage.ui.searching import find_plans, found_text, plan_rows, plan_scatter

    found = find_plans(text, page)
    table = plan_rows(text, found)
    first = table["plans"][0]
    return {"knobs_set": first["values"], "rest": first["rest"], "lead": found_text(found), **table,
            "figure": plain_chart(plan_scatter(found))}  # fmt: skip


@_answered
def sweep_reply(texts: Mapping[str, str], asked: Mapping[str, Any], page: str = "") -> Reply:
    """Plans on fewer and more GPUs: curves, their numbers, and what they are of."""
    from presage.ui.answers import drawn_job, plain_chart
    from presage.ui.question import parse_question
    from presage.ui.searching import sweep, sweep_figure, sweep_rows

    said = parse_question(**asked)
    lines = sweep(texts, said.noise, page, drawn_job)
    return {"figure": plain_chart(sweep_figure(lines, said.tokens)), **sweep_rows(lines, said.tokens)}


EXPORTS = {"toml": "application/toml", "json": "application/json", "csv": "text/csv", "html": "text/html"}


@_answered
def export_reply(text: str, asked: Mapping[str, Any], kind: str) -> Reply:
    """The answer to a plan as a file: its job as TOML, the JSON of `presage job`, key figures as CSV, the report.

    `content`, `filename` and `type`, as a browser's download takes them.
    """
    from presage.ui.answers import drawn_job
    from presage.ui.question import parse_question

    if kind not in EXPORTS:
        raise InvalidPlan(f"no such file: choose from {', '.join(EXPORTS)}")
    said = parse_question(**asked)
    p = draw(lambda: drawn_job(text, said.noise))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", p.job.name or "plan")[:60]
    if kind == "toml":
        content = text
    elif kind == "json":
        content = json.dumps(p.to_json(said.tokens), indent=2)
    elif kind == "csv":
        content = _csv(p, said)
    else:
        from presage.report.html import render_page
        from presage.report.job_answer import job_answer

        content = render_page(job_answer(p, said.tokens, page=True)).decode()
    return {"content": content, "filename": f"{name}.{kind}", "type": EXPORTS[kind]}


def _csv(p: Any, said: Any) -> str:
    from presage.ui.answers import step_measures

    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["figure", "value", "shown", "detail"])
    rows.writerows([m.name, m.value, m.shown, m.detail] for m in step_measures(p, said))
    rows.writerows([f"{part}, seconds", took, "", ""] for part, took in p.breakdown.items())
    return out.getvalue()
