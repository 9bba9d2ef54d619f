"""The `presage` command. Each subcommand lives in its module and imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as installed_version
from typing import Any

import typer
from typer.core import TyperGroup

from presage.cli import (
    accuracy,
    calibrate,
    dlrm,
    fit,
    gpus,
    graph,
    indices,
    job,
    measure,
    pack,
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
    whatif,
)
from presage.errors import PresageError

__all__ = ["app", "main"]


class _InOrder(TyperGroup):
    """Typer lists groups of commands last: studies belong to the commands about jobs."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = [n for n in super().list_commands(ctx) if n != "study"]
        names.insert(names.index("fit"), "study")
        return names


app = typer.Typer(
    name="presage",
    cls=_InOrder,
    help="How long machine-learning training will take, and how sure you can be, before you train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# These run on bare machines too, as `python -m presage.NAME`, and own their options.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("predict")(predict.command)
app.command("whatif")(whatif.command)
app.command("trace")(trace.command)
app.command("replay")(replay.command)
app.command("graph")(graph.command)
app.command("indices")(indices.command)
app.command("shard")(shard.command)
app.command("dlrm")(dlrm.command)
app.command("job")(job.command)
app.command("plan")(plan.command)
app.command("run")(run.command)
app.command("sensitivity")(sensitivity.command)
app.command("place")(place.command)
app.add_typer(study.app, name="study")
app.command("fit")(fit.command)
app.command("accuracy")(accuracy.command)
for _name, _command in (("measure", measure.command), ("calibrate", calibrate.command)):
    app.command(_name, add_help_option=False, context_settings=PASSED_ON)(_command)
app.command("pack")(pack.command)
app.command("gpus")(gpus.command)
app.command("platforms")(platforms.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("presage"))
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run; a mistake of the user's ends with one sentence and exit code 2, never with a traceback."""
    try:
        app()
    except PresageError as e:
        typer.echo(f"presage: {e}", err=True)
        sys.exit(e.exit_code)
    except BrokenPipeError:  # the reader of a pipe has left: nothing to report, and nobody to report it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
