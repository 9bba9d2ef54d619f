"""`presage place`: which GPU goes where, the cost of a hot node, which nodes to evict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.options import Change, Columns, Gpus, JobFile, Json, NoiseFile, Report, Seed, parse_columns
from presage.cli.output import check_report, show_answer, status

if TYPE_CHECKING:
    from presage.noise.sampling import Estimate
    from presage.placement import Eviction, GpuFleet, HotNode, PlacementOutcome, PlacementResult
    from presage.report.place_answer import PlacementFindings

MS = 1e3
SLOWEST = 1e6  # times as long as a usual GPU


Speeds = Annotated[
    str,
    typer.Option(
        "--speeds",
        metavar="CSV|random:...",
        help=r"GPU speeds: a CSV by rank, spares last; or drawn: random:SD\[:SHARE:FACTOR].",
    ),
]
HotOption = Annotated[
    str | None,
    typer.Option("--hot", metavar="FACTOR[@NODE]", help="Cost of one node whose compute takes FACTOR times as long."),
]
AnyNode = Annotated[
    bool, typer.Option("--any-node", help="Let tensor-parallel groups span nodes (default: they do not).")
]
Spares = Annotated[
    int, typer.Option("--spares", metavar="N", min=0, max=1_000_000, help="Spare GPUs of a randomly drawn fleet.")
]


def command(
    job: JobFile,
    speeds: Speeds = "random:0",
    column: Columns = [],  # noqa: B006
    hot: HotOption = None,
    any_node: AnyNode = False,
    spares: Spares = 0,
    evict: Annotated[int, typer.Option("--evict", metavar="N", min=0, help="Most nodes to evict.")] = 5,
    randoms: Annotated[
        int, typer.Option("--randoms", metavar="N", min=2, max=10_000, help="Random placements to compare with.")
    ] = 40,
    noise: NoiseFile = None,
    draws: Annotated[int, typer.Option("--draws", metavar="N", min=100, max=1_000_000, help="Steps to draw.")] = 10_000,
    seed: Seed = 0,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PLACEMENT.csv", help="Write the best placement.")
    ] = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Place GPUs of different speed so that slow ones hurt least; the cost of a hot node; which nodes to evict.

    The CSV has one row per GPU: its name (gpu, uuid or rank), its node, and a time (factor, time, perf: larger is
    slower) or a speed (speed, tflops: larger is faster). --column names the columns that are called otherwise.

    presage place examples/jobs/llama3.1-405b.toml --speeds random:0.02:0.002:1.15 --hot 1.3

    presage place job.toml --speeds gpus.csv --out placement.csv
    """
    from presage.cli.job import transformer_job
    from presage.placement import place
    from presage.prediction.draws import step_model
    from presage.prediction.draws.distribution import belief_of
    from presage.report.place_answer import place_answer

    check_report(report)
    shape = step_model(transformer_job(job, gpus, change))
    belief, source = belief_of(shape.job, shape.seconds, noise)
    fleet = _fleet(speeds, column, shape.job.gpus + spares, shape.job.platform.domain, seed)
    factor, node = _hot(hot)
    given = fleet.hot(node, factor) if node else fleet
    with status("placing"):
        keep, many = not any_node, {"seed": seed, "draws": draws, "randoms": randoms}
        placed = place(shape, given, belief.noise, keep_nodes=keep, **many)
        found = _findings(placed, source, evict, _hots(placed, fleet, factor, node) if hot else None)
    if out is not None:
        _write(placed, out)
    show_answer(place_answer(found, partial(_value, found, seed)), json, report, {"placement": out})


def _findings(placed: PlacementResult, source: str, evict: int, hot: HotNode | None) -> PlacementFindings:
    from presage.placement import spare_gpus, suggest_evictions
    from presage.placement.placement_search import stage_responses
    from presage.report.place_answer import PlacementFindings

    slow = max(1.02, float(placed.best.placement.factors.max()))
    outcomes = {"given": placed.given, "best": placed.best}
    evicted = {k: suggest_evictions(placed, o, evict) for k, o in outcomes.items()}
    responses = list(stage_responses(placed.judge, slow))
    return PlacementFindings(placed, source, responses, slow, evicted, spare_gpus(placed), hot)


def _fleet(speeds: str, column: list[str], gpus: int, node: int, seed: int) -> GpuFleet:
    """The fleet read from a CSV, or drawn at random."""
    from presage.errors import PresageError
    from presage.noise.sampling import RandomStreams
    from presage.placement import random_fleet, read_speeds

    (kind, _, numbers), columns = speeds.partition(":"), parse_columns(column)
    if kind != "random":
        return read_speeds(speeds, columns)
    try:
        sd, *few = (float(x) for x in numbers.split(":"))
        share, factor = few or (0.0, 1.0)
    except ValueError:
        raise PresageError(f"--speeds {speeds}: should be random:SD or random:SD:SHARE:FACTOR") from None
    if not (0 <= sd < 1 and 0 <= share <= 1 and 0 < factor < SLOWEST):
        raise PresageError(f"--speeds {speeds}: SD and SHARE should lie in [0, 1], FACTOR in (0, {SLOWEST:g})")
    return random_fleet(gpus, node, sd, RandomStreams(seed)("fleet"), share, factor)


def _hot(text: str | None) -> tuple[float, str]:
    """The factor, and the node if one is given."""
    from presage.errors import PresageError

    if text is None:
        return 1.0, ""
    number, _, node = text.partition("@")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 0 < factor < SLOWEST:
        raise PresageError(f"--hot {text}: should be FACTOR or FACTOR@NODE, such as 1.3@node7")
    return factor, node


def _hots(placed: PlacementResult, fleet: GpuFleet, factor: float, node: str) -> HotNode:
    """The cost of a hot node in each stage of the best placement."""
    import numpy as np

    from presage.placement import Placement, hot_node_cost

    sizes = [len(m) for name, m in fleet.members.items() if name]
    size = int(np.median(sizes)) if fleet.known_nodes else placed.shape.job.platform.domain
    own = float(fleet.factors[fleet.members[node]].max()) if node else 1.0
    return hot_node_cost(placed.judge, Placement(fleet, placed.best.placement.gpus).factors, own * factor, size)


def _write(placed: PlacementResult, path: Path) -> None:
    """Write one row per rank, then the spares."""
    from presage.files import write_whole

    p, s = placed.best.placement, placed.shape
    each = s.replicas * s.together
    lines = ["rank,stage,replica,place,gpu,node,factor"]
    for rank, gpu in enumerate(p.by_rank):
        lines.append(
            f"{rank},{rank // each},{rank % each // s.together},{rank % s.together},{_named(placed.fleet, gpu)}"
        )
    lines += [f",,,spare,{_named(placed.fleet, gpu)}" for gpu in p.spares]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _named(fleet: GpuFleet, gpu: int) -> str:
    names = (fleet.gpus[gpu], fleet.nodes[gpu])
    told = ('"' + n.replace('"', '""') + '"' if any(c in n for c in ',"\n') else n for n in names)
    return ",".join((*told, f"{fleet.factors[gpu]:.6g}"))


# ---- JSON


def _value(found: PlacementFindings, seed: int) -> dict[str, Any]:
    p, s, best = found.placed, found.placed.shape, found.placed.best.placement
    return {
        "kind": "place",
        "name": s.job.name,
        "gpus": s.job.gpus,
        "fleet": len(p.fleet),
        "replicas": s.replicas, "stages": s.stages, "together": s.together, "within_node": p.sizes.part,
        "noise": found.source, "seed": seed, "draws": int(p.best.draws.seconds.size),
        "predicted_ms": s.seconds * MS,
        "given": _outcome(p.given), "best": _outcome(p.best), "worst": _outcome(p.worst),
        "random": {
            "placements": len(p.randoms.p95s), "p50_ms": p.randoms.p50 * MS, "p95_ms": p.randoms.p95 * MS,
            "unlucky_p95_ms": p.randoms.unlucky * MS,
        },
        "bound_p95_ms": p.bound * MS, "gap": p.gap,
        "factors": best.factors.tolist(),
        "ranks": [p.fleet.gpus[g] for g in best.by_rank],
        "spares": [p.fleet.gpus[g] for g in best.spares],
        "left_out": [{"gpu": x.gpu, "node": x.node, "factor": x.factor, "p95_ms": x.p95 * MS} for x in found.left],
        "evict": {name: [_evicted(e) for e in rows] for name, rows in found.evicted.items()},
        "hot": None if found.hot is None else _heat(found.hot),
        "notes": list(p.fleet.notes),
    }  # fmt: skip


def _outcome(o: PlacementOutcome) -> dict[str, Any]:
    return _both(o.p50, o.p95)


def _both(p50: Estimate, p95: Estimate) -> dict[str, Any]:
    return {"p50_ms": p50.to_json(MS), "p95_ms": p95.to_json(MS)}


def _evicted(e: Eviction) -> dict[str, Any]:
    return {
        "name": e.name, "factor": e.factor, "stage": e.stage, "replica": e.replica, "gain_alone": e.alone,
        "gain": e.gain, "p95_ms": e.p95 * MS, "gpu_hours_a_day": e.gpu_hours,
    }  # fmt: skip


def _heat(h: HotNode) -> dict[str, Any]:
    stages = [
        {"stage": i, **_both(*both), "cost": cost} for i, (both, cost) in enumerate(zip(h.stages, h.costs, strict=True))
    ]
    ends = {"least": min(h.costs), "most": max(h.costs)}
    return {"factor": h.factor, "without": _both(*h.without), "stages": stages, **ends}
