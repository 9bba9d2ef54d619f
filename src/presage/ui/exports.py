"""Exports: the answer to a plan as a file to take away."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from typing import Any

from presage.ui.answers import drawn_job, step_measures
from presage.ui.drawing import draw
from presage.ui.knobs import InvalidPlan
from presage.ui.question import parse_question

KINDS = {"toml": "application/toml", "json": "application/json", "csv": "text/csv", "html": "text/html"}


def export(text: str, asked: Mapping[str, Any], kind: str) -> dict[str, str]:
    """`content`, `filename` and `type`, as a browser's download takes them."""
    if kind not in KINDS:
        raise InvalidPlan(f"no such file: choose from {', '.join(KINDS)}")
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
    return {"content": content, "filename": f"{name}.{kind}", "type": KINDS[kind]}


def _csv(p: Any, said: Any) -> str:
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["figure", "value", "shown", "detail"])
    rows.writerows([m.name, m.value, m.shown, m.detail] for m in step_measures(p, said))
    rows.writerows([f"{part}, seconds", took, "", ""] for part, took in p.breakdown.items())
    return out.getvalue()
