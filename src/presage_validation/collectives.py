"""The claims on collective times, on tables of nccl-tests.

`time`: of every curve (gpu, nodes, n_gpus, op, source) the sizes in order, every third of them left out (index % 3
== 2), and predicted from a fit of laws and corrections on the other sizes of the file; `interpolated` the same by a
straight line between neighbours on logarithmic axes, a baseline. `gpu_left_out`: every row of a GPU from a fit without
any of that GPU's; `links_left_out`: every row within a domain from a fit without any GPU of its generation of links.
`ranks_left_out`: every row within a domain from a fit without that GPU's groups of as many ranks.
`nodes_left_out`: every row over several domains from what ships, less all that was measured over several domains of any
platform. `shipped`: presage as it ships, without a fit on this file. `repeated`: the measurements of one size against
their median, the floor below which no model can go.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from presage.costs.collectives import Collectives
from presage.costs.collectives.group import OPS, RankGroup
from presage.costs.collectives.model import CollectiveParameters, shipped_parameters
from presage.errors import InputError, PresageError
from presage.files.reading import lines
from presage.hardware import Platform, cluster, platform
from presage_fit.collectives import MeasuredCollective, fit
from presage_validation.score import AccuracyResult, Row, Skipped, in_turn

Tell = Callable[[str], None]
THIRD, AT = 3, 2


def score_collectives(path: str | Path, tell: Tell = lambda _: None) -> AccuracyResult:
    """Score one table."""
    entries, skipped = read_rows(Path(path))
    tell("every third size left out")
    rows = list(_thirds(entries))
    for gpu in in_turn(dict.fromkeys(e.gpu for e in entries), tell, lambda gpu: f"{gpu} left out"):
        rows += _left_out(entries, gpu)
    for fabric in in_turn(dict.fromkeys(map(_fabric, entries)), tell, lambda fabric: f"{fabric} left out"):
        rows += _links_left_out(entries, fabric)
    sizes = dict.fromkeys((e.gpu, e.row.group) for e in entries if e.row.group.domains == 1)
    for gpu, group in in_turn(sizes, tell, lambda size: f"{size[1].ranks} ranks of {size[0]} left out"):
        rows += _ranks_left_out(entries, gpu, group)
    rows += _nodes_left_out(entries)
    rows += _shipped(entries)
    rows += _repeated(entries)
    return AccuracyResult("collectives", str(path), tuple(rows), tuple(skipped), counted="time")


def _thirds(entries: Sequence[Entry]) -> Iterator[Row]:
    scored = set(_every_third(entries))
    kept = [e for i, e in enumerate(entries) if i not in scored]
    found = fit([_of_curve(e) for e in kept])
    models: dict[Platform, Collectives] = {}
    lines = {curve: _points(e for e in kept if e.curve == curve) for curve in {e.curve for e in kept}}
    for i in sorted(scored):
        row, group = _of_curve(entries[i]), f"{entries[i].gpu} {entries[i].row.op}"
        yield Row("time", group, entries[i].name, _predicted(models, found, row), row.seconds)
        yield Row("interpolated", group, entries[i].name, _straight(lines[entries[i].curve], row.nbytes), row.seconds)


def _every_third(entries: Sequence[Entry]) -> Iterator[int]:
    """Rows of the sizes that are left out."""
    curves: dict[tuple[str, ...], list[int]] = {}
    for i, e in enumerate(entries):
        curves.setdefault(e.curve, []).append(i)
    for of in curves.values():
        sizes = sorted({entries[i].row.nbytes for i in of})
        left_out = set(sizes[AT::THIRD])
        yield from (i for i in of if entries[i].row.nbytes in left_out)


def _of_curve(entry: Entry) -> MeasuredCollective:
    """A row as of a platform of its own source, for two sources are two curves."""
    here = entry.row.platform
    return replace(entry.row, platform=replace(here, key=f"{here.key} {entry.gpu} {entry.curve[-1]}"))


def _predicted(models: dict[Platform, Collectives], found: CollectiveParameters, row: MeasuredCollective) -> float:
    if row.platform not in models:
        models[row.platform] = Collectives(row.platform, found)
    return models[row.platform].seconds(row.op, row.nbytes, row.group)


def _points(entries: Iterable[Entry]) -> tuple[list[float], list[float]]:
    """Sizes and their median times, as logarithms."""
    by_size: dict[float, list[float]] = {}
    for e in entries:
        by_size.setdefault(e.row.nbytes, []).append(e.row.seconds)
    sizes = sorted(by_size)
    return list(np.log(sizes)), [float(np.log(np.median(by_size[m]))) for m in sizes]


def _straight(points: tuple[list[float], list[float]], nbytes: float) -> float:
    x, y = points
    if nbytes <= np.exp(x[-1]):
        return float(np.exp(np.interp(np.log(nbytes), x, y)))
    m, t = np.exp(x[-2:]), np.exp(y[-2:])
    return float(t[-1] + (nbytes - m[-1]) * (t[-1] - t[0]) / (m[-1] - m[0]) if len(x) > 1 else t[-1])


def _left_out(entries: Sequence[Entry], gpu: str) -> Iterator[Row]:
    others = [e.row for e in entries if e.gpu != gpu]
    found, models = fit(others), dict[Platform, Collectives]()
    for e in (e for e in entries if e.gpu == gpu):
        unseen = replace(e.row, platform=replace(e.row.platform, key="left out"))
        yield Row("gpu_left_out", gpu, e.name, _predicted(models, found, unseen), e.row.seconds)


def _fabric(entry: Entry) -> str:
    return entry.row.platform.links[0].fabric


def _links_left_out(entries: Sequence[Entry], fabric: str) -> Iterator[Row]:
    others = [e.row for e in entries if _fabric(e) != fabric]
    if not any(r.group.domains == 1 for r in others):
        return
    found, models = fit(others), dict[Platform, Collectives]()
    for e in (e for e in entries if _fabric(e) == fabric and e.row.group.domains == 1):
        yield Row("links_left_out", fabric, e.name, _predicted(models, found, e.row), e.row.seconds)


def _ranks_left_out(entries: Sequence[Entry], gpu: str, group: RankGroup) -> Iterator[Row]:
    kept = [e.row for e in entries if (e.gpu, e.row.group) != (gpu, group)]
    if not any(r.group.domains == 1 for r in kept):
        return
    found, models = fit(kept), dict[Platform, Collectives]()
    for e in entries:
        if (e.gpu, e.row.group) == (gpu, group):
            predicted = _predicted(models, found, e.row)
            yield Row("ranks_left_out", f"{gpu} {group.ranks} ranks", e.name, predicted, e.row.seconds)


def _nodes_left_out(entries: Sequence[Entry]) -> Iterator[Row]:
    found, models = _one_domain(shipped_parameters()), dict[Platform, Collectives]()
    for e in (e for e in entries if e.row.group.domains > 1):
        predicted = _predicted(models, found, e.row)
        yield Row("nodes_left_out", f"{e.gpu}, {e.row.group.domains} nodes", e.name, predicted, e.row.seconds)


def _one_domain(fitted: CollectiveParameters) -> CollectiveParameters:
    """Parameters without the corrections of groups over several domains."""
    curves = {key: c for key, c in fitted.corrections.curves.items() if key[2].domains == 1}
    return CollectiveParameters(fitted.laws, replace(fitted.corrections, curves=curves))


def _shipped(entries: Sequence[Entry]) -> Iterator[Row]:
    for e in entries:
        model = Collectives.of(e.row.platform)
        yield Row("shipped", e.gpu, e.name, model.seconds(e.row.op, e.row.nbytes, e.row.group), e.row.seconds)


def _repeated(entries: Sequence[Entry]) -> Iterator[Row]:
    same: dict[tuple[Any, ...], list[Entry]] = {}
    for e in entries:
        same.setdefault((*e.curve, e.row.nbytes), []).append(e)
    for of in same.values():
        middle = float(np.median([e.row.seconds for e in of]))
        yield from (Row("repeated", e.gpu, e.name, middle, e.row.seconds) for e in of if len(of) > 1)


# Tables of measured collectives, as nccl-tests measures them.
#
# CSV with the columns gpu, nodes, n_gpus, op, bytes and time_us; source and others may be there. Where network_gbps (of
# a node) and fabric are given, the network between nodes is that one.

COLUMNS = ("gpu", "nodes", "n_gpus", "op", "bytes", "time_us")
# What tables call a GPU, and the platform whose links it has, which may be another GPU's: the first that fits.
NAMES = (
    (r"p4de", "p4de"),
    (r"p4d", "p4d"),
    (r"p5en", "p5en"),
    (r"p5", "p5"),
    (r"gb[23]00", "gb200-nvl72"),
    (r"b[23]00", "dgx-b200"),
    (r"h200|h20\b|h20_|gh200", "dgx-h200"),
    (r"h100.*(pcie|nvl)|h800|a800", None),
    (r"h100", "dgx-h100"),
    (r"a100.*pcie", "8xa100-pcie"),
    (r"a100.*40", "dgx-a100-40"),
    (r"a100", "dgx-a100"),
    (r"mi300", "mi300x-ib"),
    (r"gv100", "4xgv100"),
    (r"dgx-2", "dgx-2"),
    (r"v100", "dgx-1-v100"),
    (r"l40s", "8xl40s"),
    (r"\bl4\b|\bl4_", "8xl4"),
)
SPELLINGS = {op.replace("_", ""): op for op in OPS}


@dataclass(frozen=True, slots=True)
class Entry:
    """A row, what it is called, and which curve of the table it is of."""

    row: MeasuredCollective
    name: str
    gpu: str
    curve: tuple[str, ...]


def platform_of(gpu: str) -> Platform:
    """The platform with the links of a GPU as a table calls it."""
    key = next((key for pattern, key in NAMES if re.search(pattern, gpu.lower())), None)
    if key is not None:
        return platform(key)
    raise PresageError(f"no platform for the GPU name {gpu!r}")


# What spans domains has its own network: GPUs that share links within a domain may not share the network's.
OWN_NETWORK = ((r"gb300", "gb300-nvl72"), (r"b300", "dgx-b300"))


def _networked(here: Platform, line: dict[str, str]) -> Platform:
    """The platform with the network between nodes that a row is of."""
    several = int(_number(line, "nodes")) > 1
    if several and line.get("network_gbps"):
        node = min(here.domain, 8)
        return _other_network(here, node, _number(line, "network_gbps"), line.get("fabric") or "infiniband", line)
    keys = (key for pattern, key in OWN_NETWORK if several and re.search(pattern, line["gpu"].lower()))
    key = next(keys, None)
    return platform(key) if key else here


def _other_network(here: Platform, node: int, gbps: float, fabric: str, line: dict[str, str]) -> Platform:
    found = cluster(here.gpu, node, gbps, fabric=fabric, domain=here.domain)
    if not line.get("latency_us"):
        return found
    far = replace(found.links[-1], latency=_number(line, "latency_us") * 1e-6)
    return replace(found, key=f"{found.key}-{line['latency_us']}us", links=(*found.links[:-1], far))


def read_rows(path: Path) -> tuple[list[Entry], list[Skipped]]:
    """Rows that can be used, and those that cannot."""
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(_lines(path), 2):
        try:
            entries.append(_entry(line))
        except PresageError as e:
            skipped.append(Skipped(f"line {number}", str(e)))
    return entries, skipped


def _lines(path: Path) -> Iterator[dict[str, str]]:
    try:
        table = csv.DictReader(lines(path), restval="")
        _check(path, table.fieldnames or ())
        yield from table
    except csv.Error as e:
        raise InputError(path, f"not a CSV file: {e}") from e


def _check(path: Path, there: Iterable[str]) -> None:
    missing = [c for c in COLUMNS if c not in there]
    if missing:
        raise InputError(path, "no such column", missing[0])


def _entry(line: dict[str, str]) -> Entry:
    op = SPELLINGS.get(re.sub(r"[^a-z]|perf", "", line["op"].lower()))
    if op is None:
        raise PresageError(f"no model of the collective {line['op']!r}")
    here = _networked(platform_of(line["gpu"]), line)
    nodes, ranks, nbytes, us = (_number(line, c) for c in ("nodes", "n_gpus", "bytes", "time_us"))
    if nodes < 1:
        raise PresageError(f"nodes {nodes:g} is out of range")
    if ranks < 2:
        raise PresageError("one rank has nobody to talk to")
    row = MeasuredCollective(here, op, RankGroup.on_nodes(here, int(ranks), int(nodes)), nbytes, us * 1e-6)
    what = (line["gpu"], line["nodes"], line["n_gpus"], op)
    return Entry(row, f"{' '.join(what)} {int(nbytes)}", line["gpu"], (*what, line.get("source") or ""))


def _number(line: dict[str, str], column: str) -> float:
    try:
        value = float(line[column])
    except (TypeError, ValueError):
        raise PresageError(f"{column} is {line[column]!r}, not a number") from None
    if not 0 < value < float("inf"):
        raise PresageError(f"{column} {value:g} is out of range")
    return value
