"""`presage accuracy`: re-prove a claim on a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from presage.cli import complete
from presage.cli.options import HostName, Json, RayAddress, Workers
from presage.cli.output import bar, console, emit, print_brief

if TYPE_CHECKING:
    from presage_validation.score import Skipped

Tell = Callable[[str], None]


class ClaimResult(Protocol):
    """What a scorer returns: JSON with `n` and `metrics`, lines of a CSV file, and what it had to leave out."""

    @property
    def skipped(self) -> Sequence[Skipped]: ...
    def to_json(self) -> dict[str, Any]: ...
    def lines(self) -> Sequence[Sequence[str]]: ...


@dataclass(frozen=True)
class Claim:
    """One kind of claim: its data, its scorer (MODULE:FUNCTION of presage_validation) and how its result is shown."""

    data: str  # the paths it takes
    about: str
    scorer: str
    paths: tuple[int, ...] = ()  # so many, each an argument of the scorer; none: any number, as a list
    table: str = "accuracy_tables"  # of presage_validation.tables
    pool: bool = True  # cases can be spread over processes
    user_code: bool = False  # imports what a user wrote, and torch
    workers: int = 1  # at least
    needs_rows: bool = False  # it is an error if all that was given had to be left out
    host: bool = False  # the scorer takes a host
    nodes: bool = False  # the scorer takes the size of a fleet

    def score(
        self, kind: str, paths: list[Path], tell: Tell, pool: Any, host: str | None = None, nodes: int | None = None
    ) -> ClaimResult:
        """Run the scorer on the paths."""
        from presage.errors import PresageError

        if self.paths and len(paths) not in self.paths:
            count = ("one path", "two paths", "three paths")[self.paths[0] - 1]
            raise PresageError(f"accuracy {kind} takes {count}: {self.data}")
        if host is not None and not self.host:
            takers = ", ".join(name for name, claim in CLAIMS.items() if claim.host)
            raise PresageError(f"accuracy {kind} takes no --host: only {takers} does")
        if nodes is not None and not self.nodes:
            raise PresageError(f"accuracy {kind} takes no --nodes: only faults does")
        module, _, function = self.scorer.partition(":")
        score = getattr(import_module(f"presage_validation.{module}"), function)
        given = paths if self.paths else [paths]
        options = ({"pool": pool} if self.pool else {}) | ({"host": host} if host is not None else {})
        options |= {"nodes": nodes} if self.nodes else {}
        result: ClaimResult = score(*given, tell=tell, **options)
        return result


CLAIMS = {
    "traces": Claim("PATH...", "replay against measured steps", "traces:score_traces"),
    "capture": Claim(
        "WORKLOADS.py TRACES_DIR", "captured ops against traced ops", "capture:score_capture", (2,),
        "capture_tables", user_code=True,
    ),
    "workloads": Claim(
        "WORKLOADS.py MEASURED.json [TRACES_DIR]", "steps from code", "workloads:score_workloads", (2, 3),
        user_code=True, host=True,
    ),
    "et": Claim(
        "WORKLOADS.py ET_DIR [MEASURED.json]", "steps from execution traces", "execution_traces:score_execution_traces",
        (2, 3), user_code=True,
    ),
    "scripts": Claim(
        "SCRIPTS_DIR MEASURED.json", "training scripts as they are", "scripts:score_scripts", (2,), user_code=True
    ),
    "whatif": Claim(
        "PAIRS.py MEASURED...", "steps with and without an edit", "whatif:score_whatif", (), "pair_tables",
        user_code=True, needs_rows=True,
    ),
    "kernels": Claim("PATH...", "kernels of a pack (held-out shapes) or of tables", "kernels:score_kernels"),
    "learn": Claim(
        "TRACES...", "GPU time from corrections learned from other traces", "learn:score_learning", needs_rows=True
    ),
    "labels": Claim(
        "LABELS.json", "float32 models on GPUs never calibrated", "labels:score_labels", (1,), "label_tables",
        needs_rows=True,
    ),
    "collectives": Claim(
        "TABLE.csv", "collectives, with sizes and GPUs left out", "collectives:score_collectives", (1,), pool=False
    ),
    "embeddings": Claim("GROUPS.json", "groups of embedding tables", "embeddings:score_embeddings", (1,), pool=False),
    "sharding": Claim(
        "PLACEMENTS.json", "which measured placement is fastest", "sharding:score_sharding", (1,), "sharding_tables",
        pool=False,
    ),
    "ranks": Claim(
        "WORKLOADS.py RUNS.csv", "published multi-GPU runs, from code", "ranks:score_ranks", (2,), user_code=True,
        workers=2,
    ),
    "runs": Claim("RUNS.csv...", "published training runs, from their configs", "runs:score_runs"),
    "finetune": Claim(
        "RUNS.csv LOGS.json.gz...", "LoRA, QLoRA and full fine-tuning, from their configs", "finetune:score_finetune"
    ),
    "memory": Claim(
        "TABLE.csv...", "peak memory of jobs, and which fit", "peak_memory:score_memory", (), "memory_tables",
        needs_rows=True,
    ),
    "rl": Claim(
        "STEPS.csv", "published reinforcement-learning steps", "post_training:score_post_training", (1,), pool=False
    ),
    "dlrm": Claim("RUNS.csv", "MLPerf recommendation runs", "dlrm:score_dlrm", (1,), pool=False),
    "jobs": Claim(
        "FOLDER...", "recommendation jobs of traced ranks, predicted", "traced_jobs:score_traced_jobs", pool=False,
        needs_rows=True,
    ),
    "stragglers": Claim(
        "TABLE.csv...", "step times from tables of operations", "stragglers:score_stragglers", (), "straggler_tables",
        needs_rows=True,
    ),
    "steps": Claim(
        "LOGS...", "step times of a run from those of its sister runs", "steps:score_steps", (), "step_tables",
        workers=2,
    ),
    "sure": Claim(
        "LOGS RUNS.csv", "step-time distributions from configs alone", "composed:score_composed", (2,),
        "composed_tables", workers=2, needs_rows=True,
    ),
    "temporal": Claim(
        "SERIES.json.gz", "second half of a kernel series from the first", "temporal:score_temporal", (1,),
        "temporal_tables", needs_rows=True,
    ),
    "fleet": Claim("GPUS.csv...", "slow tail of a fleet from 50 of its GPUs", "fleet:score_fleets", (), "fleet_tables"),
    "faults": Claim(
        "FAULTS.csv [LATER.csv]", "later days of a log of faults from earlier ones", "faults:score_faults", (),
        "fault_tables", pool=False, nodes=True,
    ),
}  # fmt: skip

Kind = Annotated[
    str,
    typer.Argument(metavar="KIND", help="What to check (see above).", autocompletion=complete.one_of(CLAIMS)),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="ROWS.csv", help="Write every prediction with its measurement.")
]

Nodes = Annotated[int | None, typer.Option("--nodes", metavar="N", min=1, help="faults: nodes of the fleet.")]


def command(
    kind: Kind,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="The data: files or folders.")],
    out: Out = None,
    host: HostName = None,
    nodes: Nodes = None,
    workers: Workers = 1,
    ray: RayAddress = None,
    json: Json = None,
) -> None:
    from presage.pool import open_pool

    if kind == "kernels" and [p.name for p in paths] == ["labels.json"]:
        kind = "labels"
    claim = _claim(kind, workers > 1 or ray is not None)
    with _progress() as tell, open_pool(max(workers, 1 if ray else claim.workers), ray, fresh=claim.user_code) as pool:
        result = claim.score(kind, paths, tell, pool, host, nodes)
    value = result.to_json()
    if claim.needs_rows and not value["n"]:
        _raise_nothing_scored(result.skipped)
    if out is not None:
        _save(out, result.lines())
    if emit(json, lambda: value):
        _show(result, value, claim)


_KINDS = "\n".join(f"      {name:<12} {claim.data}: {claim.about}" for name, claim in CLAIMS.items())
command.__doc__ = f"""\
Check presage's accuracy on a data set: n, MAPE, geometric mean, median, p90, max and bias of the errors.

    Kinds and the data they take:
{_KINDS}

    What is fitted and what is left out for each kind: docs/accuracy_overview.md.

    presage accuracy traces ../shared/traces ../shared/h200/traces --out rows.csv
    """


def _claim(kind: str, spread: bool) -> Claim:
    """The claim of a kind; raises for an unknown one, and where `spread` and it cannot be spread over processes."""
    from presage.errors import PresageError, near

    if kind not in CLAIMS:
        raise PresageError(f"unknown accuracy kind {kind!r}: choose from {', '.join(CLAIMS)}{near(kind, CLAIMS)}")
    if spread and not CLAIMS[kind].pool:
        raise PresageError(f"accuracy {kind} cannot be spread over processes: omit --workers and --ray")
    return CLAIMS[kind]


@contextmanager
def _progress() -> Iterator[Tell]:
    """Shows the case being scored, and how many are left where that is known."""
    with bar("reading") as shown:
        yield lambda name: shown(getattr(name, "done", 0), getattr(name, "total", None), name)


def _raise_nothing_scored(skipped: Sequence[Skipped]) -> None:
    from presage.errors import PresageError

    row, why = (skipped[0].row, skipped[0].reason) if skipped else ("", "it is empty")
    why = why if row in why else f"{row}: {why}"
    raise PresageError(f"nothing could be scored: {why}")


def _show(result: ClaimResult, value: dict[str, Any], claim: Claim) -> None:
    """Print the tables, or a line per metric under --quiet, and what was skipped."""
    from presage_validation import tables

    for name, metric in value.get("metrics", {}).items():
        numbers = metric if isinstance(metric, dict) else {"": metric}
        cells = (f"{k} {v:.4g}".strip() for k, v in numbers.items() if isinstance(v, int | float))
        print_brief(f"{name}: {', '.join(cells)}")
    for part in getattr(tables, claim.table)(result):
        console().print(part)
    _print_skipped(result.skipped)


def _save(path: Path, lines: Sequence[Sequence[str]]) -> None:
    import csv
    import io

    from presage.files import write_whole

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_whole(path, text.getvalue().encode())


def _print_skipped(skipped: Sequence[Skipped]) -> None:
    """Rows left out, those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for s in skipped:
        by_reason.setdefault(s.reason, []).append(s.row)
    for reason, rows in by_reason.items():
        examples = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
        console().print(f"skipped {len(rows)}: {reason}: {examples}", style="yellow")
