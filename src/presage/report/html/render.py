"""A page as the bytes of one HTML file that needs nothing else: Plotly, styles and figures are in it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.files import write_whole
from presage.report.html.page import Page
from presage.report.html.theme import DARK, LIGHT

__all__ = ["needed", "rendered", "write_page"]


def write_page(page: Page, path: str | Path) -> None:
    """Write it whole or not at all."""
    write_whole(path, rendered(page))


def rendered(page: Page) -> bytes:
    """The same page, the same bytes."""
    needed()
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    room = files("presage.report.html")
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters["script"] = _script
    drawn = any(s.figure is not None for s in page.sections)
    text = engine.from_string((room / "page.html.j2").read_text("utf-8")).render(
        page=page,
        style=(room / "page.css").read_text("utf-8"),
        code=(room / "page.js").read_text("utf-8"),
        plotly=get_plotlyjs() if drawn else "",
        templates={"light": LIGHT, "dark": DARK},
    )
    return text.encode()


def needed() -> None:
    """Raises where what draws pages is not installed: better before the work than after it."""
    try:
        import jinja2
        import plotly.graph_objects  # noqa: F401
    except ImportError as e:
        raise PresageError(f"an HTML report needs {e.name}: pip install 'presage[report]'") from None
    del jinja2


def _script(value: Any) -> Any:
    """JSON that may stand in a script element: nothing in it closes the element."""
    from markupsafe import Markup

    text = value.to_json() if hasattr(value, "to_json") else json.dumps(value)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
