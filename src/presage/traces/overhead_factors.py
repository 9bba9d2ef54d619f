"""The host of a trace: its overheads (`presage trace --overheads`) against those of the reference's traces.

One factor for all host time, from the time within the ops that both have, each weighing by what it takes; the time
between ops is the user's Python. Of eight host-bound steps of an H200, each told by the factor of its own trace, that
errs by 13% on average; factors by thread and for launch calls by 17%, the reference as it is by 18%, overheads as
profiled by 48% (tools/compare_hosts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from presage.costs.host_factors import HostFactors, MeasuredFactors, host_spread, shrunk
from presage.errors import InputError
from presage.files.decoding import convert_record
from presage.files.reading import DATA, read_toml
from presage.traces.overheads import ANY, UNPROFILED, Kind

VERSION = 1
KINDS = tuple(kind.name for kind in (Kind.T2, Kind.T3, Kind.T4, Kind.T5, Kind.ALONE))
LEAST_SAMPLES = 50  # of ops that the reference has too
LEAST_REFERENCE = 5  # samples of an op in the reference
MOST_FACTOR = 30.0
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Row(msgspec.Struct, frozen=True):
    n: Count
    mean_us: Microseconds


class OverheadsFile(msgspec.Struct, frozen=True):
    """What `presage trace --overheads` wrote: by kind, thread role and op."""

    version: int
    unprofiled: Annotated[float, msgspec.Meta(gt=0, le=1)] = UNPROFILED  # older files have times as profiled
    gpus: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()
    rows: Mapping[tuple[str, str, str], _Row] = {}


def is_overheads(table: Mapping[str, Any]) -> bool:
    """Whether the contents of a file are host overheads."""
    return "per_event_cost_us" in table or any(kind in table for kind in KINDS)


def overheads_of(path: str | Path, table: Mapping[str, Any]) -> OverheadsFile:
    """Host overheads from the contents of their file; times without the profiler."""
    if table.get("version") != VERSION:
        raise InputError(path, f"is {table.get('version')!r}, and this presage reads {VERSION}", "version")
    about = {k: table[k] for k in ("version", "unprofiled", "gpus", "traces") if k in table}
    try:
        held = {kind: convert_record(table.get(kind, {}), dict[str, dict[str, _Row]]) for kind in KINDS}
        found = convert_record(about, OverheadsFile)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at `$")
        raise InputError(
            path, f"not what presage trace --overheads writes, or damaged: {what}", where.strip("`.")
        ) from e
    share = 1.0 if "unprofiled" in table else UNPROFILED
    return msgspec.structs.replace(found, rows=dict(_rows(held, share)))


def _rows(held: Mapping[str, dict[str, dict[str, _Row]]], share: float) -> Iterator[tuple[tuple[str, str, str], _Row]]:
    for kind, by_role in held.items():
        for role, by_key in by_role.items():
            yield from (((kind, role, k), _Row(x.n, x.mean_us * share)) for k, x in by_key.items() if k != ANY)


@cache
def reference_overheads() -> OverheadsFile:
    """Those of the reference's traces."""
    path = DATA / "h200" / "overheads.toml"
    return overheads_of(path, read_toml(path))


def traced_factors(path: str | Path, found: OverheadsFile) -> MeasuredFactors:
    """How many times as long as the reference the host of these traces takes."""
    known = reference_overheads().rows
    both = [(x, known[k]) for k, x in found.rows.items() if k in known and known[k].n >= LEAST_REFERENCE]
    samples, expected = sum(x.n for x, _ in both), sum(x.n * r.mean_us for x, r in both)
    if samples < LEAST_SAMPLES or not expected:
        raise InputError(
            path,
            f"has {samples} samples of ops that the reference has too, {LEAST_SAMPLES} are needed: trace more steps",
        )
    ratio = sum(x.n * x.mean_us for x, _ in both) / expected
    if not 1 / MOST_FACTOR < ratio < MOST_FACTOR:
        raise InputError(path, f"its host takes {ratio:.3g} times as long as the reference, which is no host's pace")
    return shrunk(HostFactors(ratio, ratio, ratio), host_spread().traced_sd, len(both))
