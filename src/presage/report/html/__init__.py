"""An answer as the bytes of one HTML file that needs nothing else: Plotly, styles and figures are in it."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.report.answer import Answer
from presage.report.html.theme import DARK, LIGHT

__all__ = ["check_installed", "render_page", "write_page"]

BUNDLE = "plotly-basic.min.js"  # bars and scatter: a quarter of the whole library


def write_page(answer: Answer, path: str | Path, command: str = "") -> None:
    """Write the page whole or not at all; `command` is shown as what makes it again."""
    write_whole(path, render_page(answer, command))


def render_page(answer: Answer, command: str = "") -> bytes:
    """The page of an answer: the same answer on the same day, the same bytes."""
    check_installed()
    from jinja2 import Environment, StrictUndefined

    folder = files("presage.report.html")
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters["script"] = _script
    sections = [
        replace(s, tables=tuple(t for t in s.tables if t.where != "terminal")) for s in answer.sections if s.on("page")
    ]
    charts = any(s.chart is not None for s in sections)
    scripts = [(folder / name).read_text("utf-8") for name in ([BUNDLE] if charts else []) + ["page.js"]]
    text = engine.from_string((folder / "page.html.j2").read_text("utf-8")).render(
        page=answer,
        cautions=[n for n in answer.notes if n.startswith("caution")],
        notes=[n for n in answer.notes if not n.startswith("caution")],
        command=command,
        made=_written_on(),
        sections=sections,
        style=(folder / "page.css").read_text("utf-8"),
        scripts=scripts,
        policy=_policy(scripts),
        templates={"light": LIGHT, "dark": DARK},
    )
    return text.encode(errors="backslashreplace")


def _policy(scripts: list[str]) -> str:
    """Nothing is fetched, and no script runs but the page's own."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"


def _written_on() -> str:
    """presage 0.1.0, 2026-11-16."""
    try:
        number = version("presage")
    except PackageNotFoundError:
        number = ""
    when = os.environ.get("SOURCE_DATE_EPOCH", "")
    day = datetime.fromtimestamp(int(when), UTC) if when.isdecimal() else datetime.now(UTC)
    return f"presage {number}, {day:%Y-%m-%d}".replace(" ,", ",")


def check_installed() -> None:
    """Raise where Jinja or Plotly is missing: better before the work than after it."""
    try:
        import jinja2
        import plotly.graph_objects  # noqa: F401
    except ImportError as e:
        raise PresageError(f"an HTML report needs {e.name}: pip install 'presage[report]'") from None
    del jinja2


def _script(value: Any) -> Any:
    """JSON for a script element: nothing in it closes the element."""
    from markupsafe import Markup

    text = value.to_json() if hasattr(value, "to_json") else json.dumps(value)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
