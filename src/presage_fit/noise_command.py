"""`presage fit`: how steps differ, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.options import Columns, Json, parse_columns
from presage.cli.output import console, emit, print_answer, status
from presage.errors import PresageError

if TYPE_CHECKING:
    from presage_fit.noise import FittedNoise


Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Prior: GPU type.", autocompletion=complete.gpus),
]
Conditions = Annotated[
    str,
    typer.Option(
        "--conditions",
        metavar="NAME",
        help="Prior: screened, production or unscreened GPUs.",
        autocompletion=complete.one_of(complete.CONDITIONS),
    ),
]
Group = Annotated[
    str | None,
    typer.Option("--group", metavar="TEXT", help="In logs of several jobs: take the job whose name contains TEXT."),
]


Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Traces, tables or logs (see above).")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.toml", help="Write the noise file, the platform file, or the failure file."),
]
Logs = Annotated[
    list[Path],
    typer.Option("--collectives", metavar="LOG", help="Output of nccl-tests on your cluster (repeatable)."),
]
MeasuredOn = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="NAME",
        help="With --collectives: the platform they were measured on.",
        autocompletion=complete.platforms,
    ),
]
GpuCount = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Prior: number of GPUs.")]
PerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", metavar="N", min=1, help="Prior: GPUs per node (default: 8).")
]
StepSeconds = Annotated[
    float | None, typer.Option("--step-seconds", metavar="S", min=1e-6, max=1e9, help="Prior: step time, s.")
]
KernelClass = Annotated[
    str,
    typer.Option(
        "--class",
        metavar="NAME",
        help="Per-GPU times: their kernel class (products: GEMM, attention, streams: memory-bound, ...).",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", min=1, help="Faults: nodes of the fleet, those without a fault included."),
]
Communication = Annotated[
    str | None,
    typer.Option("--communication", metavar="NAME", help="Traces: count all collectives as tp, dp, ep, ..."),
]


def command(
    files: Files = [],  # noqa: B006
    out: Out = None,
    collectives: Logs = [],  # noqa: B006
    platform: MeasuredOn = None,
    gpu: Gpu = None,
    gpus: GpuCount = None,
    per_node: PerNode = None,
    seconds: StepSeconds = None,
    conditions: Conditions = "production",
    kind: KernelClass = "products",
    communication: Communication = None,
    column: Columns = [],  # noqa: B006
    group: Group = None,
    nodes: Nodes = None,
    json: Json = None,
) -> None:
    """Fit a noise model to your traces and logs, for --noise of other commands; or collectives, for their --platform.

    Kineto traces of all ranks of a run (or their folder): spread over GPUs, steps and operations, by kernel class.

    A table of operations (CSV with dp_rank, stage, step, optype, ...): the same, and the load of microbatches.

    Step times (MLPerf JSON, Megatron-LM log, a CSV with a column of seconds): noise common to all GPUs, drift, stalls.

    Per-GPU times (CSV with a column for the GPU and one for the time): GPU-to-GPU spread, and the share of slow GPUs.

    Faults of nodes (CSV with node, start_day, end_day, class): rates, repeat offenders and repair times for --failures.

    Several files fill different parts. With --gpu and --gpus, the rest is taken from presage's defaults for such a job.

    With --collectives: the output of nccl-tests on your cluster becomes a platform file whose curves come first.

    presage fit gpus.csv steps.log --gpu h100_sxm --gpus 1024 --out noise.toml

    presage fit --collectives all_reduce.log --platform dgx-h100 --out mine.toml

    presage fit faults.csv --nodes 400 --out failures.toml
    """
    if collectives:
        _fit_collectives(files, collectives, platform, out, json)
        return
    if _are_faults(files):
        _fit_faults(files, nodes, out, json)
        return
    _no_nodes(nodes)
    from presage.noise.files import write_noise
    from presage.noise.model import CLASSES, COMMUNICATION
    from presage_fit.noise import Facts, fit_files

    _known(kind, CLASSES)
    _known(communication, COMMUNICATION)
    facts = Facts(gpu, gpus, per_node, seconds, conditions)
    with status(f"reading {len(files)} file{'s' if len(files) > 1 else ''}"):
        found = fit_files(files, facts, kind, communication, parse_columns(column), group)
    if out is not None:
        write_noise(found.belief, out)
    if emit(json, lambda: to_json(found)):
        _print(found, out)


def _fit_collectives(files: list[Path], logs: list[Path], base: str | None, out: Path | None, json: str | None) -> None:
    from presage_fit.nccl_tests import curves_table, measured_platform, write_platform

    if files:
        raise PresageError(f"--collectives fits a platform, not noise: leave out {files[0]}, or fit it by itself")
    if base is None:
        raise PresageError("--collectives: say where they were measured with --platform (presage platforms lists them)")
    found = measured_platform(logs, base)
    if out is not None:
        write_platform(found, out)
    if emit(json, found.to_json):
        n = len(found.curves)
        print_answer(f"{n} measured curve{'s' if n > 1 else ''} of collectives on {found.base.name}.")
        page = console()
        page.print()
        page.print(curves_table(found))
        told = f"written: {out}; use it with --platform {out}" if out else "--out FILE.toml writes the platform file"
        page.print(f"\n{told}")


def _are_faults(files: Sequence[Path]) -> bool:
    from presage_fit.fault_log import is_fault_log

    return any(is_fault_log(f) for f in files)


def _no_nodes(nodes: int | None) -> None:
    if nodes is not None:
        raise PresageError("--nodes goes with a log of faults: a CSV with the columns node, start_day and end_day")


def _fit_faults(files: list[Path], nodes: int | None, out: Path | None, json: str | None) -> None:
    from presage_fit.fault_files import fault_json, fault_summary, fault_table, offender_lines, write_failures
    from presage_fit.fault_log import read_fault_log
    from presage_fit.faults import fit_faults

    if len(files) > 1:
        raise PresageError(f"a log of faults is fitted by itself: leave out {files[1]}, or join the logs")
    with status(f"fitting {files[0].name}"):
        found = fit_faults(read_fault_log(files[0], nodes))
    if out is not None:
        write_failures(found, out)
    if not emit(json, lambda: fault_json(found)):
        return
    print_answer(fault_summary(found))
    page = console()
    for row, reason in found.log.skipped[:3]:
        page.print(f"skipped {row}: {reason}", style="yellow")
    page.print()
    page.print(fault_table(found))
    use = f"written: {out}; use it with presage run --failures {out}" if out else "--out FILE.toml writes it"
    page.print(f"\n{offender_lines(found)}\n{use}")


def to_json(found: FittedNoise) -> dict[str, Any]:
    """Every number with its range, its source and whether it is the prior's."""
    numbers, intervals = found.belief.noise.numbers(), found.belief.intervals
    return {
        "parts": [
            {"kind": p.kind, "files": list(p.files), "told": p.told, "skipped": [list(s) for s in p.skipped]}
            for p in found.parts
        ],
        "prior": found.prior,
        "kept_from_prior": sorted(found.kept),
        "numbers": {
            p: {"value": v, "low": intervals[p].low, "high": intervals[p].high} if p in intervals else {"value": v}
            for p, v in numbers.items()
        },
        "sources": dict(found.belief.sources),
    }


def _known(kind: str | None, classes: Sequence[str]) -> None:
    if kind is not None and kind not in classes:
        raise PresageError(f"unknown class of work {kind!r}: choose from {', '.join(classes)}")


def _print(found: FittedNoise, out: Path | None) -> None:
    from presage_fit.noise import belief_table, part_line, prior_line

    page = console()
    for part in found.parts:
        print_answer(part_line(part))
        for row, reason in part.skipped[:3]:
            page.print(f"skipped {row}: {reason}", style="yellow")
        if len(part.skipped) > 3:
            page.print(f"skipped {len(part.skipped) - 3} more", style="yellow")
    page.print(prior_line(found))
    page.print()
    page.print(belief_table(found.belief, found.kept))
    if out is not None:
        page.print(f"\nwritten: {out}")
