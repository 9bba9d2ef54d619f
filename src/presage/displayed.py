"""Displayed: how a result shows itself in Python, in a notebook, as a table and as an HTML page.

Answers are made by `presage.report`, above this layer: it is loaded by name when a result is first shown, so that
predictions work without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from presage.errors import PresageError

NOTEBOOK = "presage.report.notebook"


class Displayed:
    """Base of results. They say what the terminal, the JSON and the HTML page say, in the same words."""

    def __repr__(self) -> str:
        return str(import_module(NOTEBOOK).one_line(self))

    def _repr_html_(self) -> str:
        """For notebooks: headline, key figures and a chart."""
        return str(import_module(NOTEBOOK).html_of(self))

    def report(self, path: str | Path) -> None:
        """Write the HTML page that --report writes."""
        import_module(NOTEBOOK).write_report(self, path)

    def to_frame(self) -> Any:
        """The breakdown as a pandas DataFrame: a row for each part, in the report's words, times in seconds."""
        return data_frame(import_module(NOTEBOOK).in_words(self.frame_rows()))

    def frame_rows(self) -> Iterable[dict[str, Any]]:
        """The rows of `to_frame`."""
        raise NotImplementedError


def data_frame(rows: Iterable[dict[str, Any]]) -> Any:
    """A pandas DataFrame of rows."""
    try:
        import pandas
    except ImportError as e:
        raise PresageError("to_frame needs pandas, which is not installed: pip install pandas") from e
    return pandas.DataFrame(list(rows))


def share_rows(parts: dict[str, float]) -> list[dict[str, Any]]:
    """Parts of a whole with their seconds and shares, as rows."""
    whole = sum(parts.values())
    return [{"part": name, "seconds": x, "share": x / whole if whole else 0.0} for name, x in parts.items()]
