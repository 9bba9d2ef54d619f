"""The answer of a command as one value, from which terminal, HTML page, JSON and notebook are rendered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from presage.displayed import Displayed, data_frame
from presage.errors import PresageError
from presage.text import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Where = Literal["both", "terminal", "page"]
Tone = Literal["", "good", "bad", "warn"]
LONG = 14  # rows: longer tables are folded on a page


@dataclass(frozen=True)
class Fact:
    """A key figure: its label, its value as text, and a few words of context."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class DataTable:
    """Cells as text. Text columns are left-aligned, all others are numbers; `bold` and `dim` are row numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    text_columns: frozenset[int] = frozenset({0})
    bold: frozenset[int] = frozenset()
    dim: frozenset[int] = frozenset()
    wrap: bool = False  # whether numbers may wrap on a narrow terminal
    where: Where = "both"
    key: bool = False  # shown at the terminal without -v too

    @property
    def folded(self) -> bool:
        return len(self.rows) > LONG

    @property
    def headed(self) -> bool:
        return any(self.columns)


def data_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: int | Iterable[int] = 1,
    bold: Iterable[int] = (),
    dim: Iterable[int] = (),
    wrap: bool = False,
    where: Where = "both",
    key: bool = False,
) -> DataTable:
    """A table with short rows filled up; `text`: how many columns from the left are text, or which."""
    width = len(columns)
    cells = tuple((*row, *[""] * (width - len(row))) for row in rows)
    left = frozenset(range(text)) if isinstance(text, int) else frozenset(text)
    strong, weak = (frozenset(i % len(cells) for i in chosen if cells) for chosen in (bold, dim))
    return DataTable(tuple(columns), cells, title, left, strong, weak, wrap, where, key)


def share_table(
    title: str, columns: Sequence[str], parts: Iterable[tuple[str, float]], total: tuple[str, float],
    text: Callable[[float], str], **how: Any,
) -> DataTable:  # fmt: skip
    """Parts of a whole with their shares, and the whole in bold below them."""
    whole = total[1]
    rows = [(name, text(x), percent(x / whole if whole else 0.0)) for name, x in (*parts, total)]
    return data_table(title, columns, rows, bold=(-1,), **how)


def limit_rows(rows: Sequence[Sequence[str]], most: int) -> list[Sequence[str]]:
    """The first rows, and a last one that counts the rest."""
    return [*rows[:most], *([(f"and {len(rows) - most} more",)] if len(rows) > most else [])]


@dataclass(frozen=True)
class Section:
    """Tables with a chart of them. `text` introduces the chart; a section of text alone is shown at the terminal too.

    `chart` makes the figure: only the HTML page calls it. `wide`: as wide as the page, not half of it.
    """

    title: str
    tables: tuple[DataTable, ...] = ()
    chart: Callable[[], Figure] | None = None
    text: str = ""
    where: Where = "both"
    wide: bool = False

    @property
    def key(self) -> str:
        """The section's anchor on a page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def figure(self) -> Figure | None:
        """The chart, drawn."""
        return None if self.chart is None else self.chart()

    def on(self, where: Where) -> bool:
        return self.where in ("both", where)


@dataclass(frozen=True, repr=False)
class Answer(Displayed):
    """What a command found: the subject (what was asked about), the headline (the answer in a sentence), then details.

    `verdict` is the line below the headline, also under --quiet; `brief` replaces the headline under --quiet where the
    answer is the tables; `to_data` gives the JSON; `basis` says in a page's footer which data the answer rests on.
    """

    title: str
    headline: str = ""
    subject: str = ""
    question: str = ""
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    to_data: Callable[[], Mapping[str, Any]] = dict
    brief: str = ""
    verdict: str = ""  # line two: does it fit?
    verdict_tone: Tone = ""
    basis: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """The answer for machines: what --json writes."""
        return dict(self.to_data())

    def tables(self, where: Where = "both") -> tuple[DataTable, ...]:
        """The tables that a terminal or a page shows."""
        shown = (t for s in self.sections if s.on(where) for t in s.tables)
        return tuple(t for t in shown if t.where in ("both", where))

    def frame_rows(self, title: str = "") -> list[dict[str, str]]:
        """The rows of a table by its title, the first where none is given; cells are text, as printed."""
        found = [t for t in self.tables("terminal") if t.rows and title in ("", t.title)]
        if not found:
            titles = ", ".join(t.title for t in self.tables("terminal") if t.title)
            raise PresageError(f"no table {title!r} in this answer; it has {titles or 'none'}")
        names = [c or ("" if k else "name") for k, c in enumerate(found[0].columns)]
        return [dict(zip(names, row, strict=True)) for row in found[0].rows]

    def to_frame(self, title: str = "") -> Any:
        """A table as a pandas DataFrame, by its title."""
        return data_frame(self.frame_rows(title))

    def to_json(self) -> dict[str, Any]:
        """What --json writes."""
        return self.data


def sections_of(*sections: Section | None) -> tuple[Section, ...]:
    """Those that have something to show."""
    return tuple(s for s in sections if s is not None)
