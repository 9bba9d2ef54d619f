"""The answers of `presage gpus`, `presage platforms` and `presage hosts`: hardware facts with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from presage.costs.collectives.model import BusBandwidth
from presage.costs.host_factors import REFERENCE, MeasuredFactors, factors_of_host
from presage.hardware.facts import FigureSource, SourcedFigures
from presage.hardware.gpu import Gpu
from presage.hardware.host import Host
from presage.hardware.platform import Platform
from presage.report.answer import Answer, DataTable, Section, data_table
from presage.text import seconds, size

RATES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


def gpus_answer(gpus: Sequence[Gpu], one: bool, sources: bool = True) -> Answer:
    """One GPU with every figure, or a row for each and the sources of all."""
    brief = "\n".join(f"{g.key}: {g.name}" if one else g.key for g in gpus)
    tables = (figure_table(gpus[0]),) if one else (gpu_table(gpus), *([source_table(gpus)] if sources else []))
    data = {"kind": "gpus", "gpus": [{"key": g.key, **g.facts.texts, "figures": _sourced(g.facts)} for g in gpus]}
    return Answer("GPUs", sections=(Section("GPUs", tables),), to_data=lambda: data, brief=brief)


def platforms_answer(platforms: Sequence[Platform], buses: Sequence[BusBandwidth] | None) -> Answer:
    """One platform with its links and predicted bus bandwidths (`buses`), or a row for each."""
    one = buses is not None
    brief = "\n".join(f"{p.key}: {p.name}, {p.domain} x {p.gpu.name}" if one else p.key for p in platforms)
    tables = (platform_table(platforms),) if buses is None else (link_table(platforms[0]), busbw_table(buses))
    data = {"kind": "platforms", "platforms": [_platform_data(p, buses) for p in platforms]}
    return Answer("Platforms", sections=(Section("Platforms", tables),), to_data=lambda: data, brief=brief)


def hosts_answer(hosts: Sequence[Host], one: bool) -> Answer:
    """One host with every figure, or a row for each: its pace against the reference, as measured and as taken."""
    found = {h.key: None if h.key == REFERENCE else factors_of_host(h) for h in hosts}
    brief = "\n".join(f"{h.key}: {h.name}" if one else h.key for h in hosts)
    rows = [(h.key, h.name, h.processor, str(h.cpus), str(len(h.costs)), *_factor_texts(found[h.key])) for h in hosts]
    columns = ("name", "host", "processor", "CPUs", "calls", "measured", "taken as", "may differ by")
    title = f"Hosts (host time against {REFERENCE})"
    table = data_table(title, columns, rows, text=3)
    figures = ("figure", "value", "date", "source")
    own = data_table(hosts[0].name, figures, _figures(hosts[0].facts), text=(0, 2, 3), wrap=True)
    data = [
        {"key": h.key, **h.facts.texts, "figures": _sourced(h.facts), "pace": _factor_data(found[h.key])} for h in hosts
    ]
    sections = (Section("Hosts", (table, *([own] if one else []))),)
    return Answer("Hosts", sections=sections, to_data=lambda: {"kind": "hosts", "hosts": data}, brief=brief)


def _factor_texts(found: MeasuredFactors | None) -> tuple[str, str, str]:
    if found is None:
        return "1", "1", "-"
    return f"{found.measured.main:.2f}", f"{found.taken.main:.2f}", f"{100 * found.machine_sd:.0f}%"


def _factor_data(found: MeasuredFactors | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _platform_data(p: Platform, buses: Sequence[BusBandwidth] | None) -> dict[str, Any]:
    """Links in SI units, figures in the units of their keys with their sources; of one platform its collectives too."""
    own = ("name", "fabric", "topology", "in_network", "ranks", "bandwidth", "latency")
    links = [{k: getattr(link, k) for k in own} | {"figures": _sourced(link.facts)} for link in p.links]
    value = {"key": p.key, "name": p.name, "gpu": p.gpu.key, "domain": p.domain, "links": links}
    return value if buses is None else value | {"collectives": [_bus_data(b) for b in buses]}


def _bus_data(b: BusBandwidth) -> dict[str, Any]:
    group = {"op": b.op, "ranks": b.group.ranks, "per_domain": b.group.per_domain, "from": b.origin}
    group |= {"range": [b.range.low, b.range.high], "basis": b.range.basis}
    return group | {"bytes": list(b.nbytes), "seconds": list(b.seconds), "busbw": list(b.busbw)}


def _sourced(facts: Any) -> dict[str, Any]:
    """Figures as written, each with its source."""
    return {
        key: {"value": value, "source": facts.sources[key].text, "date": facts.sources[key].date}
        for key, value in facts.as_written().items()
    }


def gpu_table(gpus: Sequence[Gpu]) -> DataTable:
    """Rates are dense; links one way."""
    columns = ("name", "GPU", "SMs", "MHz", "memory", "GB/s", "L2", "power", *RATES, "link", "PCIe")
    rows = [
        (
            g.key, g.name, str(g.sms), f"{g.boost_clock / 1e6:.0f}", size(g.memory), f"{g.memory_bandwidth / 1e9:.0f}",
            size(g.l2), f"{g.power_limit:.0f} W", *(_rate(g.peak.get(d)) for d in RATES),
            f"{g.link / 1e9:.0f}" if g.link else "-", f"{g.pcie / 1e9:.0f}",
        )
        for g in gpus
    ]  # fmt: skip
    return data_table("GPUs (TFLOP/s without sparsity; links one way, in GB/s)", columns, rows, text=2)


def _rate(peak: float | None) -> str:
    return "-" if peak is None else f"{peak / 1e12:{'.0f' if peak >= 1e15 else '.4g'}}"


def source_table(gpus: Sequence[Gpu]) -> DataTable:
    """The sources of the figures."""
    keys: dict[FigureSource, list[str]] = {}
    for g in gpus:
        for source in dict.fromkeys(g.facts.sources.values()):
            keys.setdefault(source, []).append(g.key)
    rows = [(", ".join(k) if len(k) <= 3 else f"{len(k)} GPUs", s.date, s.text) for s, k in keys.items()]
    return data_table("Sources", ("of", "date", "source"), rows, text=3, wrap=True)


def figure_table(gpu: Gpu) -> DataTable:
    """Every figure of one GPU as in its file, with its source."""
    columns = ("figure", "value", "date", "source")
    return data_table(gpu.name, columns, _figures(gpu.facts), text=(0, 2, 3), wrap=True)


def _figures(facts: SourcedFigures) -> list[tuple[str, ...]]:
    """One row per figure; a source is named once."""
    above, rows = None, list[tuple[str, ...]]()
    for name, value in facts.as_written().items():
        source = facts.sources[name]
        origin = (source.date, source.text) if source != above else ("", "")
        rows.append((name, f"{value:.12g}", *origin))
        above = source
    return rows


def platform_table(platforms: Sequence[Platform]) -> DataTable:
    rows = []
    for p in platforms:
        near, *far = (f"{k.name} {k.bandwidth / 1e9:.4g} GB/s" for k in p.links)
        rows.append((p.key, p.name, p.gpu.key, str(p.domain), near, ", ".join(far) or "-"))
    columns = ("name", "platform", "GPU", "GPUs/domain", "within a domain", "between domains")
    return data_table("Platforms (links one way, per GPU)", columns, rows, text=3)


def link_table(platform: Platform) -> DataTable:
    """Every tier of one platform, its figures with their sources."""
    rows: list[tuple[str, ...]] = []
    for link in platform.links:
        kind = f"{link.fabric}, {link.topology}" + (", reduces" if link.in_network else "")
        rows.append((link.name, "kind", "", "", kind))
        facts = link.facts
        if facts is None or "bandwidth_GBps" not in facts.figures:
            rows.append(("", "bandwidth_GBps", f"{link.bandwidth / 1e9:.12g}", "", f"presage gpus {platform.gpu.key}"))
        rows += [("", *row) for row in (_figures(facts) if facts is not None else [])]
    columns = ("link", "figure", "value", "date", "source")
    return data_table(f"{platform.name}: links", columns, rows, text=(0, 1, 3, 4), wrap=True)


def busbw_table(buses: Sequence[BusBandwidth]) -> DataTable:
    """Predicted times and bus bandwidths by size."""
    sizes = [size(int(m)) for m in buses[0].nbytes] if buses else []
    rows = [
        (
            bus.op, str(bus.group.ranks), str(bus.group.per_domain),
            *(f"{seconds(t)}  {b / 1e9:.3g}" for t, b in zip(bus.seconds, bus.busbw, strict=True)), bus.origin,
            f"{bus.range.low - 1:+.0%} to {bus.range.high - 1:+.0%}",
        )
        for bus in buses
    ]  # fmt: skip
    columns = ("collective", "ranks", "per domain", *sizes, "from", "90% range")
    text = (0, len(columns) - 2)
    return data_table("Predicted: time, bus bandwidth in GB/s", columns, rows, text=text, wrap=True)
