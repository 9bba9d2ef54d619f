"""`presage place`: which GPU goes where, the cost of a hot node, which nodes to evict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from presage.cli.options import (
    Change,
    Columns,
    Gpus,
    JobFile,
    Json,
    NoiseFile,
    Report,
    Seed,
    option,
    out_option,
    parse_columns,
)
from presage.cli.output import show_answer, status

SLOWEST = 1e6  # times as long as a usual GPU


Speeds = Annotated[
    str,
    option(
        "--speeds", "CSV|random:...", r"GPU speeds: a CSV by rank, spares last; or drawn: random:SD\[:SHARE:FACTOR]."
    ),
]
HotOption = Annotated[
    str | None, option("--hot", "FACTOR[@NODE]", "Cost of one node whose compute takes FACTOR times as long.")
]
AnyNode = Annotated[bool, option("--any-node", "", "Let tensor-parallel groups span nodes (default: they do not).")]
Spares = Annotated[int, option("--spares", "N", "Spare GPUs of a randomly drawn fleet.", min=0, max=1_000_000)]


def command(
    job: JobFile,
    speeds: Speeds = "random:0",
    column: Columns = [],  # noqa: B006
    hot: HotOption = None,
    any_node: AnyNode = False,
    spares: Spares = 0,
    evict: Annotated[int, option("--evict", "N", "Most nodes to evict.", min=0)] = 5,
    randoms: Annotated[int, option("--randoms", "N", "Random placements to compare with.", min=2, max=10_000)] = 40,
    noise: NoiseFile = None,
    draws: Annotated[int, option("--draws", "N", "Steps to draw.", min=100, max=1_000_000)] = 10_000,
    seed: Seed = 0,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    out: Annotated[Path | None, out_option("--out", "PLACEMENT.csv", "Write the best placement.")] = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Place GPUs of different speed so that slow ones hurt least; the cost of a hot node; which nodes to evict.

    The CSV has one row per GPU: its name (gpu, uuid or rank), its node, and a time (factor, time, perf: larger is
    slower) or a speed (speed, tflops: larger is faster). --column names the columns that are called otherwise.

    presage place examples/jobs/llama3.1-405b.toml --speeds random:0.02:0.002:1.15 --hot 1.3

    presage place job.toml --speeds gpus.csv --out placement.csv
    """
    from presage.cli.job_source import transformer_job
    from presage.placement import parse_fleet, place_job, write_placement
    from presage.report.place_answer import place_answer

    parsed = transformer_job(job, gpus, change)
    fleet = parse_fleet(speeds, parse_columns(column), parsed.gpus + spares, parsed.platform.domain, seed)
    heat, how = _hot(hot), {"keep_nodes": not any_node, "seed": seed, "draws": draws, "randoms": randoms}
    with status("placing"):
        result = place_job(parsed, fleet, noise, hot=heat, evict=evict, **how)
    if out is not None:
        write_placement(result.placed, out)
    show_answer(place_answer(result), json, report, {"placement": out})


def _hot(text: str | None) -> tuple[float, str] | None:
    """The factor, and the node if one is given."""
    from presage.errors import PresageError

    if text is None:
        return None
    number, _, node = text.partition("@")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 0 < factor < SLOWEST:
        raise PresageError(f"--hot {text}: should be FACTOR or FACTOR@NODE, such as 1.3@node7")
    return factor, node
