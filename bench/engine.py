"""How fast the engine is, beside plain NumPy and NetworkX on the same graph: `python bench/engine.py [--json FILE]`.

Exits 1 if any two of them disagree on a result, else 0; a missed bar is said, not fatal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import networkx as nx
import numpy as np

from presage.engine import Durations, Edges, Lane, LaneKind, Program, finish_times, simulate

GRID = 2.0**-20  # durations and delays are whole multiples of this, so that sums are exact in any order


@dataclass(frozen=True)
class Graph:
    """The steps of some ranks: host launches, kernels, and an all-reduce of all ranks after every fourth kernel."""

    lanes: list[Lane]
    lane: np.ndarray
    edges: Edges
    group: np.ndarray
    seconds: np.ndarray

    def program(self) -> Program:
        return Program.of(self.lanes, self.lane, self.edges, group=self.group)


def training_step(tasks: int, ranks: int = 8) -> Graph:
    """About `tasks` tasks. A unit is four launches, four kernels and a collective on each of the ranks."""
    kinds = (LaneKind.HOST, LaneKind.COMPUTE, LaneKind.COMMUNICATION)
    lanes = [Lane(f"{kind.value} {r}", r, kind) for r in range(ranks) for kind in kinds]
    units = max(tasks // (9 * ranks), 2)
    n = units * ranks * 9
    unit, rank, place = np.unravel_index(np.arange(n), (units, ranks, 9))
    launch, kernel, collective = place < 4, (place >= 4) & (place < 8), place == 8
    lane = 3 * rank + kernel + 2 * collective
    t = np.arange(n)
    later = t[collective & (unit < units - 2)]
    edges = Edges.joined(
        [
            Edges.of(t[launch], t[launch] + 4, 8 * GRID),  # a kernel starts some time after its launch ends
            Edges.of(t[place == 0], t[place == 0] + 5, 4 * GRID, True),
            Edges.of(t[place == 7], t[place == 7] + 1),  # the all-reduce of what the four kernels made
            Edges.of(later, later + 2 * 9 * ranks - 4),  # its result is needed two units later
        ]
    )
    group = np.where(collective, unit, -1)
    seconds = np.random.default_rng(0).integers(1, 64, n) * GRID
    return Graph(lanes, lane, edges, group, seconds)


def best_of(times: int, call: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return min(once() for _ in range(times))


def noisy(graph: Graph, draws: int, share: float) -> Durations:
    """Of a share of the tasks the duration varies."""
    rng = np.random.default_rng(1)
    vary = np.flatnonzero(rng.random(len(graph.lane)) < share)
    row = np.full(len(graph.lane), -1, np.int32)
    row[vary] = np.arange(len(vary))
    return Durations(graph.seconds, row, rng.integers(1, 64, (len(vary), draws)) * GRID)


# --- the same recursion by other means


def waits_by_task(graph: Graph) -> list[list[tuple[int, float, bool]]]:
    """(task, delay, from its start) of everything each task waits for, the one before it on its lane included."""
    waits: list[list[tuple[int, float, bool]]] = [[] for _ in graph.lane]
    e = graph.edges
    for before, after, delay, from_start in zip(
        *map(np.ndarray.tolist, (e.before, e.after, e.delay, e.from_start)), strict=True
    ):
        waits[after].append((before, delay, from_start))
    last: dict[int, int] = {}
    for t, lane in enumerate(graph.lane.tolist()):
        if lane in last:
            waits[t].append((last[lane], 0.0, False))
        last[lane] = t
    return waits


def units_in_order(graph: Graph) -> list[list[int]]:
    """Single tasks and whole meetings, each after all it waits for: tasks by number, a meeting at its last member."""
    members: dict[int, list[int]] = {}
    units = []
    left = np.bincount(graph.group[graph.group >= 0]).tolist()
    for t, meeting in enumerate(graph.group.tolist()):
        if meeting < 0:
            units.append([t])
            continue
        members.setdefault(meeting, []).append(t)
        if len(members[meeting]) == left[meeting]:
            units.append(members[meeting])
    return units


def plain_numpy(
    units: list[list[int]], waits: list[list[tuple[int, float, bool]]], seconds: list[np.ndarray]
) -> np.ndarray:
    """The finish per draw: a Python loop over tasks, NumPy over draws."""
    start: list[np.ndarray] = [np.empty(0)] * len(waits)
    end = list(start)
    finish = nothing = np.zeros_like(seconds[0])
    for unit in units:
        ready, longest = nothing, nothing
        for t in unit:
            for before, delay, from_start in waits[t]:
                ready = np.maximum(ready, (start if from_start else end)[before] + delay)
            longest = np.maximum(longest, seconds[t])
        done = ready + longest
        for t in unit:
            start[t], end[t] = ready, done
        finish = np.maximum(finish, done)
    return finish


def as_networkx(units: list[list[int]], waits: list[list[tuple[int, float, bool]]], seconds: list[float]) -> nx.DiGraph:
    """Nodes are tasks and meetings, weights are start-to-start; a last node follows every end."""
    node = {t: i for i, unit in enumerate(units) for t in unit}
    longest = [max(seconds[t] for t in unit) for unit in units]
    graph, weight = nx.DiGraph(), {(i, len(units)): s for i, s in enumerate(longest)}
    for i, unit in enumerate(units):
        for t in unit:
            for before, delay, from_start in waits[t]:
                edge = (node[before], i)
                weight[edge] = max(weight.get(edge, 0.0), delay + (0.0 if from_start else longest[node[before]]))
    graph.add_weighted_edges_from((a, b, w) for (a, b), w in weight.items())
    return graph


# --- measurements


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    bar: str = ""
    passed: bool | None = None


def throughput() -> list[Row]:
    graph = training_step(20_000)
    program, rows = graph.program(), []
    n, draws = len(program), 1000
    for share in (0.1, 1.0):
        d = noisy(graph, draws, share)
        rate = n * draws / best_of(3, lambda d=d: finish_times(program, d)) / 1e6
        what = f"finish_times, {n:,} tasks x {draws:,} draws, {share:.0%} of tasks vary"
        rows.append(Row(what, rate, "million task-draws/s", ">= 5", rate >= 5))
    return rows


def one_million() -> list[Row]:
    graph = training_step(1_000_000)
    program = graph.program()
    build = best_of(3, graph.program)
    run = best_of(3, lambda: simulate(program, graph.seconds))
    n = len(program)
    return [
        Row(f"simulate, {n:,} tasks, 1 draw", run, "s", "< 1", run < 1),
        Row(f"Program.of, {n:,} tasks, {len(graph.edges):,} edges", build, "s"),
    ]


def against_others(tasks: int = 100_000, draws: int = 100) -> tuple[list[Row], bool]:
    graph = training_step(tasks)
    program, d = graph.program(), noisy(graph, draws, 0.1)
    waits, units = waits_by_task(graph), units_in_order(graph)
    each = [np.full(draws, b) if r < 0 else d.draws[r] for b, r in zip(d.base, d.row, strict=True)]
    single = [s[:1] for s in each]
    dag = as_networkx(units, waits, [float(s[0]) for s in each])
    first = np.concatenate(single)
    answers: dict[str, np.ndarray] = {}

    def timed(name: str, times: int, call: Callable[[], object]) -> float:
        return best_of(times, lambda: answers.__setitem__(name, np.atleast_1d(call())))

    ours_one = timed("engine, 1 draw", 5, lambda: simulate(program, first).finish)
    ours = timed("engine", 5, lambda: finish_times(program, d))
    numpy_one = timed("numpy, 1 draw", 1, lambda: plain_numpy(units, waits, single))
    numpy_all = timed("numpy", 1, lambda: plain_numpy(units, waits, each))
    networkx = timed("networkx, 1 draw", 1, lambda: nx.dag_longest_path_length(dag))
    agree = bool((answers["engine"] == answers["numpy"]).all()) and all(
        (answers[k] == answers["engine"][0]).all() for k in answers if "1 draw" in k
    )
    n = f"{len(program):,} tasks"
    rows = [
        Row(f"engine, {n}, 1 draw", ours_one, "s"),
        Row(f"plain NumPy, {n}, 1 draw", numpy_one, "s"),
        Row(f"NetworkX dag_longest_path_length, {n}, 1 draw", networkx, "s"),
        Row("  engine is faster than NumPy by", numpy_one / ours_one, "times"),
        Row("  engine is faster than NetworkX by", networkx / ours_one, "times"),
        Row(f"engine, {n}, {draws} draws", ours, "s"),
        Row(f"plain NumPy, {n}, {draws} draws", numpy_all, "s"),
        Row("  engine is faster than NumPy by", numpy_all / ours, "times"),
        Row("all three agree, to the last bit", float(agree), "", "yes", agree),
    ]
    return rows, agree


def memory() -> list[Row]:
    """In fresh processes: the peak of one counts for all that follows in it."""
    rows = []
    for tasks in (1_000_000, 2_000_000):
        peak = json.loads(_child("--memory-of", str(tasks)))
        rows.append(Row(f"peak memory, build + simulate, {tasks:,} tasks, 1 draw", peak["simulate"], "bytes/task"))
        rows.append(Row(f"more for finish_times, {tasks:,} tasks x 64 draws", peak["finish_times"], "bytes/task"))
    ratio = rows[2].value / rows[0].value
    rows.append(Row("bytes per task at 2 million over 1 million", ratio, "", "< 1.1 (linear)", ratio < 1.1))
    return rows


def memory_of(tasks: int) -> dict[str, float]:
    small = training_step(1000)
    d = noisy(small, 64, 0.1)
    finish_times(small.program(), d)
    simulate(small.program(), small.seconds)
    before = _resident("VmRSS")
    graph = training_step(tasks)
    program = graph.program()
    run = simulate(program, graph.seconds)
    peak = _resident("VmHWM") - before
    del run
    rows = np.where(np.arange(len(program)) % 10 == 0, np.arange(len(program)) % 100, -1).astype(np.int32)
    table = np.random.default_rng(0).random((100, 64))
    finish_times(program, Durations(graph.seconds, rows, table))
    more = max(_resident("VmHWM") - before - peak, 0)
    return {"simulate": peak / len(program), "finish_times": more / len(program)}


def _resident(field: str) -> int:
    """Bytes of this process's memory, now (VmRSS) or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def first_call() -> list[Row]:
    """A fresh process with an empty, then with a filled compile cache."""
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (json.loads(_child("--first-call", NUMBA_CACHE_DIR=folder)) for _ in range(2))
    return [Row(f"first call, {name} compile cache", t, "s") for name, t in (("cold", cold), ("warm", warm))]


def time_of_first_call() -> float:
    graph = training_step(1000)
    began = time.perf_counter()
    program = graph.program()
    simulate(program, graph.seconds)
    finish_times(program, noisy(graph, 10, 0.1))
    return time.perf_counter() - began


def _child(*arguments: str, **environment: str) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True).stdout


def shown(row: Row) -> str:
    verdict = "" if row.passed is None else f"bar {row.bar}: {'pass' if row.passed else 'FAIL'}"
    number = f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.3g}"
    return f"{row.what:<70} {number:>8} {row.unit:<22} {verdict}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of)))
        return 0
    if arguments.first_call:
        print(json.dumps(time_of_first_call()))
        return 0
    compared, agree = against_others()
    rows = [*throughput(), *one_million(), *compared, *memory(), *first_call()]
    print("\n".join(map(shown, rows)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    if not agree:
        print("the engine, NumPy and NetworkX disagree", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
