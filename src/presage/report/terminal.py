"""Answers at a terminal: the headline, tables without lines that fit any width, notes, and progress bars."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text, TextType

from presage.report.answer import Answer, DataTable
from presage.report.terms import plural
from presage.text import CONTROL, printable

GAP = 2  # between columns
FEW_NOTES = 4  # that are printed without --verbose
TONES = {"bad": "bold red", "good": "green", "warn": "yellow"}
MOST_KEYS = 3  # columns that name a row
NARROW, ROOMY = 10, 24  # that text is wrapped to: rather than cut the table in parts, and where it is cut anyway


class SafeConsole(Console):
    """A console on which no text, whatever file it is from, can send control characters to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            raw = not segment.control and CONTROL.search(segment.text)
            yield Segment(printable(segment.text), segment.style) if raw else segment


def headline_text(answer: Answer) -> Text:
    """The headline, below it the verdict, and what was asked about."""
    text = Text(answer.headline, "bold")
    if answer.verdict:
        text.append(f"\n{answer.verdict}", TONES.get(answer.verdict_tone, "not bold"))
    if answer.subject:
        text.append("\n" * bool(answer.headline) + answer.subject, "not bold")
    return text


def detail_lines(answer: Answer, verbose: bool = True) -> Iterator[RenderableType]:
    """What stands below the headline, with empty lines between: everything, or one table and the first notes."""
    tables = answer.tables("terminal")
    verbose = verbose or not answer.headline  # where the tables are the answer
    shown = tables if verbose else tuple(t for i, t in enumerate(tables) if i == 0 or t.key)
    for table in shown:
        yield ""
        yield rich_table(table)
    for section in answer.sections:
        if section.on("terminal") and section.text and not section.tables and section.chart is None:
            yield ""
            yield Text(section.text)
    notes = answer.notes if verbose or len(answer.notes) <= FEW_NOTES + 1 else answer.notes[:FEW_NOTES]
    if notes:
        yield ""
    for note in notes:
        yield Text(f"note: {note}")
    hidden = [] if len(shown) == len(tables) else [plural(len(tables) - len(shown), "more table")]
    if len(notes) < len(answer.notes):
        hidden.append(plural(len(answer.notes) - len(notes), "more note"))
    if hidden:
        yield ""
        yield Text(f"-v prints {' and '.join(hidden)}", "dim")


def print_answer(answer: Answer, out: Console, main: Console, verbose: bool = True) -> None:
    """`main` prints what --quiet leaves, `out` the rest."""
    if answer.headline or answer.subject:
        main.print(headline_text(answer), soft_wrap=True)
    if out.quiet and answer.brief:
        main.print(Text(answer.brief), soft_wrap=True)
    first = not (answer.headline or answer.subject)
    for line in detail_lines(answer, verbose):
        if not (first and line == ""):
            out.print(line, soft_wrap=isinstance(line, Text))
        first = False


def rich_table(table: DataTable) -> Table:
    """The table as Rich draws it."""
    columns = [Text(c) for c in table.columns]
    out = _empty_table(Text(table.title), columns, table.text_columns, table.wrap, table.headed)
    for i, row in enumerate(table.rows):
        style = "bold" if i in table.bold else "dim" if i in table.dim else None
        out.add_row(*map(Text, row), style=style)
    return out


def plain_table(title: str, *columns: str, left: int = 1, fold: bool = True) -> Table:
    """A table without lines: the first `left` columns to the left, numbers to the right; `fold` lets those wrap too."""
    return _empty_table(title, columns, range(left), fold)


def _empty_table(
    title: TextType, columns: Sequence[TextType], left: Container[int], fold: bool, headed: bool = True
) -> Table:
    table = _PlainTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, GAP, 0, 0),
        show_header=headed,
    )  # fmt: skip
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i in left else "right", overflow="fold", no_wrap=i > 0 and not fold)
    return table


class _PlainTable(Table):
    """Where it is too wide for the screen, texts wrap, numbers never do: the table is cut in parts instead, one below
    the other, each with the columns that name its rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = [_widest(console, options, column) for column in self.columns]
        if not self.columns or sum(wide) + GAP * (len(wide) - 1) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        fixed = [_fixed(c, w) for c, w in zip(self.columns, wide, strict=True)]
        for k, some in enumerate(_parts(fixed, wide, options.max_width)):
            part = copy(self)
            part.columns = [replace(fixed[i], _index=n) for n, i in enumerate(some)]
            part.title = self.title if k == 0 else " "
            yield from super(_PlainTable, part).__rich_console__(console, options)


def _widest(console: Console, options: ConsoleOptions, column: Column) -> int:
    every = (column.header, *column.cells)
    return max(Measurement.get(console, options.update(width=10_000), cell).maximum for cell in every)


def _fixed(column: Column, widest: int) -> Column:
    """A column of numbers: its cells on one line, its header's words below each other where they are longer."""
    header = str(column.header)
    if column.justify == "left":
        return column
    if len(header) < widest:
        return replace(column, width=widest)
    cells = max((len(str(cell)) for cell in column.cells), default=0)
    return replace(column, width=max([cells, *(len(word) for word in header.split())]), no_wrap=False)


def _parts(columns: Sequence[Column], wide: Sequence[int], width: int) -> list[list[int]]:
    """Which columns go beside each other."""

    def total(some: Sequence[int], text: int) -> int:
        needs = (columns[i].width or (wide[i] if columns[i].no_wrap else min(wide[i], text)) for i in some)
        return sum(needs) + GAP * (len(some) - 1)

    whole = list(range(len(columns)))
    if total(whole, NARROW) <= width:
        return [whole]
    keys = next((i for i, c in enumerate(columns) if c.justify != "left"), len(columns))
    again = whole[: next((n for n in range(1, MOST_KEYS + 1) if _unique(columns[:n])), keys)]
    names, numbers = whole[: max(keys, len(again))], whole[max(keys, len(again)) :]
    out, part = list[list[int]](), list[int]()
    for i in numbers:
        if part and total([*(again if out else names), *part, i], ROOMY) > width:
            out.append([*(again if out else names), *part])
            part = []
        part.append(i)
    return [*out, [*(again if out else names), *part]]


def _unique(columns: Sequence[Column]) -> bool:
    """Whether no two rows agree in them."""
    rows = list(zip(*([str(cell) for cell in c.cells] for c in columns), strict=True))
    return len(set(rows)) == len(rows)


# ---- progress


def progress_bars() -> Progress:
    """On stderr, gone when the work is done. A task has a `note` beside it."""
    text = TextColumn("{task.description}", markup=False)
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = SpinnerColumn(), text, BarColumn(24), _CountColumn(), _TimeColumn(), note
    return Progress(*columns, console=SafeConsole(stderr=True), transient=True)


class _CountColumn(ProgressColumn):
    """12/340 where things are counted, a share where they are not."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        if task.total <= 1:
            return Text(f"{task.percentage:.0f}%")
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}")


class _TimeColumn(ProgressColumn):
    """0:07, 1:20 left."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining if task.total is not None and not task.finished else None
        text = _clock(task.elapsed or 0.0) + (f", {_clock(left)} left" if left is not None else "")
        return Text(text, style="progress.elapsed")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
