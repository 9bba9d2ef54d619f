"""Bars of work under way: what, how much of it, the time it took and the time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

__all__ = ["bars"]


def bars() -> Progress:
    """On stderr, gone when the work is done. A task has a `note` beside it."""
    text = TextColumn("{task.description}", markup=False)
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = SpinnerColumn(), text, BarColumn(24), _Count(), _Times(), note
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Count(ProgressColumn):
    """12/340 where things are counted, a share where they are not."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        if task.total <= 1:
            return Text(f"{task.percentage:.0f}%")
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}")


class _Times(ProgressColumn):
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
