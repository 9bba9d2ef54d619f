"""Rich tables of hardware facts. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from presage.hardware.facts import Source
from presage.hardware.gpu import Gpu
from presage.report.graph_tables import size
from presage.report.plain import plain_table

__all__ = ["figure_table", "gpu_table", "source_table"]


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """A row a GPU. Rates are dense; links one way."""
    rates = ("fp32", "tf32", "fp16", "bf16", "fp8")
    columns = ("SMs", "boost", "memory", "bandwidth", "L2", "power", *rates, "link", "PCIe")
    title = "GPUs (TFLOP/s without sparsity; links one way)"
    table = plain_table(title, "name", "GPU", *columns, left=2, fold=False)
    for g in gpus:
        table.add_row(
            escape(g.key),
            escape(g.name),
            str(g.sms),
            f"{g.boost_clock / 1e6:.0f} MHz",
            size(g.memory),
            f"{g.memory_bandwidth / 1e9:.0f} GB/s",
            size(g.l2),
            f"{g.power_limit:.0f} W",
            *(f"{g.peak[d] / 1e12:.4g}" if d in g.peak else "-" for d in rates),
            f"{g.link / 1e9:.0f} GB/s" if g.link else "-",
            f"{g.pcie / 1e9:.0f} GB/s",
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
    above = None
    for name, value in gpu.facts.as_written().items():
        source = gpu.facts.sources[name]
        told = (source.date, escape(source.text)) if source != above else ("", "")
        table.add_row(name, f"{value:.12g}", *told)
        above = source
    return table
