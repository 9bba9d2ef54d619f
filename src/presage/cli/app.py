"""The `presage` command. Each subcommand lives in its module and imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from presage.cli import (
    calibrate,
    dlrm,
    examples,
    gpus,
    graph,
    indices,
    job,
    measure,
    place,
    plan,
    platforms,
    predict,
    replay,
    run,
    sensitivity,
    shard,
    study,
    trace,
    ui,
    whatif,
)
from presage.cli.faults import guarded
from presage.cli.options import Quiet, output_options, with_common_options
from presage.cli.plugins import COMMANDS as PLUGINS
from presage.cli.plugins import load_command

__all__ = ["app", "main"]

FIRST = """\
To begin:
  presage trace demo                where a step's time goes, of a trace
  presage predict train.py:build    how long your step takes, with no GPU here
  presage examples FOLDER           steps and jobs to start from

Every command's --help has examples, --install-completion teaches your shell.
docs/ has a page a question, and one of the terminal.
"""
STEP, MANY, TABLES, HARDWARE = "One training step", "Many GPUs", "Embedding tables", "GPUs, data and claims"
LISTING = "presage.listing"  # in a context: commands are listed, not run
# Panel, name, command (or where its package has it), and what it answers.
COMMANDS: list[tuple[str, str, Any, str]] = [
    (STEP, "predict", predict.command, "How long will my training step take, on GPUs that are not here?"),
    (STEP, "whatif", whatif.command, "Would it help if ...? Edits, predicted before they are made."),
    (STEP, "graph", graph.command, "What does my step run, and does it fit? FLOPs, bytes, memory."),
    (STEP, "trace", trace.command, "Where does my step's time go? From profiler traces."),
    (STEP, "replay", replay.command, "Is a trace understood? And what if parts took other times?"),
    (MANY, "job", job.command, "A model on so many GPUs: how long, does it fit, at what cost?"),
    (MANY, "plan", plan.command, "Which parallelism is best? Every legal plan, ranked."),
    (MANY, "run", run.command, "When will the whole run end? Failures, checkpoints, a deadline."),
    (MANY, "sensitivity", sensitivity.command, "What makes a step uncertain? Which kernel to make steadier?"),
    (MANY, "place", place.command, "Which GPU goes where, what does a hot node cost, whom to evict?"),
    (MANY, "ui", ui.command, "Plan in a browser: turn knobs, compare plans, share a link."),
    (MANY, "study", study.app, "What on machines that are not built yet?"),
    (TABLES, "indices", indices.command, "What does index data tell of embedding tables?"),
    (TABLES, "shard", shard.command, "Which rank should hold which embedding table?"),
    (TABLES, "dlrm", dlrm.command, "How long is a step of this recommendation job?"),
    (HARDWARE, "examples", examples.command, "What is there to run and to start from?"),
    (HARDWARE, "gpus", gpus.command, "Which GPUs are known, and who says so?"),
    (HARDWARE, "platforms", platforms.command, "Which machines with many GPUs are known?"),
    (HARDWARE, "calibrate", calibrate.command, "Measure this machine's GPU into a pack, for predictions."),
    (HARDWARE, "measure", measure.command, "Run a step on this machine's GPU, beside its prediction."),
    (HARDWARE, "pack", PLUGINS["pack"], "What is in a calibration pack?"),
    (HARDWARE, "fit", PLUGINS["fit"], "How do steps differ? A noise file from your traces and logs."),
    (HARDWARE, "accuracy", PLUGINS["accuracy"], "Is a claim of presage's true? Prove it again, on your data too."),
]  # fmt: skip


class _Group(TyperGroup):
    """Commands in the order of the table above; those of other packages are imported when they are run."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [name for _, name, _, _ in COMMANDS]
        return sorted(super().list_commands(ctx), key=order.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        placeholder = super().get_command(ctx, cmd_name)
        if cmd_name not in PLUGINS or ctx.meta.get(LISTING):
            return placeholder
        only = typer.Typer()
        panel, question = next((p, q) for p, name, _, q in COMMANDS if name == cmd_name)
        only.command(cmd_name, short_help=question, rich_help_panel=panel)(with_common_options(load_command(cmd_name)))
        return typer.main.get_group(only).commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[LISTING] = True
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="presage",
    cls=_Group,
    help="How long machine-learning training will take, and how sure you can be, before you train.",
    epilog=FIRST,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# These run on bare machines too, as `python -m presage.NAME`, and own their options.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _register() -> None:
    for panel, name, command, question in COMMANDS:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=question, rich_help_panel=panel)
        elif name in ("calibrate", "measure"):
            own: dict[str, Any] = {"add_help_option": False, "context_settings": PASSED_ON}
            app.command(name, short_help=question, rich_help_panel=panel, **own)(command)
        elif isinstance(command, str):
            app.command(name, short_help=question, rich_help_panel=panel)(lambda: None)
        else:
            app.command(name, short_help=question, rich_help_panel=panel)(with_common_options(command))


_register()


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("presage"))
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    quiet: Quiet = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show where presage failed, if it does.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.with_resource(output_options(quiet))


def main() -> None:
    """Run; a mistake of the user's ends with one sentence and exit code 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no UTF-8
    given = [a for a in sys.argv[1:] if a != "--debug"]  # it may stand anywhere
    debug = len(given) < len(sys.argv) - 1 or bool(os.environ.get("PRESAGE_DEBUG"))
    sys.exit(guarded(lambda: app(given, prog_name="presage", standalone_mode=False), debug))
