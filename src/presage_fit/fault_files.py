"""Failure files (`presage run --failures FILE.toml`) from a fitted log of faults, and the fit as a table."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from rich.table import Table

from presage.files import write_whole
from presage.report.terminal import plain_table
from presage.text import percent
from presage_fit.faults import FaultModel


def fault_lines(m: FaultModel) -> list[str]:
    """The file, line by line."""
    days, memory = m.log.nodes * m.log.days, f"{m.half_life:g} days" if isfinite(m.half_life) else "none"
    source = f"{m.log.name}: {int(m.log.new.sum())} faults of {m.log.nodes} nodes in {m.log.days:g} days"
    out = [
        "# Written by `presage fit`; a fault is the time that a node was out of service.",
        f'name = "{m.log.name.removesuffix(".csv")}, {m.log.nodes} nodes, {m.log.days:g} days"',
        "node_gpus = 8",
        f"node_days = {days:g}",
        "restart_s = 300",
        f"repair_hours = {m.repair.mean:.4g}",
        f"repair_shape = {m.repair.shape:.3g}",
        f"frailty = {m.frailty:.3g}",
        f"relapse = {m.relapses.share:.3g}",
        f"relapse_hours = {24 * m.relapses.days:.3g}",
        f"rate_sd = {m.drift:.3g}",
        "",
        "[sources]",
        f'failures = "{source}"',
        f'repair_hours = "{source}; Weibull, ends not seen count as later; half-life of the weight: {memory}"',
        'frailty = "variance of nodes\' own rates that lasts: early against late faults, relapses apart"',
        'relapse = "days from a return to the next fault of the node: a mixture of soon and usual"',
        f'rate_sd = "log errors of {len(m.trials)} predictions of the share of time lost from earlier days of the log"',
        'restart_s = "assumed: the log has no times of restarts"',
        'detect = "assumed: the log has no times of detection"',
        'node = "every fault of the log takes a node out of service"',
        'slow = "none: the log has none"',
    ]
    for name, count, repair in m.classes:
        out += ["", "[[failures]]", f'name = "{_plain(name)}"', f"count = {count}", "detect_s = 60", "node = 1.0"]
        out += [f"repair_hours = {repair.mean:.4g}", f"repair_shape = {repair.shape:.3g}"]
    return out


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c not in '"\\')


def write_failures(m: FaultModel, path: Path) -> None:
    write_whole(path, ("\n".join(fault_lines(m)) + "\n").encode())


def fault_table(m: FaultModel) -> Table:
    """Classes with their rates and repair times."""
    table = plain_table("Faults by class", "class", "faults", "per 1,000 node-days", "mean repair, h", "median, h")
    days = m.log.nodes * m.log.days
    rows = [*m.classes, ("all", int(m.log.new.sum()), m.repair)]
    for name, n, r in rows:
        table.add_row(name, f"{n:,}", f"{1e3 * n / days:.3g}", f"{r.mean:,.0f}", f"{r.median:,.0f}")
    return table


def fault_summary(m: FaultModel) -> str:
    """The fit in a line."""
    log = m.log
    rate = 1e3 * log.new.sum() / (log.nodes * log.days)
    return (
        f"{int(log.new.sum())} faults of {log.nodes} nodes in {log.days:g} days: {rate:.3g} per 1,000 node-days, "
        f"{percent(log.share_lost())} of node time lost, {int(log.open.sum())} nodes not back yet."
    )


def offender_lines(m: FaultModel) -> str:
    """What is known of repeat offenders."""
    memory = f"repairs count with a half-life of {m.half_life:g} days" if isfinite(m.half_life) else ""
    again = (
        f"relapses: {percent(m.relapses.share, 0)} of repairs did not help, the node failed again after "
        f"{24 * m.relapses.days:.2g} h on average; lasting differences between nodes: variance {m.frailty:.2g}"
    )
    return f"{again}\n{memory}" if memory else again


def fault_json(m: FaultModel) -> dict[str, Any]:
    return {
        "kind": "faults",
        "file": m.log.name,
        "nodes": m.log.nodes,
        "days": m.log.days,
        "faults": int(m.log.new.sum()),
        "not_back": int(m.log.open.sum()),
        "per_1000_node_days": 1e3 * m.log.rate,
        "share_of_node_time_lost": m.log.share_lost(),
        "repair_hours": {"mean": m.repair.mean, "median": m.repair.median, "weibull_shape": m.repair.shape},
        "half_life_days": m.half_life if isfinite(m.half_life) else None,
        "frailty": m.frailty,
        "relapse": {"share_of_repairs": m.relapses.share, "mean_days": m.relapses.days},
        "drift_log_sd": m.drift,
        "classes": [
            {"class": name, "faults": n, "repair_hours": r.mean, "repair_median_hours": r.median, "shape": r.shape}
            for name, n, r in m.classes
        ],
        "skipped": [list(s) for s in m.log.skipped],
    }
