"""`presage gpus`, `presage platforms` and `presage hosts`: the known hardware, with the source of every figure."""

from __future__ import annotations

from typing import Annotated

import typer

from presage.cli import complete
from presage.cli.options import Json, current_output
from presage.cli.output import show_answer


def gpus_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One GPU, by presage's name or the driver's, or a .toml file.",
            autocompletion=complete.gpus,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """List the GPUs presage knows; with NAME or --verbose, the source and date of every figure.

    A GPU is a TOML file: give its path here to check yours, and to --gpu to predict for it. A calibration pack of the
    GPU (`presage calibrate`) makes predictions more accurate.

    presage gpus

    presage gpus h200
    """
    from presage.hardware import gpu, gpus
    from presage.report.hardware_answer import gpus_answer

    chosen = [gpu(name)] if name is not None else list(gpus())
    show_answer(gpus_answer(chosen, name is not None, current_output().verbose), json)


def hosts_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One host, by name, or a .toml file.", autocompletion=complete.hosts),
    ] = None,
    json: Json = None,
) -> None:
    """List the hosts presage knows; with NAME or FILE.toml, every figure, and its pace against the reference.

    A host is the machine around a GPU. Where the GPU waits for it, its processor sets the step time. `presage calibrate
    --host` measures one within 30 s and without a GPU; give the file here to check it, and to --host to predict for it.

    presage hosts

    presage hosts h200_host

    presage calibrate --host my_host.toml

    presage hosts my_host.toml
    """
    from presage.hardware import host, hosts
    from presage.report.hardware_answer import hosts_answer

    chosen = [host(name)] if name is not None else list(hosts())
    show_answer(hosts_answer(chosen, name is not None), json)


def platforms_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One platform, by name, or a .toml file.", autocompletion=complete.platforms
        ),
    ] = None,
    json: Json = None,
) -> None:
    """List the platforms presage knows: GPUs, links with their sources, and predicted bus bandwidths.

    A platform is a TOML file: give its path here to check yours.

    presage platforms

    presage platforms dgx-h100
    """
    from presage.costs.collectives.model import bus_table
    from presage.hardware import platform, platforms
    from presage.report.hardware_answer import platforms_answer

    chosen = [platform(name)] if name is not None else list(platforms())
    buses = bus_table(chosen[0]) if name is not None else None
    show_answer(platforms_answer(chosen, buses), json)
