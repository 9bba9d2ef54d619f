"""An answer as the bytes of one HTML file that needs nothing else: Plotly, styles and figures are in it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.report.answer import Answer
from presage.report.html.theme import DARK, LIGHT

__all__ = ["check_installed", "render_page", "write_page"]


def write_page(answer: Answer, path: str | Path, command: str = "") -> None:
    """Write the page whole or not at all; `command` is shown as what makes it again."""
    write_whole(path, render_page(answer, command))


def render_page(answer: Answer, command: str = "") -> bytes:
    """The page of an answer: the same answer, the same bytes."""
    check_installed()
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    folder = files("presage.report.html")
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters["script"] = _script
    sections = [
        replace(s, tables=tuple(t for t in s.tables if t.where != "terminal")) for s in answer.sections if s.on("page")
    ]
    text = engine.from_string((folder / "page.html.j2").read_text("utf-8")).render(
        page=answer,
        command=command,
        sections=sections,
        style=(folder / "page.css").read_text("utf-8"),
        code=(folder / "page.js").read_text("utf-8"),
        plotly=get_plotlyjs() if any(s.chart is not None for s in sections) else "",
        templates={"light": LIGHT, "dark": DARK},
    )
    return text.encode(errors="backslashreplace")


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
