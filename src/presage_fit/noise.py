"""`fit_files(paths)`: noise from whatever was measured: traces, tables of operations, logs of steps, tables of GPUs.

What a file is shows in its first lines. Traces are ranks of one run; logs are runs of one job. Several kinds fill
different parts of the noise; where two say the same, the later file counts. What none of them says is kept from the
prior of the GPU and the job's size, where these are known.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from presage.errors import InputError, PresageError
from presage.noise.model import Belief, CredibleInterval, NoiseModel, join_beliefs, specified_paths
from presage.report.terminal import plain_table
from presage.text import shorten

HEAD = 1 << 16
NOT_TEXT = {"\0", "\ufffd"}
KINDS = {
    "traces": "Kineto traces of all ranks",
    "operations": "a table of operations",
    "steps": "step times",
    "fleet": "per-GPU times",
    "noise": "a noise file",
}


@dataclass(frozen=True)
class Facts:
    """What is known of the job, for the prior."""

    gpu: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    step_seconds: float | None = None
    conditions: str = "production"

    def filled(self, other: Facts) -> Facts:
        """With what the other knows where this does not."""
        return replace(self, **{k: v for k, v in vars(other).items() if k != "conditions" and getattr(self, k) is None})


@dataclass(frozen=True)
class FittedPart:
    """What one kind of files told."""

    kind: str
    files: tuple[str, ...]
    told: str  # how much there was, in a line
    belief: Belief
    facts: Facts = Facts()
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FittedNoise:
    """All of it together; `kept` are paths that are the prior's."""

    parts: tuple[FittedPart, ...]
    belief: Belief
    prior: str | None  # which, in words
    kept: frozenset[str] = field(default_factory=frozenset)


def fit_files(
    paths: Sequence[str | Path],
    facts: Facts | None = None,
    kind: str = "products",
    collectives: str | None = None,
    columns: Mapping[str, str] | None = None,
    group: str | None = None,
) -> FittedNoise:
    """Fit all files. `kind`: the class of work of per-GPU times; `collectives`: that of the traces' collectives;
    `columns`: of tables whose column names do not tell; `group`: which of several groups of runs in logs."""
    files: dict[str, list[Path]] = {}
    for path in map(Path, paths):
        files.setdefault(kind_of(path), []).append(path)
    if not files:
        raise PresageError("nothing to fit: give traces, tables of operations, step times or per-GPU times")
    told = {"kind": kind, "collectives": collectives, "columns": columns or {}, "group": group}
    parts = tuple(part for what, these in files.items() for part in _READ[what](these, told))
    known, found = facts or Facts(), Belief(NoiseModel())
    for part in parts:
        known, found = known.filled(part.facts), join_beliefs(found, part.belief)
    return _with_prior(parts, found, known)


def kind_of(path: Path) -> str:
    """What a file (or a folder of traces) holds."""
    if path.is_dir():
        return "traces"
    if path.suffix == ".toml":
        return "noise"
    if path.suffix == ".parquet":
        raise InputError(path, "is Parquet: save it as CSV")
    head = _head(path)
    if head.lstrip()[:1] in ("{", "["):
        return "traces" if '"traceEvents"' in head or '"ph"' in head else "steps"
    if NOT_TEXT & set(head):
        raise InputError(path, "is not text: traces, tables, logs or noise files were expected")
    names = next(csv.reader(head.splitlines()[:1]), [])
    return _table_kind([n.strip().lower() for n in names])


def _table_kind(names: list[str]) -> str:
    from presage_fit.fleet_files import fleet_columns

    if "optype" in names:
        return "operations"
    return "fleet" if fleet_columns(names) else "steps"


def _head(path: Path) -> str:
    from presage.files.reading import open_bytes

    with open_bytes(path) as stream:
        return stream.read(HEAD).decode("utf-8-sig", "replace")


def _with_prior(parts: tuple[FittedPart, ...], found: Belief, facts: Facts) -> FittedNoise:
    from presage.noise.priors import prior

    if facts.gpu is None or facts.gpus is None:
        return FittedNoise(parts, round_belief(found), None)
    per_node = facts.gpus_per_node or 8
    before = prior(facts.gpu, facts.gpus, per_node, facts.step_seconds, facts.conditions)
    words = f"{facts.conditions}, {facts.gpus:,} {facts.gpu}, {per_node} a node"
    kept = frozenset(specified_paths(before) - specified_paths(found))
    return FittedNoise(parts, round_belief(join_beliefs(before, found)), words, kept)


def _traces(paths: list[Path], told: Mapping[str, Any]) -> list[FittedPart]:
    from presage.traces.trace_set import files_of, read_run
    from presage_fit.trace_effects import fit_traces

    run = read_run(files_of(paths), partial=True)
    found = fit_traces(run, told["collectives"])
    many = f"{found.ranks} ranks, {found.steps} step{'s' if found.steps > 1 else ''}"
    words = f"{many}; {100 * found.compared:.0f}% of kernel time is in all of them"
    gpus = run.traces[0].gpus
    facts = Facts(_known(gpus[0] if gpus else None), run.traces[0].world or len(run))
    return [FittedPart("traces", _names(paths), words, found.belief(), facts)]


def _operations(paths: list[Path], told: Mapping[str, Any]) -> list[FittedPart]:  # noqa: ARG001
    from presage_fit.ops.effects import fit
    from presage_fit.optable import read

    out = []
    for path in paths:
        found = fit(read(path))
        words = f"{found.job}: {len(found.ids)} steps"
        out.append(FittedPart("operations", (path.name,), words, found.belief()))
    return out


def _steps(paths: list[Path], told: Mapping[str, Any]) -> list[FittedPart]:
    from presage_fit.series import fit
    from presage_fit.step_logs import read_logs

    found = read_logs(paths, told["columns"].get("time"))
    groups = {n: logs for n, logs in found.groups().items() if told["group"] is None or told["group"] in n}
    if len(groups) != 1:
        some = "; ".join(list(found.groups())[:3])
        many = f"{len(groups) or len(found.groups())} groups of runs: say which with --group, such as {some}"
        raise InputError(
            paths[0], many if groups or told["group"] is None else f"no group {told['group']!r} among {many}"
        )
    ((name, logs),) = groups.items()
    fitted = fit(logs)
    words = f"{name}: {len(logs)} run{'s' if len(logs) > 1 else ''}, {sum(len(x.seconds) for x in logs):,} records"
    meta = logs[0].meta
    facts = Facts(
        _known(meta.get("accelerator")), _whole(meta.get("n_gpus")), _whole(meta.get("gpus_per_node")), fitted.level
    )
    return [FittedPart("steps", _names(paths), words, fitted.belief(f"step times of {name}"), facts, found.skipped)]


def _fleet(paths: list[Path], told: Mapping[str, Any]) -> list[FittedPart]:
    from presage_fit.fleet import fit_fleet
    from presage_fit.fleet_files import read_fleet

    out = []
    for path in paths:
        fleet = fit_fleet(read_fleet(path, told["columns"]))
        v, worst = fleet.variation, fleet.largest(256)
        within = "" if v.usual is None else f", run-to-run {100 * v.usual:.2f}%"
        words = f"{len(fleet.gpus)} GPUs, {fleet.rows:,} rows: {100 * fleet.rank_sd().value:.2f}% apart{within}; "
        words += f"the slowest of 256 takes {worst.value:.3f} ({worst.low:.3f}-{worst.high:.3f}) times the median"
        out.append(FittedPart("fleet", (path.name,), words, fleet.belief(told["kind"]), skipped=fleet.skipped))
    return out


def _noise(paths: list[Path], told: Mapping[str, Any]) -> list[FittedPart]:  # noqa: ARG001
    from presage.noise.files import read_noise

    return [FittedPart("noise", (path.name,), "as it is", read_noise(path)) for path in paths]


_READ = {"traces": _traces, "operations": _operations, "steps": _steps, "fleet": _fleet, "noise": _noise}


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(p.name for p in paths)


def _known(name: Any) -> str | None:
    """A GPU's name in a file, where presage knows that GPU."""
    from presage.hardware import gpu_by_name

    try:
        gpu_by_name(str(name or ""))
    except PresageError:
        return None
    return str(name)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value > 0 else None


# Rich tables of a fitted noise model.

SECONDS = ("common.jitter", "stalls.seconds")
HIDDEN = ("network.moves", "network.factors.0")  # of which the file tells more than a line can
WITHOUT_UNIT = ("log_sd", "cv", "shape", "shares", "moves", "n")


def belief_table(belief: Belief, kept: frozenset[str] = frozenset(), title: str = "Noise") -> Table:
    """Every number that is not 0, what else it may be, and where it is from; those kept from the prior are dim."""
    table = plain_table(title, "number", "value", "90%", "from", left=1)
    table.columns[-1].justify = "left"
    told = specified_paths(belief)
    for path, value in belief.noise.numbers().items():
        interval = belief.intervals.get(path)
        if not _under(path, told) or _under(path, HIDDEN) or (not value and interval is None):
            continue
        middle = f"{_format_number(path, interval.low)} .. {_format_number(path, interval.high)}" if interval else ""
        prior = _under(path, kept)
        source = shorten(_source(belief, path), 52)
        table.add_row(
            _named(belief, path),
            _format_number(path, value),
            middle,
            f"prior: {source}" if prior else source,
            style="dim" if prior else "",
        )
    return table


def part_line(part: FittedPart) -> str:
    """The files of one kind, and how much they hold."""
    some = ", ".join(part.files[:2]) + (f" and {len(part.files) - 2} more" if len(part.files) > 2 else "")
    return f"{some} ({KINDS[part.kind]}): {part.told}"


def prior_line(fitted: FittedNoise) -> str:
    """Which prior the rest is from, or that there is none."""
    if fitted.prior is None:
        return "Other parameters were not fitted; pass --gpu and --gpus to take them from presage's defaults."
    return f"not estimated, kept from the prior ({fitted.prior}): {len(fitted.kept)} numbers and distributions"


def _under(path: str, starts: Iterable[str]) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in starts)


def _named(belief: Belief, path: str) -> str:
    """Scheduled slow steps by their names, not by their numbers."""
    words = path.split(".")
    if words[0] == "scheduled":
        words[1] = f"({belief.noise.scheduled[int(words[1])].name})"
    return ".".join(words).replace("scheduled.(", "scheduled (")


def _source(belief: Belief, path: str) -> str:
    """Source of a number: its own, or that of the longest prefix of its path."""
    words = path.split(".")
    starts = (".".join(words[:n]) for n in range(len(words), 0, -1))
    return next((belief.sources[s] for s in starts if s in belief.sources), "")


def _format_number(path: str, value: float) -> str:
    last = path.split(".")[-1]
    if path.startswith(SECONDS) and last not in WITHOUT_UNIT:
        return f"{value:.4g} s"
    if path.startswith("spread") or last in ("share", "sd", "drift", "drift_sd", "run_sd"):
        return f"{100 * value:.3g}%"
    return f"{value:.4g}"


EXACT = {"shares", "moves"}  # numbers that must add up to 1


def round_belief(belief: Belief, digits: int = 4) -> Belief:
    """The belief with its numbers rounded to so many digits."""

    def short(value: float) -> float:
        return float(f"{value:.{digits}g}")

    numbers = {p: short(v) for p, v in belief.noise.numbers().items() if not EXACT & set(p.split("."))}
    whole = {p for p in numbers if p.endswith(".n")}
    noise = belief.noise.changed({p: v for p, v in numbers.items() if p not in whole})
    return replace(
        belief,
        noise=noise,
        intervals={p: CredibleInterval(short(i.low), short(i.high)) for p, i in belief.intervals.items()},
    )
