"""Policies against failures side by side, in the answer of `presage run --policy`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.bars import grouped_figure, time_unit
from presage.report.terms import span
from presage.runs.policies import PolicyOutcome
from presage.runs.whole import RunResult
from presage.text import amount, percent


def policies_section(p: RunResult) -> Section | None:
    """All policies with their end, goodput and cost; a bar chart of their ends."""
    found = p.policy_outcomes
    if not found:
        return None
    best = max(found, key=lambda o: o.goodput)
    cheapest = min(found, key=lambda o: float(o.outcome.cost(1.0).mean()))
    text = f"Most goodput: {best.policy.name}, {percent(best.goodput)}. Fewest GPU-hours: {cheapest.policy.name}."
    ends = {name: [o.outcome.quantile(q) for o in found] for name, q in (("p50", 0.5), ("p95", 0.95))}
    names = [o.policy.name for o in found]
    chart = partial(grouped_figure, names, ends, "policy", time_unit(max(ends["p50"])), across=True)
    return Section("Policies against failures", (policy_table(p),), chart, text)


def policy_table(p: RunResult) -> DataTable:
    """A row for each policy."""
    price = p.job.terms.price
    money = "GPU-hours" if price is None else "cost"
    columns = ("policy", "goodput", "p50", "p90", "p95", "extra nodes", money)
    found = p.policy_outcomes
    best = max(range(len(found)), key=lambda i: found[i].goodput)
    rows = [_row(o, 1.0 if price is None else price) for o in found]
    return data_table("Policies against failures", columns, rows, bold=(best,))


def _row(o: PolicyOutcome, price: float) -> tuple[str, ...]:
    ends = (span(o.outcome.quantile(q)) for q in (0.5, 0.9, 0.95))
    return (
        o.policy.name,
        percent(o.goodput),
        *ends,
        f"{o.policy.extra_nodes:,}",
        amount(float(o.outcome.cost(price).mean())),
    )


def policy_notes(p: RunResult) -> Iterator[str]:
    """What the policies assume, each assumption once."""
    yield from dict.fromkeys(f"assumed: {note}" for policy in p.policies for note in policy.assumed)
    if any(policy.run.spares is None for policy in p.policies):
        yield "policies without spares=N: a spare node is always ready, and costs nothing"
