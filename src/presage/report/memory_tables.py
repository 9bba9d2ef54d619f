"""Rich tables of a step's memory. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from presage.memory.step_memory import MemoryProfile
from presage.report.graph_tables import size
from presage.report.plain import plain_table

__all__ = ["module_table", "peak_table", "role_table", "top_table"]

WORDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "activation": "activations",
    "workspace": "workspace",
}


def peak_table(profile: MemoryProfile, peak_op: str) -> Table:
    """The peaks and where they are reached."""
    table = plain_table("Memory", "", "bytes", fold=False)
    table.add_row("peak allocated", size(profile.peak_allocated))
    table.add_row("peak reserved", size(profile.peak_reserved))
    table.add_row("unused of reserved", f"{profile.fragmentation:.1%}")
    table.add_row("between steps", size(profile.after))
    table.add_row("peak reached in", escape(peak_op))
    return table


def role_table(profile: MemoryProfile) -> Table:
    """What is alive at the peak, by kind."""
    return _shares("Alive at the peak", "kind", {WORDS[k]: n for k, n in profile.by_role().items()})


def module_table(profile: MemoryProfile, depth: int = 2, rows: int = 20) -> Table:
    """What is alive at the peak, by module."""
    modules = {name or "(no module)": n for name, n in profile.by_module(depth).items()}
    return _shares("Alive at the peak", "module", dict(list(modules.items())[:rows]))


def top_table(profile: MemoryProfile, count: int = 10) -> Table:
    """The largest single pieces alive at the peak."""
    table = plain_table("Largest at the peak", "name", "kind", "module", "bytes", fold=False)
    for h in profile.top(count):
        table.add_row(escape(h.name or f"storage {h.storage}"), WORDS[h.role], escape(h.module), size(h.nbytes))
    return table


def _shares(title: str, what: str, amounts: Mapping[str, int]) -> Table:
    total = sum(amounts.values())
    table = plain_table(title, what, "bytes", "share", fold=False)
    for name, n in amounts.items():
        table.add_row(escape(name), size(n), f"{n / total:.1%}")
    return table
