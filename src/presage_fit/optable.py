"""Tables of operations: one row per operation of a worker, over many steps, as pipeline-parallel jobs publish them.

A worker is a (data-parallel rank, pipeline stage) pair. Columns of the file, times in seconds:
dp_rank, stage, rank, step, optype, start_ts, duration, seq_id (order among the worker's operations of that type), mc
(model chunk on the stage), mb_id (microbatch), gmc (model chunk in the whole model); -1 where a column says nothing.
An operation type that presage does not know stays in the table and counts as work of its own worker.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.files import reading
from presage.files.csv_table import number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMMUNICATION = frozenset((
    "forward-send", "forward-recv", "backward-send", "backward-recv", "params-all-gather", "grads-reduce-scatter",
    "separate-grads-all-reduce", "embedding-grads-all-reduce", "layernorm-grads-all-reduce", "optimizer-clip-main-grad",
))  # fmt: skip
KNOWN = COMMUNICATION | {FORWARD, BACKWARD, "optimizer", "gc"}

WHOLE = {
    "dp": "dp_rank", "stage": "stage", "rank": "rank", "step": "step", "seq": "seq_id", "chunk": "mc",
    "microbatch": "mb_id", "model_chunk": "gmc",
}  # fmt: skip
SECONDS = ("start_ts", "duration")
COLUMNS = ("optype", *WHOLE.values(), *SECONDS)


@dataclass(frozen=True, eq=False)
class OpTable:
    """The rows of one file, column by column. `op` is an index into `ops`, the names of the operation types."""

    path: str
    ops: tuple[str, ...]
    op: Ints
    dp: Ints
    stage: Ints
    rank: Ints
    step: Ints
    seq: Ints
    chunk: Ints
    microbatch: Ints
    model_chunk: Ints
    start: Floats
    duration: Floats

    def __len__(self) -> int:
        return len(self.op)

    @property
    def job(self) -> str:
        """The job's name, from a file called trace-JOB.csv or trace-JOB.csv.gz."""
        return Path(self.path).name.split(".")[0].removeprefix("trace-")

    @cached_property
    def steps(self) -> Ints:
        return np.unique(self.step)

    @cached_property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return int(self.dp.max()) + 1

    @cached_property
    def stages(self) -> int:
        return int(self.stage.max()) + 1

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operation types that presage does not know, and so takes for work of their own worker."""
        return tuple(x for x in self.ops if x not in KNOWN)


def read(path: str | Path) -> OpTable:
    """Read and check a table, plain or gzip."""
    path = Path(path)
    columns = _columns(path)
    ops, op = np.unique(np.array(columns["optype"]), return_inverse=True)
    whole = {field: _whole(path, name, columns[name]) for field, name in WHOLE.items()}
    start, duration = (_numbers(path, name, columns[name]) for name in SECONDS)
    table = OpTable(str(path), tuple(ops.tolist()), op.astype(np.int64), start=start, duration=duration, **whole)
    _check(path, table)
    return table


def _columns(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        lines = [x for x in csv.reader(reading.lines(path), strict=True) if x]
    except csv.Error as e:
        raise InputError(path, f"not a CSV table ({e})") from e
    header = [x.strip() for x in lines[0]] if lines else []
    missing = [x for x in COLUMNS if x not in header]
    if len(missing) == len(COLUMNS):
        raise InputError(path, f"not a table of operations: the first line must name the columns {', '.join(COLUMNS)}")
    if missing:
        raise InputError(path, "the table has no such column", missing[0])
    if len(lines) < 2:
        raise InputError(path, "the table has a header and no rows")
    for n, line in enumerate(lines, 1):
        if len(line) != len(header):
            raise InputError(path, f"{len(line)} values for {len(header)} columns: is the file cut off?", f"line {n}")
    return dict(zip(header, zip(*lines[1:], strict=True), strict=True))


def _numbers(path: Path, name: str, values: tuple[str, ...]) -> Floats:
    out = np.array([number(x) for x in values], np.float64)  # NaN for what is no finite number
    if np.isnan(out).any():
        bad = int(np.argmax(np.isnan(out)))
        raise InputError(path, f"line {bad + 2}: {values[bad]!r} is not a finite number", name)
    return out


def _whole(path: Path, name: str, values: tuple[str, ...]) -> Ints:
    numbers = _numbers(path, name, values)
    out = numbers.astype(np.int64)
    if (out != numbers).any():
        bad = int(np.flatnonzero(out != numbers)[0])
        raise InputError(path, f"line {bad + 2}: {values[bad]!r} is not a whole number", name)
    return out


def _check(path: Path, table: OpTable) -> None:
    negative = np.flatnonzero(table.duration < 0)
    if len(negative):
        raise InputError(path, f"line {negative[0] + 2}: negative duration {table.duration[negative[0]]}", "duration")
    for name, column in (("dp_rank", table.dp), ("stage", table.stage)):
        if column.min() < 0:
            raise InputError(path, f"line {int(column.argmin()) + 2}: negative {name}", name)
    _check_ranks(path, table)


def _check_ranks(path: Path, table: OpTable) -> None:
    """Every worker has rows in every step: a worker that says nothing would look like one that is never waited for."""
    workers = table.replicas * table.stages
    if workers > len(table):
        raise InputError(path, f"{table.replicas} x {table.stages} workers, but only {len(table)} rows", "rank")
    step = np.searchsorted(table.steps, table.step)
    cells = np.bincount(step * workers + table.dp * table.stages + table.stage, minlength=len(table.steps) * workers)
    empty = np.flatnonzero(cells == 0)
    if len(empty):
        at, worker = divmod(int(empty[0]), workers)
        dp, stage = divmod(worker, table.stages)
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise InputError(path, f"step {table.steps[at]} has no rows of dp_rank {dp}, stage {stage}{more}", "rank")
