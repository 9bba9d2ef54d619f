"""`presage gpus` and `presage platforms`: the known hardware, with the source of every figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.options import Json
from presage.cli.output import show_answer

if TYPE_CHECKING:
    from presage.hardware import Platform
    from presage.hardware.gpu import Gpu


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
    """List the GPUs presage knows, with the source and date of every figure.

    A GPU is a TOML file: give its path here to check yours, and to --gpu to predict for it. A calibration pack of the
    GPU (`presage calibrate`) makes predictions more accurate.

    presage gpus

    presage gpus h200
    """
    from presage.hardware import gpu, gpus
    from presage.report.hardware_answer import gpus_answer

    found = [gpu(name)] if name is not None else list(gpus())
    to_data = lambda: {"kind": "gpus", "gpus": [_gpu_json(g) for g in found]}  # noqa: E731
    show_answer(gpus_answer(found, name is not None, to_data), json)


def _gpu_json(g: Gpu) -> dict[str, Any]:
    """Figures in the units of their keys, each with its source."""
    return {"key": g.key, **g.facts.texts, "figures": _figures_json(g.facts)}


def platforms_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One platform, by name, or a .toml file.",
            autocompletion=complete.platforms,
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

    found = [platform(name)] if name is not None else list(platforms())
    buses = bus_table(found[0]) if name is not None else None
    to_data = lambda: {"kind": "platforms", "platforms": [_platform_json(p, one=name is not None) for p in found]}  # noqa: E731
    show_answer(platforms_answer(found, buses, to_data), json)


def _platform_json(p: Platform, one: bool) -> dict[str, Any]:
    """Links in SI units, figures in the units of their keys with their sources; of one platform its collectives too."""
    links = [
        {
            "name": k.name,
            "fabric": k.fabric,
            "topology": k.topology,
            "in_network": k.in_network,
            "ranks": k.ranks,
            "bandwidth": k.bandwidth,
            "latency": k.latency,
            "figures": _figures_json(k.facts),
        }
        for k in p.links
    ]
    value = {"key": p.key, "name": p.name, "gpu": p.gpu.key, "domain": p.domain, "links": links}
    return value | {"collectives": _collectives_json(p)} if one else value


def _figures_json(facts: Any) -> dict[str, Any]:
    return {
        key: {"value": value, "source": facts.sources[key].text, "date": facts.sources[key].date}
        for key, value in facts.as_written().items()
    }


def _collectives_json(p: Platform) -> list[dict[str, Any]]:
    from presage.costs.collectives.model import bus_table

    return [
        {
            "op": c.op,
            "ranks": c.group.ranks,
            "per_domain": c.group.per_domain,
            "from": c.origin,
            "bytes": list(c.nbytes),
            "seconds": list(c.seconds),
            "busbw": list(c.busbw),
        }
        for c in bus_table(p)
    ]
