"""Rich tables of what presage found in traces. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from presage.report.plain import plain_table
from presage.text import percent, seconds, shorten
from presage.traces.explain import LaneActivity, Lateness, OpSummary, PathPart
from presage.traces.overheads import ANY, Kind, Overhead, Overheads
from presage.traces.replay import StepTime
from presage.traces.trace_set import Meeting

__all__ = [
    "activity_table",
    "count_table",
    "kernel_table",
    "late_table",
    "meeting_table",
    "op_table",
    "overhead_table",
    "path_table",
    "replay_table",
    "step_table",
]


def step_table(ranks: Sequence[tuple[str, Sequence[StepTime]]]) -> Table:
    """Step times, a row a rank."""
    most = max((len(steps) for _, steps in ranks), default=0)
    shown = min(most, 8)
    table = plain_table("Step times", "rank", "mean", *(f"step {i}" for i in range(shown)))
    for rank, steps in ranks:
        mean = sum(s.seconds for s in steps) / len(steps) if steps else float("nan")
        table.add_row(rank, seconds(mean), *(seconds(s.seconds) for s in steps[:shown]))
    return table


def activity_table(rows: Sequence[tuple[str, LaneActivity]], device: str = "GPU") -> Table:
    """What each GPU (or CPU) did: shares of the span."""
    columns = ("span", f"{device} active", "compute", "exposed comm", "of it waiting", "overlap")
    idle = ("idle", "host-bound", "sync", "gaps", "unexplained")
    table = plain_table(f"{device} time (shares of the span)", "rank", *columns, *idle)
    for rank, a in rows:
        s = a.span
        table.add_row(
            rank,
            seconds(s),
            percent(a.active / s),
            percent(a.compute / s),
            percent(a.exposed_communication / s),
            percent(a.waiting_for_ranks / s),
            percent(a.overlap) if a.communication else "-",
            percent(a.idle.total / s),
            percent(a.idle.host / s),
            percent(a.idle.sync / s),
            percent(a.idle.gap / s),
            percent(a.idle.unexplained / s),
        )
    return table


def op_table(ops: Sequence[OpSummary], top: int, rank: str, off_host: str = "GPU") -> Table:
    table = plain_table(f"Top ops by {off_host} time (rank {rank}, all steps)", "op", "calls", off_host, "host")
    for o in ops[:top]:
        table.add_row(
            shorten(o.name.removeprefix("autograd::engine::evaluate_function: ")),
            str(o.calls),
            seconds(o.gpu),
            seconds(o.host),
        )
    return table


def kernel_table(kernels: Sequence[OpSummary], top: int, rank: str, what: str = "kernel") -> Table:
    total = sum(k.gpu for k in kernels)
    table = plain_table(f"Top {what}s (rank {rank}, all steps)", what, "calls", "time", "share")
    for k in kernels[:top]:
        table.add_row(shorten(k.name), str(k.calls), seconds(k.gpu), percent(k.gpu / total))
    return table


MEANINGS = {
    Kind.T1: "T1 between ops",
    Kind.T2: "T2 before the first launch",
    Kind.T3: "T3 after the last launch",
    Kind.T4: "T4 the launch call",
    Kind.T5: "T5 between launches",
    Kind.ALONE: "op without a launch",
}


def overhead_table(found: Overheads, top: int) -> Table:
    """The five host overheads over all ops, then for the ops that cost the host most."""
    table = plain_table(
        "Host overheads (as profiled)", "overhead", "op", "thread", "n", "median", "mean", "p10", "p90", left=3
    )
    rows = [(kind, key, role, o) for (kind, key, role), o in found.table.items() if kind in MEANINGS]
    for kind, _, role, o in sorted((r for r in rows if r[1] == ANY), key=lambda r: (r[0], r[2])):
        table.add_row(MEANINGS[kind], "all", role.name.lower(), *_overhead_cells(o))
    single = sorted((r for r in rows if r[1] != ANY), key=lambda r: -r[3].n * r[3].mean)
    for kind, key, role, o in single[:top]:
        table.add_row(MEANINGS[kind], shorten(key, 40), role.name.lower(), *_overhead_cells(o))
    return table


def _overhead_cells(o: Overhead) -> list[str]:
    return [str(o.n), *(seconds(x) for x in (o.median, o.mean, o.p10, o.p90))]


def path_table(parts: Sequence[PathPart], top: int) -> Table:
    total = sum(p.seconds for p in parts)
    table = plain_table(f"Critical path ({seconds(total)})", "what", "name", "time", "share", left=2)
    for p in parts[:top]:
        name = p.name.removeprefix("autograd::engine::evaluate_function: ")
        table.add_row(p.kind, shorten(name), seconds(p.seconds), percent(p.seconds / total))
    return table


def late_table(rows: Sequence[Lateness]) -> Table:
    table = plain_table("Who is late at collectives", "rank", "times last", "made others wait", "waited itself")
    for r in rows:
        table.add_row(str(r.rank), str(r.times_last), seconds(r.made_others_wait), seconds(r.waited))
    return table


def meeting_table(rows: Sequence[tuple[Meeting, int, float, float]]) -> Table:
    table = plain_table("Collectives that cost most waiting", "collective", "at", "last rank", "waited by all")
    for meeting, last, waited, at in rows:
        table.add_row(shorten(meeting.kind.split("|")[0]), seconds(at), str(last), seconds(waited))
    return table


def replay_table(
    rows: Sequence[tuple[str, Sequence[StepTime], Sequence[StepTime], Sequence[StepTime] | None]],
) -> Table:
    """Measured beside replayed, and beside the edited replay if there is one."""
    edited = any(e is not None for *_, e in rows)
    columns = ["step", "measured", "replayed", "error", *(["edited", "change"] if edited else [])]
    table = plain_table("Replay", "rank", *columns)
    for rank, measured, replayed, changed in rows:
        for i, (m, r) in enumerate(zip(measured, replayed, strict=True)):
            cells = [str(i), seconds(m.seconds), seconds(r.seconds), percent(r.seconds / m.seconds - 1, 2)]
            if changed is not None:
                cells += [seconds(changed[i].seconds), percent(changed[i].seconds / r.seconds - 1, 1)]
            table.add_row(rank, *cells)
    return table


def count_table(title: str, rows: Sequence[tuple[str, int]]) -> Table:
    table = plain_table(title, "what", "count")
    for name, count in rows:
        table.add_row(shorten(name), str(count))
    return table
