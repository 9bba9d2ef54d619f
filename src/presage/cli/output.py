"""Everything a command prints or writes: the answer, tables, notes, JSON, HTML reports, timelines, progress bars."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from presage.cli.options import current_output
from presage.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from presage.pool import Pool
    from presage.prediction.jobs.job_prediction import JobResult
    from presage.prediction.step import StepResult
    from presage.report.answer import Answer
    from presage.traces.trace_set import TraceSet

T = TypeVar("T")
R = TypeVar("R")
C1 = re.compile(rb"\xc2[\x80-\x9f]")  # control characters that JSON leaves as they are
HINTS = {"timeline": " (open it at ui.perfetto.dev)", "report": " (open it in a browser)"}


# ---- the terminal


def console(answer: bool = False) -> Console:
    """A console that does not wrap in a pipe; under --quiet it prints only the answer."""
    from presage.report.terminal import SafeConsole

    mute = current_output().quiet and not answer
    return SafeConsole(width=None if _on_a_terminal() else 160, highlight=False, quiet=mute)


def _on_a_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def print_answer(text: Any) -> None:
    """Print the answer, also under --quiet."""
    console(answer=True).print(text, soft_wrap=True)


def print_brief(text: str) -> None:
    """Print plain text under --quiet only: the answer of commands that print tables otherwise."""
    if current_output().quiet:
        console(answer=True).print(text, soft_wrap=True, markup=False)


def print_note(text: str) -> None:
    """Print a note to stderr."""
    if not current_output().quiet:
        typer.echo(printable(text), err=True)


def show_answer(
    answer: Answer,
    json: str | None = None,
    report: Path | None = None,
    files: Mapping[str, Path | None] = {},
    *,
    notes: Sequence[str] = (),
    then: Sequence[object] = (),
) -> None:
    """Print the answer or write it as JSON, write its page, and name the files that were written.

    `notes` say what the command assumed, before those of the answer; `then` are the words of a command to try next.
    """
    answer = _with_notes(answer, notes) if notes else answer
    shown = emit(json, answer.to_data)
    if shown:
        from presage.report.terminal import print_answer

        print_answer(answer, console(), console(answer=True), current_output().verbose)
    if report is not None:
        from presage.report.html import write_page

        write_page(answer, report, shlex.join(["presage", *sys.argv[1:]]))
    for name, path in {**files, "report": report}.items() if shown else ():
        if path is not None:
            console().print(f"\n{name}: {path}{HINTS.get(name, '')}", soft_wrap=True, markup=False)
    if shown and then:
        console().print(f"\nnext: {shlex.join(['presage', *map(str, then)])}", soft_wrap=True, markup=False)


def _with_notes(answer: Answer, notes: Sequence[str]) -> Answer:
    """The answer with notes before its own, in the JSON too."""

    def data() -> dict[str, Any]:
        found = answer.data
        return found | {"notes": [*notes, *found.get("notes", ())]}

    return replace(answer, notes=(*notes, *answer.notes), to_data=data)


# ---- files


def emit(json: str | None, data: Callable[[], Mapping[str, Any]]) -> bool:
    """Write the data as JSON if --json was given, and try the condition of --fail-if on it; returns whether the tables
    should still be printed."""
    condition = current_output().fail_if
    if json is None and condition is None:
        return True
    value = _json_value(data())
    if condition is not None:
        from presage.cli.conditions import holds

        current_output().failed.append(holds(condition, value))
    if json is None:
        return True
    import msgspec

    from presage.files import write_whole

    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    if json == "-":
        sys.stdout.buffer.write(C1.sub(lambda m: b"\\u00%02x" % m[0][1], text))
        return False
    write_whole(json, text)
    return True


def _json_value(value: Any) -> Any:
    """What JSON can hold: NaN becomes null, half characters (of file names that are not UTF-8) become \\udcff."""
    if isinstance(value, dict):
        return {_json_value(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, float):  # NumPy's too, which are floats
        return None if value != value else float(value)
    return value


def write_timeline(result: StepResult | JobResult, path: Path) -> None:
    """Write a predicted timeline for Perfetto: one process per kind of rank, or per stage."""
    from presage.files import write_whole
    from presage.traces.perfetto import timeline_trace

    write_whole(path, timeline_trace(result.timeline, result.timeline_names))


# ---- traces


def load_runs(paths: Iterable[Path], ignore: Iterable[str], partial: bool, cpu_only: bool) -> list[TraceSet]:
    """Read the given traces; a folder stands for the trace files in it."""
    from presage.traces.trace_set import files_of, read_runs

    files = files_of(paths)
    items = progress(files, f"reading {len(files)} trace{'s' if len(files) > 1 else ''}", len(files))
    return read_runs(items, ignore=ignore, partial=partial, need_gpu=not cpu_only)


# ---- progress


class Bar(Protocol):
    """Updates a progress bar: amount done, of the total (None: unchanged), the current item, and a note."""

    def __call__(self, done: float, total: float | None = None, what: str = "", note: str = "") -> None: ...


@contextmanager
def bar(message: str, total: float | None = None) -> Iterator[Bar]:
    """A progress bar with elapsed time and time left, on a terminal only."""
    if not current_output().animated:
        yield _no_bar
        return
    from presage.report.terminal import progress_bars

    with progress_bars() as shown:
        task = shown.add_task(message, total=total, note="")

        def update(done: float, total: float | None = None, what: str = "", note: str = "") -> None:
            description: dict[str, Any] = {"description": _shortened(what)} if what else {}
            shown.update(task, completed=done, total=total, note=note, **description)

        yield update


def _shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _no_bar(done: float, total: float | None = None, what: str = "", note: str = "") -> None:
    """Draws nothing."""


def progress(items: Iterable[T], message: str, total: int | None = None) -> Iterator[T]:
    """Iterate over the items with a progress bar."""
    count = len(items) if total is None and isinstance(items, Sequence) else total
    with bar(message, None if count == 1 else count) as update:  # the time left of a single item is unknown
        for done, item in enumerate(items):
            yield item
            update(done + 1)


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner, for work of unknown length."""
    with bar(message):
        yield


@contextmanager
def pool_progress(message: str, opened: AbstractContextManager[Pool]) -> Iterator[Pool]:
    """A pool whose finished work moves a progress bar."""
    with bar(message) as update, opened as pool:
        yield _CountingPool(pool, update)


@dataclass
class _CountingPool:
    """A pool that reports how many of its items are done."""

    pool: Pool
    update: Bar
    done: int = 0
    total: int = 0

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        every = list(items)
        self.total += len(every)
        for result in self.pool.map(function, every):
            self.done += 1
            self.update(self.done, self.total)
            yield result
