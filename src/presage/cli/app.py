"""The `presage` command. Each subcommand lives in its module and imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from presage.cli.faults import INTERRUPTED, run_guarded
from presage.cli.options import HelpCommand, Quiet, Verbose, option, output_options, plain_types, with_common_options
from presage.cli.plugins import COMMANDS as PLUGINS
from presage.cli.plugins import load_command

FIRST = """\
To begin:
  presage trace demo                see where the time of a recorded step goes
  presage predict train.py:build    predict your training step (no GPU needed)
  presage examples FOLDER           copy example steps and jobs to start from

Every command's --help has examples; --install-completion sets up your shell.
See docs/: one page per question, plus terminal tips and a glossary.
"""
STEP, MANY, TABLES, HARDWARE = "One training step", "Many GPUs", "Embedding tables", "Hardware, data and accuracy"
LISTING = "presage.listing"  # in a context: commands are listed, not run
# Panel, name, module:function of presage.cli (or of another package), and what it does.
COMMANDS: list[tuple[str, str, str, str]] = [
    (STEP, "predict", "predict:command", "Predict the time and memory of a training step on a GPU you do not have"),
    (STEP, "whatif", "whatif:command", "Predict the effect of edits: bf16, CUDA graphs, another batch or GPU, ..."),
    (STEP, "graph", "graph:command", "List what a step runs: ops, FLOPs, bytes, memory, by module"),
    (STEP, "trace", "trace:command", "Explain where the time of a step goes, from profiler traces"),
    (STEP, "replay", "replay:command", "Re-simulate a trace, then change kernel or CPU times"),
    (STEP, "diff", "compare:diff_command", "Show what changed between two answers, traces, graphs or jobs, and why"),
    (MANY, "job", "job:command", "Predict a job on many GPUs: step time, memory, days, cost"),
    (MANY, "plan", "plan:command", "Find the best parallelism: every legal plan, ranked"),
    (MANY, "run", "run:command", "Predict when a whole run ends: failures, checkpoints, a deadline"),
    (MANY, "sensitivity", "sensitivity:command", "Rank what the p95 step time depends on most"),
    (MANY, "place", "place:command", "Place slow GPUs where they hurt least; cost of a hot node; whom to evict"),
    (MANY, "ui", "ui:command", "Plan in a browser: change settings, compare plans, share a link"),
    (MANY, "study", "study:app", "Explore hardware that does not exist yet"),
    (TABLES, "indices", "indices:command", "Summarise embedding lookups: pooling, reuse, skew"),
    (TABLES, "shard", "shard:command", "Shard embedding tables over GPUs"),
    (TABLES, "dlrm", "dlrm:command", "Predict a step of a recommendation (DLRM) job"),
    (HARDWARE, "examples", "examples:command", "List or copy the example steps, jobs and tables"),
    (HARDWARE, "gpus", "hardware:gpus_command", "List known GPUs, with the source of every figure"),
    (HARDWARE, "platforms", "hardware:platforms_command", "List known platforms: GPUs, links, collective bandwidths"),
    (HARDWARE, "hosts", "hardware:hosts_command", "List known hosts, with the source of every figure"),
    (HARDWARE, "calibrate", "device:calibrate_command", "Measure this machine's GPU, or its host alone, into a file"),
    (HARDWARE, "measure", "device:measure_command", "Run a step on this machine's GPU and compare with its prediction"),
    (HARDWARE, "compare", "compare:command", "Compare a training loop that presage watched with its prediction"),
    (HARDWARE, "pack", PLUGINS["pack"], "Show or merge calibration packs"),
    (HARDWARE, "fit", PLUGINS["fit"], "Fit noise to your traces and logs, or collectives to nccl-tests"),
    (HARDWARE, "accuracy", PLUGINS["accuracy"], "Check presage's accuracy, on its data or yours"),
]  # fmt: skip
LOADED = {name for _, name, where, _ in COMMANDS if where == PLUGINS.get(name)}  # when they are run


class _Group(TyperGroup):
    """Commands in the order of the table above; those of other packages are imported when they are run."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for _, name, _, _ in COMMANDS]
        return sorted(super().list_commands(ctx), key=order.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        placeholder = super().get_command(ctx, cmd_name)
        if cmd_name not in LOADED or ctx.meta.get(LISTING):
            return placeholder
        only = typer.Typer()
        panel, question = next((p, q) for p, name, _, q in COMMANDS if name == cmd_name)
        only.command(cmd_name, cls=HelpCommand, short_help=question, rich_help_panel=panel)(
            with_common_options(load_command(cmd_name))
        )
        return typer.main.get_group(only).commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[LISTING] = True
        with plain_types(self.get_params(ctx)):
            super().format_help(ctx, formatter)


# These run on bare machines too, as Python modules (see device.py), and own their options.
PASSED_ON = {
    "allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": [],
}  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("presage"))
        raise typer.Exit


def _options(
    context: typer.Context,
    quiet: Quiet = False,
    verbose: Verbose = False,
    _debug: Annotated[bool, option("--debug", "", "Show a traceback if presage fails.")] = False,
    _version: Annotated[bool, option("--version", "", "Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    context.with_resource(output_options(quiet, verbose=verbose))


@cache
def build(only: str | None = None) -> typer.Typer:
    """The command line, or the part of it that one command needs: importing all of them takes a while."""
    app = typer.Typer(
        name="presage",
        cls=_Group,
        help="Predict how long ML training will take, and how certain that is, before you train.",
        epilog=FIRST,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for panel, name, where, question in COMMANDS:
        if only in (None, name):
            _add(app, name, where, {"short_help": question, "rich_help_panel": panel})
    return app


def _add(app: typer.Typer, name: str, where: str, how: dict[str, Any]) -> None:
    if name in LOADED:
        app.command(name, **how)(lambda: None)
        return
    module, _, attribute = where.partition(":")
    command = getattr(import_module(f"presage.cli.{module}"), attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, **how)
    elif name in ("calibrate", "measure"):
        app.command(name, add_help_option=False, context_settings=PASSED_ON, **how)(command)
    else:
        app.command(name, cls=HelpCommand, **how)(with_common_options(command))


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return build()
    raise AttributeError(name)


def main() -> None:
    """Run the command line; a user error ends with one sentence and exit code 2, never with a traceback."""
    vars(sys.modules["presage"])["own_process"] = True
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (closed by the shell: >&-)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no UTF-8
    given = [a for a in sys.argv[1:] if a != "--debug"]  # it may stand anywhere
    debug = len(given) < len(sys.argv) - 1 or bool(os.environ.get("PRESAGE_DEBUG"))
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS")  # what a shell completes
    words = given if line is None else line.split()[1:]
    first = next((a for a in words if a not in ("-q", "--quiet", "-v", "--verbose")), None)
    only = first if first in {name for _, name, _, _ in COMMANDS} else None
    code = run_guarded(lambda: build(only)(given, prog_name="presage", standalone_mode=False), debug)
    if code == INTERRUPTED:
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit waits for threads at work
    sys.exit(code)
