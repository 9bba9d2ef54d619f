"""Options that several commands share, and the verbosity options that every command has.

`with_common_options` adds the latter to a command; whatever prints consults `current_output()`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from presage.cli import complete
from presage.cli.faults import CONDITION_HELD
from presage.errors import PresageError
from presage.files.finite import finite
from presage.files.writing import check_writable
from presage.text import printable

OUTPUT = "Output"


def option(names: str, metavar: str, help: str, panel: str | None = None, complete: Any = None, **checks: Any) -> Any:
    """A command-line option: its names ("--quiet -q"), the metavar of its value (a flag has none), its help; `checks`
    of the value such as min and max."""
    return typer.Option(
        *names.split(), metavar=metavar or None, help=help, rich_help_panel=panel, autocompletion=complete, **checks
    )


def out_option(names: str, metavar: str, help: str, panel: str | None = None, check: Any = None) -> Any:
    """An option that names a file to be written: that it can be written is checked before any work."""

    def checked(path: Any) -> Any:
        if path is not None and str(path) != "-":
            check_writable(path)
            if check is not None:
                check(path)
        return path

    return option(names, metavar, help, panel=panel, callback=checked)


def _check_plot(path: Path) -> None:
    from presage.report.plots import check_plottable

    check_plottable(path)


def _check_report(_: Path) -> None:
    from presage.report.html import check_installed

    check_installed()


def _check_condition(text: str | None) -> str | None:
    if text is not None:
        from presage.cli.conditions import parse_condition

        parse_condition(text)
    return text


Quiet = Annotated[bool, option("--quiet -q", "", "Print only the answer: no tables, notes or progress.", panel=OUTPUT)]
Verbose = Annotated[bool, option("--verbose -v", "", "Print every table and note.", panel=OUTPUT)]
FailIf = Annotated[
    str | None,
    option(
        "--fail-if",
        "CONDITION",
        "Exit with status 3 if CONDITION holds for the JSON, e.g. 'not fits' or 'p95 > 40ms' (docs/terminal.md).",
        panel=OUTPUT,
        callback=_check_condition,
    ),
]
HostName = Annotated[
    str | None,
    option(
        "--host",
        "FILE|NAME",
        "Host to predict for: a file of `presage calibrate --host` or of `presage trace --overheads`, a pack, a known "
        "host (see `presage hosts`), or 'unknown' (default: the pack's, else the H200's).",
        complete=complete.hosts,
    ),
]
PackFolder = Annotated[
    Path | None,
    option("--pack", "FOLDER", "Kernel corrections learned from traces (`presage calibrate --from`), or a sweep's."),
]
Json = Annotated[str | None, out_option("--json", "FILE|-", "Write JSON to FILE, or to stdout with '-'.", panel=OUTPUT)]
Report = Annotated[
    Path | None,
    out_option(
        "--report",
        "OUT.html",
        "Write charts and tables as one HTML file (works offline).",
        panel=OUTPUT,
        check=_check_report,
    ),
]
Plot = Annotated[
    Path | None,
    out_option(
        "--plot", "OUT.svg", "Draw a chart (.svg, .png or .pdf; needs matplotlib).", panel=OUTPUT, check=_check_plot
    ),
]
Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE", help="Kineto traces (.json, .json.gz) of one run, the folder they are in, or 'demo'."
    ),
]
Ignore = Annotated[list[str], option("--ignore", "CATEGORY", "Leave out trace events of this category (repeatable).")]
Partial = Annotated[bool, option("--partial", "", "Accept a run with ranks missing.")]
CpuOnly = Annotated[bool, option("--cpu-only", "", "Accept traces without GPU events.")]
Draws = Annotated[
    int, option("--draws", "N", "Steps to draw (10000 gives a good p99; 0: no draws).", min=0, max=1_000_000)
]
NoiseFile = Annotated[
    str | None,
    option(
        "--noise",
        "FILE|PRESET",
        "Noise: a file from `presage fit`, or screened, production (default), unscreened.",
        complete=complete.one_of(complete.CONDITIONS),
    ),
]
JobFile = Annotated[
    Path, typer.Argument(metavar="JOB.toml|MODEL", help="A job file (see docs/jobs.md), or a model such as llama3-8b.")
]
Gpus = Annotated[int | None, option("--gpus", "N", "Number of GPUs (overrides the file).", min=1)]
Change = Annotated[
    list[str], option("--set", "KEY=VALUE", "Override a key of the file, e.g. parallel.tp=4 (repeatable).")
]
Columns = Annotated[
    list[str], option("--column", "KEY=NAME", "CSV: the column that holds KEY (gpu, time, ...) (repeatable).")
]
Workers = Annotated[int, option("--workers", "N", "Number of worker processes.", min=1)]
RayAddress = Annotated[
    str | None, option("--ray", "auto|ADDRESS", "Run on Ray: 'auto' for the local cluster, or its address.")
]
RunDraws = Annotated[
    int, option("--draws", "N", "Runs to draw for the interval of the step time.", min=1, max=1_000_000)
]
StepDraws = Annotated[
    int | None,
    option(
        "--draws",
        "N",
        "Runs to draw for the interval of the step time (default: 200); with --noise, steps to draw (default: 2000).",
        min=1,
        max=1_000_000,
    ),
]
Price = Annotated[float | None, option("--price", "P", "Price per GPU-hour, in any currency.")]
TraceOut = Annotated[
    Path | None, out_option("--trace", "OUT.json", "Write the predicted timeline as a Perfetto trace.")
]
SearchSeconds = Annotated[float, option("--seconds", "S", "Time limit of the search, s.", min=0.0)]
ShardingOut = Annotated[Path | None, out_option("--out", "PLAN.json", "Write the sharding plan.")]
Seed = Annotated[int, option("--seed", "N", "Random seed.", min=0)]


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
    verbose: bool = False  # every table and note
    fail_if: str | None = None  # a condition over the JSON
    failed: list[bool] = field(default_factory=list)  # whether it held, for each answer given

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
def output_options(
    quiet: bool = False, json_on_stdout: bool = False, verbose: bool = False, fail_if: str | None = None
) -> Iterator[None]:
    """Set output options for a block, on top of those already set."""
    now = _CURRENT.get()
    token = _CURRENT.set(
        OutputOptions(
            quiet or now.quiet, json_on_stdout or now.json_on_stdout, verbose or now.verbose, fail_if or now.fail_if
        )
    )
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
    """The command with the options that all commands have: --quiet, --verbose, and --fail-if where it has --json."""
    own = inspect.signature(command, eval_str=True)
    common: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False), "verbose": (Verbose, False)}
    if "json" in own.parameters:
        common["fail_if"] = (FailIf, None)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in common.items()
    ]

    @wraps(command)
    def run(*args: Any, quiet: bool = False, verbose: bool = False, fail_if: str | None = None, **values: Any) -> None:
        _check_numbers(own, values)
        with output_options(quiet, values.get("json") == "-", verbose, fail_if):
            command(*args, **values)
            if any(current_output().failed):
                typer.echo(f"presage: --fail-if: {printable(str(fail_if))}", err=True)
                raise typer.Exit(CONDITION_HELD)

    run.__doc__ = help_text(command)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *extra])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own.parameters.values(), *extra)} | {"return": None}
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
