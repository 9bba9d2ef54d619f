"""Measured collectives of one's own cluster: what nccl-tests (or rccl-tests) print, as curves of a platform file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from presage.costs.collectives import OPS, Collectives, RankGroup, volume
from presage.errors import InputError, PresageError
from presage.files import write_whole
from presage.files.reading import read_bytes
from presage.hardware import Platform
from presage.hardware.platform import MeasuredCurve, platform_file, read_platform
from presage.report.terminal import plain_table
from presage.text import percent, size

LONGEST = 64 << 20  # bytes of a log
RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\b")
ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s")
NAMES = {
    "all_reduce": ("all_reduce", "allreduce"),
    "all_gather": ("all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter", "reducescatter"),
    "all_to_all": ("alltoall", "all_to_all", "all2all"),
    "broadcast": ("broadcast", "bcast"),
    "send_recv": ("sendrecv", "send_recv"),
}


def read_nccl_tests(path: Path) -> list[MeasuredCurve]:
    """The curves in a log: one for each test that was run in it."""
    text = read_bytes(path, LONGEST).decode("utf-8", "replace")
    curves = [_curve(path, part) for part in _tests(text)]
    if not curves:
        raise InputError(path, "holds no table of nccl-tests: its rows begin with size, count and type")
    return curves


@dataclass
class _Test:
    """What one test printed: the lines before its table, and the rows of it."""

    said: list[str]
    rows: list[list[str]]


def _tests(text: str) -> Iterable[_Test]:
    """Tests in the order they were run; a comment after rows begins another one."""
    test = _Test([], [])
    for line in text.splitlines():
        if ROW.match(line):
            test.rows.append(line.split())
        elif test.rows and RANK.search(line):  # the next test lists its ranks anew
            yield test
            test = _Test([line], [])
        else:
            test.said.append(line)
    if test.rows:
        yield test


def _curve(path: Path, test: _Test) -> MeasuredCurve:
    hosts = {int(m[1]): m[2] for line in test.said if (m := RANK.search(line))}
    if len(hosts) < 2:
        raise InputError(path, "does not list its ranks ('#  Rank  0 ... on HOST device'): keep the whole output")
    near = Counter(hosts.values()).most_common()
    if len({n for _, n in near}) > 1:
        raise InputError(path, "has more ranks on some hosts than on others: run it with as many on each")
    # in a row: size, count, type, perhaps redop and root, then time, algbw, busbw, errors: out of place, and in place
    sizes = [float(row[0]) for row in test.rows]
    times = [_time(path, row) for row in test.rows]
    kept = sorted({m: t for m, t in zip(sizes, times, strict=True) if m > 0 and t > 0}.items())
    if not kept:
        raise InputError(path, "has no row with a size and a time")
    op = _op(path, test, len(hosts))
    return MeasuredCurve(op, len(hosts), near[0][1], tuple(m for m, _ in kept), tuple(t for _, t in kept))


def _numbers(row: Sequence[str]) -> list[float]:
    """Times and bandwidths of a row: from the last word that is no number, or the root, on."""
    words = row[3:]
    while words and not re.fullmatch(r"\d+\.\d+(e[+-]?\d+)?", words[0]):
        words = words[1:]
    return [float(w) for w in words[:3]] if len(words) >= 3 else []


def _time(path: Path, row: Sequence[str]) -> float:
    try:
        return _numbers(row)[0] * 1e-6
    except (IndexError, ValueError):
        raise InputError(path, f"cannot be read: {' '.join(row)[:60]!r} has no time") from None


def _op(path: Path, test: _Test, ranks: int) -> str:
    """The op by the test's own name, else the file's, else by its ratio of bandwidths where only one op has it."""
    for text in ("\n".join(line for line in test.said if "_perf" in line), path.name):
        found = [op for op, names in NAMES.items() if any(n in text.lower() for n in names)]
        if len(found) == 1:
            return found[0]
    algbw, busbw = _numbers(test.rows[-1])[1:]
    reduces = "sum" in test.rows[-1]
    if algbw and reduces:
        ratio = busbw / algbw
        return min(("all_reduce", "reduce_scatter"), key=lambda op: abs(volume(op, ranks) - ratio))
    ops = ", ".join(n for op in OPS for n in NAMES[op][:1])
    raise InputError(path, f"does not say which collective it measured: put its name into the file's ({ops})")


# ---- a platform with measured curves


@dataclass(frozen=True)
class MeasuredPlatform:
    """A platform file with measured curves, and how far presage's own were from them."""

    base: Platform
    curves: tuple[MeasuredCurve, ...]
    text: str

    def errors(self) -> list[float]:
        """Mean absolute error of each curve as predicted without it."""
        return [_error(self.base, c) for c in self.curves]

    def to_json(self) -> dict[str, Any]:
        """Every curve as measured, with the error of the prediction without it."""
        return {
            "platform": self.base.key,
            "curves": [
                {"op": c.op, "ranks": c.ranks, "ranks_per_domain": c.per_domain, "bytes": list(c.nbytes),
                 "seconds": list(c.seconds), "error_without": error}
                for c, error in zip(self.curves, self.errors(), strict=True)
            ],
        }  # fmt: skip


def _error(here: Platform, curve: MeasuredCurve) -> float:
    group = RankGroup(curve.ranks, curve.per_domain)
    predicted = Collectives.of(here).seconds(curve.op, np.array(curve.nbytes), group)
    return float(np.mean(np.abs(predicted / np.array(curve.seconds) - 1)))


def measured_platform(logs: Sequence[Path], base: str) -> MeasuredPlatform:
    """A platform with the curves of these logs; several of one op and group are one, the faster at each size."""
    file = platform_file(base)
    here, curves = read_platform(file), _merged([c for log in logs for c in read_nccl_tests(log)])
    for c in curves:
        if c.per_domain > here.domain:
            raise PresageError(f"--platform {base} has {here.domain} GPUs in a domain, and the log {c.per_domain}")
    curves = [replace(c, per_domain=_near(here, c)) for c in curves]
    known = {(c.op, c.ranks, c.per_domain) for c in here.measured}
    for c in curves:
        if (c.op, c.ranks, c.per_domain) in known:
            raise InputError(file, f"has {c.op} on {c.ranks} ranks already: give the platform it was made of")
    text = "\n".join([file.read_text().rstrip("\n"), *(_toml(c) for c in curves)]) + "\n"
    return MeasuredPlatform(here, tuple(curves), text)


def _near(here: Platform, curve: MeasuredCurve) -> int:
    """Ranks of a curve in a domain, which may be several hosts."""
    return RankGroup.on_nodes(here, curve.ranks, curve.ranks // curve.per_domain).per_domain


def _merged(curves: Sequence[MeasuredCurve]) -> list[MeasuredCurve]:
    points: dict[tuple[str, int, int], dict[float, float]] = {}
    for c in curves:
        best = points.setdefault((c.op, c.ranks, c.per_domain), {})
        for m, t in zip(c.nbytes, c.seconds, strict=True):
            best[m] = min(t, best.get(m, t))
    return [MeasuredCurve(*key, tuple(sorted(p)), tuple(p[m] for m in sorted(p))) for key, p in points.items()]


def _toml(curve: MeasuredCurve) -> str:
    nbytes = ", ".join(f"{m:.0f}" for m in curve.nbytes)
    times = ", ".join(f"{t * 1e6:.6g}" for t in curve.seconds)
    head = f'\n[[collectives]]\nop = "{curve.op}"\nranks = {curve.ranks}\nranks_per_domain = {curve.per_domain}'
    return f"{head}\nbytes = [{nbytes}]\ntime_us = [{times}]"


def write_platform(found: MeasuredPlatform, path: Path) -> None:
    """Write the platform file, and read it back."""
    if path.suffix != ".toml":
        raise PresageError(f"--out {path}: a platform file ends in .toml")
    write_whole(path, found.text.encode())
    read_platform(path)


def curves_table(found: MeasuredPlatform) -> Table:
    """Every curve, its sizes, and how far presage's own was from it."""
    table = plain_table("Measured", "collective", "ranks", "per domain", "sizes", "bytes", "predicted without it")
    for c, error in zip(found.curves, found.errors(), strict=True):
        sizes = f"{size(c.nbytes[0])} to {size(c.nbytes[-1])}"
        table.add_row(c.op, str(c.ranks), str(c.per_domain), str(len(c.nbytes)), sizes, f"{percent(error)} off")
    return table
