"""What a page says, as values: the answer, a few facts, sections of charts and tables, notes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["Fact", "Page", "Section", "Table", "Tone", "plain", "table_of"]

Tone = Literal["", "good", "bad", "warn"]
SHORT = 14  # rows: longer tables are folded until someone opens them


@dataclass(frozen=True)
class Fact:
    """A number that people look for first: what it is, the number, and a few words."""

    name: str
    value: str
    detail: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """Cells as text; `words` are the columns of words, the first where nothing is said: the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    words: frozenset[int] = frozenset({0})

    @property
    def folded(self) -> bool:
        return len(self.rows) > SHORT

    @property
    def headed(self) -> bool:
        return any(self.columns)


@dataclass(frozen=True)
class Section:
    """A chart with its numbers, or tables alone; `lead` says in a sentence what it shows and how to read it."""

    title: str
    tables: tuple[Table, ...]
    figure: Figure | None = None
    lead: str = ""

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """`question` is what was asked, `answer` the one sentence; `command` is what makes the page again."""

    title: str
    question: str
    answer: str
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""


def plain(text: str) -> str:
    """Rich's markup as the words alone."""
    return Text.from_markup(text).plain


def table_of(rich: RichTable) -> Table:
    """A table of the terminal as one of the page."""
    columns = [_cell(c.header) if rich.show_header else "" for c in rich.columns]
    cells = [[_cell(text) for text in c._cells] for c in rich.columns]
    words = frozenset(i for i, c in enumerate(rich.columns) if c.justify == "left")
    title = "" if rich.title is None else _cell(rich.title)
    return Table(tuple(columns), tuple(zip(*cells, strict=True)), title, words)


def _cell(shown: object) -> str:
    if isinstance(shown, str):
        return plain(shown)
    if isinstance(shown, Text):
        return shown.plain
    console = Console(width=10_000, record=True, file=StringIO())  # whatever else Rich can show
    console.print(shown)
    return console.export_text().strip()
