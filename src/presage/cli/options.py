"""Options that several commands share, and the verbosity options that every command has.

`with_common_options` adds the latter to a command; whatever prints consults `current_output()`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from presage.cli import complete
from presage.errors import PresageError
from presage.files.finite import finite

OUTPUT = "Output"
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only the answer: no tables, notes or progress.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write JSON to FILE, or to stdout with '-'.", rich_help_panel=OUTPUT),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="OUT.html",
        help="Write charts and tables as one HTML file (works offline).",
        rich_help_panel=OUTPUT,
    ),
]


def _check_plot(path: Path | None) -> Path | None:
    if path is not None:
        from presage.report.plots import check_plottable

        check_plottable(path)
    return path


Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="OUT.svg",
        help="Draw a chart (.svg, .png or .pdf; needs matplotlib).",
        callback=_check_plot,
        rich_help_panel=OUTPUT,
    ),
]
Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE", help="Kineto traces (.json, .json.gz) of one run, the folder they are in, or 'demo'."
    ),
]
Ignore = Annotated[
    list[str],
    typer.Option("--ignore", metavar="CATEGORY", help="Leave out trace events of this category (repeatable)."),
]
Partial = Annotated[bool, typer.Option("--partial", help="Accept a run with ranks missing.")]
CpuOnly = Annotated[bool, typer.Option("--cpu-only", help="Accept traces without GPU events.")]
Draws = Annotated[
    int,
    typer.Option(
        "--draws", metavar="N", min=0, max=1_000_000, help="Steps to draw (10000 gives a good p99; 0: no draws)."
    ),
]
NoiseFile = Annotated[
    str | None,
    typer.Option(
        "--noise",
        metavar="FILE|PRESET",
        autocompletion=complete.one_of(complete.CONDITIONS),
        help="Noise: a file from `presage fit`, or screened, production (default), unscreened.",
    ),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file (see docs/jobs.md).")]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs (overrides the file).")]
Change = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. parallel.tp=4 (repeatable)."),
]
Columns = Annotated[
    list[str],
    typer.Option("--column", metavar="KEY=NAME", help="CSV: the column that holds KEY (gpu, time, ...) (repeatable)."),
]
Workers = Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Number of worker processes.")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|ADDRESS", help="Run on Ray: 'auto' for the local cluster, or its address."),
]
RunDraws = Annotated[
    int,
    typer.Option("--draws", metavar="N", min=1, max=1_000_000, help="Runs to draw for the interval of the step time."),
]
Price = Annotated[float | None, typer.Option("--price", metavar="P", help="Price per GPU-hour, in any currency.")]
TraceOut = Annotated[
    Path | None, typer.Option("--trace", metavar="OUT.json", help="Write the predicted timeline as a Perfetto trace.")
]
SearchSeconds = Annotated[float, typer.Option("--seconds", metavar="S", min=0.0, help="Time limit of the search, s.")]
ShardingOut = Annotated[Path | None, typer.Option("--out", metavar="PLAN.json", help="Write the sharding plan.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed.")]


def parse_columns(items: Iterable[str]) -> dict[str, str]:
    """The column names given by --column, by key."""
    for text in items:
        if "=" not in text:
            raise PresageError(f"--column {text}: should be KEY=NAME, such as gpu=serial or time=seconds")
    return {key.strip(): name for key, _, name in (text.partition("=") for text in items)}


@dataclass(frozen=True)
class OutputOptions:
    """How much a command prints."""

    quiet: bool = False  # the answer only
    json_on_stdout: bool = False

    @property
    def animated(self) -> bool:
        """Whether progress bars may be drawn: only on a terminal, and not under --quiet."""
        return not self.quiet and not self.json_on_stdout and sys.stderr.isatty()


DEFAULT_OUTPUT = OutputOptions()
_CURRENT: ContextVar[OutputOptions] = ContextVar("output_options", default=DEFAULT_OUTPUT)


def current_output() -> OutputOptions:
    """The output options of the running command."""
    return _CURRENT.get()


@contextmanager
def output_options(quiet: bool, json_on_stdout: bool = False) -> Iterator[None]:
    """Set output options for a block, on top of those already set."""
    now = _CURRENT.get()
    token = _CURRENT.set(replace(now, quiet=quiet or now.quiet, json_on_stdout=json_on_stdout or now.json_on_stdout))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _check_numbers(signature: inspect.Signature, values: dict[str, Any]) -> None:
    """Reject nan and inf in every numeric option."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float):
                finite(number, _option_name(signature.parameters[name]))


def _option_name(parameter: inspect.Parameter) -> str:
    """The option as it is typed, e.g. --draws."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    names = (n for m in metadata for n in (m.default, *(m.param_decls or ())))
    return next((n for n in names if isinstance(n, str) and n.startswith("--")), f"--{parameter.name}")


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options that all commands have (--quiet)."""
    own = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)

    @wraps(command)
    def run(*args: Any, quiet: bool = False, **values: Any) -> None:
        _check_numbers(own, values)
        with output_options(quiet, values.get("json") == "-"):
            command(*args, **values)

    run.__doc__ = help_text(command)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), extra])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in own.parameters.values()} | {"quiet": Quiet, "return": None}
    return run


class HelpCommand(TyperCommand):
    """A command whose help shows metavars only where they say something."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with plain_types(self.get_params(ctx)):
            super().format_help(ctx, formatter)


def _no_type(ctx: Any) -> None:
    """No type in the help."""


@contextmanager
def plain_types(params: list[Any]) -> Iterator[None]:
    """Help without `<bool>` for flags, types of arguments, ranges of numbers and a column of negative flags."""
    negative = {id(p): p.secondary_opts for p in params}
    for p in params:
        if p.param_type_name == "argument":
            p.display_type_rich = _no_type
        elif p.is_flag:
            p.metavar, p.secondary_opts = "", []
            p.show_default = False
        p._get_number_range_help_str = lambda: None
    try:
        yield
    finally:
        for p in params:
            p.secondary_opts = negative[id(p)]


def help_text(command: Callable[..., Any]) -> str:
    """A docstring as --help shows it: each paragraph on one line, examples under a heading, no Rich markup."""
    blocks = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    paragraphs = [block if "\n  " in block else " ".join(block.split()) for block in blocks]  # lists keep their lines
    paragraphs = [p.replace("[", r"\[") for p in paragraphs]
    text = [p for p in paragraphs if not p.startswith("presage ")]
    examples = [f"[not dim]  {p}[/]" for p in paragraphs if p.startswith("presage ")]
    return "\n\n".join([*text, "\n".join(["Examples:", *examples])] if examples else text)
