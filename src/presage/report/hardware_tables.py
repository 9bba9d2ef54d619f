"""Rich tables of hardware facts. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from presage.costs.collectives.table import Bus
from presage.hardware.facts import Facts, Source
from presage.hardware.gpu import Gpu
from presage.hardware.platform import Platform
from presage.report.graph_tables import size
from presage.report.plain import plain_table
from presage.text import seconds

__all__ = ["busbw_table", "figure_table", "gpu_table", "link_table", "platform_table", "source_table"]


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """A row a GPU. Rates are dense; links one way."""
    rates = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
    columns = ("SMs", "MHz", "memory", "GB/s", "L2", "power", *rates, "link", "PCIe")
    title = "GPUs (TFLOP/s without sparsity; links one way, in GB/s)"
    table = plain_table(title, "name", "GPU", *columns, left=2, fold=False)
    for g in gpus:
        table.add_row(
            escape(g.key),
            escape(g.name),
            str(g.sms),
            f"{g.boost_clock / 1e6:.0f}",
            size(g.memory),
            f"{g.memory_bandwidth / 1e9:.0f}",
            size(g.l2),
            f"{g.power_limit:.0f} W",
            *(f"{g.peak[d] / 1e12:{'.0f' if g.peak[d] >= 1e15 else '.4g'}}" if d in g.peak else "-" for d in rates),
            f"{g.link / 1e9:.0f}" if g.link else "-",
            f"{g.pcie / 1e9:.0f}",
        )
    return table


def source_table(gpus: Sequence[Gpu]) -> Table:
    """Where the figures are from."""
    found: dict[Source, list[str]] = {}
    for g in gpus:
        for source in dict.fromkeys(g.facts.sources.values()):
            found.setdefault(source, []).append(g.key)
    table = plain_table("Sources", "of", "date", "source", left=3)
    for source, keys in found.items():
        names = ", ".join(keys) if len(keys) <= 3 else f"{len(keys)} of them"
        table.add_row(escape(names), source.date, escape(source.text))
    return table


def figure_table(gpu: Gpu) -> Table:
    """Every figure of one GPU as its file has it, beside its source."""
    table = plain_table(gpu.name, "figure", "value", "date", "source", left=4)
    table.columns[1].justify = "right"
    _add_figures(table, gpu.facts)
    return table


def _add_figures(table: Table, facts: Facts, *before: str) -> None:
    """A row a figure; a source is told once."""
    above = None
    for name, value in facts.as_written().items():
        source = facts.sources[name]
        told = (source.date, escape(source.text)) if source != above else ("", "")
        table.add_row(*before, name, f"{value:.12g}", *told)
        above = source


def platform_table(platforms: Sequence[Platform]) -> Table:
    """A row a platform."""
    columns = ("in a domain", "within it", "across")
    table = plain_table(
        "Platforms (links one way, for each GPU)", "name", "platform", "GPU", *columns, left=3, fold=False
    )
    for p in platforms:
        near, *far = (f"{k.name} {k.bandwidth / 1e9:.4g} GB/s" for k in p.links)
        table.add_row(escape(p.key), escape(p.name), p.gpu.key, str(p.domain), near, ", ".join(far) or "-")
    return table


def link_table(platform: Platform) -> Table:
    """Every tier of one platform, its figures as its file has them, beside their sources."""
    table = plain_table(f"{platform.name}: links", "link", "figure", "value", "date", "source", left=5)
    table.columns[2].justify = "right"
    for link in platform.links:
        kind = f"{link.fabric}, {link.topology}" + (", reduces" if link.in_network else "")
        table.add_row(escape(link.name), "kind", "", "", escape(kind))
        facts = link.facts
        if facts is None or "bandwidth_GBps" not in facts.figures:
            table.add_row("", "bandwidth_GBps", f"{link.bandwidth / 1e9:.12g}", "", f"presage gpus {platform.gpu.key}")
        if facts is not None:
            _add_figures(table, facts, "")
    return table


def busbw_table(found: Sequence[Bus]) -> Table:
    """Predicted times and bus bandwidths by size."""
    sizes = [size(int(m)) for m in found[0].nbytes] if found else []
    table = plain_table("Predicted: time, bus bandwidth in GB/s", "collective", "ranks", "a domain", *sizes, "from")
    for bus in found:
        cells = [f"{seconds(t)}  {b / 1e9:.3g}" for t, b in zip(bus.seconds, bus.busbw, strict=True)]
        table.add_row(bus.op, str(bus.group.ranks), str(bus.group.per_domain), *cells, bus.origin)
    table.columns[-1].justify = "left"
    return table
