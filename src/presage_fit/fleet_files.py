"""Tables of per-GPU measurements: the same work timed on many GPUs, one row for each time.

Columns are known by their names, or told: the GPU (`uuid`, `gpu`, or a node and a device), the time (`perf`, `seconds`,
...; rates such as `tflops` are turned over), what was run (`kern`, `exp`, ...) where there are several kinds of work.
Only ratios between GPUs count, so any unit will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from presage.errors import InputError
from presage.files.csv_table import DEVICE, WORK, number, read_table

GPU = ("uuid", "gpu_uuid", "gpu_id", "gpu", "gpuid", "serial", "gpu_serial", "device_uuid", "gpu_name_id")
NODE = ("cab-node", "hostname", "host", "node", "node_id", "cabinet")  # the first is enough but for cabinet and node
TIME = ("perf", "seconds", "time", "duration", "elapsed", "latency", "median_time", "mean_time", "runtime")
UNITS = ("", "_s", "_ms", "_us", "_ns", "_seconds", "_sec")
RATE = ("tflops", "gflops", "throughput", "bandwidth", "gbps", "tokens_per_second", "samples_per_second")
RATIOS = ("perfvar", "slowness", "slowdown", "relative_time")  # a column for each kind of work


@dataclass(frozen=True)
class MeasuredFleet:
    """Times of work on GPUs, one entry a row; rows that could not be used, with their reasons."""

    name: str
    gpus: tuple[str, ...]
    works: tuple[str, ...]
    times: tuple[float, ...]
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Columns:
    gpu: tuple[str, ...]
    times: tuple[str, ...]
    work: tuple[str, ...]
    rate: bool


def read_fleet(path: str | Path, columns: Mapping[str, str] | None = None) -> MeasuredFleet:
    """A CSV file's measurements. `columns` says which column is `gpu`, `time` or `work` where the names do not."""
    path = Path(path)
    names, rows = read_table(path)
    found = _columns(path, names, columns or {})
    gpus, works, times, skipped = [], [], [], []
    for line, row in rows:
        gpu = "-".join((row[c] or "").strip() for c in found.gpu)
        for column in found.times:
            seconds = number(row[column])
            if not gpu.strip("-") or seconds is None or seconds <= 0:
                skipped.append((f"line {line}", f"no GPU, or no time above 0 in {column}"))
                continue
            work = [(row[c] or "").strip() for c in found.work] + ([column] if len(found.times) > 1 else [])
            gpus.append(gpu)
            works.append(" ".join(work))
            times.append(1 / seconds if found.rate else seconds)
    if not times:
        raise InputError(path, "no row in it has a GPU and a time above 0")
    return MeasuredFleet(_stem(path), tuple(gpus), tuple(works), tuple(times), tuple(skipped))


def fleet_columns(names: Sequence[str]) -> bool:
    """Whether a table with these columns is one of per-GPU measurements."""
    lower = [n.strip().lower() for n in names]
    device = any(n in DEVICE for n in lower) and any(n in NODE for n in lower)
    return (any(n in GPU for n in lower) or device) and bool(_times(lower))


def _columns(path: Path, names: list[str], told: Mapping[str, str]) -> _Columns:
    unknown = sorted(set(told) - {"gpu", "time", "work"})
    if unknown:
        raise InputError(path, f"unknown column key {unknown[0]}: choose from gpu, time, work")
    for column in told.values():
        if column not in names:
            raise InputError(path, f"is not a column: choose from {', '.join(names)}", column)
    lower = {n.strip().lower(): n for n in names}
    gpu = (told["gpu"],) if "gpu" in told else tuple(lower[n] for n in _gpu(list(lower)))
    times = (told["time"],) if "time" in told else tuple(lower[n] for n in _times(list(lower)))
    work = (told["work"],) if "work" in told else tuple(lower[n] for n in WORK if n in lower and lower[n] not in times)
    for what, columns in (("the GPU", gpu), ("the time", times)):
        if not columns:
            raise InputError(path, f"which column is {what}? Say --column {what.split()[-1].lower()}=NAME")
    return _Columns(gpu, times, work, _is_rate(times[0].strip().lower()))


def _gpu(lower: list[str]) -> list[str]:
    """One column that names a GPU, or those that tell where it is."""
    one = [n for n in GPU if n in lower]
    if one:
        return one[:1]
    device = [n for n in DEVICE if n in lower][:1]
    place = [n for n in NODE if n in lower]
    return [*sorted(place), *device] if device and place else []


def _times(lower: list[str]) -> list[str]:
    ratios = [n for n in lower if n.startswith(RATIOS)]
    named = [w + u for w in TIME for u in UNITS if w + u in lower]
    alone = [n for n in lower if n in ("ms", "us", "ns")]
    return (named or alone)[:1] or ratios or [n for n in lower if _is_rate(n)][:1]


def _is_rate(name: str) -> bool:
    return name.startswith(RATE)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv").removesuffix("-agg")
