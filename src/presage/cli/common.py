"""What several commands share: options, the doors all output goes through, JSON out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.manners import OUTPUT, manners
from presage.cli.progress import bar, progress, status, watched

if TYPE_CHECKING:
    from rich.console import Console

    from presage.traces.trace_set import TraceSet

__all__ = [
    "Change",
    "Columns",
    "CpuOnly",
    "Draws",
    "Gpus",
    "Ignore",
    "JobFile",
    "Json",
    "NoiseFile",
    "Partial",
    "Plot",
    "RayAddress",
    "Seed",
    "Traces",
    "Workers",
    "answer",
    "bar",
    "brief",
    "columns_of",
    "console",
    "emit",
    "labels",
    "load_runs",
    "progress",
    "remark",
    "status",
    "watched",
]

Traces = Annotated[
    list[Path],
    typer.Argument(metavar="TRACE...", help="Kineto files (.json, .json.gz) of one run, their folder, or 'demo'."),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write JSON to FILE, or to stdout with '-'.", rich_help_panel=OUTPUT),
]
Ignore = Annotated[list[str], typer.Option("--ignore", metavar="CATEGORY", help="Leave out events of this category.")]
Partial = Annotated[bool, typer.Option("--partial", help="Accept a run with ranks missing.")]
CpuOnly = Annotated[bool, typer.Option("--cpu-only", help="Accept traces without GPU events.")]
Draws = Annotated[
    int,
    typer.Option("--draws", metavar="N", min=0, max=1_000_000, help="Steps to draw: 10000 tells p99 well; 0: none."),
]
NoiseFile = Annotated[
    str | None,
    typer.Option(
        "--noise",
        metavar="NOISE.toml|CONDITIONS",
        autocompletion=complete.among(complete.CONDITIONS),
        help="What varies: as `presage fit` writes it, or assumed of screened, production or unscreened GPUs.",
    ),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job: see docs/jobs.md.")]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Instead of the job's.")]
Change = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A key of the file said anew: parallel.tp=4; repeatable."),
]
Columns = Annotated[
    list[str],
    typer.Option("--column", metavar="KEY=NAME", help="Of a CSV: which column is the gpu, time, ...; repeatable."),
]


def _plottable(path: Path | None) -> Path | None:
    if path is not None:
        from presage.report.plots import ready

        ready(path)
    return path


Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="OUT.svg",
        help="Draw it (.svg, .png, .pdf; needs matplotlib).",
        callback=_plottable,
        rich_help_panel=OUTPUT,
    ),
]
Workers = Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Processes to work with.")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|ADDRESS", help="Work on a Ray cluster: the one that runs here, or at."),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the draws: the same seed, the same answer.")]


def console(answer: bool = False) -> Console:
    """A console that wraps nothing in a pipe, and is mute under --quiet but for the answer."""
    from rich.console import Console

    mute = manners().quiet and not answer
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, quiet=mute)


def answer(text: Any) -> None:
    """Print the answer: what --quiet leaves."""
    console(answer=True).print(text, soft_wrap=True)


def brief(text: str) -> None:
    """Print plain text under --quiet alone: the answer, where it is tables otherwise."""
    if manners().quiet:
        console(answer=True).print(text, soft_wrap=True, markup=False)


def remark(text: str) -> None:
    """Say something beside the answer, on stderr."""
    if not manners().quiet:
        typer.echo(text, err=True)


def emit(json: str | None, value: dict[str, Any]) -> bool:
    """Write the value as JSON if that was asked for; whether the tables should still be printed."""
    if json is None:
        return True
    import msgspec

    from presage.files import write_whole

    data = msgspec.json.format(msgspec.json.encode(_finite(value)), indent=2) + b"\n"
    if json == "-":
        sys.stdout.buffer.write(data)
        return False
    write_whole(json, data)
    return True


def _finite(value: Any) -> Any:
    """NaN is not JSON: unknown numbers become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and value != value else value


def columns_of(given: Iterable[str]) -> dict[str, str]:
    """What --column says, by key."""
    from presage.errors import PresageError

    for text in given:
        if "=" not in text:
            raise PresageError(f"--column {text}: it should be KEY=NAME, such as gpu=serial or time=seconds")
    return {key.strip(): name for key, _, name in (text.partition("=") for text in given)}


def load_runs(paths: Iterable[Path], ignore: Iterable[str], partial: bool, cpu_only: bool) -> list[TraceSet]:
    """Read the traces that were named; a folder stands for the trace files in it."""
    from presage.traces.trace_set import files_of, read_runs

    files = files_of(paths)
    taken = progress(files, f"reading {len(files)} trace{'s' if len(files) > 1 else ''}", len(files))
    return read_runs(taken, ignore=ignore, partial=partial, need_gpu=not cpu_only)


def labels(runs: list[TraceSet]) -> list[list[str]]:
    """What to call each rank of each run: its number, or its file's name where there are several runs."""
    if len(runs) == 1:
        return [[str(runs[0].rank(i)) for i in range(len(runs[0]))]]
    return [[Path(t.path).name.removesuffix(".gz").removesuffix(".json") for t in run.traces] for run in runs]
